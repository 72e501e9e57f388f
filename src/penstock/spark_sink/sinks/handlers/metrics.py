"""A batch's report as OpenTelemetry metrics, on the driver."""

from __future__ import annotations

from penstock.spark_sink.sinks.handlers.execution.report import BatchReport
from penstock.telemetry import Telemetry
from penstock.telemetry.names import CONSUMER_GROUP_NAME, DURATION_BOUNDARIES_S

#: What became of a message.
OUTCOME = "penstock.spark.handler.outcome"


class HandlerMetrics:
    """The instruments of one sink, with its group as an attribute. Thread-safe, as OpenTelemetry's are."""

    def __init__(self, telemetry: Telemetry, group: str) -> None:
        meter = telemetry.meter()
        self._group = {CONSUMER_GROUP_NAME: group}
        self._messages = meter.create_counter(
            "penstock.spark.handler.messages", "{message}", "Messages that handlers on executors are done with."
        )
        self._failures = meter.create_counter(
            "penstock.spark.handler.failures", "{failure}", "Failed tries of handlers on executors."
        )
        self._retries = meter.create_counter(
            "penstock.spark.handler.retries", "{try}", "Tries after the first of handlers on executors."
        )
        self._tasks = meter.create_histogram(
            "penstock.spark.handler.task.duration",
            "s",
            "How long a task with handlers took.",
            explicit_bucket_boundaries_advisory=DURATION_BOUNDARIES_S,
        )
        self._skew = meter.create_gauge(
            "penstock.spark.handler.skew", "1", "Messages of the last batch's largest task over the mean of its tasks."
        )
        self._heaviest = meter.create_gauge(
            "penstock.spark.handler.heaviest_lane", "1", "Part of the last batch that was in its largest lane."
        )

    def record(self, report: BatchReport) -> None:
        """Record a batch."""
        for outcome, count in (
            ("handled", report.handled),
            ("filtered", report.filtered),
            ("dead_letter", report.dead_letters),
            ("dropped", report.dropped),
        ):
            if count:
                self._messages.add(count, {**self._group, OUTCOME: outcome})
        if report.failed:
            self._failures.add(report.failed, self._group)
        if report.retried:
            self._retries.add(report.retried, self._group)
        for task in report.tasks:
            self._tasks.record(task.seconds, self._group)
        if report.rows:
            self._skew.set(report.skew, self._group)
            self._heaviest.set(report.heaviest_lane_share, self._group)
