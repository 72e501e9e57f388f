"""A file store that is open: what producers, the coordinator and operators of the process share.

The writing thread changes the journal. A batch that has become durable is taken in at once, under the journal's lock,
so what is seen here is on the disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from penstock.errors import PenstockError, StoreFailedError
from penstock.transactions.store import SettledCallback
from penstock.transactions.stores.file.check_sources import CheckSources
from penstock.transactions.stores.file.log.journal import Journal
from penstock.transactions.stores.file.log.judging import Applied, Change, Settle
from penstock.transactions.stores.file.log.ledger import StoredTransaction
from penstock.transactions.stores.file.log.redo import NoRoomError
from penstock.transactions.stores.file.log.table import State
from penstock.transactions.stores.file.ready_queue import ReadyQueue
from penstock.transactions.stores.relay.changes import Decide, Prepare, Result
from penstock.transactions.stores.relay.counts import Counts
from penstock.transactions.wire.ops import Author, Verdict

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
