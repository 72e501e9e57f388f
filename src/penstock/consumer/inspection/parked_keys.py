"""The parked keys of a consumer: the head message of each, what it waits for, and for how long."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from penstock.consumer.assignments import ConsumerLane, ConsumerParked, Fetch, Item
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

#: A parked key in its lane, and its head.
ParkedHead = tuple[ConsumerLane, Hashable, ConsumerParked, Item]


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


def parked_heads(scheduler: Scheduler[Fetch, Record]) -> Iterator[ParkedHead]:
    """Yield all parked keys with their heads. Any thread."""
    for lane in scheduler.lanes:
        # A copy, made in one step: the holder changes the dictionary meanwhile. A list of items is not, for the
        # collector may run at any tuple of it.
        for key, parked in lane.parked.copy().items() if lane.parked else ():
            if (head := head_of(parked)) is not None:
                yield lane, key, parked, head


def head_of(parked: ConsumerParked) -> Item | None:
    """Return the head of a parked key, or None where its holder has just taken the last. Any thread."""
    try:
        return parked.waiting[0]
    except IndexError:
        return None


def parked_message(key: Hashable, parked: ConsumerParked, head: Item, now: float) -> ParkedMessage:
    """Return what is shown of a parked key. Any thread."""
    assignment = head[0].assignment
    return ParkedMessage(
        assignment.topic,
        assignment.partition,
        head[2].offset(),
        assignment.route.handler.name,
        "held by rate" if parked.awaits_token else _STATES.get(parked.state, "put off"),
        key_of(key.key if isinstance(key, NotDue) else key),
        parked.attempts,
        max(0.0, now - parked.since) if parked.since else None,
        max(0.0, parked.due_at - now) if parked.state is KeyState.WAITING else None,
    )


def most_tried(scheduler: Scheduler[Fetch, Record], now: float, most: int) -> list[ParkedMessage]:
    """Return the parked keys that their handlers hold or that were tried most, at most so many. Any thread."""
    heads = heapq.nlargest(
        most,
        parked_heads(scheduler),
        key=lambda head: (head[2].state is KeyState.HELD, head[2].attempts, -head[2].since),
    )
    return [parked_message(key, parked, head, now) for _, key, parked, head in heads]
