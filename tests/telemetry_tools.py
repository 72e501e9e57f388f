"""Telemetry kept in memory by OpenTelemetry's own SDK, and messages as a producer with tracing sends them."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Metric
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler

from penstock.message import Message
from penstock.telemetry import Telemetry

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
#: What a coordinator tells of itself, each number another.
READING = SimpleNamespace(
    pending=1,
    oldest_pending_age=2.5,
    held=3,
    held_by_key=4,
    delayed=5,
    committed=6,
    rolled_back=7,
    discarded=8,
    refused=9,
    forged=10,
    checks=11,
    no_producer=12,
    lost=13,
    finish_bounds=(0.1, 1.0),
    finish_times=(20, 2, 1),
    finish_seconds=14.5,
)


class Recorded:
    """A pair of providers with their spans and metrics."""

    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.tracer_provider = TracerProvider(sampler, shutdown_on_exit=False)
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.meter_provider = MeterProvider([self._reader], shutdown_on_exit=False)

    def telemetry(self, *, record_keys: bool = False) -> Telemetry:
        return Telemetry(self.tracer_provider, self.meter_provider, record_keys)

    def spans(self, name: str | None = None) -> list[ReadableSpan]:
        """Return the spans that ended, in that order."""
        return [span for span in self._exporter.get_finished_spans() if name is None or span.name == name]

    def span(self, name: str) -> ReadableSpan:
        """Return the only span of that name."""
        (found,) = self.spans(name)
        return found

    def metrics(self) -> dict[str, Metric]:
        """Collect once."""
        data = self._reader.get_metrics_data()
        if data is None:
            return {}
        return {
            metric.name: metric
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def points(self, name: str) -> list[Any]:
        """Collect once and return the points of one metric."""
        metric = self.metrics().get(name)
        return [] if metric is None else list(metric.data.data_points)

    def values(self, name: str) -> dict[frozenset[tuple[str, Any]], float]:
        """Collect once and return the values of one metric by their attributes, without the group."""
        return {
            frozenset(
                (key, value) for key, value in point.attributes.items() if key != "messaging.consumer.group.name"
            ): point.value
            for point in self.points(name)
        }


def traceparent(trace: str = TRACE, span: str = SPAN, flags: str = "01") -> tuple[str, bytes]:
    return ("traceparent", f"00-{trace}-{span}-{flags}".encode())


def message(
    offset: int = 7,
    *,
    partition: int = 3,
    key: bytes | None = b"account-42",
    value: bytes | None = b"secret value",
    headers: Iterable[tuple[str, bytes | None]] = (),
) -> Message:
    return Message.of(value, topic="orders", partition=partition, offset=offset, key=key, headers=headers)


def partition(number: int, lag: int | None, in_flight: int = 0) -> SimpleNamespace:
    return SimpleNamespace(topic="orders", partition=number, lag=lag, bytes_in_flight=in_flight, ledger=None)


def reading(**changes: Any) -> SimpleNamespace:
    """Return statistics of a consumer in which every count is another, but for the changes."""
    given: dict[str, Any] = {
        "lanes": 1024,
        "ready_lanes": 5,
        "workers": 16,
        "busy_workers": 9,
        "in_flight": 321,
        "partitions": [partition(0, 11, 60_000), partition(1, 12, 5_000)],
        "parked_keys": 3,
        "held_keys": 1,
        "handled": 16,
        "failed": 21,
        "retried": 17,
        "dead_letters": 2,
        "dead_letter_failures": 14,
        "stalls": 15,
        "over_time_limit": 31,
        "abandoned_calls": 32,
        "oldest_call": 33.5,
        "dropped": 4,
        "pauses": {"byte limit": 6, "in-flight limit": 1},
        "assigned": 8,
        "revoked": 7,
        "lost": 10,
        "commits": 99,
        "failed_commits": 13,
    }
    return SimpleNamespace(**{**given, **changes})
