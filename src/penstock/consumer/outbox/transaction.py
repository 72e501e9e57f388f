"""What is in one Kafka transaction of a consumer: submissions, and the positions that tell of their messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.consumer.assignments import Assignment, ConsumerLane
from penstock.consumer.outbox.outbox import Submission
from penstock.offsets import Block, CommitPoint, decode

#: Places in blocks of offsets.
Places = dict[Block, list[int]]
#: Lanes in which something is kept, so that what comes later in them waits; nothing waits for a parked message. Where
#: an assignment is named, those of it below the offset pass: they are of other keys, and what is kept has room in the
#: offset map only once they are done.
Held = dict[ConsumerLane | None, tuple[Assignment | None, int]]


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


def waits_behind(held: Held, submission: Submission) -> bool:
    """Tell whether a submission must stay behind an earlier one of its lane that is kept."""
    if submission.lane not in held:
        return False
    assignment, lowest = held[submission.lane]
    return assignment is not submission.assignment or max(_offsets_of(submission)) >= lowest


def without_room(
    inside: Sequence[Submission],
    places: Mapping[Assignment, Places],
    positions: Mapping[Assignment, CommitPoint],
    held: Held,
) -> list[Submission]:
    """Return those whose offsets the positions do not tell, with what must stay behind them; their lanes are held.

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
    for submission in inside:
        offsets = _offsets_of(submission)
        if max(offsets) >= done_below.get(submission.assignment, 0) or waits_behind(held, submission):
            without.append(submission)
            assignment, lowest = held.get(submission.lane, (submission.assignment, offsets[0]))
            if submission.lane is not None and assignment is submission.assignment:
                held[submission.lane] = assignment, min(*offsets, lowest)
    return without


def _offsets_of(submission: Submission) -> list[int]:
    return [fetch.block.offsets[index] for fetch, index, _ in submission.items]


def _done_below(assignment: Assignment, point: CommitPoint) -> int:
    """Return the offset below which the commit point covers all."""
    done = decode(point.offset, point.metadata, assignment.owner)
    return point.offset if done is None else done.end
