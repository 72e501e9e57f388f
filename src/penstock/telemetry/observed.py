"""What a consumer tells of itself when a metric reader collects, and the table of metrics made of it.

Counts begin at zero again with each consumer, as after a restart of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from penstock.telemetry import names

Point = tuple[float, Mapping[str, str]]

ReadingT = TypeVar("ReadingT")
#: Reads a metric's value, its values with their attributes, or None where there is none now.
Read = Callable[[ReadingT], float | Iterable[Point] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A consumer at one moment, as in `ConsumerStatistics`, which says what each field is."""

    lanes: int
    ready_lanes: int
    workers: int
    busy_workers: int
    in_flight: int
    bytes_in_flight: int
    #: By topic and partition; a partition whose end is not known is left out.
    lag: Mapping[tuple[str, int], int]
    parked_keys: int
    held_keys: int
    handled: int
    failed: int
    over_time_limit: int
    abandoned_calls: int
    oldest_call: float
    retried: int
    dead_letters: int
    dead_letter_failures: int
    dropped: int
    stalls: int
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
    """A metric that is read from live state; its unit is in UCUM, its description for whoever charts it."""

    name: str
    kind: Kind
    unit: str
    description: str
    read: Read[ReadingT]

    def points(self, reading: ReadingT) -> Iterable[Point]:
        """Return its values in a reading, with their attributes."""
        found = self.read(reading)
        if found is None:
            return ()
        return ((found, {}),) if isinstance(found, int | float) else found


def counter(name: str, unit: str, description: str, read: Read[ReadingT]) -> ObservedMetric[ReadingT]:
    """Return a metric that only rises."""
    return ObservedMetric(name, Kind.COUNTER, unit, description, read)


def up_down_counter(name: str, unit: str, description: str, read: Read[ReadingT]) -> ObservedMetric[ReadingT]:
    """Return a metric that rises and falls, and whose values of several consumers may be added."""
    return ObservedMetric(name, Kind.UP_DOWN_COUNTER, unit, description, read)


def gauge(name: str, unit: str, description: str, read: Read[ReadingT]) -> ObservedMetric[ReadingT]:
    """Return a metric that says something of one thing alone."""
    return ObservedMetric(name, Kind.GAUGE, unit, description, read)


def by_partition(values: Mapping[tuple[str, int], int]) -> Iterable[Point]:
    """Return values by topic and partition with the attributes of OpenTelemetry's conventions."""
    return [
        (value, {names.DESTINATION_NAME: topic, names.DESTINATION_PARTITION_ID: str(partition)})
        for (topic, partition), value in values.items()
    ]


def _by(attribute: str, values: Mapping[str, int]) -> Iterable[Point]:
    return [(value, {attribute: name}) for name, value in values.items()]


#: All metrics of a consumer that are observed; each also carries the consumer group.
METRICS: tuple[ObservedMetric[Reading], ...] = (
    up_down_counter("penstock.lane.count", "{lane}", "Lanes of the consumer.", lambda it: it.lanes),
    up_down_counter("penstock.lane.ready", "{lane}", "Lanes that wait for a worker.", lambda it: it.ready_lanes),
    up_down_counter("penstock.worker.count", "{worker}", "Workers of the consumer.", lambda it: it.workers),
    up_down_counter(
        "penstock.worker.busy", "{worker}", "Workers with a message in a handler.", lambda it: it.busy_workers
    ),
    up_down_counter(
        "penstock.in_flight.messages", "{message}", "Messages taken in and not done.", lambda it: it.in_flight
    ),
    up_down_counter(
        "penstock.in_flight.size", "By", "Bytes of the messages taken in and not done.", lambda it: it.bytes_in_flight
    ),
    gauge(
        "penstock.partition.lag",
        "{offset}",
        "Offsets from the watermark to the end of the log.",
        lambda it: by_partition(it.lag),
    ),
    up_down_counter(
        "penstock.key.parked", "{key}", "Keys that wait for the retry of their message.", lambda it: it.parked_keys
    ),
    up_down_counter(
        "penstock.key.held",
        "{key}",
        "Keys whose message is held for good by its handler's choice.",
        lambda it: it.held_keys,
    ),
    counter("penstock.handled_messages", "{message}", "Messages whose handler returned.", lambda it: it.handled),
    counter("penstock.handler.failures", "{call}", "Calls of a handler that raised.", lambda it: it.failed),
    counter(
        "penstock.handler.time_limits",
        "{call}",
        "Failures of handlers that were over their time limit.",
        lambda it: it.over_time_limit,
    ),
    gauge(
        "penstock.handler.oldest",
        "s",
        "Seconds since the oldest call of a handler that is under way began.",
        lambda it: it.oldest_call,
    ),
    up_down_counter(
        "penstock.worker.abandoned",
        "{thread}",
        "Threads left behind in a handler that does not return.",
        lambda it: it.abandoned_calls,
    ),
    counter(
        "penstock.handler.retries",
        "{call}",
        "Calls of a handler that were not the first for their message.",
        lambda it: it.retried,
    ),
    counter(
        "penstock.dead_letters", "{message}", "Messages written to a dead-letter topic.", lambda it: it.dead_letters
    ),
    counter(
        "penstock.dead_letter_failures",
        "{try}",
        "Tries to write a dead letter that failed; its message is held.",
        lambda it: it.dead_letter_failures,
    ),
    counter(
        "penstock.handler.stalls",
        "{message}",
        "Messages that the watchdog reported for being in a handler for too long.",
        lambda it: it.stalls,
    ),
    counter(
        "penstock.dropped_messages", "{message}", "Messages given up by the handler's choice.", lambda it: it.dropped
    ),
    counter(
        "penstock.pauses", "{pause}", "Pauses of partitions, by reason.", lambda it: _by(names.PAUSE_REASON, it.pauses)
    ),
    counter(
        "penstock.rebalanced_partitions",
        "{partition}",
        "Partitions that were assigned, revoked or lost.",
        lambda it: _by(names.REBALANCE_KIND, {"assigned": it.assigned, "revoked": it.revoked, "lost": it.lost}),
    ),
    counter(
        "penstock.commits",
        "{commit}",
        "Commits of offsets, by outcome.",
        lambda it: _by(names.COMMIT_OUTCOME, {"ok": it.commits, "failed": it.failed_commits}),
    ),
)
