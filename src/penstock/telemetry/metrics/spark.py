"""Metrics of Spark queries: what a query is at, read when a metric reader collects, and how long its batches took."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.telemetry import names
from penstock.telemetry.metrics.gauge_registry import Observed, registry_of
from penstock.telemetry.metrics.readings import ObservedMetric, by_partition, counter, gauge
from penstock.telemetry.settings import Telemetry
from penstock.telemetry.suppressed_errors import SuppressedErrors

_Offsets = Mapping[tuple[str, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkReading:
    """A query at one moment. Counts are since the process met it."""

    #: Rows of committed batches.
    rows: int
    #: Rows that Spark processed in a second of the last batch.
    rows_per_s: float
    #: Offsets from the query's position to the end of the log, by topic and partition.
    lag: _Offsets
    #: Next offset to apply by the sink's own ledger, by topic and partition; empty where it does not tell.
    ledger: _Offsets
    restarts: int


#: All metrics of a query that are observed; each also carries the query's name.
SPARK_METRICS: tuple[ObservedMetric[SparkReading], ...] = (
    counter("penstock.spark.rows", "{row}", "Rows of committed batches.", lambda it: it.rows),
    gauge(
        "penstock.spark.rows_per_second",
        "{row}/s",
        "Rows that Spark processed in a second of the last batch.",
        lambda it: it.rows_per_s,
    ),
    gauge(
        "penstock.spark.partition.lag",
        "{offset}",
        "Offsets from the query's position to the end of the log.",
        lambda it: by_partition(it.lag),
    ),
    gauge(
        "penstock.spark.ledger.position",
        "{offset}",
        "Next offset to apply by the ledger of the sink.",
        lambda it: by_partition(it.ledger),
    ),
    counter("penstock.spark.restarts", "{restart}", "Restarts of the query after failures.", lambda it: it.restarts),
)


class SparkTelemetry:
    """Shows the metrics of one query until closed. Thread-safe; `read` is called on the metric readers' threads."""

    def __init__(self, telemetry: Telemetry, query: str, read: Callable[[], SparkReading]) -> None:
        self._query = query
        self._suppressed = SuppressedErrors(query)
        self._durations = telemetry.meter().create_histogram(
            names.SPARK_BATCH_DURATION,
            "s",
            "Time of a batch of a Spark query, by phase.",
            explicit_bucket_boundaries_advisory=names.BATCH_BOUNDARIES_S,
        )
        self._registry = registry_of(telemetry, SPARK_METRICS, names.SPARK_QUERY)
        self._observed = Observed(query, read)
        self._registry.add(self._observed)

    def batch(self, seconds: Mapping[str, float]) -> None:
        """Report a committed batch by the seconds of its phases, with Spark's names for them."""
        with self._suppressed.instead_of_raising():
            for phase, taken in seconds.items():
                self._durations.record(taken, {names.SPARK_QUERY: self._query, names.SPARK_PHASE: phase})

    def close(self) -> None:
        """Show it no more."""
        self._registry.remove(self._observed)
