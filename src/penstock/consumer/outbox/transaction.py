"""What is in one Kafka transaction of a consumer: submissions, and the positions that tell of their messages."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.consumer.assignments import Assignment, ConsumerLane, require_key
from penstock.consumer.outbox.outbox import Submission
from penstock.offsets import Block, CommitPoint, decode

#: Places in blocks of offsets.
Places = dict[Block, list[int]]
#: Lanes in which something is kept, so that what comes later in them waits; nothing waits for a parked message. None:
#: for a silent topic, behind which all waits. Else it waits for room in the offset map, and only its keys do. What is
#: of the partition named there and below the offset passes: it was refused before, and what is kept needs its room.
Held = dict[ConsumerLane | None, dict[Hashable, tuple[Assignment, int]] | None]


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
    keys, own = held[submission.lane], submission.assignment
    return keys is None or any(
        key in keys and (keys[key][0] is not own or offset >= keys[key][1]) for key, offset in _keyed(submission)
    )


def hold(held: Held, submission: Submission, *, is_silent: bool = False) -> None:
    """Have what comes later wait behind a submission that is kept."""
    if submission.lane is None:
        return
    keys, own = None if is_silent else held.setdefault(submission.lane, {}), submission.assignment
    if keys is None:
        held[submission.lane] = None
        return
    for key, offset in _keyed(submission):
        assignment, lowest = keys.get(key, (own, offset))
        if assignment is own:
            keys[key] = own, min(offset, lowest)


def without_room(
    inside: Sequence[Submission],
    places: Mapping[Assignment, Places],
    positions: Mapping[Assignment, CommitPoint],
    held: Held,
) -> list[Submission]:
    """Return those whose offsets the positions do not tell, with what must stay behind them; those are held.

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
        last = max(fetch.block.offsets[index] for fetch, index, _ in submission.items)
        if last >= done_below.get(submission.assignment, 0) or waits_behind(held, submission):
            without.append(submission)
            hold(held, submission)
    return without


def _keyed(submission: Submission) -> list[tuple[Hashable, int]]:
    return [(require_key(item), item[0].block.offsets[item[1]]) for item in submission.items]


def _done_below(assignment: Assignment, point: CommitPoint) -> int:
    """Return the offset below which the commit point covers all."""
    done = decode(point.offset, point.metadata, assignment.owner)
    return point.offset if done is None else done.end
