"""What reports show of a consumer beside its partitions and counts: parked keys, lanes, latencies, dead letters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from penstock.consumer.assignments import Fetch
from penstock.consumer.execution_slot import ExecutionSlot
from penstock.consumer.failures.dead_letter_reasons import DeadLetterReason, DeadLetterReasons
from penstock.consumer.inspection.lane_depths import lane_depths
from penstock.consumer.inspection.parked_keys import ParkedMessage, parked_keys
from penstock.message import Record
from penstock.routing import Scheduler


@dataclass(frozen=True, slots=True)
class ConsumerDetails:
    """A consumer at one moment.

    Attributes:
        parked: the parked keys that their handlers hold or that were tried most.
        lanes: depth and age of the lanes, by handler.
        latencies: counts since the start by `reports.latencies.BOUNDARIES_S`: `handler` and `done`.
        dead_letters: each reason, with the seconds since its last one.
    """

    parked: Sequence[ParkedMessage]
    lanes: dict[str, dict[str, list[float]]]
    latencies: dict[str, list[int]]
    dead_letters: Sequence[tuple[DeadLetterReason, float]]


def details_of(
    scheduler: Scheduler[Fetch, Record],
    slots: Iterable[ExecutionSlot],
    reasons: DeadLetterReasons,
    now: float,
    most_parked: int,
) -> ConsumerDetails:
    """Return the details, from live state. Any thread."""
    slots = list(slots)
    counted = {"handler": attrgetter("handler_times"), "done": attrgetter("done_times")}
    return ConsumerDetails(
        parked_keys(scheduler, now, most_parked),
        lane_depths(scheduler, now),
        {name: [sum(column) for column in zip(*map(of, slots), strict=True)] for name, of in counted.items()},
        [(reason, max(0.0, now - reason.at)) for reason in reasons.all()],
    )
