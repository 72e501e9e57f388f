"""Spans and metrics of what the Kafka client does: `poll {topic}`, `commit {topic}`, `send {topic}`.

Each is told after the fact, starts and ends within one call, and is never made current: the thread that polls runs
nothing of the user's, so it needs no context. There is one span for a fetch and topic, whatever the number of messages.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from opentelemetry.context import Context
from opentelemetry.metrics import Meter
from opentelemetry.trace import Link, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue

from penstock.telemetry import names
from penstock.telemetry.propagation import HeaderT, extract, inject
from penstock.telemetry.suppressed_errors import SuppressedErrors

_ROOT = Context()
_NANOSECONDS = 1_000_000_000


class ClientSpans:
    """Reports the operations of a consumer's clients. Thread-safe.

    Args:
        tracer: makes the spans.
        meter: makes the instruments.
        group: the consumer group.
        suppressed: where telemetry's own failures go; the poll thread must not end of them.
    """

    def __init__(self, tracer: Tracer, meter: Meter, group: str, suppressed: SuppressedErrors) -> None:
        self._tracer = tracer
        self._group = group
        self._suppressed = suppressed
        self._durations = meter.create_histogram(
            names.OPERATION_DURATION,
            "s",
            "Duration of an operation of the Kafka client.",
            explicit_bucket_boundaries_advisory=names.DURATION_BOUNDARIES_S,
        )
        self._consumed = meter.create_counter(
            names.CONSUMED_MESSAGES, "{message}", "Messages that were fetched, each delivery counted once."
        )
        self._sent = meter.create_counter(
            names.SENT_MESSAGES, "{message}", "Messages that were given to the Kafka client to send."
        )

    def polled(self, topic: str, messages: Mapping[int, int], duration_s: float) -> None:
        """Report the messages of one topic in one fetch.

        Args:
            topic: name of the topic.
            messages: how many messages of which partition.
            duration_s: seconds the fetch took.
        """
        measured = self._measured("poll", topic)
        received: dict[str, AttributeValue] = {**measured, names.OPERATION_TYPE: "receive"}
        attributes = {**received, names.BATCH_MESSAGE_COUNT: sum(messages.values())}
        if len(messages) == 1:
            attributes[names.DESTINATION_PARTITION_ID] = str(next(iter(messages)))
        with self._suppressed.instead_of_raising():
            for partition, count in messages.items():
                self._consumed.add(count, {**measured, names.DESTINATION_PARTITION_ID: str(partition)}, _ROOT)
            self._durations.record(duration_s, received, _ROOT)
            self._report(f"poll {topic}", attributes, duration_s, None)

    def committed(self, topic: str, partitions: int, error: str | None, duration_s: float | None) -> None:
        """Report the answer to a commit.

        Args:
            topic: name of the topic.
            partitions: how many of its partitions the commit named.
            error: the name of Kafka's error, as `REBALANCE_IN_PROGRESS`, or None when the group took it.
            duration_s: seconds from the request to the answer, or None where nobody measured.
        """
        measured = {**self._measured("commit", topic), names.OPERATION_TYPE: "settle"}
        if error is not None:
            measured[names.ERROR_TYPE] = error
        with self._suppressed.instead_of_raising():
            if duration_s is not None:
                self._durations.record(duration_s, measured, _ROOT)
            self._report(f"commit {topic}", {**measured, names.PARTITION_COUNT: partitions}, duration_s or 0.0, error)

    def sending(self, topic: str, headers: Iterable[tuple[str, HeaderT]]) -> list[tuple[str, HeaderT | bytes]]:
        """Report a message that is about to be sent, and return its headers with the context of its span.

        The span is linked to the context that the headers carried, and takes its place in them: from a dead letter the
        way leads to the span that sent it, and from there to who sent the message first.

        Args:
            topic: name of the topic it is sent to.
            headers: pairs of name and content.
        """
        given = list(headers)
        sender = extract(given)
        measured: dict[str, AttributeValue] = {
            names.SYSTEM: names.KAFKA,
            names.OPERATION_NAME: "send",
            names.DESTINATION_NAME: topic,
        }
        injected: list[tuple[str, HeaderT | bytes]] = list(given)
        with self._suppressed.instead_of_raising():
            span = self._tracer.start_span(
                f"send {topic}",
                _ROOT,
                SpanKind.PRODUCER,
                {**measured, names.OPERATION_TYPE: "send"},
                () if sender is None else (Link(sender),),
            )
            self._sent.add(1, measured, _ROOT)
            injected = inject(given, set_span_in_context(span, _ROOT))
            span.end()
        return injected

    def _measured(self, operation: str, topic: str) -> dict[str, AttributeValue]:
        return {
            names.SYSTEM: names.KAFKA,
            names.OPERATION_NAME: operation,
            names.CONSUMER_GROUP_NAME: self._group,
            names.DESTINATION_NAME: topic,
        }

    def _report(
        self, name: str, attributes: Mapping[str, AttributeValue], duration_s: float, error: str | None
    ) -> None:
        """Make a span of something that just ended."""
        now = time.time_ns()
        began = now - int(duration_s * _NANOSECONDS)
        span = self._tracer.start_span(name, _ROOT, SpanKind.CLIENT, attributes, start_time=began)
        if error is not None:
            span.set_status(StatusCode.ERROR)
        span.end(now)


__all__ = ["ClientSpans"]
