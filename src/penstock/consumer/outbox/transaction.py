"""What is in one Kafka transaction of a consumer: submissions, and the positions that tell of their messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.consumer.assignments import Assignment
from penstock.consumer.outbox.outbox import Submission
from penstock.offsets import Block, CommitPoint, decode

#: Places in blocks of offsets.
Places = dict[Block, list[int]]
#: Of partitions whose offset map has no room for all that would be done: the lowest offset that it does not tell of.
Full = dict[Assignment, int]


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


def note_full(full: Full, places: Mapping[Assignment, Places], positions: Mapping[Assignment, CommitPoint]) -> bool:
    """Note the partitions whose positions do not tell of all these places; return whether there are such.

    An offset map that is too long is cut at its end. A message whose offset was cut off would be visible, and written
    again by the next owner.
    """
    found = {}
    for assignment, blocks in places.items():
        point = positions.get(assignment)
        below = 0 if point is None else _done_below(assignment, point)
        # By fetch first: as a rule there is room for all.
        if beyond := [block for block, indexes in blocks.items() if block.offsets[max(indexes)] >= below]:
            offsets = (block.offsets[index] for block in beyond for index in blocks[block])
            lowest = min(offset for offset in offsets if offset >= below)
            found[assignment] = min(lowest, full.get(assignment, lowest))
    full |= found
    return bool(found)


def has_no_room(full: Full, submission: Submission) -> bool:
    """Tell whether a submission waits for room in the offset map of its partition.

    So does all that is above it there. What is below passes, for it gives the room: also of the same key, as a message
    that is done again after a refusal.
    """
    below = full.get(submission.assignment)
    return below is not None and max(fetch.block.offsets[index] for fetch, index, _ in submission.items) >= below


def _done_below(assignment: Assignment, point: CommitPoint) -> int:
    """Return the offset below which the commit point covers all."""
    done = decode(point.offset, point.metadata, assignment.owner)
    return point.offset if done is None else done.end
