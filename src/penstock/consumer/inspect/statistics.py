"""The statistics of a consumer, and whether it lives: frozen values, taken from live state.

It lives if its poll thread turns, its event loop does, and no message is in a handler for too long. What is too long is
for whoever asks, such as `/healthz`: here are only the times.
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
        watermark: lowest offset not done: what is committed at the next tick; 0 while no position is known.
        position: next offset to fetch; 0 while it is not known.
        in_flight: messages taken in and not done.
        parked: how many of them are set aside, as `max_parked` counts them.
        bytes_in_flight: bytes of those in flight.
        lag: offsets from the watermark to the end of the log, or None while one of them is not known.
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

    While no partition is taken away, `received = restored + handled + filtered + dropped + dead_letters + retry_topic +
    in_flight`, save for what moves at that moment: a message is done before it is counted as such. What was in flight
    of a partition that was taken away is received by its next owner.

    Attributes:
        received: messages taken in.
        restored: those of them that a former owner had done, so that they were skipped.
        handled: messages whose handler returned.
        failed: calls of a handler that raised.
        over_time_limit: how many of them were over the time limit.
        abandoned_calls: calls under way that were given up with their thread or task, for they do not return: an alarm.
        oldest_call: seconds since the oldest call under way began; 0 where there is none.
        retried: calls of a handler that were not the first for their message.
        dead_letters: messages written to a dead-letter topic.
        dead_letter_failures: dead letters that could not be written, each time it was tried.
        retry_topic: messages written to a retry topic.
        published: messages written that handlers returned.
        dropped: messages given up by the handler's choice.
        filtered: messages that a handler's filter refused.
        in_flight: messages taken in and not done.
        parked_keys: keys whose head message waits.
        held_keys: how many of them their handler holds for good, by `on_failure="hold"`: an alarm.
        deferred: completions that are put off.
        stalls: messages that were reported for being in a handler for too long.
        commits: commits the group took.
        failed_commits: commits that failed and were made again; none that a rebalance refused.
        pauses: how often a partition was paused, by reason.
        assigned: partitions assigned; `revoked` and `lost` count partitions too.
        stale: messages that arrived for a partition this process had no more; its next owner gets them.
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
        """Return all but the partitions, as JSON has it."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "partitions"}


def partition_statistics(assignment: Assignment) -> PartitionStatistics:
    """Return the counts of a partition at this moment. Any thread."""
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


#: Seconds in which the poll thread turns whatever brokers do, the waits of a revocation left out.
LOOP_BUDGET_S = 30.0


@dataclass(frozen=True, slots=True)
class InHandler:
    """A message in a user's function: whose, where, and for how many seconds."""

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
        turned_s: seconds since the poll thread came round, or None while that is not to be expected: before its first
            turn, and from when it leaves the group.
        turn_limit_s: seconds after which it cannot be waiting for anything that has an end.
        loop_blocked_s: seconds for which the event loop has not come round; 0 where there is none.
        longest: the message that has been in a handler for longest, or None.
    """

    turned_s: float | None
    turn_limit_s: float
    loop_blocked_s: float
    longest: InHandler | None


def under_way(slots: Iterable[ExecutionSlot]) -> Iterator[tuple[ExecutionSlot, Fetch, Record]]:
    """Yield the messages that are in users' functions, each with its slot. Any thread."""
    for slot in slots:
        # A slot writes `started` and then `record`, and goes on meanwhile: where `started` is the same after `record`
        # was read, they are of one message.
        started, record, fetch = slot.started, slot.record, slot.fetch
        if record is not None and fetch is not None and slot.started == started:
            yield slot, fetch, record


def in_handler(slot: ExecutionSlot, fetch: Fetch, record: Record, now: float) -> InHandler:
    """Return what is said of a message in a user's function."""
    place = f"{fetch.assignment}@{record.offset()}"
    return InHandler(place, fetch.assignment.route.handler.name, slot.name, max(0.0, now - slot.started))


def longest_in_handler(slots: Iterable[ExecutionSlot], now: float) -> InHandler | None:
    """Return the message that has been in a handler for longest, or None. Any thread."""
    longest = min(under_way(slots), key=lambda call: call[0].started, default=None)
    return None if longest is None else in_handler(*longest, now)
