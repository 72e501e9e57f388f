"""The plan of an offset change: new offsets and offset maps, and the messages handled again or skipped. Pure.

A plan is all or nothing: if one partition's change is impossible, no partition is changed.
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
    """The change of one partition."""

    #: The previous position of the group.
    before: Position
    #: The offset to commit, and its metadata.
    offset: int
    metadata: str
    #: The offsets done above it that the metadata holds.
    done: tuple[range, ...]
    #: The number of offsets that were done and are handled again.
    again: int
    #: The number of offsets that were not done and will not be handled.
    skipped: int
    #: The number of done offsets that do not fit into the metadata, and are handled again.
    cut: int


def reset(
    group: str, to: Target, positions: Sequence[Position], found: Mapping[Part, int], *, keep_done: bool
) -> list[Change]:
    """Return the changes of a reset, without partitions that do not change.

    Args:
        group: the group.
        to: the target of the reset.
        positions: the present positions, of partitions that exist.
        found: the offset of each partition, if the target is the latest offset or a time.
        keep_done: whether offsets done above the committed offset stay done.

    Raises:
        ConfigurationError: offsets lie outside of their logs; it names all of them with the ranges.
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
            f"nothing was changed: {'; '.join(outside)}; choose offsets in this range, or leave these partitions out"
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
            # A shift needs a committed offset.
            return None if position.committed is None else position.committed + to.number


def skip(group: str, before: Position, offset: int) -> Change:
    """Return the change that skips one message and changes nothing else.

    `PenstockError` if the message is done already, the group has no offset, or the metadata has no room for it.
    """
    place, log, committed = f"{before.place}@{offset}", before.log, before.committed
    if committed is None:
        raise PenstockError(f"{place} cannot be skipped: the group has no offset in this partition; reset it first")
    if offset not in log:
        raise ConfigurationError(f"there is no {place}: the log begins at {log.start} and ends at {log.stop}")
    if before.is_done(offset):
        raise PenstockError(f"{place} is done already; nothing was changed")
    changed = change(group, before, max(committed, log.start), (*before.done, range(offset, offset + 1)))
    if changed.cut:
        raise PenstockError(
            f"{place} was not skipped: the commit's metadata is full of offsets done above the commit point; let the "
            "app go on, and give the message up when it holds its partition"
        )
    return changed


def change(group: str, before: Position, offset: int, done: Iterable[range] = ()) -> Change:
    """Return the change of a partition to an offset of its log, with `done` above the offset."""
    log = before.log
    # The map may be of a topic that was recreated and is now shorter.
    runs = joined(clipped(done, log.start, log.stop))
    for run in runs:
        # A committed offset is never done: if this one is, the commit moves to the end of its range.
        offset = run.stop if offset in run else offset
    keep = clipped(runs, offset, log.stop)
    owner = owner_of(group, *before.part)
    metadata = encode(offset, keep, owner=owner)
    found = decode(offset, metadata, owner)
    kept = found.done if found else ()
    # Without a committed offset nothing was done.
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
    """Return the ranges of a log that are done: below the committed offset and in `done`."""
    return clipped((range(log.start, max(log.start, committed)), *done), log.start, log.stop)


def refuse_coordinators(group: str, topics: Iterable[str]) -> None:
    """Raise `ConfigurationError` if it is a group of coordinators: its offsets are their checkpoints."""
    prefix, dot, name = group.rpartition(".")
    if dot and name == "coordinator" and {f"{prefix}.half", f"{prefix}.op"} & set(topics):
        raise ConfigurationError(
            f"nothing was changed: the offsets of group {group} are checkpoints of transactions, which would be lost "
            "or published twice; list and decide them with `penstock tx`"
        )
