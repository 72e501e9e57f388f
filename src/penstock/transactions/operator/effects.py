"""Whether a decision took effect in a store that shows what is pending: it is asked until the transaction is gone."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.transactions.model import PendingTransaction
from penstock.transactions.operator.kafka_operator import Decided, Effect
from penstock.transactions.wire.ops import Verdict

#: Seconds between two looks.
_LOOK_S = 0.2


def await_effect(
    show: Callable[[str], PendingTransaction | None], transaction_id: str, verdict: Verdict, timeout_s: float
) -> Decided:
    """Wait until a transaction that was decided is settled, at most so long; return whether it is."""
    deadline = time.monotonic() + timeout_s
    while (left := show(transaction_id)) is not None:
        if time.monotonic() >= deadline:
            return Decided(Effect.WAITS, verdict, left.waits_for or "a coordinator")
        time.sleep(_LOOK_S)
    return Decided(Effect.DONE, verdict)
