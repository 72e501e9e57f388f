"""Spans of sent messages: `send {topic}` of producers and consumers, and the later steps of a transaction.

For a transactional message these steps are `settle {topic}`, its decision, and `publish {topic}`. Both are children of
the `send` span, whose context is in the half. So producer and coordinator, which may run elsewhere, add to the sender's
trace. A message that is not sampled there costs a look at a header.
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

        The span is a child of the current one, or of the one in `context`. The consumer's span will link to it.
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
        """Return whether a message is traced: its trace is sampled, or it is chosen at random."""
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
        """Begin the span of a transaction's decision; return `answered`, wrapped so that it ends the span.

        The span is a child of the message's `send` span. If that is not sampled, there is no span.
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
    """The `publish {topic}` spans of one transactional writer. Used by its thread.

    A writer calls `begin`, `written` for each message, and `committed` after the commit: only visible messages are
    published.
    """

    def __init__(self, telemetry: Telemetry, prefix: str) -> None:
        self._tracer = telemetry.tracer()
        self._prefix = prefix
        self._suppressed = SuppressedErrors(prefix)
        self._began_ns = 0
        self._found: list[tuple[str, SpanContext]] = []

    def begin(self) -> None:
        """Forget messages that were not committed."""
        self._began_ns = time.time_ns()
        self._found.clear()

    def written(self, topic: str, headers: Collection[tuple[str, HeaderT]]) -> None:
        """Note a message of the transaction under way."""
        context = sampled_context(headers)
        if context is not None:
            self._found.append((topic, context))

    def committed(self) -> None:
        """Report the noted messages: they are visible now."""
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
