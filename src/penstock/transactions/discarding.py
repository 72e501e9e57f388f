"""What becomes of a half whose checks are exhausted: the discard policy.

Whatever it says is written into the op log, like anybody's decision, and counts when it is read back, if it is the
first. A function is called on slots with a time limit; until it has answered, the half stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from penstock.transactions.model import DiscardPolicy, HalfMessage, TransactionState
from penstock.transactions.pending import Pending
from penstock.transactions.records import Verdict
from penstock.transactions.slots import Slots

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

#: Writes a decision of the coordinator's: half partition, transaction, what.
Decide = Callable[[int, Pending, Verdict], None]


class Discarding:
    """Applies a discard policy. `settle` and `tend` are called by the coordinator's thread.

    Args:
        policy: `"topic"`, `"commit"`, `"rollback"`, or a function.
        timeout_s: seconds that a function may take; one that takes longer has said UNKNOWN.
        decide: writes what was decided; called by the coordinator's thread, or by one of the slots.
        name: what the names of threads end with.
    """

    def __init__(self, policy: DiscardPolicy, timeout_s: float, decide: Decide, name: str) -> None:
        self._policy = policy
        self._decide = decide
        self._slots = Slots(_CALLS, timeout_s, f"penstock-discard-{name}")
        # Transactions that the function is asked about. Added by the coordinator's thread, removed by the slots: each
        # of the two is one step under the interpreter's lock.
        self._asked: set[str] = set()

    @property
    def hung(self) -> int:
        """Calls of the function that were given up."""
        return self._slots.hung

    def settle(self, half_partition: int, pending: Pending) -> None:
        """Decide what becomes of a half. It is called again after an interval if nothing has come of it."""
        policy = self._policy
        if not callable(policy):
            self._settle(half_partition, pending, _FIXED[policy])
        elif pending.half.transaction_id not in self._asked:
            self._asked.add(pending.half.transaction_id)
            self._slots.submit(
                f"the discard policy for transaction {pending.half.transaction_id}",
                partial(self._ask, policy, half_partition, pending),
                partial(self._settle, half_partition, pending, Verdict.DISCARD),
            )

    def tend(self) -> None:
        """Give up calls that hang."""
        self._slots.tend()

    def close(self) -> None:
        """Drop the calls that wait; those that run are left behind."""
        self._slots.close(0)

    def _settle(self, half_partition: int, pending: Pending, verdict: Verdict) -> None:
        _log.error(
            "transaction %s for %s is undecided after %d checks: by the discard policy it is %s",
            pending.half.transaction_id,
            pending.half.topic,
            pending.check_count,
            _WORDS[verdict],
        )
        self._decide(half_partition, pending, verdict)

    def _ask(self, policy: Callable[[HalfMessage], TransactionState], half_partition: int, pending: Pending) -> None:
        """Ask the function; runs on a slot."""
        half, verdict = pending.half, Verdict.DISCARD
        try:
            state: object = policy(
                HalfMessage(half.topic, half.key, half.value, half.headers, half.transaction_id, pending.check_count)
            )
        except Exception:  # noqa: BLE001 - the user's function may raise anything
            _log.exception("the discard policy raised for transaction %s: it counts as UNKNOWN", half.transaction_id)
        else:
            if isinstance(state, TransactionState):
                verdict = _ANSWERS[state]
            else:
                text = "the discard policy returned a %s for transaction %s, no TransactionState: it counts as UNKNOWN"
                _log.error(text, type(state).__name__, half.transaction_id)
        try:
            self._settle(half_partition, pending, verdict)
        finally:
            self._asked.discard(half.transaction_id)


__all__ = ["Decide", "Discarding"]
