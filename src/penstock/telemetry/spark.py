"""Telemetry of a Spark query, on the driver: the span of a batch, `process {query}`, and the query's metrics.

The span is current while the batch's function runs. It has no links, because a batch has too many senders. So every
batch has a span, whatever the sample ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, get_current_span, use_span

from penstock.telemetry import names
from penstock.telemetry.gauges import registry_of
from penstock.telemetry.observed import SPARK_METRICS
from penstock.telemetry.settings import Telemetry
from penstock.telemetry.suppressed_errors import SuppressedErrors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Bucket boundaries in seconds for batches, which take longer than messages.
_BOUNDARIES_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

_suppressed = SuppressedErrors("of Spark")


def within_spans(
    telemetry: Telemetry, query: str, function: Callable[[DataFrame, int], None]
) -> Callable[[DataFrame, int], None]:
    """Return a function that calls `function` with each batch of a query within a span. Any thread may call it.

    Exceptions pass through, and mark the span with their type alone.
    """
    tracer, suppressed = telemetry.tracer(), SuppressedErrors(query)

    def traced(batch: DataFrame, batch_id: int) -> None:
        span: Span = INVALID_SPAN
        with suppressed:
            attributes = names.attributes("process", "process")
            attributes |= {names.SPARK_QUERY: query, "penstock.spark.batch.id": batch_id}
            span = tracer.start_span(f"process {query}", Context(), SpanKind.CONSUMER, attributes)
        try:
            with use_span(span, record_exception=False, set_status_on_exception=False):
                function(batch, batch_id)
        except BaseException as error:
            with suppressed:
                names.mark_failed(span, error)
            raise
        finally:
            with suppressed:
                span.end()

    return traced


def count_messages(messages: int) -> None:
    """Note on the current span how many messages a batch had."""
    with _suppressed:
        get_current_span().set_attribute(names.BATCH_MESSAGE_COUNT, messages)


class SparkTelemetry:
    """Reports the metrics of a query until `close`. Thread-safe; `read` is called on the metric readers' threads."""

    def __init__(self, telemetry: Telemetry, query: str, read: Callable[[], Any]) -> None:
        self._query = query
        self._suppressed = SuppressedErrors(query)
        self._durations = telemetry.meter().create_histogram(
            "penstock.spark.batch.duration",
            "s",
            "Time of a batch of a Spark query, by phase.",
            explicit_bucket_boundaries_advisory=_BOUNDARIES_S,
        )
        self.close = registry_of(telemetry, SPARK_METRICS, names.SPARK_QUERY).add(query, read)

    def batch(self, seconds: Mapping[str, float]) -> None:
        """Report a committed batch: seconds by phase, with Spark's names."""
        with self._suppressed:
            for phase, taken in seconds.items():
                self._durations.record(taken, {names.SPARK_QUERY: self._query, "penstock.spark.phase": phase})
