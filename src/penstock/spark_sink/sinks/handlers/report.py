"""What a batch came to: counted by each task, put together on the driver, where skew shows, and sent as metrics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from penstock.telemetry import Telemetry
from penstock.telemetry.names import CONSUMER_GROUP_NAME, DURATION_BOUNDARIES_S

#: What became of a message.
OUTCOME = "penstock.spark.handler.outcome"


@dataclass(slots=True)
class Counts:
    """What a task has done so far. At its end, `rows` is the sum of `handled`, `dead_letters`, `dropped`, `filtered`.

    Attributes:
        rows: messages taken in.
        handled: messages that their handler has done.
        filtered: messages that a filter refused.
        dead_letters: messages given up to a dead-letter topic.
        dropped: messages given up and logged.
        failed: failures, each try counted.
        retried: tries after the first.
        results: messages that handlers returned, to be published.
    """

    rows: int = 0
    handled: int = 0
    filtered: int = 0
    dead_letters: int = 0
    dropped: int = 0
    failed: int = 0
    retried: int = 0
    results: int = 0

    @property
    def done(self) -> int:
        """Messages that are done with, one way or another."""
        return self.handled + self.filtered + self.dead_letters + self.dropped


@dataclass(slots=True, kw_only=True)
class TaskReport(Counts):
    """What one task came to. It is not changed once it is made.

    Attributes:
        task: its number in the batch.
        attempt: 0, or how often it had failed before.
        heaviest_lane: messages of its largest lane: of one key, where few keys share it.
        seconds: how long it took, waits for retries included.
    """

    task: int
    attempt: int
    heaviest_lane: int
    seconds: float


def to_json(report: TaskReport) -> bytes:
    """Return a task's report as it travels to the driver."""
    return json.dumps(asdict(report)).encode()


def from_json(text: bytes) -> TaskReport:
    """Read a report that a task sent along."""
    return TaskReport(**json.loads(text))


@dataclass(slots=True, kw_only=True)
class BatchReport(Counts):
    """What one micro-batch came to: the counts of its tasks, summed. It is not changed once it is made.

    Attributes:
        batch_id: Spark's number of the batch.
        tasks: a report of each task that had messages.
        parallelism: how many tasks there were in all.
    """

    batch_id: int
    tasks: Sequence[TaskReport]
    parallelism: int

    def __post_init__(self) -> None:
        """Sum the counts."""
        for count in fields(Counts):
            setattr(self, count.name, sum(getattr(task, count.name) for task in self.tasks))

    @property
    def skew(self) -> float:
        """Messages of the largest task, over the mean of all: 1 is even, `parallelism` is all in one task."""
        return max((task.rows for task in self.tasks), default=0) * self.parallelism / max(1, self.rows)

    @property
    def heaviest_lane_share(self) -> float:
        """The part of the batch that is in its largest lane, from 0 to 1: near what the largest key has."""
        return max((task.heaviest_lane for task in self.tasks), default=0) / max(1, self.rows)

    @property
    def slowest_s(self) -> float:
        """Seconds of the task that took longest."""
        return max((task.seconds for task in self.tasks), default=0.0)

    def __str__(self) -> str:
        """Say it in a line, without any key."""
        return (
            f"batch {self.batch_id}: {self.rows} messages in {len(self.tasks)} of {self.parallelism} tasks, "
            f"{self.handled} handled, {self.filtered} filtered, {self.dead_letters} dead letters, "
            f"{self.dropped} dropped, {self.failed} failures, {self.results} results; "
            f"slowest task {self.slowest_s:.3f} s, skew {self.skew:.2f}, heaviest lane {self.heaviest_lane_share:.0%}"
        )


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
