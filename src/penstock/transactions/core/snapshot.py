"""Which pending transactions are written down again in the done log, so that the checkpoints can pass them.

Pure. One old half (its group is down for a week, or its message is due in a month) would else pin the half log and the
op log at its place, and a restart would read all that came since. Snapshots are always taken of the lower part of what
is pending, so that after a restart the rest, which is read from the half log, comes behind it in the order of offsets.
Snapshots grow old, too: when the done log has grown far past one that is still needed, it is written down once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from penstock.transactions.core.pending import Pending
from penstock.transactions.core.state import PartitionState

#: How many records a log may be longer than what is pending in it, before what is pending is snapshotted.
GAP = 20_000
#: Most transactions, and bytes of their messages, that one Kafka transaction snapshots.
_MOST = 2_000
_MOST_BYTES = 2 << 20
#: A transaction that is larger stays where it is, and pins its logs: no record of the done log could hold it.
_LARGEST_BYTES = 900_000


def to_snapshot(state: PartitionState, done_end: int, gap: int) -> list[Pending]:
    """Return what the next Kafka transaction shall snapshot; payloads that are not in memory are asked for.

    `gap` is how far a log may go on past what is needed of it.
    """
    gap = max(gap, 4 * len(state.pending))
    chosen: list[Pending] = []
    room = _MOST_BYTES
    is_missing = False
    for pending in _candidates(state, done_end, gap):
        room -= pending.size_bytes
        if len(chosen) == _MOST or (room < 0 and chosen):
            break
        if pending.dropped is not None:
            is_missing = True
            if not state.payloads.want(pending):
                break
        elif not is_missing or pending.snapshot_at is not None:
            # What is snapshotted is the lower part: those behind one whose payload is being read wait for it.
            chosen.append(pending)
    return chosen


def _candidates(state: PartitionState, done_end: int, gap: int) -> Iterator[Pending]:
    places = state.places
    lowest = next(iter(places.only_in_half_log.values()), None)
    if lowest is not None and state.half_position - lowest.offset > gap:
        for pending in places.only_in_half_log.values():
            is_old = state.half_position - pending.offset > gap // 2
            if not (is_old and pending.is_complete and pending.size_bytes <= _LARGEST_BYTES):
                break
            yield pending
    # Only the oldest are looked at: a million that are not due yet cost nothing.
    yield from takewhile(
        lambda snapshot: state.op_position - snapshot.decided_at > gap, places.stale_snapshots.values()
    )
    yield from takewhile(lambda pending: done_end - (pending.snapshot_at or 0) > gap, places.snapshotted.values())
