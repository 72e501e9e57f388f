"""What a batch came to: counted by each task, put together on the driver, where skew shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields


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
        senders: `traceparent` of messages whose senders were sampled, some of them; none without telemetry.
    """

    task: int
    attempt: int
    heaviest_lane: int
    seconds: float
    senders: Sequence[str] = ()


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
        for one in fields(Counts):
            setattr(self, one.name, sum(getattr(task, one.name) for task in self.tasks))

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
