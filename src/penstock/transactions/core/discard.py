"""The discard policy for halves whose checks are exhausted, the same for every store.

Its answer is stored like any other decision, and counts if it is the first. A function is called on a pool with a time
limit, so that no loop waits for it. Until it answers or is given up, the half stays as it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, get_args

from penstock.errors import ConfigurationError
from penstock.options import a_plain_function
from penstock.transactions.bulkhead import BulkheadPool, answer_of
from penstock.transactions.messages import as_seen
from penstock.transactions.model import DiscardPolicy, HalfMessage, TransactionState
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Verdict

_log = logging.getLogger("penstock.transactions")

#: Calls of a policy at a time.
_CALLS = 2
_FIXED = {"topic": Verdict.DISCARD, "commit": Verdict.COMMIT, "rollback": Verdict.ROLLBACK}
_WORDS = {
    Verdict.DISCARD: "moved to the discarded topic",
    Verdict.COMMIT: "published",
    Verdict.ROLLBACK: "rolled back",
}
_ANSWERS = {
    TransactionState.COMMIT: Verdict.COMMIT,
    TransactionState.ROLLBACK: Verdict.ROLLBACK,
    TransactionState.UNKNOWN: Verdict.DISCARD,
}

_Policy = Callable[[HalfMessage], TransactionState]


class Exhausted(NamedTuple):
    """A transaction that is still undecided after the maximum of answered checks."""

    transaction_id: str
    group: str
    check_count: int
    #: Reads its first half; None if it is decided by now. Called by a thread of the pool.
    half: Callable[[], Half | None]
    #: Stores the verdict. Called by the coordinator's thread, or by a thread of the pool.
    decide: Callable[[Verdict], None]


def require_discard(policy: object) -> None:
    """Raise `ConfigurationError` unless this is a discard policy."""
    if callable(policy):
        a_plain_function("discard", policy)
    elif policy not in _FIXED:
        words = ", ".join(map(repr, get_args(get_args(DiscardPolicy)[0])))
        raise ConfigurationError(f"discard must be {words} or a function, but is {policy!r}; choose one of them")


class Discarding:
    """Applies a discard policy. The coordinator's thread calls `settle` and `tend`.

    A function that raises, or takes longer than `timeout_s` seconds, counts as UNKNOWN.
    """

    def __init__(self, policy: DiscardPolicy, timeout_s: float, name: str) -> None:
        self._policy = policy
        self._pool = BulkheadPool(_CALLS, timeout_s, f"penstock-discard-{name}")
        # Guards the two below: the coordinator's thread submits and gives up, the pool's threads answer.
        self._lock = threading.Lock()
        # Ids with an open call. A call that was given up is no longer among them.
        self._asked: set[str] = set()
        self._closed = False

    @property
    def reads_halves(self) -> bool:
        """Whether the policy is a function, which needs the half."""
        return callable(self._policy)

    @property
    def hung(self) -> int:
        """Calls of the function that were given up."""
        return self._pool.hung

    def settle(self, exhausted: Exhausted) -> None:
        """Apply the policy to a transaction. The caller repeats this after a while if there is no decision."""
        policy = self._policy
        if not callable(policy):
            self._settle(exhausted, _FIXED[policy])
            return
        with self._lock:
            is_new = exhausted.transaction_id not in self._asked
            self._asked.add(exhausted.transaction_id)
        if is_new:
            self._pool.submit(
                _label(exhausted),
                partial(self._ask, policy, exhausted),
                partial(self._give_up, exhausted),
            )
        elif self._pool.is_short:
            # So many calls hang that this one may never run.
            self._give_up(exhausted)

    def tend(self) -> None:
        """Give up calls that hang."""
        self._pool.tend()

    def close(self) -> None:
        """Drop the calls that wait, and abandon those that run: their answers do not count."""
        with self._lock:
            self._closed = True
        self._pool.close(0)

    def _give_up(self, exhausted: Exhausted) -> None:
        if self._end_call(exhausted):
            self._settle(exhausted, Verdict.DISCARD)

    def _end_call(self, exhausted: Exhausted) -> bool:
        """End the call for a transaction. Tell whether it was open."""
        with self._lock:
            was_open = exhausted.transaction_id in self._asked and not self._closed
            self._asked.discard(exhausted.transaction_id)
        return was_open

    def _settle(self, exhausted: Exhausted, verdict: Verdict) -> None:
        _log.error(
            "transaction %s of group %s is undecided after %d checks: by the discard policy it is %s",
            exhausted.transaction_id,
            exhausted.group,
            exhausted.check_count,
            _WORDS[verdict],
        )
        exhausted.decide(verdict)

    def _ask(self, policy: _Policy, exhausted: Exhausted) -> None:
        """Call the function and store its answer. Runs on a thread of the pool."""
        with self._lock:
            is_open = exhausted.transaction_id in self._asked and not self._closed
        verdict: Verdict | None = None
        try:
            half = exhausted.half() if is_open else None
            if half is not None:
                state = answer_of(_label(exhausted), partial(policy, as_seen(half, exhausted.check_count)))
                verdict = _ANSWERS[state or TransactionState.UNKNOWN]
        finally:
            was_open = self._end_call(exhausted)
        if verdict is not None and was_open:
            self._settle(exhausted, verdict)
        elif verdict is not None:
            _log.warning("%s returned too late: its answer does not count", _label(exhausted))


def _label(exhausted: Exhausted) -> str:
    return f"the discard policy for transaction {exhausted.transaction_id}"
