"""The decided transactions of a file store that wait to be published, and what each waits for. Pure.

In the order of their decisions; those that share a group and an order key (`order="half"`), a line, in that of their
halves: there, one that is not decided, or that Kafka refuses for now, holds those behind it, and no others.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

from penstock.transactions.stores.file.ledger import Kept
from penstock.transactions.stores.relay.quarantine import Reason
from penstock.transactions.wire.half import Line
from penstock.transactions.wire.ops import Verdict


class Shelf:
    """What waits to be published. Not thread-safe: its store guards it.

    Times are milliseconds since the epoch.
    """

    def __init__(self) -> None:
        # By decision: the smallest first.
        self._ready: list[tuple[int, Kept]] = []
        self._delayed: list[tuple[int, int, Kept]] = []
        # Why what is tried apart is held, by id; and which of that a trial has, or an operator is about to discard.
        self._held: dict[str, Reason] = {}
        self._tried: set[str] = set()
        self._discarding: set[str] = set()
        # Unsettled transactions in the order of their halves.
        self._lines: dict[Line, deque[Kept]] = {}
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
            for kept in queue
            if kept is not queue[0] and kept.verdict is Verdict.COMMIT and not self._is_under_way(kept)
        )

    def _is_under_way(self, kept: Kept) -> bool:
        return kept.transaction_id in self._out and kept.transaction_id not in self._held

    def held_by(self, kept: Kept) -> str | None:
        """Return the id of the transaction that a transaction waits for, by its key."""
        queue = self._lines.get(kept.line) if kept.line is not None else None
        return queue[0].transaction_id if queue and queue[0] is not kept else None

    def reason(self, kept: Kept) -> Reason | None:
        """Return why a transaction is held and tried apart, or None."""
        return self._held.get(kept.transaction_id)

    def add(self, kept: Kept, now_ms: int) -> None:
        """Take a transaction in, decided or not, in the order of the halves."""
        if kept.line is not None:
            self._lines.setdefault(kept.line, deque()).append(kept)
        if kept.verdict is not None:
            self.decided(kept, now_ms)

    def decided(self, kept: Kept, now_ms: int) -> None:
        """Take in that a transaction was decided COMMIT or DISCARD; the latter also where it was held."""
        if kept.verdict is Verdict.DISCARD:
            self._let_go(kept)
        if kept.verdict is Verdict.COMMIT:
            if kept.deliver_at_ms is not None and kept.deliver_at_ms > now_ms:
                heapq.heappush(self._delayed, (kept.deliver_at_ms, kept.decided, kept))
                return
            if kept.line is not None and self._lines[kept.line][0] is not kept:
                # It is taken when those before it are gone.
                return
        heapq.heappush(self._ready, (kept.decided, kept))

    def hold_back(self, kept: Kept) -> bool:
        """Take out a transaction that waits for its time; tell whether it did."""
        left = [entry for entry in self._delayed if entry[2] is not kept]
        if len(left) == len(self._delayed):
            return False
        heapq.heapify(left)
        self._delayed = left
        return True

    def remove(self, kept: Kept) -> None:
        """Take out a transaction that is settled, wherever it waits."""
        kept.settled = True
        self._let_go(kept)
        if kept.line is None:
            return
        queue = self._lines[kept.line]
        was_first = queue[0] is kept
        queue.remove(kept)
        if not queue:
            del self._lines[kept.line]
        elif was_first and queue[0].verdict is Verdict.COMMIT and queue[0].transaction_id not in self._out:
            heapq.heappush(self._ready, (queue[0].decided, queue[0]))

    def take(self, now_ms: int, limit: int) -> list[Kept]:
        """Take what can be published, in order; each must be given back, or removed."""
        while self._delayed and self._delayed[0][0] <= now_ms:
            _, decided, kept = heapq.heappop(self._delayed)
            heapq.heappush(self._ready, (decided, kept))
        taken: list[Kept] = []
        while self._ready and len(taken) < limit:
            _, kept = heapq.heappop(self._ready)
            if kept.settled:
                # The done log told that it had been published.
                continue
            taken.append(kept)
            self._out.add(kept.transaction_id)
            if kept.line is not None and kept.verdict is Verdict.COMMIT:
                taken.extend(self._chain(kept))
        return taken

    def _chain(self, first: Kept) -> Iterable[Kept]:
        """Take those of a line that are committed, up to the first that is not."""
        assert first.line is not None  # noqa: S101 - the caller asked for its line
        for kept in self._lines[first.line]:
            if kept is first:
                continue
            if kept.verdict is not Verdict.COMMIT:
                return
            self._out.add(kept.transaction_id)
            yield kept

    def give_back(self, kept: Kept) -> None:
        """Give back one that was taken and not published, without its fault."""
        self._out.discard(kept.transaction_id)
        queue = self._lines.get(kept.line) if kept.line is not None else None
        if queue is None or queue[0] is kept or kept.verdict is Verdict.DISCARD:
            heapq.heappush(self._ready, (kept.decided, kept))

    def hold(self, kept: Kept, reason: Reason) -> None:
        """Keep one that was taken for trials, or note why it is kept."""
        self._held[kept.transaction_id] = reason

    def try_held(self, kept: Kept) -> bool:
        """Take one that is held for a trial; tell whether that may be: an operator may be about to discard it."""
        if kept.transaction_id in self._discarding:
            return False
        self._tried.add(kept.transaction_id)
        return True

    def put_back(self, kept: Kept) -> None:
        """A trial is over, and it was not published."""
        self._tried.discard(kept.transaction_id)

    def begin_discard(self, kept: Kept) -> bool:
        """Keep trials off one that an operator discards; tell whether it is held, and no trial has it."""
        may = kept.transaction_id in self._held and kept.transaction_id not in self._tried
        if may:
            self._discarding.add(kept.transaction_id)
        return may

    def end_discard(self, kept: Kept) -> None:
        """The operator's decision is stored, or failed."""
        self._discarding.discard(kept.transaction_id)

    def begin_anew(self, unsettled: Iterable[Kept]) -> None:
        """Give back all that a former coordinator of this process had; the next one first reads the done log."""
        for kept in unsettled:
            if kept.transaction_id in self._out:
                self._let_go(kept)
                self.give_back(kept)

    def _let_go(self, kept: Kept) -> None:
        for ids in (self._out, self._tried, self._discarding):
            ids.discard(kept.transaction_id)
        self._held.pop(kept.transaction_id, None)

    def wait_s(self, now_ms: int, at_most: float) -> float:
        """Return the seconds until something can be taken; 0 if it can now."""
        if self._ready:
            return 0.0
        wait = at_most
        if self._delayed:
            wait = min(wait, (self._delayed[0][0] - now_ms) / 1000)
        return max(wait, 0.0)


__all__ = ["Shelf"]
