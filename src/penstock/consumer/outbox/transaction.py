"""What is in one Kafka transaction of a consumer: submissions, and the positions that tell of their messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.consumer.assignments import Assignment, ConsumerLane
from penstock.consumer.outbox.outbox import Submission
from penstock.offsets import Block, CommitPoint, decode

#: Places in blocks of offsets.
Places = dict[Block, list[int]]


@dataclass(slots=True, eq=False)
class Transaction:
    """One Kafka transaction: what is in it, and the positions that it commits."""

    inside: list[Submission]
    #: Where the messages of these stand.
    places: dict[Assignment, Places]
    positions: dict[Assignment, CommitPoint]


def places_of(inside: Iterable[Submission]) -> dict[Assignment, Places]:
    """Return the places of all messages that are done with what is inside."""
    found: dict[Assignment, Places] = {}
    blocks: Places = {}
    for submission in inside:
        for fetch, index, _ in submission.items:
            block = fetch.block
            indexes = blocks.get(block)
            if indexes is None:
                indexes = blocks[block] = []
                found.setdefault(fetch.assignment, {})[block] = indexes
            indexes.append(index)
    return found


def without_room(
    inside: Sequence[Submission], places: Mapping[Assignment, Places], positions: Mapping[Assignment, CommitPoint]
) -> list[Submission]:
    """Return those whose offsets the positions do not tell, with what must stay behind them in their lanes.

    `places` are those of all that is inside. An offset map that is too long is cut at its end. A message whose offset
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
    without: list[Submission] = []
    held = Held()
    for submission in inside:
        if max(_offsets_of(submission)) >= done_below.get(submission.assignment, 0) or submission in held:
            without.append(submission)
            held.add(submission)
    return without


class Held:
    """Tells which submissions must stay behind those that are kept.

    They are the later ones of the same lane, save those below in its partition: they are of another key, and the room
    of what is kept may depend on them. Nothing stays behind a parked message.
    """

    def __init__(self, kept: Iterable[Submission] = ()) -> None:
        # Of each lane, the lowest offset of each assignment.
        self._lowest: dict[ConsumerLane, dict[Assignment, int]] = {}
        for submission in kept:
            self.add(submission)

    def add(self, submission: Submission) -> None:
        """Keep one more."""
        if submission.lane is not None:
            lowest = self._lowest.setdefault(submission.lane, {})
            offsets = _offsets_of(submission)
            lowest[submission.assignment] = min(*offsets, lowest.get(submission.assignment, offsets[0]))

    def __contains__(self, submission: Submission) -> bool:
        """Whether a later submission must stay behind one that is kept."""
        if submission.lane not in self._lowest:
            return False
        highest = max(_offsets_of(submission))
        lowest = self._lowest[submission.lane]
        return any(of is not submission.assignment or offset < highest for of, offset in lowest.items())


def _offsets_of(submission: Submission) -> list[int]:
    return [fetch.block.offsets[index] for fetch, index, _ in submission.items]


def _done_below(assignment: Assignment, point: CommitPoint) -> int:
    """Return the offset below which the commit point covers all."""
    done = decode(point.offset, point.metadata, assignment.owner)
    return point.offset if done is None else done.end
