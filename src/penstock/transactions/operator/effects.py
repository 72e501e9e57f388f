"""Whether a decision took effect in a store that shows what is pending: it is asked until the transaction is gone."""

from __future__ import annotations

from collections.abc import Callable

from penstock.clients.asking import ask_again
from penstock.transactions.model import PendingTransaction
from penstock.transactions.operator.kafka_operator import Decided, Effect
from penstock.transactions.wire.ops import Verdict

#: Seconds between two looks.
_LOOK_S = 0.2


def await_effect(
    show: Callable[[str], PendingTransaction | None], transaction_id: str, verdict: Verdict, timeout_s: float
) -> Decided:
    """Wait until a transaction that was decided is settled, at most so long; return whether it is."""
    left = ask_again(lambda: show(transaction_id), timeout_s, _LOOK_S, until=lambda found: found is None)
    if left is not None:
        return Decided(Effect.WAITS, verdict, left.waits_for or "a coordinator")
    return Decided(Effect.DONE, verdict)
