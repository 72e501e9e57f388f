"""`send {topic}` spans, of transactional producers and of what a consumer sends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind, StatusCode, get_current_span, set_span_in_context
from opentelemetry.util.types import AttributeValue

from penstock.errors import class_name
from penstock.telemetry import names
from penstock.telemetry.settings import Telemetry, by_chance
from penstock.telemetry.spans.propagation import HeaderT, inject
from penstock.telemetry.spans.publications import settle_span
from penstock.telemetry.suppressed_errors import SuppressedErrors

ErrorT = TypeVar("ErrorT", bound=BaseException)


class SendSpans:
    """Makes the `send {topic}` spans of a producer or consumer group. Thread-safe."""

    def __init__(self, telemetry: Telemetry, group: str, suppressed: SuppressedErrors | None = None) -> None:
        self._ratio = telemetry.sample_ratio
        self._tracer = telemetry.tracer()
        self._sent = telemetry.meter().create_counter(
            names.SENT_MESSAGES, "{message}", "Messages that were given to the Kafka client to send."
        )
        self._suppressed = suppressed or SuppressedErrors(group)

    def sending(
        self,
        topic: str,
        headers: Iterable[tuple[str, HeaderT]],
        context: Context | None = None,
        links: Sequence[Link] = (),
    ) -> list[tuple[str, HeaderT | bytes]]:
        """Report a message that is about to be sent or stored, and return its headers with the context of its span.

        The span is a child of the current one, or of the one in `context`. Who consumes the message is linked to it.
        """
        measured: dict[str, AttributeValue] = {
            names.SYSTEM: names.KAFKA,
            names.OPERATION_NAME: "send",
            names.DESTINATION_NAME: topic,
        }
        given = list(headers)
        injected: list[tuple[str, HeaderT | bytes]] = list(given)
        if self._ratio < 1 and not self._is_chosen(context, links):
            with self._suppressed.instead_of_raising():
                self._sent.add(1, measured, context)
            return injected
        with self._suppressed.instead_of_raising():
            attributes = {**measured, names.OPERATION_TYPE: "send"}
            span = self._tracer.start_span(f"send {topic}", context, SpanKind.PRODUCER, attributes, links)
            self._sent.add(1, measured, context)
            injected = inject(given, set_span_in_context(span, context))
            span.end()
        return injected

    def _is_chosen(self, context: Context | None, links: Sequence[Link]) -> bool:
        """Return whether a message is traced: its trace is sampled already, or chance says so."""
        if get_current_span(context).get_span_context().trace_flags.sampled:
            return True
        return any(link.context.trace_flags.sampled for link in links) or by_chance(self._ratio)

    def settling(
        self,
        topic: str,
        headers: Collection[tuple[str, HeaderT]],
        decision: str,
        answered: Callable[[ErrorT | None], None],
    ) -> Callable[[ErrorT | None], None]:
        """Return `answered` with a span around it, of a transaction's decision: it ends when that is stored, or fails.

        The span is a child of its message's `send`; where that is not sampled there is none.
        """
        span = None
        with self._suppressed.instead_of_raising():
            span = settle_span(self._tracer, topic, headers, decision)
        if span is None:
            return answered

        def end(error: ErrorT | None) -> None:
            with self._suppressed.instead_of_raising():
                if error is not None:
                    span.set_attribute(names.ERROR_TYPE, class_name(error))
                    span.set_status(StatusCode.ERROR)
                span.end()
            answered(error)

        return end
