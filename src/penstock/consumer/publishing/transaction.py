"""What is in one Kafka transaction of a consumer: results, and the positions that tell of their messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from penstock.consumer.assignments import Assignment, ConsumerLane, Item
from penstock.consumer.handlers.results import Result
from penstock.consumer.publishing.outlet import Delivered
from penstock.consumer.publishing.result_publisher import Unpublished
from penstock.offsets import Block, CommitPoint, decode

#: Places in blocks of offsets.
Places = dict[Block, list[int]]


@dataclass(slots=True, eq=False)
class Transaction:
    """One Kafka transaction: what is in it, and the positions that it commits."""

    inside: list[Unpublished]
    #: Where the messages of these stand.
    places: dict[Assignment, Places]
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


def places_of(inside: Iterable[Unpublished]) -> dict[Assignment, Places]:
    """Return the places of all messages whose results are inside."""
    found: dict[Assignment, Places] = {}
    blocks: Places = {}
    for unpublished in inside:
        for fetch, index, _ in unpublished.items:
            block = fetch.block
            indexes = blocks.get(block)
            if indexes is None:
                indexes = blocks[block] = []
                found.setdefault(fetch.assignment, {})[block] = indexes
            indexes.append(index)
    return found


def without_room(
    inside: Sequence[Unpublished], places: Mapping[Assignment, Places], positions: Mapping[Assignment, CommitPoint]
) -> list[Unpublished]:
    """Return those whose offsets the positions do not tell, with what must stay behind them in their lanes.

    `places` are those of all that is inside. An offset map that is too long is cut at its end. A result whose offset
    was cut off would be visible, and written again by the next owner.
    """
    done_below = {assignment: _done_below(assignment, point) for assignment, point in positions.items()}
    # By fetch first: as a rule there is room for all.
    if all(
        block.offsets[max(indexes)] < done_below.get(assignment, 0)
        for assignment, blocks in places.items()
        for block, indexes in blocks.items()
    ):
        return []
    without: list[Unpublished] = []
    # Of what is held in a lane, the lowest offset of each assignment. A message that was given up has left its lane.
    held: dict[ConsumerLane, dict[Assignment, int]] = {}
    for unpublished in inside:
        assignment, offsets = (
            unpublished.assignment,
            [fetch.block.offsets[index] for fetch, index, _ in unpublished.items],
        )
        highest, behind = max(offsets), held.get(unpublished.lane, {})
        if highest >= done_below.get(assignment, 0) or any(
            # What stands below in its partition is of another key, and the room may depend on it.
            other is not assignment or lowest < highest
            for other, lowest in behind.items()
        ):
            without.append(unpublished)
            if not isinstance(unpublished, ForwardedMessage):
                lowest_held = held.setdefault(unpublished.lane, {})
                lowest_held[assignment] = min(*offsets, lowest_held.get(assignment, highest))
    return without


def _done_below(assignment: Assignment, point: CommitPoint) -> int:
    """Return the offset below which the commit point covers all."""
    done = decode(point.offset, point.metadata, assignment.owner)
    return point.offset if done is None else done.end
