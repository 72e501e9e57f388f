"""The parked keys of a consumer: the head message of each, what it waits for, and for how long."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from penstock.consumer.assignments import ConsumerParked, Fetch
from penstock.consumer.failures.parking import NotDue
from penstock.consumer.handlers.options.ordering import key_of
from penstock.message import Record
from penstock.routing import KeyState, Scheduler

#: The state of a message that is the head of a parked key, by the state of that; "put off" where another thread has it.
_STATES = {
    KeyState.WAITING: "parked",
    KeyState.UNSCHEDULED: "parked",
    KeyState.STOPPING: "parked",
    KeyState.HELD: "held",
}


@dataclass(frozen=True, slots=True)
class ParkedMessage:
    """The head of a parked key at one moment.

    Attributes:
        state: as `Explanation.state`.
        key: what its messages have in common; not part of `repr`.
        attempt: how often it was tried.
        age: seconds since its first try, or None.
        due_in: seconds until its next try; None where there is none by the clock.
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


def head_of(parked: ConsumerParked) -> tuple[Fetch, int, Record] | None:
    """Return the head of a parked key, or None where its holder has just taken the last. Any thread."""
    try:
        return parked.waiting[0]
    except IndexError:
        return None


def state_of(parked: ConsumerParked) -> str:
    """Say where the head of a parked key is."""
    return "held by rate" if parked.awaits_token else _STATES.get(parked.state, "put off")


def parked_keys(scheduler: Scheduler[Fetch, Record], now: float, most: int) -> list[ParkedMessage]:
    """Return the parked keys that were held or tried most, at most so many. Any thread."""
    chosen = heapq.nlargest(
        most,
        (
            (parked.state is KeyState.HELD, parked.attempts, -parked.since, number, key, parked)
            for number, (key, parked) in enumerate(
                # A copy, made in one step: the holder of the lane changes the dictionary meanwhile.
                item
                for lane in scheduler.lanes
                if lane.parked
                for item in lane.parked.copy().items()
            )
        ),
    )
    found = []
    for *_, key, parked in chosen:
        if (head := head_of(parked)) is None:
            continue
        assignment = head[0].assignment
        found.append(
            ParkedMessage(
                assignment.topic,
                assignment.partition,
                head[2].offset(),
                assignment.route.handler.name,
                state_of(parked),
                key_of(key.key if isinstance(key, NotDue) else key),
                parked.attempts,
                max(0.0, now - parked.since) if parked.since else None,
                max(0.0, parked.due_at - now) if parked.state is KeyState.WAITING else None,
            )
        )
    return found
