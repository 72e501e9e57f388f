"""The spans of a transactional message after its half: `settle {topic}`, its decision, and `publish {topic}`.

Both are children of the `send {topic}` span whose context the half carries: the producer, and the coordinator that may
run elsewhere, add to the trace of who sent the message. What was not sampled there costs a look at a header.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue

from penstock.telemetry import names
from penstock.telemetry.settings import Telemetry
from penstock.telemetry.spans.propagation import HeaderT, sampled_context
from penstock.telemetry.suppressed_errors import SuppressedErrors


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
        with self._suppressed.instead_of_raising():
            for topic, context in self._found:
                span = self._tracer.start_span(
                    f"publish {topic}",
                    set_span_in_context(NonRecordingSpan(context)),
                    SpanKind.CLIENT,
                    {**_common(topic, "publish", "send"), names.STORE_PREFIX: self._prefix},
                    start_time=self._began_ns,
                )
                span.end()
        self._found.clear()


def settle_span(tracer: Tracer, topic: str, headers: Collection[tuple[str, HeaderT]], decision: str) -> Span | None:
    """Begin the span of a decision, or return None where its message is not sampled."""
    context = sampled_context(headers)
    if context is None:
        return None
    parent = set_span_in_context(NonRecordingSpan(context))
    attributes = {**_common(topic, "settle", "settle"), names.DECISION: decision}
    return tracer.start_span(f"settle {topic}", parent, SpanKind.CLIENT, attributes)


def _common(topic: str, operation: str, kind: str) -> dict[str, AttributeValue]:
    return {
        names.SYSTEM: names.KAFKA,
        names.OPERATION_NAME: operation,
        names.OPERATION_TYPE: kind,
        names.DESTINATION_NAME: topic,
    }
