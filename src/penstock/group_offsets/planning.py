"""Which offsets and offset maps a group gets, and what that means: what is handled again, and what never is.

Pure. A plan is whole: where one partition cannot have what is wanted, none is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import ConfigurationError, PenstockError
from penstock.group_offsets.positions import Part, Position, clipped, shared, total
from penstock.group_offsets.targets import Target, To
from penstock.offsets import decode, encode, owner_of


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one partition is to have."""

    #: Where the group stands now.
    before: Position
    offset: int
    #: What is done above the offset: ranges of the log that rise and lie apart. What lies below it is passed over.
    done: tuple[range, ...] = ()


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


def reset_wanted(
    to: Target, positions: Sequence[Position], found: Mapping[Part, int], *, keep_done: bool
) -> list[Wanted]:
    """Return what a reset wants of each partition; without those that stay as they are.

    Args:
        to: where the group is to go.
        positions: where it stands, of partitions that exist.
        found: for the latest offset and for a time: the offset that was found for each partition.
        keep_done: whether what is done above the committed offset stays done.
    """
    offsets = [(position, _target_offset(to, position, found)) for position in positions]
    return [
        # A map may tell of a topic that was made again since, and has become shorter.
        Wanted(position, offset, clipped(position.done, position.log.start, position.log.stop) if keep_done else ())
        for position, offset in offsets
        if offset is not None
    ]


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


def skip_wanted(position: Position, offset: int) -> Wanted:
    """Return what a partition is to have so that one message of it is passed over, and nothing else changed.

    `PenstockError` where the group does not stand before it.
    """
    place, log, committed = f"{position.place}@{offset}", position.log, position.committed
    if committed is None:
        raise PenstockError(f"{place} cannot be passed over: the group has no offset there; reset it first")
    if offset not in log:
        raise ConfigurationError(f"there is no {place}: the log begins at {log.start} and ends at {log.stop}")
    if offset < committed or any(offset in run for run in position.done):
        raise PenstockError(f"{place} is done already; nothing was changed")
    done = sorted((*position.done, range(offset, offset + 1)), key=lambda run: run.start)
    return Wanted(position, max(committed, log.start), clipped(done, log.start, log.stop))


def plan(group: str, wanted: Sequence[Wanted]) -> list[Change]:
    """Return the change of each partition for which something is wanted.

    `ConfigurationError` where offsets lie outside of their logs: all are named, with the ranges.
    """
    outside = [
        f"{it.before.place} cannot begin at {it.offset}: its log begins at {it.before.log.start} and ends at "
        f"{it.before.log.stop}"
        for it in wanted
        if not it.before.log.start <= it.offset <= it.before.log.stop
    ]
    if outside:
        raise ConfigurationError(
            f"nothing was changed: {'; '.join(outside)}; choose offsets in there, or leave these partitions out"
        )
    return [_change(group, it) for it in wanted]


def _change(group: str, wanted: Wanted) -> Change:
    before, offset, log = wanted.before, wanted.offset, wanted.before.log
    for run in wanted.done:
        # A committed offset is not done by definition; where this one is, all up to the end of its range is.
        offset = run.stop if offset in run else offset
    keep = clipped(wanted.done, offset, log.stop)
    owner = owner_of(group, *before.part)
    metadata = encode(offset, keep, owner=owner)
    found = decode(offset, metadata, owner)
    done = found.done if found else ()
    # Without a committed offset nothing counts as done.
    was_done = _done_in_log(log, log.start if before.committed is None else before.committed, before.done)
    is_done = _done_in_log(log, offset, done)
    both = shared(was_done, is_done)
    return Change(
        before=before,
        offset=offset,
        metadata=metadata,
        done=done,
        again=total(was_done) - both,
        skipped=total(is_done) - both,
        cut=total(keep) - total(done),
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
