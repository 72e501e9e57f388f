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
from pathlib import Path

from penstock.transactions.model import FINISH_BUCKETS_S
from penstock.transactions.store import ToldSettled
from penstock.transactions.stores.file.journal import Change, Decide, Journal, Outcome, Prepare, Settle
from penstock.transactions.stores.file.ledger import Kept
from penstock.transactions.stores.file.questions import Questions
from penstock.transactions.stores.file.shelf import Shelf
from penstock.transactions.stores.file.table import Table
from penstock.transactions.stores.file.writer import Writer
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
    """One opened store. Thread-safe.

    Args:
        folder: where the table goes.
        journal: opened.
        name: what the names of threads end with.
        max_pending_bytes: payloads kept in memory; those beyond are read from the log again.
    """

    def __init__(self, folder: Path, journal: Journal, name: str, max_pending_bytes: int) -> None:
        self.guard = threading.Lock()
        self.lock = threading.Condition(threading.Lock())
        self.journal = journal
        self.table = Table(folder)
        self.shelf = Shelf()
        self.questions = Questions()
        self.counts = FileCounts()
        #: By id, in the order they were prepared.
        self.kept: dict[str, Kept] = {}
        #: Plans the next check of an undecided transaction; set by the settler.
        self.plan: Callable[[Kept], None] | None = None
        self._watches: dict[str, ToldSettled] = {}
        # Halves in memory, each with the bytes they count for.
        self._cache: dict[str, tuple[tuple[Half, ...], int]] = {}
        self._cached_bytes = 0
        self._max_cached_bytes = max_pending_bytes
        self._warned_at = 0.0
        now_ms = int(time.time() * 1000)
        for kept in sorted(journal.ledger.kept.values(), key=lambda one: one.number):
            self.kept[kept.transaction_id] = kept
            self.table.add(kept)
            self.shelf.add(kept, now_ms)
        journal.delays = self
        self.writer = Writer(journal, self.guard, self._changed, f"penstock-file-{name}")

    def halves(self, kept: Kept) -> tuple[Half, ...]:
        """Return the halves of a transaction, from memory or from the log.

        Raises:
            StoreDamagedError: they do not read any more.
            OSError: the disk failed.
        """
        with self.lock:
            cached = self._cache.get(kept.transaction_id)
        if cached is not None:
            return cached[0]
        with self.guard:
            return self.journal.halves(kept)

    def undecided_halves(self, kept: Kept) -> tuple[Half, ...] | None:
        """Return the halves of a transaction, unless it was decided or settled meanwhile: then they may be gone.

        Raises:
            StoreDamagedError: they do not read any more.
            OSError: the disk failed.
        """
        with self.guard:
            return self.journal.undecided_halves(kept)

    def is_watched(self, kept: Iterable[Kept]) -> bool:
        """Tell whether somebody waits for the settling of one of them."""
        with self.lock:
            return bool(self._watches) and any(one.transaction_id in self._watches for one in kept)

    def watch(self, transaction_id: str, told: ToldSettled) -> None:
        """Tell how a transaction is settled."""
        with self.lock:
            self._watches[transaction_id] = told

    def forget(self, transaction_id: str) -> None:
        """Give a watch up."""
        with self.lock:
            self._watches.pop(transaction_id, None)

    def hold_back(self, kept: Kept) -> bool:
        """Let nobody publish a transaction that waits for its time; False where it does not. Called by the journal."""
        with self.lock:
            return self.shelf.hold_back(kept)

    def put_back(self, kept: Kept) -> None:
        """Let a transaction that was held back wait for its time again."""
        with self.lock:
            self.shelf.decided(kept, int(time.time() * 1000))

    def published(self, kept: Sequence[Kept]) -> list[tuple[ToldSettled, Verdict]]:
        """Take in that transactions were published, before that is durable here: the done log knows of it.

        Returns:
            Who is to be told, and what.
        """
        told = []
        now = time.time()
        with self.lock:
            for one in kept:
                if one.settled:
                    continue
                self.shelf.remove(one)
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
                    told.append((watch, verdict))
        return told

    def _changed(self, changes: Sequence[Change], outcomes: Sequence[Outcome]) -> None:
        told: list[ToldSettled] = []
        with self.lock:
            for change, outcome in zip(changes, outcomes, strict=True):
                if outcome.refused is not None:
                    self._refused(change, outcome.refused)
                elif isinstance(change, Prepare):
                    self._prepared(outcome.kept[0], change.halves)
                elif isinstance(change, Settle):
                    for kept in outcome.kept:
                        self._gone(kept)
                else:
                    for kept in outcome.kept:
                        told.extend(self._decided(kept, change))
            for kept in self.journal.take_moved():
                if kept.transaction_id in self.kept:
                    self.table.move(kept)
            self.lock.notify_all()
        for watch in told:
            watch(Verdict.ROLLBACK)

    def _prepared(self, kept: Kept, halves: tuple[Half, ...]) -> None:
        self.kept[kept.transaction_id] = kept
        self.table.add(kept)
        self.shelf.add(kept, int(time.time() * 1000))
        # A record is a little longer than its payloads.
        if self._cached_bytes + kept.size <= self._max_cached_bytes:
            self._cached_bytes += kept.size
            self._cache[kept.transaction_id] = halves, kept.size
        if self.plan is not None:
            self.plan(kept)

    def _decided(self, kept: Kept, change: Decide) -> list[ToldSettled]:
        self.counts.answered_checks += change.author is Author.CHECK
        if change.verdict is Verdict.UNKNOWN:
            if self.plan is not None:
                self.plan(kept)
        elif change.verdict is Verdict.ROLLBACK:
            self.counts.rolled_back += 1
            self.shelf.remove(kept)
            self._gone(kept)
            watch = self._watches.pop(kept.transaction_id, None)
            return [watch] if watch is not None else []
        else:
            self.table.update(kept)
            self.shelf.decided(kept, int(time.time() * 1000))
        return []

    def _gone(self, kept: Kept) -> None:
        self.kept.pop(kept.transaction_id, None)
        self.table.remove(kept)
        cached = self._cache.pop(kept.transaction_id, None)
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


__all__ = ["FileCounts", "OpenStore"]
