"""What reports show of a consumer beside its partitions and counts: parked keys, lanes, latencies, dead letters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from penstock.consumer.assignments import Fetch
from penstock.consumer.execution_slot import ExecutionSlot
from penstock.consumer.failures.dead_letter_reasons import DeadLetterReason, DeadLetterReasons
from penstock.consumer.inspection.parked_keys import ParkedMessage, most_tried
from penstock.message import Record
from penstock.routing import Scheduler

#: Buckets of one handler; neighbouring lanes share one where there are more lanes.
BUCKETS = 64
#: Runs of a lane that are counted one by one; of what is behind them, the mean is taken.
_COUNTED = 64


@dataclass(frozen=True, slots=True)
class ConsumerDetails:
    """A consumer at one moment.

    Attributes:
        parked: the parked keys that their handlers hold or that were tried most.
        lanes: by handler, of its lanes in buckets, `depth` (messages that wait or are in a handler) and `age` (seconds
            since the oldest of them was fetched).
        latencies: counts since the start by `latencies.BOUNDARIES_S`: `handler` and `done`.
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
    return ConsumerDetails(
        most_tried(scheduler, now, most_parked),
        lane_depths(scheduler, now),
        {
            "handler": [sum(counts) for counts in zip(*(slot.handler_times for slot in slots), strict=True)],
            "done": [sum(counts) for counts in zip(*(slot.done_times for slot in slots), strict=True)],
        },
        [(reason, max(0.0, now - reason.at)) for reason in reasons.all()],
    )


def lane_depths(scheduler: Scheduler[Fetch, Record], now: float) -> dict[str, dict[str, list[float]]]:
    """Return depth and age by handler. Any thread; parked messages are not in it, for they do not wait for a worker."""
    lanes = scheduler.lanes
    buckets = min(BUCKETS, len(lanes))
    found: dict[str, dict[str, list[float]]] = {}
    for number, lane in enumerate(lanes):
        # Copies, each made in one step: the router appends and the holder takes meanwhile.
        runs = lane.runs.copy()
        for aside in lane.aside.copy().values() if lane.aside else ():
            runs += aside.runs.copy()
        bucket = number * buckets // len(lanes)
        scale = max(1.0, len(runs) / _COUNTED)
        for run in islice(runs, _COUNTED):
            assignment = run.owner.assignment
            if not assignment.active:
                # Of a former incarnation of its partition: it goes when its lane is served.
                continue
            depths = found.setdefault(assignment.route.handler.name, {"depth": [0] * buckets, "age": [0.0] * buckets})
            depths["depth"][bucket] += round(max(0, len(run.records) - run.next) * scale)
            age = round(max(0.0, now - run.owner.arrived), 2)
            depths["age"][bucket] = max(depths["age"][bucket], age)
    return found
