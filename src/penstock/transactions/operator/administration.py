"""How a pending transaction is shown to operators, whatever store it is in, and what became of an operator's decision.

A store that shows what is pending is asked until the transaction is gone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from penstock.clients.bounded_calls import ask_again
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


#: Seconds between two looks.
_POLL_S = 0.2

#: What a decision that took effect has done; and how those that may stand are called.
_ENDS = {
    Verdict.COMMIT: "committed: visible",
    Verdict.ROLLBACK: "rolled back",
    Verdict.DISCARD: "moved to the discarded topic",
}
_NAMES = {verdict: verdict.name for verdict in _ENDS}


class Effect(Enum):
    """What became of an operator's decision."""

    #: It stands, and it is done.
    DONE = "done"
    #: Another decision was in the log before it, and stands.
    REFUSED = "refused"
    #: It is stored and was not seen to take effect: no coordinator runs, or the transaction waits for something.
    WAITS = "waits"


@dataclass(frozen=True, slots=True)
class Decided:
    """The answer to an operator's decision."""

    effect: Effect
    #: The decision that stands, as far as it is known.
    stands: Verdict | None
    #: In words.
    waits_for: str = ""

    def text(self, verdict: Verdict) -> str:
        """Return what came of a decision, as the end of a line."""
        if self.effect is Effect.DONE:
            return _ENDS[verdict]
        waits = f"; it waits for {self.waits_for}" if self.waits_for else ""
        if self.effect is Effect.REFUSED:
            stands = "nothing yet" if self.stands is None else _NAMES.get(self.stands, "another decision")
            return f"refused: {stands} was decided before{waits}"
        return f"stored, not seen to take effect{waits}"


def await_effect(
    show: Callable[[str], PendingTransaction | None], transaction_id: str, verdict: Verdict, timeout_s: float
) -> Decided:
    """Wait until a transaction that was decided is settled, at most so long; return whether it is."""
    left = ask_again(lambda: show(transaction_id), timeout_s, _POLL_S, until=lambda found: found is None)
    if left is not None:
        return Decided(Effect.WAITS, verdict, left.waits_for or "a coordinator")
    return Decided(Effect.DONE, verdict)


class Administration(ABC):
    """What an operator may do on a store. Safe from any thread, save for a store in Kafka."""

    @abstractmethod
    def pending(self) -> Sequence[PendingTransaction]:
        """Return what is not settled, oldest first."""

    @abstractmethod
    def show(self, transaction_id: str) -> PendingTransaction | None:
        """Return one pending transaction, or None."""

    @abstractmethod
    def decide(self, transaction_id: str, verdict: Verdict, actor: str, why: str = "") -> object:
        """Store an operator's decision, and write down who it was and why. It counts if it is the first."""

    @abstractmethod
    def resume(self, transaction_id: str, actor: str, why: str = "") -> object:
        """Bring a discarded transaction back, undecided, and write down who it was and why."""

    def settle(self, transaction_id: str, verdict: Verdict, actor: str, why: str, timeout_s: float) -> Decided:
        """Do what `decide` does, and wait at most `timeout_s` seconds until it took effect."""
        self.decide(transaction_id, verdict, actor, why)
        return await_effect(self.show, transaction_id, verdict, timeout_s)
