"""What an operator may do with the transactions of a store: look, decide, bring a discarded one back.

A store shows what it holds and takes a decision. What an operator reads of it is put into words here, the same for all.
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

#: What the undecided transactions of a producer group wait for that could not be asked about them.
NO_PRODUCER = "a producer of group {}: none runs"
NO_ANSWER = "an answer of group {}: the brokers did not say whether one of its producers runs"

#: DISCARD is no state that a user knows.
_STATES = {Verdict.COMMIT: TransactionState.COMMIT, Verdict.ROLLBACK: TransactionState.ROLLBACK}
#: What a decision that took effect has done.
_ENDS = {
    Verdict.COMMIT: "committed: visible",
    Verdict.ROLLBACK: "rolled back",
    Verdict.DISCARD: "moved to the discarded topic",
}
#: Seconds between two looks whether a decision took effect.
_POLL_S = 0.2


def hanging(call: str, age_s: float) -> str:
    """Return what publication waits for where a call into the Kafka client has not gone on for so many seconds."""
    return f"Kafka: {call} has not gone on for {max(0.0, age_s):.0f} s"


def shown(
    pending: Pending, now_ms: float, held_by: str | None, obstacle: str, otherwise: str = "a coordinator"
) -> PendingTransaction:
    """Return a transaction that is not settled as an operator sees it.

    Args:
        pending: the transaction; no payload is needed.
        now_ms: the store's time, in milliseconds since the epoch.
        held_by: id of the transaction of its group and key that it waits for, or None.
        obstacle: what stands in its way, if that is known: of an undecided one, why nobody is asked about it.
        otherwise: what it waits for if it is decided, and none of this is so.
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
    """Return what came of a decision, as the end of a line; `waits` is what `Administration.decide` returned."""
    return f"stored, not seen to take effect; it waits for {waits}" if waits else _ENDS[verdict]


class Act(NamedTuple):
    """What an operator did, or began to do, as it stands in an audit log."""

    who: str
    #: `commit`, `rollback`, `discard` or `resume`.
    what: str
    #: Its id.
    transaction: str
    group: str
    #: Topic, partition and offset; or what the store is called.
    place: str
    why: str = ""
    #: Of its record, and when it was written, in milliseconds since the epoch by the store's clock.
    offset: int = -1
    at_ms: int = 0


@dataclass(frozen=True, slots=True)
class Discarded:
    """A transaction that was discarded, or one message of it: `resume` brings it back.

    Attributes:
        topics: the topics of its messages, in the order of its parts.
        check_count: answered checks until then.
        at_ms: when it was settled, in milliseconds since the epoch, by the store's clock.
        resumed_by: who brought it back since; empty: it waits there.
    """

    transaction_id: str
    group: str
    topics: tuple[str, ...]
    reason: str
    check_count: int
    at_ms: int
    resumed_by: str


class Administration(ABC):
    """What an operator may do on a store. Safe from any thread, save for a store in Kafka."""

    @abstractmethod
    def pending(self) -> Sequence[PendingTransaction]:
        """Return what is not settled, oldest first."""

    @abstractmethod
    def show(self, transaction_id: str) -> PendingTransaction | None:
        """Return one pending transaction, or None."""

    @abstractmethod
    def discarded(self) -> Sequence[Discarded]:
        """Return what was discarded, as long as it is kept; also what was brought back since, where it still lies."""

    @abstractmethod
    def acts(self, transaction_id: str) -> Sequence[Act]:
        """Return what operators did to a transaction, oldest first: it is kept for ever."""

    def notices(self, pending: Sequence[PendingTransaction]) -> list[str]:  # noqa: ARG002 - most stores have none
        """Return sentences about obstacles of the listed transactions that their `waits_for` does not give."""
        return []

    @abstractmethod
    def decide(self, transaction_id: str, verdict: Verdict, actor: str, why: str = "", timeout_s: float = 0.0) -> str:
        """Store an operator's decision, and wait until it took effect, at most `timeout_s` seconds.

        It counts if it is the first. A ROLLBACK also counts against a COMMIT whose message waits for its `deliver_at`,
        and a DISCARD against one that Kafka refuses. Who it was, and why, is written down before.

        Returns:
            what the transaction still waits for; empty: it is settled.

        Raises:
            TransactionRefusedError: another decision stands; or what is committed is to be discarded, and Kafka does
                not refuse it, or it is being published just now.
            TransactionError: no such transaction is pending, or not all of its messages are there.
            DecisionNotStoredError: it is not known to be durable.
            PenstockError: it could not be written down; nothing was done.
        """

    @abstractmethod
    def resume(self, transaction_id: str, actor: str, why: str = "", *, again: bool = False) -> int:
        """Bring a discarded transaction back, undecided, with a fresh count of checks; return how many messages it has.

        Who it was, and why, is written down before. It is brought back once; `again`: also what was brought back
        before, which may become visible twice.

        Raises:
            TransactionError: it is not among the discarded ones, is pending, or was brought back before.
            MissingRightError: this client may not store halves, or not look who brought it back; nothing was done.
            PenstockError: it could not be written down; or was not stored after that, then try with `again`.
        """


class StoreAdministration(Administration):
    """What an operator may do on a store outside Kafka, in the process of its coordinator. Safe from any thread."""

    @abstractmethod
    def oldest(self, most: int, shards: Collection[int]) -> Sequence[PendingTransaction]:
        """Return the oldest pending transactions of some shards, at most so many."""

    def decide(self, transaction_id: str, verdict: Verdict, actor: str, why: str = "", timeout_s: float = 0.0) -> str:
        """Store an operator's decision; see `Administration.decide`."""
        self._store_decision(transaction_id, verdict, actor, why)
        left = ask_again(lambda: self.show(transaction_id), timeout_s, _POLL_S, until=lambda found: found is None)
        return "" if left is None else left.waits_for or "a coordinator"

    @abstractmethod
    def _store_decision(self, transaction_id: str, verdict: Verdict, actor: str, why: str) -> None:
        """Do what `decide` does, and wait for no effect."""
