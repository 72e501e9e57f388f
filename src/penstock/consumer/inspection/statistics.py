"""The statistics of a consumer: frozen values, taken from live state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from penstock.consumer.assignments import Assignment

if TYPE_CHECKING:
    from penstock.telemetry import Reading


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
        abandoned_calls: calls under way that were given up with their threads, for they do not return: an alarm.
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

    def reading(self) -> Reading:
        """Return what metrics are made of."""
        from penstock.telemetry import Reading

        own = {field.name for field in fields(Reading)} - {"bytes_in_flight", "lag"}
        shown: dict[str, Any] = {name: getattr(self, name) for name in own}
        return Reading(
            bytes_in_flight=sum(partition.bytes_in_flight for partition in self.partitions),
            lag={
                (partition.topic, partition.partition): partition.lag
                for partition in self.partitions
                if partition.lag is not None
            },
            **shown,
        )


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
