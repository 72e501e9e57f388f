"""Snapshots: which pending transactions are written into the done log, so that the checkpoints can pass them.

Pure. Some halves are pending for long: their group is down for a week, or their message is due in a month. Without
snapshots one such half would hold the checkpoints of the half and op logs, and a restart would read all records after
it. Snapshots are taken of the lowest pending transactions, so that after a restart the rest follows from the half log
in the order of offsets. Snapshots also grow old: when the done log is far past one that is still needed, it is written
again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from penstock.transactions.core.pending import Pending
from penstock.transactions.core.state import PartitionState

#: How many records a log may go on past a pending transaction before that gets a snapshot. With many pending: more.
GAP = 20_000
#: Most transactions, and bytes of their messages, that one Kafka transaction snapshots.
_MAX_SNAPSHOTS = 2_000
_MAX_BYTES = 2 << 20
#: A larger transaction gets no snapshot, because no record of the done log could hold it. It holds the checkpoints.
_MAX_TRANSACTION_BYTES = 900_000


def to_snapshot(state: PartitionState, done_end: int) -> list[Pending]:
    """Return the transactions that the next Kafka transaction snapshots. Request payloads that are not in memory."""
    gap = max(GAP, 4 * len(state.pending))
    chosen: list[Pending] = []
    room = _MAX_BYTES
    is_missing = False
    for pending in _candidates(state, done_end, gap):
        room -= pending.size_bytes
        if len(chosen) == _MAX_SNAPSHOTS or (room < 0 and chosen):
            break
        if pending.dropped is not None:
            is_missing = True
            if not state.payloads.want(pending):
                break
        elif not is_missing or pending.snapshot_at is not None:
            # First snapshots are taken from the lowest up: those behind a payload that is being read wait for it.
            chosen.append(pending)
    return chosen


def _candidates(state: PartitionState, done_end: int, gap: int) -> Iterator[Pending]:
    places = state.places
    lowest = next(iter(places.only_in_half_log.values()), None)
    if lowest is not None and state.half_position - lowest.offset > gap:
        for pending in places.only_in_half_log.values():
            is_old = state.half_position - pending.offset > gap // 2
            if not (is_old and pending.is_complete and pending.size_bytes <= _MAX_TRANSACTION_BYTES):
                break
            yield pending
    # Only the oldest are looked at: a million that are not due yet cost nothing.
    yield from takewhile(
        lambda snapshot: state.op_position - snapshot.decided_at > gap, places.stale_snapshots.values()
    )
    yield from takewhile(lambda pending: done_end - (pending.snapshot_at or 0) > gap, places.snapshotted.values())
