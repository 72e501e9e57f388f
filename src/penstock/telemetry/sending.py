"""`send {topic}` spans, of transactional producers and of what a consumer sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind, set_span_in_context
from opentelemetry.util.types import AttributeValue

from penstock.telemetry import names
from penstock.telemetry.propagation import HeaderT, inject
from penstock.telemetry.settings import Telemetry
from penstock.telemetry.suppressed_errors import SuppressedErrors


class SendSpans:
    """Makes the `send {topic}` spans of a producer or consumer group. Thread-safe."""

    def __init__(self, telemetry: Telemetry, group: str, suppressed: SuppressedErrors | None = None) -> None:
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
        with self._suppressed.instead_of_raising():
            attributes = {**measured, names.OPERATION_TYPE: "send"}
            span = self._tracer.start_span(f"send {topic}", context, SpanKind.PRODUCER, attributes, links)
            self._sent.add(1, measured, context)
            injected = inject(given, set_span_in_context(span, context))
            span.end()
        return injected
