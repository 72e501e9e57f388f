"""What is in one Kafka transaction of a consumer: results, and the positions that tell of their messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from penstock.consumer.assignments import Assignment, ConsumerLane, Item
from penstock.consumer.handlers.results import Result
from penstock.consumer.publishing.outlet import Delivered
from penstock.consumer.publishing.result_publisher import Unpublished
from penstock.offsets import Block, CommitPoint, decode

#: Places in blocks of offsets.
Places = list[tuple[Block, int]]


@dataclass(slots=True, eq=False)
class Transaction:
    """One Kafka transaction: what is in it, and the positions that it commits."""

    inside: list[Unpublished]
    positions: dict[Assignment, CommitPoint]


class ForwardedMessage(Unpublished):
    """A message that was given up, for another topic. Its key is parked, so nothing of it waits behind."""

    __slots__ = ("_complete", "delivered")

    def __init__(self, item: Item, to: Result, complete: Callable[[], None], delivered: Delivered) -> None:
        super().__init__(cast("ConsumerLane", None), (item,), (to,), None)
        self._complete = complete
        #: Takes what became of it. To be called by the poll thread.
        self.delivered = delivered

    def complete(self) -> None:
        """Mark the offset done."""
        self._complete()


def places_of(inside: Sequence[Unpublished]) -> dict[Assignment, Places]:
    """Return the places of all messages whose results are inside."""
    found: dict[Assignment, Places] = {}
    for one in inside:
        found.setdefault(one.assignment, []).extend((fetch.block, index) for fetch, index, _ in one.items)
    return found


def without_room(inside: Sequence[Unpublished], positions: Mapping[Assignment, CommitPoint]) -> list[Unpublished]:
    """Return those whose offsets the positions do not tell, with what is behind them in their lanes.

    An offset map that is too long is cut at its end. A result whose offset was cut off would be visible, and written
    again by the next owner.
    """
    maps = {
        assignment: decode(point.offset, point.metadata, assignment.owner) for assignment, point in positions.items()
    }
    without: list[Unpublished] = []
    lanes: set[ConsumerLane | None] = set()
    for one in inside:
        point, done = positions.get(one.assignment), maps.get(one.assignment)
        is_told = point is not None and all(
            offset < point.offset or (done is not None and offset in done)
            for offset in (fetch.block.offsets[index] for fetch, index, _ in one.items)
        )
        if not is_told or one.lane in lanes:
            without.append(one)
            lanes.add(one.lane)
    return without
