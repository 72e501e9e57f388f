"""The decided transactions of a file store that wait to be published, and what each waits for. Pure.

In the order of their decisions; those that share a group and an order key (`order="half"`), a line, in that of their
halves: there, one that is not decided, or that Kafka refuses for now, holds those behind it, and no others.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from itertools import dropwhile, takewhile

from penstock.transactions.stores.file.log.ledger import StoredTransaction
from penstock.transactions.stores.relay.backlog import Reason
from penstock.transactions.wire.half import Line
from penstock.transactions.wire.ops import Verdict


class ReadyQueue:
    """What waits to be published. Not thread-safe: its store guards it. Times are milliseconds since the epoch."""

    def __init__(self) -> None:
        # By decision: the smallest first.
        self._ready: list[tuple[int, StoredTransaction]] = []
        self._delayed: list[tuple[int, int, StoredTransaction]] = []
        # Why what is tried apart is held, by id; and which of that a trial has, or an operator is about to discard.
        self._held: dict[str, Reason] = {}
        self._tried: set[str] = set()
        self._discarding: set[str] = set()
        # Unsettled transactions in the order of their halves.
        self._lines: dict[Line, deque[StoredTransaction]] = {}
        # Ids of those that were taken and are not given back.
        self._out: set[str] = set()

    @property
    def delayed(self) -> int:
        """How many wait for their time of delivery."""
        return len(self._delayed)

    @property
    def refused(self) -> int:
        """How many Kafka refused."""
        return sum(reason.behind is None for reason in self._held.values())

    @property
    def held_by_key(self) -> int:
        """How many committed ones wait for an earlier one of their key."""
        return sum(
            1
            for queue in self._lines.values()
            for stored in queue
            if stored is not queue[0] and stored.verdict is Verdict.COMMIT and not self._is_under_way(stored)
        )

    def _is_under_way(self, stored: StoredTransaction) -> bool:
        return stored.transaction_id in self._out and stored.transaction_id not in self._held

    def held_by(self, stored: StoredTransaction) -> str | None:
        """Return the id of the transaction that a transaction waits for, by its key."""
        queue = self._lines.get(stored.line) if stored.line is not None else None
        return queue[0].transaction_id if queue and queue[0] is not stored else None

    def reason(self, stored: StoredTransaction) -> Reason | None:
        """Return why a transaction is held and tried apart, or None."""
        return self._held.get(stored.transaction_id)

    def add(self, stored: StoredTransaction, now_ms: int) -> None:
        """Take a transaction in, decided or not, in the order of the halves."""
        if stored.line is not None:
            self._lines.setdefault(stored.line, deque()).append(stored)
        if stored.verdict is not None:
            self.decided(stored, now_ms)

    def decided(self, stored: StoredTransaction, now_ms: int) -> None:
        """Take in that a transaction was decided COMMIT or DISCARD; the latter also where it was held."""
        if stored.verdict is Verdict.DISCARD:
            self._release(stored)
        if stored.verdict is Verdict.COMMIT:
            if stored.deliver_at_ms is not None and stored.deliver_at_ms > now_ms:
                heapq.heappush(self._delayed, (stored.deliver_at_ms, stored.decided, stored))
                return
            if stored.line is not None and self._lines[stored.line][0] is not stored:
                # It is taken when those before it are gone.
                return
        heapq.heappush(self._ready, (stored.decided, stored))

    def hold_back(self, stored: StoredTransaction) -> bool:
        """Take out a transaction that waits for its time; tell whether it did."""
        left = [entry for entry in self._delayed if entry[2] is not stored]
        if len(left) == len(self._delayed):
            return False
        heapq.heapify(left)
        self._delayed = left
        return True

    def remove(self, stored: StoredTransaction) -> None:
        """Take out a transaction that is settled, wherever it waits."""
        stored.settled = True
        self._release(stored)
        if stored.line is None:
            return
        queue = self._lines[stored.line]
        was_first = queue[0] is stored
        queue.remove(stored)
        if not queue:
            del self._lines[stored.line]
        elif was_first and queue[0].verdict is Verdict.COMMIT and queue[0].transaction_id not in self._out:
            heapq.heappush(self._ready, (queue[0].decided, queue[0]))

    def take(self, now_ms: int, limit: int, room_bytes: int) -> list[StoredTransaction]:
        """Take what can be published, in order; each must be given back, or removed.

        It is `limit` transactions and `room_bytes` in the log at most; a single one may be larger.
        """
        while self._delayed and self._delayed[0][0] <= now_ms:
            _, decided, stored = heapq.heappop(self._delayed)
            heapq.heappush(self._ready, (decided, stored))
        taken: list[StoredTransaction] = []
        while self._ready and len(taken) < limit:
            _, first = self._ready[0]
            for stored in () if first.settled else self._run(first):
                room_bytes -= stored.size
                if taken and (room_bytes < 0 or len(taken) == limit):
                    # The next of a line becomes ready once those before it are settled.
                    limit = len(taken)
                    break
                taken.append(stored)
                self._out.add(stored.transaction_id)
            if first.settled or first.transaction_id in self._out:
                # Where it is settled: by the done log it had been published.
                heapq.heappop(self._ready)
        return taken

    def _run(self, first: StoredTransaction) -> Iterable[StoredTransaction]:
        """Yield one that is ready, and those of its line behind it that are committed, up to the first that is not."""
        if first.line is None or first.verdict is not Verdict.COMMIT:
            return (first,)
        line = dropwhile(lambda stored: stored is not first, self._lines[first.line])
        return takewhile(lambda stored: stored.verdict is Verdict.COMMIT, line)

    def give_back(self, stored: StoredTransaction) -> None:
        """Give back one that was taken and not published, without its fault."""
        self._out.discard(stored.transaction_id)
        queue = self._lines.get(stored.line) if stored.line is not None else None
        if queue is None or queue[0] is stored or stored.verdict is Verdict.DISCARD:
            heapq.heappush(self._ready, (stored.decided, stored))

    def hold(self, stored: StoredTransaction, reason: Reason) -> None:
        """Keep one that was taken for trials, or note why it is kept."""
        self._held[stored.transaction_id] = reason

    def release(self, stored: StoredTransaction) -> None:
        """Let one that was held go with the others again."""
        self._held.pop(stored.transaction_id, None)
        self.give_back(stored)

    def try_held(self, stored: StoredTransaction) -> bool:
        """Take one that is held for a trial; tell whether that may be: an operator may be about to discard it."""
        if stored.transaction_id in self._discarding:
            return False
        self._tried.add(stored.transaction_id)
        return True

    def put_back(self, stored: StoredTransaction) -> None:
        """A trial is over, and it was not published."""
        self._tried.discard(stored.transaction_id)

    def begin_discard(self, stored: StoredTransaction) -> bool:
        """Keep trials off one that an operator discards; tell whether it is held, and no trial has it."""
        may = stored.transaction_id in self._held and stored.transaction_id not in self._tried
        if may:
            self._discarding.add(stored.transaction_id)
        return may

    def end_discard(self, stored: StoredTransaction) -> None:
        """The operator's decision is stored, or failed."""
        self._discarding.discard(stored.transaction_id)

    def begin_anew(self, unsettled: Iterable[StoredTransaction]) -> None:
        """Give back all that a former coordinator of this process had; the next one first reads the done log."""
        for stored in unsettled:
            if stored.transaction_id in self._out:
                self._release(stored)
                self.give_back(stored)

    def _release(self, stored: StoredTransaction) -> None:
        for ids in (self._out, self._tried, self._discarding):
            ids.discard(stored.transaction_id)
        self._held.pop(stored.transaction_id, None)

    def wait_s(self, now_ms: int, at_most: float) -> float:
        """Return the seconds until something can be taken; 0 if it can now."""
        if self._ready:
            return 0.0
        wait = at_most
        if self._delayed:
            wait = min(wait, (self._delayed[0][0] - now_ms) / 1000)
        return max(wait, 0.0)
