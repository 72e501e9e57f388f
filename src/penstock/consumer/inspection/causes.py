"""Causes beside the message itself that hold a partition: its topic, a dead letter, a key parked in another topic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from penstock.consumer.assignments import Assignment, ConsumerParked, Fetch
from penstock.message import Record
from penstock.routing import Scheduler

#: An assignment and an offset of it.
Place = tuple[Assignment, int]
#: Why a consumer has no partition that was not refused by its group.
NO_PARTITION = (
    "no partition is assigned to this member: the group rebalances, or waits for a member that died until its session "
    "ends (session.timeout.ms, 45 s by default), or other members have them all"
)


@dataclass(frozen=True, slots=True)
class Causes:
    """What holds partitions beside the messages themselves. Any thread.

    Attributes:
        publishing: where messages are that go to another topic, in words, by their places.
        topic_trouble: returns what is wrong with a topic, in words, or None.
        results: returns where what a handler returned for a message is, in words, or None.
        missing_rights: returns which rights are missing that a topic comes to a halt without, in words, or None.
    """

    publishing: Mapping[Place, str]
    topic_trouble: Callable[[str], str | None]
    missing_rights: Callable[[str], str | None]
    results: Callable[[Assignment, int], str | None] = lambda _assignment, _offset: None


def parked_ahead(scheduler: Scheduler[Fetch, Record], wanted: Collection[Place]) -> dict[Place, ConsumerParked]:
    """Return the parked keys behind whose head these messages wait.

    Args:
        scheduler: the lanes.
        wanted: the places of the messages, as few as can be: what waits is searched one by one.
    """
    found: dict[Place, ConsumerParked] = {}
    for lane in scheduler.lanes if wanted else ():
        # Copies, each made in one step: the holder of the lane changes them meanwhile.
        for parked in lane.parked.copy().values() if lane.parked else ():
            for fetch, _, record in parked.waiting.copy():
                place = (fetch.assignment, record.offset())
                if place in wanted:
                    found[place] = parked
    return found
