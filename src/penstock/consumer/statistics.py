"""What a consumer tells about itself: frozen values, taken from live state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PartitionStatistics:
    """One assigned partition.

    Attributes:
        topic: name of the topic.
        partition: number of the partition.
        watermark: lowest offset not done: what is committed at the next tick.
        position: next offset to fetch.
        in_flight: messages taken in and not done.
        bytes_in_flight: bytes of the fetches that are not wholly done.
        paused: why the partition is paused, or None.
    """

    topic: str
    partition: int
    watermark: int
    position: int
    in_flight: int
    bytes_in_flight: int
    paused: str | None


@dataclass(frozen=True, slots=True)
class ConsumerStatistics:
    """A consumer at one moment. Counts are since its start.

    Attributes:
        received: messages taken in.
        handled: messages whose handler returned.
        failed: calls of a handler that raised.
        retried: calls of a handler that were not the first for their message.
        dead_letters: messages written to a dead-letter topic.
        dead_letter_failures: dead letters that could not be written, each time it was tried.
        dropped: messages given up by the handler's choice.
        in_flight: messages taken in and not done.
        retries_waiting: parked keys that wait for their time.
        commits: commits the group took.
        failed_commits: commits that failed and were made again.
        pauses: how often a partition was paused, by reason.
        assigned: partitions assigned, ever.
        revoked: partitions revoked, ever.
        lost: partitions lost, ever.
        stale: messages that arrived for a partition this process had no more; its next owner gets them.
        busy_workers: workers with a message in a handler.
        partitions: the partitions assigned now.
    """

    received: int
    handled: int
    failed: int
    retried: int
    dead_letters: int
    dead_letter_failures: int
    dropped: int
    in_flight: int
    retries_waiting: int
    commits: int
    failed_commits: int
    pauses: Mapping[str, int]
    assigned: int
    revoked: int
    lost: int
    stale: int
    busy_workers: int
    partitions: tuple[PartitionStatistics, ...]


__all__ = ["ConsumerStatistics", "PartitionStatistics"]
