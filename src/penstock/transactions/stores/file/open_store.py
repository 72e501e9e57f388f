"""A file store that is open: what producers, the coordinator and operators of the process share.

The journal changes under `guard`, on the writing thread. All else here changes under `lock`: a batch that has become
durable is taken in at once, so what is seen here is on the disk. Who holds `lock` does not take `guard`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from penstock.errors import PenstockError, StoreFailedError
from penstock.transactions.store import SettledCallback
from penstock.transactions.stores.file.check_sources import CheckSources
from penstock.transactions.stores.file.log.journal import Applied, Change, Journal, Settle
from penstock.transactions.stores.file.log.ledger import StoredTransaction
from penstock.transactions.stores.file.log.redo import NoRoomError
from penstock.transactions.stores.file.ready_queue import ReadyQueue
from penstock.transactions.stores.relay.changes import Decide, Prepare, Result
from penstock.transactions.stores.relay.counts import Counts
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Verdict

_log = logging.getLogger("penstock.transactions")


class OpenStore:
    """One opened store. Thread-safe. Payloads beyond `max_pending_bytes` are read from the log again."""

    def __init__(self, journal: Journal, max_pending_bytes: int) -> None:
        self.guard = threading.Lock()
        self.lock = threading.Lock()
        self.journal = journal
        self.ready = ReadyQueue()
        self.check_sources = CheckSources(self.first_half)
        self.counts = Counts()
        #: Why it takes nothing more, or None. Written by the writing thread.
        self.failure: StoreFailedError | None = None
        #: By id, in the order they were prepared.
        self.pending: dict[str, StoredTransaction] = {}
        #: Of the coordinator, where there is one: plans the next check of an undecided transaction, and wakes it.
        self.coordinator: tuple[Callable[[StoredTransaction], None], Callable[[], object]] | None = None
        self._watches: dict[str, SettledCallback] = {}
        # Halves in memory, each with the bytes they count for.
        self._cache: dict[str, tuple[tuple[Half, ...], int]] = {}
        self._cached_bytes = 0
        self._max_cached_bytes = max_pending_bytes
        now_ms = int(time.time() * 1000)
        for stored in sorted(journal.ledger.pending.values(), key=lambda pending: pending.number):
            self.pending[stored.transaction_id] = stored
            self.ready.add(stored, now_ms)
        journal.publication = self

    def write(self, changes: Sequence[Change]) -> Sequence[Result]:
        """Make changes durable, all of them or none, take them in, and return what became of each."""
        if self.failure is not None:
            return [self.failure] * len(changes)
        try:
            with self.guard:
                applied = self.journal.commit(changes)
            self.changed(changes, applied)
        except NoRoomError as error:
            _log.warning("the file store has no room: %s; what was to be stored is refused until there is", error)
            return [error] * len(changes)
        except Exception as error:  # noqa: BLE001 - each change gets it; the thread must not die in silence
            return [self._fail(error)] * len(changes)
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

    def halves(self, stored: StoredTransaction) -> tuple[Half, ...]:
        """Return the halves of a transaction, from memory or from the log. Raises as `Journal.halves`."""
        with self.lock:
            cached = self._cache.get(stored.transaction_id)
        if cached is not None:
            return cached[0]
        with self.guard:
            return self.journal.halves(stored)

    def first_half(self, stored: StoredTransaction) -> Half | None:
        """Return the first half of a transaction, unless it was decided or settled meanwhile: then it may be gone."""
        with self.guard:
            halves = self.journal.undecided_halves(stored)
        return None if halves is None else halves[0]

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

    def withdraw(self, stored: StoredTransaction, verdict: Verdict) -> bool:
        """Let nobody publish what is to be decided again, if that may be. Called by the journal."""
        with self.lock:
            return self.ready.withdraw(stored, verdict)

    def restore(self, stored: StoredTransaction) -> None:
        """Let it wait as before."""
        with self.lock:
            self.ready.restore(stored)

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

    def changed(self, changes: Sequence[Change], applied: Sequence[Applied]) -> None:
        """Take in what has become durable."""
        callbacks: list[SettledCallback] = []
        with self.lock:
            for change, outcome in zip(changes, applied, strict=True):
                if outcome.refused is not None:
                    self.counts.refused += isinstance(change, Decide)
                elif isinstance(change, Prepare):
                    self._prepared(outcome.changed[0], change.halves)
                elif isinstance(change, Settle):
                    for stored in outcome.changed:
                        self._gone(stored)
                else:
                    for stored in outcome.changed:
                        callbacks.extend(self._decided(stored, change))
            coordinator = self.coordinator
        if coordinator is not None:
            coordinator[1]()
        for callback in callbacks:
            callback(Verdict.ROLLBACK)

    def _prepared(self, stored: StoredTransaction, halves: tuple[Half, ...]) -> None:
        self.pending[stored.transaction_id] = stored
        self.ready.add(stored, int(time.time() * 1000))
        # A record is a little longer than its payloads.
        if self._cached_bytes + stored.size <= self._max_cached_bytes:
            self._cached_bytes += stored.size
            self._cache[stored.transaction_id] = halves, stored.size
        self._plan(stored)

    def _plan(self, stored: StoredTransaction) -> None:
        if self.coordinator is not None:
            self.coordinator[0](stored)

    def _decided(self, stored: StoredTransaction, change: Decide) -> list[SettledCallback]:
        self.counts.answered_checks += change.author is Author.CHECK
        self.check_sources.forget(stored)
        if change.verdict is Verdict.UNKNOWN:
            self._plan(stored)
        elif change.verdict is Verdict.ROLLBACK:
            self.counts.settled(change.verdict, 0.0)
            self.ready.remove(stored)
            self._gone(stored)
            watch = self._watches.pop(stored.transaction_id, None)
            return [watch] if watch is not None else []
        else:
            self.ready.decided(stored, int(time.time() * 1000))
        return []

    def _gone(self, stored: StoredTransaction) -> None:
        self.pending.pop(stored.transaction_id, None)
        cached = self._cache.pop(stored.transaction_id, None)
        if cached is not None:
            self._cached_bytes -= cached[1]
