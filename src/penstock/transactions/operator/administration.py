"""The operator's actions on the transactions of a store: list, decide, bring a discarded one back.

Each store implements `Administration`. The texts that an operator reads are made here, the same for all stores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.clients.bounded_calls import ask_again
from penstock.transactions.core.pending import Pending
from penstock.transactions.model import PendingTransaction, TransactionState
from penstock.transactions.wire.ops import Verdict

#: `waits_for` of an undecided transaction whose check reached no producer of its group.
NO_PRODUCER = "a producer of group {}: none runs"
NO_ANSWER = "an answer of group {}: the brokers did not say whether one of its producers runs"

#: DISCARD has no public state.
_STATES = {Verdict.COMMIT: TransactionState.COMMIT, Verdict.ROLLBACK: TransactionState.ROLLBACK}
#: The effect of a decision.
_ENDS = {
    Verdict.COMMIT: "committed: visible",
    Verdict.ROLLBACK: "rolled back",
    Verdict.DISCARD: "moved to the discarded topic",
}
#: Seconds between two looks at the effect of a decision.
_POLL_S = 0.2


def hanging(call: str, age_s: float) -> str:
    """Return the `waits_for` text of a publication whose call into the Kafka client hangs."""
    return f"Kafka: {call} has not gone on for {max(0.0, age_s):.0f} s"


def shown(
    pending: Pending, now_ms: float, held_by: str | None, obstacle: str, otherwise: str = "a coordinator"
) -> PendingTransaction:
    """Return a pending transaction as an operator sees it.

    Args:
        pending: the transaction; no payload is needed.
        now_ms: the store's time, in milliseconds since the epoch.
        held_by: id of the transaction of its group and key that it waits for, or None.
        obstacle: a known obstacle to its publication; for an undecided transaction, the reason why no check is sent.
        otherwise: `waits_for` of a decided transaction without any obstacle.
    """
    half, verdict = pending.half, pending.verdict
    if not pending.is_complete:
        waits = "the rest of its messages"
    elif verdict is None:
        waits = obstacle
    elif verdict is Verdict.COMMIT and held_by is not None:
        waits = ""
    elif verdict is Verdict.COMMIT and half.deliver_at_ms is not None and half.deliver_at_ms > now_ms:
        waits = "its time"
    else:
        waits = obstacle or otherwise
    return PendingTransaction(
        transaction_id=half.transaction_id,
        group=half.group,
        topics=tuple(half.topic for half in pending.halves),
        age_s=max(0.0, (now_ms - pending.birth_ms) / 1000),
        check_count=pending.check_count,
        decided=None if verdict is None else _STATES.get(verdict),
        deliver_at_ms=half.deliver_at_ms,
        held_by=held_by,
        waits_for=waits,
    )


def outcome_text(verdict: Verdict, waits: str) -> str:
    """Return the effect of a decision, as the end of a line; `waits` is the result of `Administration.decide`."""
    return f"stored, but it has not taken effect; it waits for {waits}" if waits else _ENDS[verdict]


class Act(NamedTuple):
    """An operator's action, done or begun, as the audit log records it."""

    who: str
    #: `commit`, `rollback`, `discard` or `resume`.
    what: str
    #: The id of the transaction.
    transaction: str
    group: str
    #: Topic, partition and offset; or the name of the store.
    place: str
    why: str = ""
    #: The offset of the record.
    offset: int = -1
    #: The time of the record, in milliseconds since the epoch by the store's clock.
    at_ms: int = 0


@dataclass(frozen=True, slots=True)
class Discarded:
    """A discarded transaction, or one message of it: `resume` brings it back.

    Attributes:
        topics: the topics of its messages, in the order of its parts.
        check_count: the number of answered checks.
        at_ms: the time of the discard, in milliseconds since the epoch, by the store's clock.
        resumed_by: the operator who brought it back; empty: it was not brought back.
    """

    transaction_id: str
    group: str
    topics: tuple[str, ...]
    reason: str
    check_count: int
    at_ms: int
    resumed_by: str


class Administration(ABC):
    """An operator's actions on a store. Safe from any thread, except for a store in Kafka."""

    @abstractmethod
    def pending(self) -> Sequence[PendingTransaction]:
        """Return the pending transactions, oldest first."""

    @abstractmethod
    def show(self, transaction_id: str) -> PendingTransaction | None:
        """Return one pending transaction, or None."""

    @abstractmethod
    def discarded(self) -> Sequence[Discarded]:
        """Return the discarded transactions that are still kept, including those that were brought back."""

    @abstractmethod
    def acts(self, transaction_id: str) -> Sequence[Act]:
        """Return all operators' actions on a transaction, oldest first; they are kept for ever."""

    def notices(self, pending: Sequence[PendingTransaction]) -> list[str]:  # noqa: ARG002 - most stores have none
        """Return sentences about obstacles of the listed transactions that their `waits_for` does not give."""
        return []

    @abstractmethod
    def decide(self, transaction_id: str, verdict: Verdict, actor: str, why: str = "", timeout_s: float = 0.0) -> str:
        """Store an operator's decision, and wait for its effect, at most `timeout_s` seconds.

        The decision counts if it is the first. A ROLLBACK also counts against a COMMIT whose message waits for its
        `deliver_at`, and a DISCARD against a COMMIT whose messages Kafka refuses. The audit log gets the operator and
        the reason before.

        Returns:
            what the transaction still waits for; empty: it is settled.

        Raises:
            TransactionRefusedError: another decision counts. Or it is a DISCARD of a committed transaction that Kafka
                does not refuse, or that is being published now.
            TransactionError: no such transaction is pending, or some of its messages are absent.
            DecisionNotStoredError: the decision is not known to be durable.
            PenstockError: the audit log was not written; nothing was done.
        """

    @abstractmethod
    def resume(self, transaction_id: str, actor: str, why: str = "", *, again: bool = False) -> int:
        """Bring a discarded transaction back, undecided and without checks so far; return the number of its messages.

        The audit log gets the operator and the reason before. A transaction is brought back once. With `again` it may
        be brought back repeatedly, and may become visible twice.

        Raises:
            TransactionError: it is not discarded, is pending, or was brought back before.
            MissingRightError: this client may not store halves, or not read the audit log; nothing was done.
            PenstockError: the audit log was not written. Or the halves were not stored after that; then use `again`.
        """


class StoreAdministration(Administration):
    """An operator's actions on a store outside Kafka, in the process of its coordinator. Safe from any thread."""

    @abstractmethod
    def oldest(self, most: int, shards: Collection[int]) -> Sequence[PendingTransaction]:
        """Return the oldest pending transactions of some shards, at most `most`."""

    def decide(self, transaction_id: str, verdict: Verdict, actor: str, why: str = "", timeout_s: float = 0.0) -> str:
        """Store an operator's decision; see `Administration.decide`."""
        self._store_decision(transaction_id, verdict, actor, why)
        pending = ask_again(lambda: self.show(transaction_id), timeout_s, _POLL_S, until=lambda shown: shown is None)
        return "" if pending is None else pending.waits_for or "a coordinator"

    @abstractmethod
    def _store_decision(self, transaction_id: str, verdict: Verdict, actor: str, why: str) -> None:
        """Do what `decide` does, without waiting for the effect."""
