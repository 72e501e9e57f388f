"""Statistics and liveness of a consumer: frozen values, taken from live state.

A consumer is alive if its poll thread and its event loop go on, and no message is in a handler for too long. Here are
only the times. Their limits are up to the caller, such as `/healthz`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from penstock.consumer.assignments import Assignment, Fetch
from penstock.consumer.lanes.slot import ExecutionSlot
from penstock.message import Record


@dataclass(frozen=True, slots=True)
class PartitionStatistics:
    """One assigned partition.

    Attributes:
        watermark: the lowest offset that is not done; the next commit commits it. 0 while no position is known.
        position: the next offset to fetch; 0 while it is not known.
        in_flight: messages taken in and not done.
        parked: the messages among them that are set aside.
        bytes_in_flight: bytes of the messages in flight.
        lag: offsets from the watermark to the end of the log; None while either is not known.
        paused: why the partition is paused, or None.
    """

    topic: str
    partition: int
    watermark: int
    position: int
    in_flight: int
    parked: int
    bytes_in_flight: int
    lag: int | None
    paused: str | None


@dataclass(frozen=True, slots=True)
class ConsumerStatistics:
    """A consumer at one moment. Counts are since its start.

    While no partition is revoked, `received = restored + handled + filtered + dropped + dead_letters + retry_topic +
    in_flight`, except for messages that move at that moment: a message is done before it is counted as such. The next
    owner of a revoked partition receives its messages in flight.

    Attributes:
        received: messages taken in.
        restored: messages among them that were skipped, because a former owner had done them.
        handled: messages whose handler returned.
        failed: calls of a handler that raised.
        over_time_limit: the calls among them that were over the time limit.
        abandoned_calls: running calls that were given up with their thread or task, because they do not return: an
            alarm.
        oldest_call: seconds since the start of the oldest running call; 0 without one.
        retried: calls of a handler that were not the first for their message.
        dead_letters: messages written to a dead-letter topic.
        dead_letter_failures: failed tries to write a dead letter.
        retry_topic: messages written to a retry topic.
        published: results of handlers that were written.
        dropped: messages given up by the handler's choice.
        filtered: messages that a handler's filter refused.
        in_flight: messages taken in and not done.
        parked_keys: keys whose head message waits.
        held_keys: the keys among them that their handler holds for good, by `on_failure="hold"`: an alarm.
        deferred: open deferred completions.
        stalls: reports of messages that were in a handler for too long.
        commits: commits that the group accepted.
        failed_commits: commits that failed and were repeated, without those that a rebalance refused.
        pauses: how often a partition was paused, by reason.
        assigned: partitions assigned; `revoked` and `lost` count partitions too.
        stale: messages for a partition that this process no longer had; its next owner gets them.
        busy_workers: threads and tasks with a message in a handler.
        ready_lanes: lanes that wait for a worker.
        partitions: the partitions assigned now.
    """

    received: int
    restored: int
    handled: int
    failed: int
    over_time_limit: int
    abandoned_calls: int
    oldest_call: float
    retried: int
    dead_letters: int
    dead_letter_failures: int
    retry_topic: int
    published: int
    dropped: int
    filtered: int
    in_flight: int
    parked_keys: int
    held_keys: int
    deferred: int
    stalls: int
    commits: int
    failed_commits: int
    pauses: Mapping[str, int]
    assigned: int
    revoked: int
    lost: int
    stale: int
    workers: int
    busy_workers: int
    lanes: int
    ready_lanes: int
    partitions: tuple[PartitionStatistics, ...]

    def counts(self) -> dict[str, Any]:
        """Return all counts without the partitions, ready for JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "partitions"}


def partition_statistics(assignment: Assignment) -> PartitionStatistics:
    """Return the current counts of a partition. Any thread."""
    tracker = assignment.tracker
    watermark = tracker.watermark
    return PartitionStatistics(
        assignment.topic,
        assignment.partition,
        watermark,
        tracker.position,
        tracker.in_flight,
        tracker.parked[0],
        tracker.bytes_in_flight,
        assignment.lag(watermark),
        None if assignment.paused is None else assignment.paused.value,
    )


#: The longest step of the poll thread in seconds, whatever brokers do, without the waits of a revocation.
LOOP_BUDGET_S = 30.0


@dataclass(frozen=True, slots=True)
class InHandler:
    """A message in a user's function: which one, where, and for how many seconds."""

    place: str
    handler: str
    worker: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.place} has been in {self.handler} for {self.seconds:.1f} s on {self.worker}"


@dataclass(frozen=True, slots=True)
class Liveness:
    """A consumer's threads at one moment.

    Attributes:
        turned_s: seconds since the last step of the poll thread; None before its first step and once it leaves the
            group.
        turn_limit_s: seconds of a step after which the poll thread must be stuck.
        loop_blocked_s: seconds since the last sign of life of the event loop; 0 without a loop.
        longest: the message that has been in a handler for longest, or None.
    """

    turned_s: float | None
    turn_limit_s: float
    loop_blocked_s: float
    longest: InHandler | None


def under_way(slots: Iterable[ExecutionSlot]) -> Iterator[tuple[ExecutionSlot, Fetch, Record]]:
    """Yield the messages that are in users' functions, each with its slot. Any thread."""
    for slot in slots:
        # A slot writes `started` and then `record`, and goes on meanwhile. If `started` is unchanged after `record` was
        # read, both are of one message.
        started, record, fetch = slot.started, slot.record, slot.fetch
        if record is not None and fetch is not None and slot.started == started:
            yield slot, fetch, record


def in_handler(slot: ExecutionSlot, fetch: Fetch, record: Record, now: float) -> InHandler:
    """Return the report of a message in a user's function."""
    place = f"{fetch.assignment}@{record.offset()}"
    return InHandler(place, fetch.assignment.route.handler.name, slot.name, max(0.0, now - slot.started))


def longest_in_handler(slots: Iterable[ExecutionSlot], now: float) -> InHandler | None:
    """Return the message that has been in a handler for longest, or None. Any thread."""
    longest = min(under_way(slots), key=lambda call: call[0].started, default=None)
    return None if longest is None else in_handler(*longest, now)
