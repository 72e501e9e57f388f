"""The file store's check scheduler: whose check is due, to whom it goes, and who meets the discard policy."""

from __future__ import annotations

import heapq
import itertools
import logging
import time

from penstock.errors import TransactionError
from penstock.transactions.core.discard import Exhausted
from penstock.transactions.stores.file.changes import Changes
from penstock.transactions.stores.file.log.journal import Decide
from penstock.transactions.stores.file.log.ledger import StoredTransaction
from penstock.transactions.stores.file.open_store import OpenStore
from penstock.transactions.stores.relay.relayed_store import CheckTerms
from penstock.transactions.wire.check_request import CheckRequest
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Verdict

_log = logging.getLogger("penstock.transactions")

#: Seconds after which a check that no producer was there for, or that found no room, is tried again, at most.
_SOON_S = 1.0
_ALARM_S = 30.0
#: Checks in one round: many undecided halves delay nobody's publication.
_CHECKS = 2_000
#: Entries of the queue before those of transactions that need no check any more are taken out.
_CROWD = 4_096


class DueQueue:
    """Undecided transactions by the time of their next check, in monotonic seconds. Guarded by the store's lock."""

    def __init__(self) -> None:
        # Due time, number that settles ties, and transaction. Entries of what was decided, settled or planned anew stay
        # until they come up, or until there are many.
        self._entries: list[tuple[float, int, StoredTransaction]] = []
        self._crowd = _CROWD
        self._ticket = itertools.count()

    def plan(self, stored: StoredTransaction, due: float) -> None:
        """Plan the next check of a transaction; what was planned before does not count."""
        stored.due = due
        heapq.heappush(self._entries, (due, next(self._ticket), stored))
        if len(self._entries) > self._crowd:
            self._entries = [entry for entry in self._entries if _is_planned(entry)]
            heapq.heapify(self._entries)
            self._crowd = max(_CROWD, 2 * len(self._entries))

    def take_due(self, now: float, limit: int) -> list[StoredTransaction]:
        """Take those whose time has come, the longest due first, so many at most; each must be planned again."""
        due: list[StoredTransaction] = []
        while self._entries and self._entries[0][0] <= now and len(due) < limit:
            entry = heapq.heappop(self._entries)
            if _is_planned(entry):
                due.append(entry[2])
        return due

    @property
    def next_due(self) -> float:
        """The time of the first entry; infinite where there is none."""
        return self._entries[0][0] if self._entries else float("inf")


def _is_planned(entry: tuple[float, int, StoredTransaction]) -> bool:
    due, _, stored = entry
    return stored.due == due and stored.verdict is None and not stored.settled


class FileCheckScheduler:
    """Checks undecided transactions. Used by the coordinator's thread, and `plan` under the store's lock."""

    def __init__(self, opened: OpenStore, checks: CheckTerms, changes: Changes) -> None:
        self._opened = opened
        self._policy = checks.policy
        self._discarding = checks.discarding
        self._changes = changes
        # Guarded by the store's lock.
        self._queue = DueQueue()
        # By group: when the last alarm was raised.
        self._alarms: dict[str, float] = {}

    def plan(self, stored: StoredTransaction) -> None:
        """Plan the next check of an undecided transaction. The caller holds the store's lock."""
        if stored.verdict is not None:
            return
        # Wall clocks jump; what they say is trusted no further than that a birth is not in the future.
        now_ms = time.time() * 1000
        birth_s, answered_s = min(stored.birth_ms, now_ms) / 1000, min(stored.answered_ms, now_ms) / 1000
        due = self._policy.next_due(birth_s, (stored.immunity_ms or 0) / 1000, answered_s, stored.check_count)
        self._queue.plan(stored, time.monotonic() + max(0.0, due - now_ms / 1000))

    def wait_s(self) -> float:
        """Return the seconds until a check is due. The caller holds the store's lock."""
        return self._queue.next_due - time.monotonic()

    def round(self) -> None:
        """Send the checks that are due, as many as one round has time for."""
        opened, now = self._opened, time.monotonic()
        with opened.lock:
            due = self._queue.take_due(now, _CHECKS)
        for stored in due:
            wait = self._check(stored)
            with opened.lock:
                if not stored.settled and stored.verdict is None:
                    self._queue.plan(stored, now + wait)

    def _check(self, stored: StoredTransaction) -> float:
        """Send the check of one transaction, and return the seconds after which to look at it again."""
        interval = self._policy.interval(stored.check_count + 1)
        if stored.check_count >= self._policy.maximum:
            self._discarding.settle(self._exhausted(stored))
            return interval
        opened = self._opened
        if not opened.check_sources.has_any(stored.group):
            with opened.lock:
                opened.counts.no_producer += 1
            opened.unasked.add(stored.group)
            self._alarm(stored)
            return min(interval, _SOON_S)
        halves = opened.undecided_halves(stored)
        if halves is None:
            return interval
        request = CheckRequest(halves[0], 0, stored.number, stored.check_count + 1)
        stored.attempts += 1
        if not opened.check_sources.send(request, stored.attempts):
            return min(interval, _SOON_S)
        opened.unasked.discard(stored.group)
        with opened.lock:
            opened.counts.checks += 1
        return interval

    def _alarm(self, stored: StoredTransaction) -> None:
        now = time.monotonic()
        if now - self._alarms.get(stored.group, -_ALARM_S) >= _ALARM_S:
            self._alarms[stored.group] = now
            _log.warning(
                "no producer of group %s is here to answer a check, of transaction %s and maybe others; start one "
                "with a check in this process",
                stored.group,
                stored.transaction_id,
            )

    def _exhausted(self, stored: StoredTransaction) -> Exhausted:
        def half() -> Half | None:
            halves = self._opened.undecided_halves(stored)
            return None if halves is None else halves[0]

        def decide(verdict: Verdict) -> None:
            now_ms = int(time.time() * 1000)
            decision = Decide(stored.transaction_id, stored.group, verdict, Author.COORDINATOR, 0, now_ms)
            self._changes.decide(decision, _log_failure)

        return Exhausted(stored.transaction_id, stored.group, stored.check_count, half, decide)


def _log_failure(error: TransactionError | None) -> None:
    if error is not None:
        # It is due again in an interval.
        _log.warning("%s", error)
