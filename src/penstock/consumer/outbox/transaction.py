"""The content of one Kafka transaction of a consumer: submissions, and the positions that cover their messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.consumer.assignments import Assignment
from penstock.consumer.outbox.outbox import Submission
from penstock.offsets import Block, CommitPoint, decode

#: Indexes of messages, by block of offsets.
Places = dict[Block, list[int]]
#: Partitions whose offset map is full. The value is the lowest done offset that the map does not cover.
Full = dict[Assignment, int]


@dataclass(slots=True, eq=False)
class Transaction:
    """One Kafka transaction: its submissions, and the positions that it commits."""

    submissions: list[Submission]
    #: The messages of these submissions.
    places: dict[Assignment, Places]
    positions: dict[Assignment, CommitPoint]


def places_of(submissions: Iterable[Submission]) -> dict[Assignment, Places]:
    """Return the places of all messages that are done with these submissions."""
    found: dict[Assignment, Places] = {}
    blocks: Places = {}
    for submission in submissions:
        for fetch, index, _ in submission.items:
            block = fetch.block
            indexes = blocks.get(block)
            if indexes is None:
                indexes = blocks[block] = []
                found.setdefault(fetch.assignment, {})[block] = indexes
            indexes.append(index)
    return found


def note_full(full: Full, places: Mapping[Assignment, Places], positions: Mapping[Assignment, CommitPoint]) -> bool:
    """Note the partitions whose positions do not cover all these places; return whether there are any.

    An offset map that is too long is cut at its end. The results of a message whose offset was cut off would be
    visible, and the next owner would write them again.
    """
    found = {}
    for assignment, blocks in places.items():
        point = positions.get(assignment)
        below = 0 if point is None else _done_below(assignment, point)
        # By block first, for speed: usually there is room for all.
        if beyond := [block for block, indexes in blocks.items() if block.offsets[max(indexes)] >= below]:
            offsets = (block.offsets[index] for block in beyond for index in blocks[block])
            lowest = min(offset for offset in offsets if offset >= below)
            found[assignment] = min(lowest, full.get(assignment, lowest))
    full |= found
    return bool(found)


def has_no_room(full: Full, submission: Submission) -> bool:
    """Return whether a submission waits for room in the offset map of its partition.

    All submissions above it in the partition wait too. Lower offsets pass, because they make room. A lower one may be
    of the same key: a message that is handled again after a refusal.
    """
    below = full.get(submission.assignment)
    return below is not None and max(fetch.block.offsets[index] for fetch, index, _ in submission.items) >= below


def _done_below(assignment: Assignment, point: CommitPoint) -> int:
    """Return the offset below which the commit point covers all messages."""
    done = decode(point.offset, point.metadata, assignment.owner)
    return point.offset if done is None else done.end
