"""What else holds a partition, beside the message itself: its topic, its dead letter, a key parked in another topic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from penstock.consumer.assignments import Assignment, ConsumerParked, Fetch
from penstock.message import Record
from penstock.routing import Scheduler

#: An assignment and an offset of it.
Place = tuple[Assignment, int]
#: What a consumer says that has no partition, and was not refused by its group.
NO_PARTITION = (
    "no partition is assigned to this member: the group rebalances, or waits for a member that died until its session "
    "ends (session.timeout.ms, 45 s by default), or other members have them all"
)


class Context:
    """What is known of a consumer's surroundings. Any thread.

    Args:
        outgoing: what became of messages that are written to another topic, in words.
        trouble: returns what is wrong with a topic, in words, or None.
        missing: returns which rights are missing that a topic comes to a halt without, in words, or None.
    """

    def __init__(
        self,
        outgoing: Mapping[Place, str],
        trouble: Callable[[str], str | None],
        missing: Callable[[str], str | None] = lambda _topic: None,
    ) -> None:
        self.outgoing = outgoing
        self.trouble = trouble
        self.missing = missing


def nothing_known() -> Context:
    """Return a context that knows of nothing."""
    return Context({}, lambda _topic: None)


def parked_ahead(scheduler: Scheduler[Fetch, Record], wanted: Collection[Place]) -> dict[Place, ConsumerParked]:
    """Return the parked keys behind whose head these messages wait.

    Args:
        scheduler: the lanes.
        wanted: the places of the messages, as few as can be: what waits is looked through one by one.
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


__all__ = ["NO_PARTITION", "Context", "Place", "nothing_known", "parked_ahead"]
