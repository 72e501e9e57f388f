"""`ConsumerTelemetry`: the telemetry of a consumer engine, which makes it at its start and closes it at its end.

Its methods never wait, never raise because of telemetry, and leave no span current on the caller's thread. The spans of
client operations (poll, commit, send) are made afterwards: each starts and ends within one call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind, StatusCode
from opentelemetry.util.types import AttributeValue

from penstock.telemetry import names
from penstock.telemetry.gauges import registry_of
from penstock.telemetry.observed import METRICS
from penstock.telemetry.processing import Processing
from penstock.telemetry.propagation import HeaderT, extract
from penstock.telemetry.sending import SendSpans
from penstock.telemetry.settings import Telemetry, by_chance
from penstock.telemetry.suppressed_errors import SuppressedErrors

_ROOT = Context()
_NANOSECONDS = 1_000_000_000


class ConsumerTelemetry:
    """Spans and metrics of one consumer. All methods may be called from any thread."""

    def __init__(self, telemetry: Telemetry, group: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tracer, meter, self._suppressed = telemetry.tracer(), telemetry.meter(), SuppressedErrors(group)
        self._group = group
        self._ratio = telemetry.sample_ratio
        #: Wraps handlers.
        self.processing = Processing(telemetry, group, self._suppressed, clock)
        self._durations = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "Duration of an operation of the Kafka client.",
            explicit_bucket_boundaries_advisory=names.DURATION_BOUNDARIES_S,
        )
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages that were fetched, each delivery counted once."
        )
        self._sends = SendSpans(telemetry, group, self._suppressed)
        self._registry = registry_of(telemetry, METRICS, names.CONSUMER_GROUP_NAME)
        self._hide: Callable[[], None] | None = None

    def polled(self, topic: str, messages: Mapping[int, int], duration_s: float) -> None:
        """Report the messages of one topic in a fetch of `duration_s` seconds, as counts by partition."""
        measured, received = self._measured("poll", None, topic), self._measured("poll", "receive", topic)
        attributes = {**received, names.BATCH_MESSAGE_COUNT: sum(messages.values())}
        if len(messages) == 1:
            attributes[names.DESTINATION_PARTITION_ID] = str(next(iter(messages)))
        with self._suppressed:
            for partition, count in messages.items():
                self._consumed.add(count, {**measured, names.DESTINATION_PARTITION_ID: str(partition)}, _ROOT)
            self._durations.record(duration_s, received, _ROOT)
            if self._ratio == 1 or by_chance(self._ratio):
                self._report(f"poll {topic}", attributes, duration_s, None)

    def committed(self, topic: str, partitions: int, error: str | None = None) -> None:
        """Report the answer to a commit of some partitions of a topic.

        `error` is the name of Kafka's error, for example `REBALANCE_IN_PROGRESS`, or None if the commit succeeded.
        """
        measured = self._measured("commit", "settle", topic)
        if error is not None:
            measured[names.ERROR_TYPE] = error
        with self._suppressed:
            self._report(f"commit {topic}", {**measured, "penstock.partition.count": partitions}, 0.0, error)

    def sending(self, topic: str, headers: Iterable[tuple[str, HeaderT]]) -> list[tuple[str, HeaderT | bytes]]:
        """Report a message that is about to be sent, and return its headers with the context of its span.

        The span replaces the context in the headers and links to it. So a dead letter leads to the span that sent it,
        and from there to the original sender.
        """
        given = list(headers)
        sender = extract(given)
        return self._sends.sending(topic, given, _ROOT, () if sender is None else (Link(sender),))

    def publishing(self, topic: str, headers: Iterable[tuple[str, HeaderT]]) -> list[tuple[str, HeaderT | bytes]]:
        """Report a message that a handler returned, as `sending`; its span is a child of the handler's span."""
        return self._sends.sending(topic, headers)

    def observe(self, read: Callable[[], Any]) -> None:
        """Include the consumer in the metrics `penstock.*` until `close`. A second call replaces the first.

        `read` returns `ConsumerStatistics`. Metric readers call it on their threads, once for each collection. It must
        not wait for the poll thread.
        """
        self.close()
        self._hide = self._registry.add(self._group, read)

    def close(self) -> None:
        """Remove the consumer from the metrics and drop `read`. May be called more than once."""
        hide, self._hide = self._hide, None
        if hide is not None:
            hide()

    def _measured(self, operation: str, kind: str | None, topic: str) -> dict[str, AttributeValue]:
        return names.attributes(operation, kind, topic) | {names.CONSUMER_GROUP_NAME: self._group}

    def _report(
        self, name: str, attributes: Mapping[str, AttributeValue], duration_s: float, error: str | None
    ) -> None:
        """Make a span for an operation that just ended."""
        now = time.time_ns()
        began = now - int(duration_s * _NANOSECONDS)
        span = self._tracer.start_span(name, _ROOT, SpanKind.CLIENT, attributes, start_time=began)
        if error is not None:
            span.set_status(StatusCode.ERROR)
        span.end(now)
