"""The details of a consumer for reports, in addition to counts: parked keys, lanes, latencies, dead letters."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.consumer.assignments import ConsumerParked, Fetch, Item
from penstock.consumer.handlers.ordering import key_of
from penstock.consumer.lanes.parking import NotDue
from penstock.consumer.lanes.slot import ExecutionSlot
from penstock.consumer.outbox.dead_letters import DeadLetterReason
from penstock.message import Record
from penstock.routing import KeyState, Scheduler

#: The state of the head of a parked key as reports show it; "put off" if another thread has the head.
_STATES = {
    KeyState.WAITING: "parked",
    KeyState.UNSCHEDULED: "parked",
    KeyState.STOPPING: "parked",
    KeyState.HELD: "held",
}

#: A parked key with its entry and its head.
ParkedHead = tuple[Hashable, ConsumerParked, Item]


@dataclass(frozen=True, slots=True)
class ParkedMessage:
    """The head of a parked key at one moment.

    Attributes:
        state: as `Explanation.state`.
        key: the common key of its messages; not part of `repr`.
        attempt: how often it was tried.
        age: seconds since its first try, without a try since its retry time, or None.
        due_in: seconds until its next try; None if no time is set.
    """

    topic: str
    partition: int
    offset: int
    handler: str
    state: str
    key: object = field(repr=False)
    attempt: int
    age: float | None
    due_in: float | None


def parked_heads(scheduler: Scheduler[Fetch, Record]) -> Iterator[ParkedHead]:
    """Yield all parked keys with their heads. Any thread."""
    for lane in scheduler.lanes:
        # A copy, made in one step: the lane's holder changes the dictionary meanwhile. A list of its items is not made
        # in one step: the garbage collector may run at any tuple of it.
        for key, parked in lane.parked.copy().items() if lane.parked else ():
            # A batch that failed is parked under the keys of all its messages: yield it once.
            if key not in parked.keys[:1]:
                continue
            try:
                head = parked.waiting[0]
            except IndexError:
                continue  # the lane's holder has just taken the last one
            yield key, parked, head


def parked_message(parked_head: ParkedHead, now: float) -> ParkedMessage:
    """Return the report of a parked key. Any thread."""
    key, parked, (fetch, _, record) = parked_head
    assignment, is_waiting = fetch.assignment, parked.state is KeyState.WAITING
    # A message of a retry topic was not tried here yet: it is late since its retry time.
    since = parked.since or (parked.due_at if is_waiting and parked.due_at <= now else 0.0)
    return ParkedMessage(
        assignment.topic,
        assignment.partition,
        record.offset(),
        assignment.route.handler.name,
        "held by rate" if parked.awaits_token else _STATES.get(parked.state, "put off"),
        key_of(key.key if isinstance(key, NotDue) else key),
        parked.attempts,
        max(0.0, now - since) if since else None,
        max(0.0, parked.due_at - now) if is_waiting else None,
    )


#: Buckets per handler. If there are more lanes, neighbouring lanes share a bucket.
BUCKETS = 64


@dataclass(frozen=True, slots=True)
class ConsumerDetails:
    """A consumer at one moment.

    Attributes:
        parked: parked keys, first those that their handlers hold, then those with the most tries.
        lanes: by handler, a list over the buckets of its lanes for `depth` (messages that wait or are in a handler) and
            for `age` (seconds since the oldest of them was fetched).
        latencies: counts since the start by `latencies.BOUNDARIES_S`: `handler` and `done`.
        dead_letters: each reason, with the seconds since its last dead letter.
    """

    parked: Sequence[ParkedMessage]
    lanes: dict[str, dict[str, list[float]]]
    latencies: dict[str, list[int]]
    dead_letters: Sequence[tuple[DeadLetterReason, float]]


def details_of(
    scheduler: Scheduler[Fetch, Record],
    slots: Iterable[ExecutionSlot],
    reasons: Iterable[DeadLetterReason],
    now: float,
    most_parked: int,
) -> ConsumerDetails:
    """Return the details, from live state. Any thread."""
    slots = list(slots)
    most_tried = heapq.nlargest(
        most_parked,
        parked_heads(scheduler),
        key=lambda head: (head[1].state is KeyState.HELD, head[1].attempts, -head[1].since),
    )
    return ConsumerDetails(
        [parked_message(parked_head, now) for parked_head in most_tried],
        lane_depths(scheduler, now),
        {
            "handler": [sum(counts) for counts in zip(*(slot.handler_times for slot in slots), strict=True)],
            "done": [sum(counts) for counts in zip(*(slot.done_times for slot in slots), strict=True)],
        },
        [(reason, max(0.0, now - reason.at)) for reason in sorted(reasons, key=lambda reason: -reason.count)],
    )


def lane_depths(scheduler: Scheduler[Fetch, Record], now: float) -> dict[str, dict[str, list[float]]]:
    """Return depth and age by handler, without parked messages: they do not wait for a worker. Any thread."""
    lanes = scheduler.lanes
    buckets = min(BUCKETS, len(lanes))
    found: dict[str, dict[str, list[float]]] = {}
    for number, lane in enumerate(lanes):
        # Copies, each made in one step: the fetcher appends and the lane's holder takes meanwhile.
        runs = lane.runs.copy()
        for aside in lane.aside.copy().values() if lane.aside else ():
            runs += aside.runs.copy()
        bucket = number * buckets // len(lanes)
        for run in runs:
            assignment = run.owner.assignment
            if not assignment.active:
                # Of a former incarnation of its partition: it is dropped when its lane is served.
                continue
            depths = found.setdefault(assignment.route.handler.name, {"depth": [0] * buckets, "age": [0.0] * buckets})
            depths["depth"][bucket] += max(0, len(run.records) - run.next)
            age = round(max(0.0, now - run.owner.arrived), 2)
            depths["age"][bucket] = max(depths["age"][bucket], age)
    return found
