"""A file store that is open: what producers, the coordinator and operators of the process share.

The writing thread changes the journal. A batch that has become durable is taken in at once, under the journal's lock,
so what is seen here is on the disk.

What is decided waits to be published in the order of the decisions; what shares a group and an order key
(`order="half"`), a line, in that of its halves: there, a transaction that is not decided, or that Kafka refuses for
now, holds those behind it, and no others. Those that are delayed for long wait in the state table, and come here when
their time is near.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import dropwhile, takewhile

from penstock.errors import PenstockError, StoreFailedError
from penstock.transactions.store import SettledCallback
from penstock.transactions.stores.coordination import Counts
from penstock.transactions.stores.file.checks import CheckSources
from penstock.transactions.stores.file.log.journal import Journal
from penstock.transactions.stores.file.log.ledger import Applied, Change, Settle, Standing, StoredTransaction
from penstock.transactions.stores.file.log.redo import NoRoomError
from penstock.transactions.stores.file.log.table import State
from penstock.transactions.stores.relayed_store import Decide, Prepare, Result
from penstock.transactions.wire.half import Line
from penstock.transactions.wire.ops import Author, Verdict

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


_log = logging.getLogger("penstock.transactions")


class OpenStore:
    """One opened store. Thread-safe. Payloads beyond `max_pending_bytes` are read from the log again."""

    def __init__(self, journal: Journal, max_pending_bytes: int) -> None:
        self.journal = journal
        #: Guards the journal, and all that is here.
        self.lock = journal.lock
        self.ready = ReadyQueue()
        self.check_sources = CheckSources(journal)
        self.counts = Counts()
        #: Why it takes nothing more, or None. Written by the writing thread.
        self.failure: StoreFailedError | None = None
        #: Wakes the coordinator, where there is one.
        self.wake: Callable[[], object] | None = None
        #: The call into the Kafka client that publication waits for, and since when in monotonic seconds; None: none.
        self.slow_call: tuple[str, float] | None = None
        #: What is due by then, in milliseconds since the epoch, waits in memory; what is due later, in the table.
        self.near_ms = 0.0
        self._watches: dict[str, SettledCallback] = {}
        self._cached_bytes = 0
        self._max_cached_bytes = max_pending_bytes
        # Of the writing thread: whom to call once a batch is taken in.
        self._rolled_back: list[SettledCallback] = []
        now_ms = time.time() * 1000
        for stored in sorted(journal.live.values(), key=lambda pending: pending.number):
            self._keep_halves(stored)
            self.ready.add(stored)
            if stored.verdict is not None:
                self._wait(stored, now_ms)
        journal.publication = self

    def write(self, changes: Sequence[Change]) -> Sequence[Result]:
        """Make changes durable, all of them or none, take them in, and return what became of each."""
        if self.failure is not None:
            return [self.failure] * len(changes)
        try:
            applied = self.journal.commit(changes)
        except NoRoomError as error:
            _log.warning("the file store has no room: %s; what was to be stored is refused until there is", error)
            return [error] * len(changes)
        except Exception as error:  # noqa: BLE001 - each change gets it; the thread must not die in silence
            return [self._fail(error)] * len(changes)
        wake = self.wake
        if wake is not None:
            wake()
        callbacks, self._rolled_back = self._rolled_back, []
        for callback in callbacks:
            callback(Verdict.ROLLBACK)
        return applied

    def _fail(self, error: Exception) -> StoreFailedError:
        """Take nothing more: after a sync that failed, nobody knows what the disk holds, and asking again may lie."""
        self.failure = StoreFailedError(
            f"the file store takes nothing more: {error}; repair the disk and open the store again, "
            "what it acknowledged is there"
        )
        self.failure.__cause__ = error
        if not isinstance(error, OSError | PenstockError):
            _log.exception("the file store fails")
        return self.failure

    def is_watched(self, stored: Iterable[StoredTransaction]) -> bool:
        """Tell whether somebody waits for the settling of one of them."""
        with self.lock:
            return bool(self._watches) and any(transaction.transaction_id in self._watches for transaction in stored)

    def watch(self, transaction_id: str, callback: SettledCallback) -> None:
        """Call back once a transaction is settled."""
        with self.lock:
            self._watches[transaction_id] = callback

    def forget(self, transaction_id: str) -> None:
        """Give a watch up."""
        with self.lock:
            self._watches.pop(transaction_id, None)

    def published(self, stored: Sequence[StoredTransaction]) -> list[tuple[SettledCallback, Verdict]]:
        """Take in that transactions were published, before that is durable here: the done log knows of it.

        Returns the callbacks to call, each with how its transaction was settled.
        """
        completed = []
        now = time.time()
        with self.lock:
            for transaction in stored:
                if transaction.settled:
                    continue
                self.ready.remove(transaction)
                verdict = transaction.verdict or Verdict.COMMIT
                self.counts.settled(verdict, now - transaction.birth_ms / 1000)
                watch = self._watches.pop(transaction.transaction_id, None)
                if watch is not None:
                    completed.append((watch, verdict))
        return completed

    # What follows is called with the lock held.

    def withdraw(self, stored: StoredTransaction, verdict: Verdict) -> bool:
        """Let nobody publish what is to be decided again, if that may be."""
        return self.ready.withdraw(stored, verdict)

    def restore(self, stored: StoredTransaction) -> None:
        """Let it wait as before."""
        self.ready.restore(stored)

    def changed(self, changes: Sequence[Change], applied: Sequence[Applied]) -> None:
        """Take in what has become durable."""
        now_ms = time.time() * 1000
        for change, outcome in zip(changes, applied, strict=True):
            if outcome.refused is not None:
                self.counts.refused += isinstance(change, Decide)
            elif isinstance(change, Prepare):
                self.ready.add(outcome.changed[0])
                self._keep_halves(outcome.changed[0])
            elif isinstance(change, Settle):
                for stored in outcome.changed:
                    self.ready.forget(stored)
                    self.drop_halves(stored)
            else:
                for stored in outcome.changed:
                    self._decided(stored, change, now_ms)

    def _decided(self, stored: StoredTransaction, change: Decide, now_ms: float) -> None:
        self.counts.answered_checks += change.author is Author.CHECK
        self.check_sources.forget(stored)
        if change.verdict is Verdict.UNKNOWN:
            return
        if change.verdict is not Verdict.ROLLBACK:
            self._wait(stored, now_ms)
            return
        self.counts.settled(change.verdict, 0.0)
        self.ready.remove(stored)
        self.ready.forget(stored)
        self.drop_halves(stored)
        watch = self._watches.pop(stored.transaction_id, None)
        if watch is not None:
            self._rolled_back.append(watch)

    def _wait(self, stored: StoredTransaction, now_ms: float) -> None:
        """Let a decided transaction wait for its time, or to be published."""
        due_ms = stored.deliver_at_ms
        if stored.verdict is not Verdict.COMMIT or due_ms is None or due_ms <= now_ms:
            self.ready.free(stored)
        elif stored.stays or due_ms <= self.near_ms:
            self.ready.delay(stored)
        else:
            self.drop_halves(stored)

    def bring_in(self, number: int, stored: StoredTransaction | None) -> None:
        """Let one that was read wait in memory, for its time is near; it may be there already, or be settled by now."""
        if self.journal.table.row(number).state == State.DELAYED:
            stored = self.journal.adopt(number, stored)
            if stored is not None:
                self._keep_halves(stored)
                self.ready.delay(stored)

    def _keep_halves(self, stored: StoredTransaction) -> None:
        # A record is a little longer than its payloads.
        if self._cached_bytes + stored.size <= self._max_cached_bytes:
            self._cached_bytes += stored.size
            stored.cached = stored.size
        else:
            stored.halves = None

    def drop_halves(self, stored: StoredTransaction) -> None:
        """Keep no payloads of a transaction in memory."""
        self._cached_bytes -= stored.cached
        stored.cached, stored.halves = 0, None
