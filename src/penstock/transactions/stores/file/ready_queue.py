"""The decided transactions of a file store that wait to be published, and what each waits for. Pure.

In the order of their decisions; those that share a group and an order key (`order="half"`), a line, in that of their
halves: there, one that is not decided, or that Kafka refuses for now, holds those behind it, and no others. Those that
are delayed for long wait in the state table, and come here when their time is near.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from itertools import dropwhile, takewhile

from penstock.transactions.stores.file.log.ledger import Standing, StoredTransaction
from penstock.transactions.wire.half import Line
from penstock.transactions.wire.ops import Verdict

#: What a relay has.
_OUT = frozenset({Standing.TAKEN, Standing.HELD, Standing.TRIED})


class ReadyQueue:
    """What waits to be published. Not thread-safe: its store guards it. Times are milliseconds since the epoch.

    All that changes how a transaction stands is here.
    """

    def __init__(self) -> None:
        # The smallest first: by decision; by time. What stands otherwise by now is passed over.
        self._ready: list[tuple[int, StoredTransaction]] = []
        self._delayed: list[tuple[int, int, StoredTransaction]] = []
        # Why what is held is held, by id.
        self._reasons: dict[str, str] = {}
        # Unsettled transactions in the order of their halves.
        self._lines: dict[Line, deque[StoredTransaction]] = {}
        #: How many stand behind an earlier one of their key; how many are over, and not durably so.
        self.held_by_key = 0
        self.settled = 0

    @property
    def held(self) -> int:
        """How many Kafka refuses, or must stay behind such."""
        return len(self._reasons)

    def held_by(self, stored: StoredTransaction) -> str | None:
        """Return the id of the transaction that a transaction waits for, by its key."""
        return None if self._is_first(stored) or stored.line is None else self._lines[stored.line][0].transaction_id

    def reason(self, stored: StoredTransaction) -> str | None:
        """Return why a transaction is held and tried apart, or None."""
        return self._reasons.get(stored.transaction_id)

    def add(self, stored: StoredTransaction) -> None:
        """Take a transaction that stands in a line in, decided or not, in the order of the halves."""
        if stored.line is not None:
            self._lines.setdefault(stored.line, deque()).append(stored)

    def free(self, stored: StoredTransaction) -> None:
        """Let one be taken that is decided, now or when those before it are gone."""
        self._reasons.pop(stored.transaction_id, None)
        if stored.verdict is Verdict.COMMIT and not self._is_first(stored):
            self._stand(stored, Standing.BEHIND)
        else:
            self._stand(stored, Standing.READY)
            heapq.heappush(self._ready, (stored.decided, stored))

    def delay(self, stored: StoredTransaction) -> None:
        """Let a committed one wait for its time, which comes soon."""
        self._stand(stored, Standing.DELAYED)
        heapq.heappush(self._delayed, (stored.deliver_at_ms or 0, stored.decided, stored))

    def remove(self, stored: StoredTransaction) -> None:
        """Take out a transaction that is settled, wherever it waits."""
        is_first = self._is_first(stored)
        self._stand(stored, Standing.SETTLED)
        self._reasons.pop(stored.transaction_id, None)
        if stored.line is None:
            return
        line = self._lines[stored.line]
        line.remove(stored)
        if not line:
            del self._lines[stored.line]
        elif is_first and line[0].standing is Standing.BEHIND:
            self.free(line[0])

    def forget(self, stored: StoredTransaction) -> None:
        """Take in that it is durably settled."""
        self.settled -= stored.standing is Standing.SETTLED

    def take(self, now_ms: int, limit: int, room_bytes: int) -> list[StoredTransaction]:
        """Take what can be published, in order; each must be given back, or removed.

        It is `limit` transactions and `room_bytes` in the log at most; a single one may be larger.
        """
        self._ripen(now_ms)
        taken: list[StoredTransaction] = []
        while self._ready and len(taken) < limit:
            _, first = self._ready[0]
            for stored in self._run(first):
                room_bytes -= stored.size
                if taken and (room_bytes < 0 or len(taken) == limit):
                    # The next of a line becomes ready once those before it are settled.
                    return taken
                taken.append(stored)
                self._stand(stored, Standing.TAKEN)
            heapq.heappop(self._ready)
        return taken

    def _run(self, first: StoredTransaction) -> Iterable[StoredTransaction]:
        """Yield one that is ready, and those of its line that wait for nothing but it."""
        if first.standing is not Standing.READY:
            return
        yield first
        if first.line is None or first.verdict is not Verdict.COMMIT:
            return
        line = dropwhile(lambda stored: stored is not first, self._lines[first.line])
        next(line)
        yield from takewhile(lambda stored: stored.standing is Standing.BEHIND, line)

    def hold(self, stored: StoredTransaction, reason: str) -> None:
        """Keep one that was taken for trials, or that a trial had, or note why it is kept."""
        if stored.standing in _OUT:
            self._reasons[stored.transaction_id] = reason
            self._stand(stored, Standing.HELD)

    def try_held(self, stored: StoredTransaction) -> bool:
        """Take one that is held for a trial; tell whether that may be: an operator may be about to discard it."""
        if stored.standing is not Standing.WITHDRAWN:
            self._stand(stored, Standing.TRIED)
        return stored.standing is Standing.TRIED

    def withdraw(self, stored: StoredTransaction, verdict: Verdict) -> bool:
        """Let nobody publish what is to be decided again; tell whether that may be.

        A ROLLBACK may be where it waits for its time, a DISCARD where it is held, and no trial has it.
        """
        waits = {Standing.PARKED, Standing.DELAYED} if verdict is Verdict.ROLLBACK else {Standing.HELD}
        may = stored.standing in waits
        if may:
            self._stand(stored, Standing.WITHDRAWN)
        return may

    def restore(self, stored: StoredTransaction) -> None:
        """It was not decided again: it is held, or waits for its time."""
        if stored.transaction_id in self._reasons:
            self._stand(stored, Standing.HELD)
        else:
            self.delay(stored)

    def begin_again(self, unsettled: Iterable[StoredTransaction]) -> None:
        """Give back all that a former coordinator of this process had; the next one first reads the done log."""
        self._reasons.clear()
        for stored in unsettled:
            if stored.standing in _OUT:
                self.free(stored)

    def wait_s(self, now_ms: int, at_most: float) -> float:
        """Return the seconds until something can be taken; 0 if it can now."""
        self._ripen(now_ms)
        if self._ready:
            return 0.0
        return min(at_most, (self._delayed[0][0] - now_ms) / 1000) if self._delayed else at_most

    def _ripen(self, now_ms: int) -> None:
        """Let go what is due, and pass over what stands otherwise by now."""
        delayed, ready = self._delayed, self._ready
        while delayed and (delayed[0][0] <= now_ms or delayed[0][2].standing is not Standing.DELAYED):
            stored = heapq.heappop(delayed)[2]
            if stored.standing is Standing.DELAYED:
                self.free(stored)
        while ready and ready[0][1].standing is not Standing.READY:
            heapq.heappop(ready)

    def _is_first(self, stored: StoredTransaction) -> bool:
        return stored.line is None or self._lines[stored.line][0] is stored

    def _stand(self, stored: StoredTransaction, standing: Standing) -> None:
        self.held_by_key += (standing is Standing.BEHIND) - (stored.standing is Standing.BEHIND)
        self.settled += (standing is Standing.SETTLED) - (stored.standing is Standing.SETTLED)
        stored.standing = standing
