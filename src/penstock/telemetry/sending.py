"""The spans of what is sent: `send {topic}`, of producers and of what a consumer sends, and what follows its half.

Of a transactional message those are `settle {topic}`, its decision, and `publish {topic}`: children of the `send` span
whose context the half carries. The producer, and the coordinator that may run elsewhere, add to the trace of who sent
the message; what was not sampled there costs a look at a header.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    get_current_span,
    set_span_in_context,
)

from penstock.telemetry import names
from penstock.telemetry.propagation import HeaderT, inject, sampled_context
from penstock.telemetry.settings import Telemetry, by_chance
from penstock.telemetry.suppressed_errors import SuppressedErrors

ErrorT = TypeVar("ErrorT", bound=BaseException)


class SendSpans:
    """Makes the `send {topic}` spans of a producer or consumer group. Thread-safe."""

    def __init__(self, telemetry: Telemetry, group: str, suppressed: SuppressedErrors | None = None) -> None:
        self._ratio = telemetry.sample_ratio
        self._tracer = telemetry.tracer()
        self._sent = telemetry.meter().create_counter(
            "messaging.client.sent.messages", "{message}", "Messages that were given to the Kafka client to send."
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
        measured = names.attributes("send", topic=topic)
        given = list(headers)
        injected: list[tuple[str, HeaderT | bytes]] = list(given)
        with self._suppressed:
            self._sent.add(1, measured, context)
            if self._ratio < 1 and not self._is_chosen(context, links):
                return injected
            attributes = {**measured, names.OPERATION_TYPE: "send"}
            span = self._tracer.start_span(f"send {topic}", context, SpanKind.PRODUCER, attributes, links)
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
        context, span = sampled_context(headers), None
        if context is not None:
            with self._suppressed:
                parent = set_span_in_context(NonRecordingSpan(context))
                attributes = {**names.attributes("settle", "settle", topic), "penstock.transactions.decision": decision}
                span = self._tracer.start_span(f"settle {topic}", parent, SpanKind.CLIENT, attributes)
        if span is None:
            return answered

        def end(error: ErrorT | None) -> None:
            with self._suppressed:
                if error is not None:
                    names.mark_failed(span, error)
                span.end()
            answered(error)

        return end


class PublicationSpans:
    """The `publish {topic}` spans of one transactional writer. For its thread.

    A writer calls `begin`, `written` for each message, and `committed` where the Kafka transaction was: only what
    readers see was published.
    """

    def __init__(self, telemetry: Telemetry, prefix: str) -> None:
        self._tracer = telemetry.tracer()
        self._prefix = prefix
        self._suppressed = SuppressedErrors(prefix)
        self._began_ns = 0
        self._found: list[tuple[str, SpanContext]] = []

    def begin(self) -> None:
        """Forget what was not committed."""
        self._began_ns = time.time_ns()
        self._found.clear()

    def written(self, topic: str, headers: Collection[tuple[str, HeaderT]]) -> None:
        """Note a message of the transaction under way."""
        context = sampled_context(headers)
        if context is not None:
            self._found.append((topic, context))

    def committed(self) -> None:
        """Report what was noted: it is visible from now on."""
        with self._suppressed:
            for topic, context in self._found:
                span = self._tracer.start_span(
                    f"publish {topic}",
                    set_span_in_context(NonRecordingSpan(context)),
                    SpanKind.CLIENT,
                    {**names.attributes("publish", "send", topic), names.STORE_PREFIX: self._prefix},
                    start_time=self._began_ns,
                )
                span.end()
        self._found.clear()
