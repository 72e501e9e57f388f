"""Has the dropped payloads of one half partition read again, and takes in what was read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.transactions.core.check_plan import CheckSchedule
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.state import PartitionState
from penstock.transactions.stores.kafka.logs.log_identity import DONE, HALF
from penstock.transactions.stores.kafka.logs.payload_reader import PayloadReader, Read, Wanted

#: Seconds until a payload is looked for again that was not found yet, or was not there.
_AGAIN_S = 0.2
#: Seconds for which a payload must have been gone before it is called lost: who was paused, and has lost the partition
#: to somebody that deletes what he does not need, learns so meanwhile.
_SURE_S = 3.0


class PayloadReload:
    """Keeps the payloads of one half partition within the budget. Used by the coordinator's thread.

    `ids` are the topic ids of the logs; the caller changes them.
    """

    def __init__(
        self, number: int, state: PartitionState, schedule: CheckSchedule, reader: PayloadReader, ids: Mapping[str, str]
    ) -> None:
        self._number = number
        self._settlement = state
        self._schedule = schedule
        self._reader = reader
        # What is being read.
        self._reading: list[str] = []
        self._ids = ids
        # Since when payloads are gone, in monotonic seconds.
        self._gone: dict[str, float] = {}
        state.payloads.limit = reader.budget_bytes(self)

    def poll(self, now: float) -> Iterable[tuple[str, Pending]]:
        """Take in what was read, drop what is too much, and have read what is needed next; does not wait.

        Returns what is lost, each with the log that does not hold its payload any more.
        """
        payloads, lost = self._settlement.payloads, []
        payloads.limit = self._reader.budget_bytes(self)
        if self._reading:
            read = self._reader.take(self)
            if read is not None:
                asked, self._reading = self._reading, []
                for transaction_id in asked:
                    lost += self._take_in(transaction_id, read, now)
        payloads.make_room()
        if self._reading:
            return lost
        wanted = payloads.next_read(now, self._settlement.now_ms)
        if wanted and self._reader.read(self, _wanted(self._number, wanted, self._ids)):
            self._reading = [pending.half.transaction_id for pending in wanted]
        return lost

    def _take_in(self, transaction_id: str, read: Read, now: float) -> list[tuple[str, Pending]]:
        state = self._settlement
        pending = state.pending.get(transaction_id)
        if pending is None or pending.dropped is None:
            return []
        place = None
        if transaction_id in read.snapshots:
            place, snapshot = read.snapshots[transaction_id]
            halves = [(half.offset, half.half) for half in snapshot.halves]
        else:
            halves = [(offset, read.halves[offset]) for offset in pending.offsets if offset in read.halves]
        if state.load(transaction_id, halves, place) is not None:
            self._gone.pop(transaction_id, None)
            if pending.verdict is None and state.payloads.is_wanted(transaction_id):
                self._schedule.bring_forward(pending)
        elif pending.snapshot_at is None:
            # What is there may be something else than what was stored.
            if len(halves) == len(pending.offsets) or not read.gone.isdisjoint(pending.offsets):
                return self._not_there(pending, HALF, now)
        elif transaction_id in read.gone_snapshots:
            return self._not_there(pending, DONE, now)
        elif transaction_id in read.absent:
            # It goes on where reading came to: what was written a moment ago may not be visible yet.
            pending.snapshot_at = max(pending.snapshot_at, read.absent[transaction_id])
            state.payloads.failed(transaction_id, now + _AGAIN_S)
        return []

    def _not_there(self, pending: Pending, log: str, now: float) -> list[tuple[str, Pending]]:
        transaction_id = pending.half.transaction_id
        if now - self._gone.setdefault(transaction_id, now) < _SURE_S:
            self._settlement.payloads.failed(transaction_id, now + _AGAIN_S)
            return []
        del self._gone[transaction_id]
        return [(log, one) for one in self._settlement.lose([pending])]


def _wanted(number: int, some: list[Pending], ids: Mapping[str, str]) -> Wanted:
    snapshots = {one.half.transaction_id: one.snapshot_at for one in some if one.snapshot_at is not None}
    halves = frozenset(offset for one in some if one.snapshot_at is None for offset in one.offsets)
    return Wanted(number, halves, snapshots, dict(ids))
