"""How a pending transaction is shown to operators, whatever store it is in. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.transactions.model import PendingTransaction, TransactionState
from penstock.transactions.wire.ops import Verdict

#: DISCARD is no state that a user knows.
_STATES = {Verdict.COMMIT: TransactionState.COMMIT, Verdict.ROLLBACK: TransactionState.ROLLBACK}

#: What the undecided transactions of a producer group wait for that could not be asked about them.
NO_PRODUCER = "a producer of group {}: none runs"
NO_ANSWER = "an answer of group {}: the brokers did not say whether one of its producers runs"


def hanging(call: str, age_s: float) -> str:
    """Return what publication waits for where a call into the Kafka client has not gone on for so many seconds."""
    return f"Kafka: {call} has not gone on for {max(0.0, age_s):.0f} s"


def described(
    transaction_id: str,
    group: str,
    topics: Sequence[str],
    *,
    birth_ms: float,
    now_ms: float,
    check_count: int,
    verdict: Verdict | None,
    deliver_at_ms: int | None,
    held_by: str | None,
    is_complete: bool = True,
    missing: Collection[str] = (),
    obstacle: str = "",
    unasked: str = "",
) -> PendingTransaction:
    """Return a transaction that is not settled as an operator sees it. Times are milliseconds since the epoch.

    The verdict waits to take effect; `held_by` is the id of the transaction of its group and key that it waits for;
    `missing` are topics that do not exist; `unasked` is what it waits for as long as nobody can be asked about it.
    """
    waits_for = obstacle or "a coordinator"
    if not is_complete:
        waits_for = "the rest of its messages"
    elif verdict is None:
        waits_for = unasked
    elif verdict is Verdict.COMMIT and held_by is not None:
        waits_for = ""
    elif verdict is Verdict.COMMIT and (absent := sorted(set(topics) & set(missing))):
        waits_for = f"topic {', '.join(absent)}, which does not exist"
    elif verdict is Verdict.COMMIT and deliver_at_ms is not None and deliver_at_ms > now_ms:
        waits_for = "its time"
    return PendingTransaction(
        transaction_id=transaction_id,
        group=group,
        topics=tuple(topics),
        age_s=max(0.0, (now_ms - birth_ms) / 1000),
        check_count=check_count,
        decided=None if verdict is None else _STATES.get(verdict),
        deliver_at_ms=deliver_at_ms,
        held_by=held_by,
        waits_for=waits_for,
    )
