"""What a consumer tells of itself when it is observed, and the table of metrics made of it.

A `Reading` is taken from live state whenever a metric reader collects; counts in it are since the consumer's start, so
they begin at zero again with each consumer, as after a restart of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from penstock.telemetry import names

Point = tuple[float, Mapping[str, str]]

ReadingT = TypeVar("ReadingT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A consumer at one moment. Counts are since its start.

    Attributes:
        lanes: lanes in all.
        ready_lanes: lanes with work that no worker holds.
        workers: workers in all.
        busy_workers: workers with a message in a handler.
        in_flight: messages taken in and not done.
        bytes_in_flight: bytes of these.
        lag: offsets from the watermark to the end of the log, by topic and partition; a partition whose end is not
            known is left out.
        parked_keys: keys that wait for their retry time.
        held_keys: how many of them wait for good, for their handler holds them.
        failed: calls of a handler that raised.
        retried: calls of a handler that were not the first for their message.
        dead_letters: messages written to a dead-letter topic.
        dropped: messages given up by the handler's choice.
        pauses: how often a partition was paused, by reason.
        assigned: partitions assigned.
        revoked: partitions revoked.
        lost: partitions lost.
        commits: commits the group took.
        failed_commits: commits that failed and were made again.
    """

    lanes: int
    ready_lanes: int
    workers: int
    busy_workers: int
    in_flight: int
    bytes_in_flight: int
    lag: Mapping[tuple[str, int], int]
    parked_keys: int
    held_keys: int
    failed: int
    retried: int
    dead_letters: int
    dropped: int
    pauses: Mapping[str, int]
    assigned: int
    revoked: int
    lost: int
    commits: int
    failed_commits: int


class Kind(Enum):
    """How an observed value adds up."""

    #: It only rises.
    COUNTER = "counter"
    #: It rises and falls, and the values of several consumers may be added.
    UP_DOWN_COUNTER = "up-down counter"
    #: It says something of one thing alone.
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class ObservedMetric(Generic[ReadingT]):
    """A metric that is read from live state, from a `Reading` of a consumer or from what something else tells.

    Attributes:
        name: its name.
        kind: how it adds up.
        unit: its unit, in UCUM.
        description: one sentence for whoever charts it.
        points: returns its values with their attributes.
    """

    name: str
    kind: Kind
    unit: str
    description: str
    points: Callable[[ReadingT], Iterable[Point]]


def _one(value: int) -> tuple[Point]:
    return ((value, {}),)


def _by(attribute: str, values: Mapping[str, int]) -> Iterable[Point]:
    return [(value, {attribute: name}) for name, value in values.items()]


def _lag(reading: Reading) -> Iterable[Point]:
    return [
        (lag, {names.DESTINATION_NAME: topic, names.DESTINATION_PARTITION_ID: str(partition)})
        for (topic, partition), lag in reading.lag.items()
    ]


_UP_DOWN, _COUNTER, _GAUGE = Kind.UP_DOWN_COUNTER, Kind.COUNTER, Kind.GAUGE

#: All metrics of a consumer that are observed; each also carries the consumer group.
METRICS: tuple[ObservedMetric[Reading], ...] = (
    ObservedMetric("penstock.lane.count", _UP_DOWN, "{lane}", "Lanes of the consumer.", lambda it: _one(it.lanes)),
    ObservedMetric(
        "penstock.lane.ready", _UP_DOWN, "{lane}", "Lanes that wait for a worker.", lambda it: _one(it.ready_lanes)
    ),
    ObservedMetric(
        "penstock.worker.count", _UP_DOWN, "{worker}", "Workers of the consumer.", lambda it: _one(it.workers)
    ),
    ObservedMetric(
        "penstock.worker.busy",
        _UP_DOWN,
        "{worker}",
        "Workers with a message in a handler.",
        lambda it: _one(it.busy_workers),
    ),
    ObservedMetric(
        "penstock.in_flight.messages",
        _UP_DOWN,
        "{message}",
        "Messages taken in and not done.",
        lambda it: _one(it.in_flight),
    ),
    ObservedMetric(
        "penstock.in_flight.size",
        _UP_DOWN,
        "By",
        "Bytes of the messages taken in and not done.",
        lambda it: _one(it.bytes_in_flight),
    ),
    ObservedMetric(
        "penstock.partition.lag", _GAUGE, "{offset}", "Offsets from the watermark to the end of the log.", _lag
    ),
    ObservedMetric(
        "penstock.key.parked",
        _UP_DOWN,
        "{key}",
        "Keys that wait for the retry of their message.",
        lambda it: _one(it.parked_keys),
    ),
    ObservedMetric(
        "penstock.key.held",
        _UP_DOWN,
        "{key}",
        "Keys whose message is held for good by its handler's choice.",
        lambda it: _one(it.held_keys),
    ),
    ObservedMetric(
        "penstock.handler.failures", _COUNTER, "{call}", "Calls of a handler that raised.", lambda it: _one(it.failed)
    ),
    ObservedMetric(
        "penstock.handler.retries",
        _COUNTER,
        "{call}",
        "Calls of a handler that were not the first for their message.",
        lambda it: _one(it.retried),
    ),
    ObservedMetric(
        "penstock.dead_letters",
        _COUNTER,
        "{message}",
        "Messages written to a dead-letter topic.",
        lambda it: _one(it.dead_letters),
    ),
    ObservedMetric(
        "penstock.dropped_messages",
        _COUNTER,
        "{message}",
        "Messages given up by the handler's choice.",
        lambda it: _one(it.dropped),
    ),
    ObservedMetric(
        "penstock.pauses",
        _COUNTER,
        "{pause}",
        "Pauses of partitions, by reason.",
        lambda it: _by(names.PAUSE_REASON, it.pauses),
    ),
    ObservedMetric(
        "penstock.rebalanced_partitions",
        _COUNTER,
        "{partition}",
        "Partitions that were assigned, revoked or lost.",
        lambda it: _by(names.REBALANCE_KIND, {"assigned": it.assigned, "revoked": it.revoked, "lost": it.lost}),
    ),
    ObservedMetric(
        "penstock.commits",
        _COUNTER,
        "{commit}",
        "Commits of offsets, by outcome.",
        lambda it: _by(names.COMMIT_OUTCOME, {"ok": it.commits, "failed": it.failed_commits}),
    ),
)

__all__ = ["METRICS", "Kind", "ObservedMetric", "Point", "Reading", "ReadingT"]
