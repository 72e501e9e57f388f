"""A file store that is open: what producers, the coordinator and operators of the process share.

The journal changes under `guard`, on the writing thread. All else here changes under `lock`: a batch that has become
durable is taken in at once, so what is seen here is on the disk. Who holds `lock` does not take `guard`.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.transactions.model import FINISH_BUCKETS_S
from penstock.transactions.store import SettledCallback
from penstock.transactions.stores.file.check_sources import CheckSources
from penstock.transactions.stores.file.log.journal import Change, Decide, Journal, Outcome, Prepare, Settle
from penstock.transactions.stores.file.log.ledger import StoredTransaction
from penstock.transactions.stores.file.log.writer import Writer
from penstock.transactions.stores.file.ready_queue import ReadyQueue
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Verdict

_log = logging.getLogger("penstock.transactions")

#: Seconds between two warnings of one kind.
_WARN_S = 5.0


@dataclass(slots=True)
class FileCounts:
    """Counts since the store was opened. Guarded by the store's lock."""

    committed: int = 0
    rolled_back: int = 0
    discarded: int = 0
    refused: int = 0
    checks: int = 0
    answered_checks: int = 0
    no_producer: int = 0
    finish_times: list[int] = field(default_factory=lambda: [0] * (len(FINISH_BUCKETS_S) + 1))
    finish_seconds: float = 0.0


class OpenStore:
    """One opened store. Thread-safe. Payloads beyond `max_pending_bytes` are read from the log again."""

    def __init__(self, journal: Journal, name: str, max_pending_bytes: int) -> None:
        self.guard = threading.Lock()
        self.lock = threading.Lock()
        self.journal = journal
        self.ready = ReadyQueue()
        self.check_sources = CheckSources()
        self.counts = FileCounts()
        #: Groups whose last check found no producer. Written by the coordinator's thread; any reads.
        self.unasked: set[str] = set()
        #: By id, in the order they were prepared.
        self.pending: dict[str, StoredTransaction] = {}
        #: Of the coordinator, where there is one: plans the next check of an undecided transaction, and wakes it.
        self.coordinator: tuple[Callable[[StoredTransaction], None], Callable[[], object]] | None = None
        self._watches: dict[str, SettledCallback] = {}
        # Halves in memory, each with the bytes they count for.
        self._cache: dict[str, tuple[tuple[Half, ...], int]] = {}
        self._cached_bytes = 0
        self._max_cached_bytes = max_pending_bytes
        self._warned_at = 0.0
        now_ms = int(time.time() * 1000)
        for stored in sorted(journal.ledger.pending.values(), key=lambda one: one.number):
            self.pending[stored.transaction_id] = stored
            self.ready.add(stored, now_ms)
        journal.delays = self
        self.writer = Writer(journal, self.guard, self._changed, f"penstock-file-{name}")

    def halves(self, stored: StoredTransaction) -> tuple[Half, ...]:
        """Return the halves of a transaction, from memory or from the log. Raises as `Journal.halves`."""
        with self.lock:
            cached = self._cache.get(stored.transaction_id)
        if cached is not None:
            return cached[0]
        with self.guard:
            return self.journal.halves(stored)

    def undecided_halves(self, stored: StoredTransaction) -> tuple[Half, ...] | None:
        """Return the halves of a transaction, unless it was decided or settled meanwhile: then they may be gone."""
        with self.guard:
            return self.journal.undecided_halves(stored)

    def is_watched(self, stored: Iterable[StoredTransaction]) -> bool:
        """Tell whether somebody waits for the settling of one of them."""
        with self.lock:
            return bool(self._watches) and any(one.transaction_id in self._watches for one in stored)

    def watch(self, transaction_id: str, callback: SettledCallback) -> None:
        """Call back once a transaction is settled."""
        with self.lock:
            self._watches[transaction_id] = callback

    def forget(self, transaction_id: str) -> None:
        """Give a watch up."""
        with self.lock:
            self._watches.pop(transaction_id, None)

    def hold_back(self, stored: StoredTransaction) -> bool:
        """Let nobody publish a transaction that waits for its time; False where it does not. Called by the journal."""
        with self.lock:
            return self.ready.hold_back(stored)

    def put_back(self, stored: StoredTransaction) -> None:
        """Let a transaction that was held back wait for its time again."""
        with self.lock:
            self.ready.decided(stored, int(time.time() * 1000))

    def published(self, stored: Sequence[StoredTransaction]) -> list[tuple[SettledCallback, Verdict]]:
        """Take in that transactions were published, before that is durable here: the done log knows of it.

        Returns the callbacks to call, each with how its transaction was settled.
        """
        completed = []
        now = time.time()
        with self.lock:
            for one in stored:
                if one.settled:
                    continue
                self.ready.remove(one)
                verdict = one.verdict or Verdict.COMMIT
                if verdict is Verdict.COMMIT:
                    self.counts.committed += 1
                    age = max(0.0, now - one.birth_ms / 1000)
                    self.counts.finish_times[bisect_left(FINISH_BUCKETS_S, age)] += 1
                    self.counts.finish_seconds += age
                else:
                    self.counts.discarded += 1
                watch = self._watches.pop(one.transaction_id, None)
                if watch is not None:
                    completed.append((watch, verdict))
        return completed

    def _changed(self, changes: Sequence[Change], outcomes: Sequence[Outcome]) -> None:
        callbacks: list[SettledCallback] = []
        with self.lock:
            for change, outcome in zip(changes, outcomes, strict=True):
                if outcome.refused is not None:
                    self._refused(change, outcome.refused)
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
        if change.verdict is Verdict.UNKNOWN:
            self._plan(stored)
        elif change.verdict is Verdict.ROLLBACK:
            self.counts.rolled_back += 1
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

    def _refused(self, change: Change, why: str) -> None:
        if not isinstance(change, Decide):
            return
        self.counts.refused += 1
        now = time.monotonic()
        if now - self._warned_at > _WARN_S:
            self._warned_at = now
            _log.warning("transaction %s: a %s is refused: %s", change.transaction_id, change.verdict.name, why)
