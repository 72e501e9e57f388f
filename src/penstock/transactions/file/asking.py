"""The file store's checks: who is due, who is asked, and what becomes of those whose checks are exhausted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from penstock.errors import DecisionNotStoredError
from penstock.transactions.file.ledger import Kept
from penstock.transactions.file.opened import OpenStore
from penstock.transactions.file.store import FileStore
from penstock.transactions.model import HalfMessage, TransactionState
from penstock.transactions.records import Author, CheckRequest, Verdict
from penstock.transactions.store import CoordinatorOptions

_log = logging.getLogger("penstock.transactions")

#: Seconds after which a question that nobody was there for, or that found no room, is asked again, at most.
_SOON_S = 1.0
_ALARM_S = 30.0
#: Checks in one round: a crowd of undecided halves delays nobody's publication.
_CHECKS = 2_000
_DECISIONS = {
    TransactionState.COMMIT: Verdict.COMMIT,
    TransactionState.ROLLBACK: Verdict.ROLLBACK,
    TransactionState.UNKNOWN: Verdict.DISCARD,
}


class FileAsker:
    """Asks about undecided transactions. Used by the settler's thread, save for `plan`, which holds the store's lock.

    Args:
        store: takes the decisions of the discard policy.
        opened: the same store, opened.
        options: times, limits and the discard policy.
        stopping: set when no more is to be waited for.
    """

    def __init__(
        self, store: FileStore, opened: OpenStore, options: CoordinatorOptions, stopping: threading.Event
    ) -> None:
        self._store = store
        self._opened = opened
        self._options = options
        self._stopping = stopping
        # By group: when the last alarm was raised.
        self._alarms: dict[str, float] = {}
        # Ids whose discard policy, a function, is being asked. Guarded by the store's lock.
        self._judged: set[str] = set()

    def plan(self, kept: Kept) -> None:
        """Plan the next check of an undecided transaction. The caller holds the store's lock."""
        if kept.verdict is not None:
            return
        # Wall clocks jump; what they say is trusted no further than that a birth is not in the future.
        now_ms, now = time.time() * 1000, time.monotonic()
        first = max(self._options.transaction_timeout_s, (kept.immunity_ms or 0) / 1000)
        wait = first - max(0.0, now_ms - kept.birth_ms) / 1000
        if kept.check_count:
            interval = self._interval(kept.check_count)
            wait = max(wait, interval - max(0.0, now_ms - kept.answered_ms) / 1000)
        self._opened.table.plan(kept, now + max(0.0, wait))

    def _interval(self, answered: int) -> float:
        return self._options.check_interval_s * self._options.check_backoff ** max(0, answered - 1)

    def round(self) -> None:
        """Ask about those that are due, as many as one round has time for."""
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
        interval = self._interval(kept.check_count + 1)
        if kept.check_count >= self._options.check_max:
            self._exhausted(kept)
            return interval
        opened = self._opened
        if not opened.questions.anybody(kept.group):
            with opened.lock:
                opened.counts.no_producer += 1
            self._alarm(kept)
            return min(interval, _SOON_S)
        half = opened.halves(kept)[0]
        if not opened.questions.ask(CheckRequest(half, 0, kept.number, kept.check_count + 1)):
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
        policy = self._options.discard
        if callable(policy):
            self._judge(kept, policy)
            return
        verdict = {"commit": Verdict.COMMIT, "rollback": Verdict.ROLLBACK}.get(policy, Verdict.DISCARD)
        self._decide(kept, verdict)

    def _decide(self, kept: Kept, verdict: Verdict) -> None:
        _log.error(
            "transaction %s of group %s: %d checks were answered UNKNOWN; it is settled by the discard policy: %s",
            kept.transaction_id,
            kept.group,
            kept.check_count,
            verdict.name,
        )
        self._store.change(kept.transaction_id, kept.group, verdict, Author.COORDINATOR, _log_failure)

    def _judge(self, kept: Kept, policy: Callable[[HalfMessage], TransactionState]) -> None:
        """Ask a function, on a thread of its own: one that hangs is given up, and holds nobody else."""
        opened = self._opened
        with opened.lock:
            if kept.transaction_id in self._judged:
                return
            self._judged.add(kept.transaction_id)
        half = opened.halves(kept)[0]
        message = HalfMessage(half.topic, half.key, half.value, half.headers, kept.transaction_id, kept.check_count)
        # Whoever takes the slot decides: the function's thread, or the timer.
        slot = [True]

        def settle(state: object) -> None:
            with opened.lock:
                if not slot:
                    return
                slot.clear()
                self._judged.discard(kept.transaction_id)
            self._decide(
                kept, _DECISIONS.get(state, Verdict.DISCARD) if isinstance(state, TransactionState) else Verdict.DISCARD
            )

        def judge() -> None:
            try:
                state: object = policy(message)
            except Exception:  # noqa: BLE001 - the user's function may raise anything
                _log.exception("the discard policy raised for transaction %s; it is discarded", kept.transaction_id)
                state = None
            timer.cancel()
            settle(state)

        def give_up() -> None:
            with opened.lock:
                opened.counts.hung_checks += bool(slot)
            settle(None)

        timer = threading.Timer(self._options.check_timeout_s, give_up)
        timer.daemon = True
        timer.start()
        threading.Thread(target=judge, name=f"penstock-discard-{kept.number}", daemon=True).start()


def _log_failure(error: DecisionNotStoredError | None) -> None:
    if error is not None:
        # It is due again in an interval.
        _log.warning("%s", error)


__all__ = ["FileAsker"]
