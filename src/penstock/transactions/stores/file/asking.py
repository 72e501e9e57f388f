"""The file store's checks: who is due, who is asked, and what becomes of those whose checks are exhausted."""

from __future__ import annotations

import logging
import time

from penstock.errors import TransactionError
from penstock.transactions.coordinator.checks.discard_policy import Discarding, Exhausted
from penstock.transactions.coordinator.state.check_schedule import CheckPolicy
from penstock.transactions.store import CoordinatorOptions
from penstock.transactions.stores.file.ledger import Kept
from penstock.transactions.stores.file.opened import OpenStore
from penstock.transactions.stores.file.store import FileStore
from penstock.transactions.wire.check_request import CheckRequest
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Verdict

_log = logging.getLogger("penstock.transactions")

#: Seconds after which a question that nobody was there for, or that found no room, is asked again, at most.
_SOON_S = 1.0
_ALARM_S = 30.0
#: Checks in one round: a crowd of undecided halves delays nobody's publication.
_CHECKS = 2_000


class FileAsker:
    """Asks about undecided transactions. Used by the settler's thread, save for `plan`, which holds the store's lock.

    Args:
        store: takes the decisions of the discard policy.
        opened: the same store, opened.
        options: times, limits and the discard policy.
    """

    def __init__(self, store: FileStore, opened: OpenStore, options: CoordinatorOptions) -> None:
        self._store = store
        self._opened = opened
        self._policy = CheckPolicy(
            options.transaction_timeout_s, options.check_interval_s, options.check_max, options.check_backoff
        )
        self._discarding = Discarding(options.discard, options.check_timeout_s, store.path.name)
        # By group: when the last alarm was raised.
        self._alarms: dict[str, float] = {}

    @property
    def hung(self) -> int:
        """Calls of the discard policy that were given up."""
        return self._discarding.hung

    def close(self) -> None:
        """Ask the discard policy no more."""
        self._discarding.close()

    def plan(self, kept: Kept) -> None:
        """Plan the next check of an undecided transaction. The caller holds the store's lock."""
        if kept.verdict is not None:
            return
        # Wall clocks jump; what they say is trusted no further than that a birth is not in the future.
        now_ms, now = time.time() * 1000, time.monotonic()
        first = max(self._policy.timeout_s, (kept.immunity_ms or 0) / 1000)
        wait = first - max(0.0, now_ms - kept.birth_ms) / 1000
        if kept.check_count:
            interval = self._policy.interval(kept.check_count)
            wait = max(wait, interval - max(0.0, now_ms - kept.answered_ms) / 1000)
        self._opened.table.plan(kept, now + max(0.0, wait))

    def round(self) -> None:
        """Ask about those that are due, as many as one round has time for."""
        self._discarding.tend()
        opened, now = self._opened, time.monotonic()
        with opened.lock:
            due = opened.table.take_due(now, _CHECKS)
        for kept in due:
            wait = self._ask(kept)
            with opened.lock:
                if not kept.settled and kept.verdict is None:
                    opened.table.plan(kept, now + wait)

    def _ask(self, kept: Kept) -> float:
        """Ask about one transaction, and return the seconds after which to look at it again."""
        interval = self._policy.interval(kept.check_count + 1)
        if kept.check_count >= self._policy.maximum:
            self._exhausted(kept)
            return interval
        opened = self._opened
        if not opened.questions.anybody(kept.group):
            with opened.lock:
                opened.counts.no_producer += 1
            self._alarm(kept)
            return min(interval, _SOON_S)
        halves = opened.undecided_halves(kept)
        if halves is None:
            return interval
        if not opened.questions.ask(CheckRequest(halves[0], 0, kept.number, kept.check_count + 1)):
            return min(interval, _SOON_S)
        with opened.lock:
            opened.counts.checks += 1
        return interval

    def _alarm(self, kept: Kept) -> None:
        now = time.monotonic()
        if now - self._alarms.get(kept.group, -_ALARM_S) >= _ALARM_S:
            self._alarms[kept.group] = now
            _log.warning(
                "no producer of group %s is here to answer a check, of transaction %s and maybe others; start one "
                "with a check in this process",
                kept.group,
                kept.transaction_id,
            )

    def _exhausted(self, kept: Kept) -> None:
        def half() -> Half | None:
            halves = self._opened.undecided_halves(kept)
            return None if halves is None else halves[0]

        def decide(verdict: Verdict) -> None:
            self._store.change(kept.transaction_id, kept.group, verdict, Author.COORDINATOR, _log_failure)

        self._discarding.settle(Exhausted(kept.transaction_id, kept.group, kept.check_count, half, decide))


def _log_failure(error: TransactionError | None) -> None:
    if error is not None:
        # It is due again in an interval.
        _log.warning("%s", error)


__all__ = ["FileAsker"]
