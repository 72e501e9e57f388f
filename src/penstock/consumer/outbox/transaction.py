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
    # Of what is held in a lane, the lowest offset of each assignment.
    held: dict[ConsumerLane | None, dict[Assignment, int]] = {}
    for submission in inside:
        assignment, lane = submission.assignment, submission.lane
        offsets = [fetch.block.offsets[index] for fetch, index, _ in submission.items]
        highest, behind = max(offsets), held.get(lane, {})
        if highest >= done_below.get(assignment, 0) or any(
            # What stands below in its partition is of another key, and the room may depend on it.
            other is not assignment or lowest < highest
            for other, lowest in behind.items()
        ):
            without.append(submission)
            if lane is not None:
                lowest_held = held.setdefault(lane, {})
                lowest_held[assignment] = min(*offsets, lowest_held.get(assignment, highest))
    return without


def _done_below(assignment: Assignment, point: CommitPoint) -> int:
    """Return the offset below which the commit point covers all."""
    done = decode(point.offset, point.metadata, assignment.owner)
    return point.offset if done is None else done.end
