"""Which offsets and offset maps a group gets, and what that means: what is handled again, and what never is.

Pure. A plan is whole: where one partition cannot have what is wanted, none is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import ConfigurationError, PenstockError
from penstock.group_offsets.positions import Part, Position, clipped, total
from penstock.group_offsets.targets import Target, To
from penstock.offsets import decode, encode, joined, owner_of


@dataclass(frozen=True, slots=True)
class Change:
    """What one partition gets."""

    #: Where the group stood before.
    before: Position
    #: The offset to commit, and its metadata.
    offset: int
    metadata: str
    #: What is done above that offset, as far as the metadata holds it.
    done: tuple[range, ...]
    #: Offsets of the log that were done and are handled again.
    again: int
    #: Offsets of the log that were not done and will not be handled.
    skipped: int
    #: Offsets that were to be kept as done and are not: a commit cannot hold more.
    cut: int


def reset(
    group: str, to: Target, positions: Sequence[Position], found: Mapping[Part, int], *, keep_done: bool
) -> list[Change]:
    """Return the change of each partition that a reset makes; without those that stay as they are.

    Args:
        group: the group.
        to: where the group is to go.
        positions: where it stands, of partitions that exist.
        found: for the latest offset and for a time: the offset that was found for each partition.
        keep_done: whether what is done above the committed offset stays done.

    Raises:
        ConfigurationError: offsets lie outside of their logs; all are named, with the ranges.
    """
    offsets = [(before, _target_offset(to, before, found)) for before in positions]
    wanted = [(before, offset) for before, offset in offsets if offset is not None]
    outside = [
        f"{before.place} cannot begin at {offset}: its log begins at {before.log.start} and ends at {before.log.stop}"
        for before, offset in wanted
        if not before.log.start <= offset <= before.log.stop
    ]
    if outside:
        raise ConfigurationError(
            f"nothing was changed: {'; '.join(outside)}; choose offsets in there, or leave these partitions out"
        )
    return [change(group, before, offset, before.done if keep_done else ()) for before, offset in wanted]


def _target_offset(to: Target, position: Position, found: Mapping[Part, int]) -> int | None:
    match to.to:
        case To.EARLIEST:
            return position.log.start
        case To.LATEST | To.TIME:
            return found[position.part]
        case To.OFFSET:
            return to.number
        case To.SHIFT:
            # Without a committed offset there is nothing to count from.
            return None if position.committed is None else position.committed + to.number


def skip(group: str, before: Position, offset: int) -> Change:
    """Return the change that has a group pass over one message, and changes nothing else.

    `PenstockError` where the group does not stand before it, or a commit has no room for it.
    """
    place, log, committed = f"{before.place}@{offset}", before.log, before.committed
    if committed is None:
        raise PenstockError(f"{place} cannot be passed over: the group has no offset there; reset it first")
    if offset not in log:
        raise ConfigurationError(f"there is no {place}: the log begins at {log.start} and ends at {log.stop}")
    if before.is_done(offset):
        raise PenstockError(f"{place} is done already; nothing was changed")
    changed = change(group, before, max(committed, log.start), (*before.done, range(offset, offset + 1)))
    if changed.cut:
        raise PenstockError(
            f"{place} was not passed over: so much is done above the commit point that a commit has no room for one "
            "more; let the app go on, and give the message up once it holds its partition"
        )
    return changed


def change(group: str, before: Position, offset: int, done: Iterable[range] = ()) -> Change:
    """Return the change of a partition that has a group begin at an offset of its log, with `done` above it."""
    log = before.log
    # A map may tell of a topic that was made again since, and has become shorter.
    runs = joined(clipped(done, log.start, log.stop))
    for run in runs:
        # A committed offset is not done by definition; where this one is, all up to the end of its range is.
        offset = run.stop if offset in run else offset
    keep = clipped(runs, offset, log.stop)
    owner = owner_of(group, *before.part)
    metadata = encode(offset, keep, owner=owner)
    found = decode(offset, metadata, owner)
    kept = found.done if found else ()
    # Without a committed offset nothing counts as done.
    was_done = _done_in_log(log, log.start if before.committed is None else before.committed, before.done)
    is_done = _done_in_log(log, offset, kept)
    either = total(joined((*was_done, *is_done)))
    return Change(
        before=before,
        offset=offset,
        metadata=metadata,
        done=kept,
        again=either - total(is_done),
        skipped=either - total(was_done),
        cut=total(keep) - total(kept),
    )


def _done_in_log(log: range, committed: int, done: Sequence[range]) -> tuple[range, ...]:
    """Return all of a log that counts as done at a committed offset."""
    return clipped((range(log.start, max(log.start, committed)), *done), log.start, log.stop)


def refuse_coordinators(group: str, topics: Iterable[str]) -> None:
    """Raise `ConfigurationError` where a group is that of coordinators: its offsets are their checkpoints."""
    prefix, dot, name = group.rpartition(".")
    if dot and name == "coordinator" and {f"{prefix}.half", f"{prefix}.op"} & set(topics):
        raise ConfigurationError(
            f"nothing was changed: the offsets of group {group} are checkpoints of transactions, which would be lost "
            "or published twice; look at them, and decide them, with `penstock tx`"
        )
