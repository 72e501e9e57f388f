"""The seam between producers, coordinators and the place where halves and decisions are kept.

`KafkaStore` keeps them in topics. Another store implements the same protocols; the producer and its checks do not
know which one they speak to. What a store is asked on the way of a message it answers by a callback, `told`: that is
how one thread has thousands of transactions in flight. `told` is called exactly once for each request, from any
thread, soon after the store's own time limit at the latest; it neither raises nor waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import HalfNotStoredError, TransactionError
from penstock.options import a_telemetry, positive
from penstock.transactions.coordinator.checks.discard_policy import require_discard
from penstock.transactions.coordinator.state.check_schedule import require_checks
from penstock.transactions.model import CoordinatorStatistics, DiscardPolicy, PendingTransaction
from penstock.transactions.wire.check_request import CheckRequest
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Verdict

if TYPE_CHECKING:
    from penstock.telemetry import Telemetry


class Prepared(Protocol):
    """The halves of one transaction, all stored."""

    @property
    def halves(self) -> Sequence[Half]:
        """The halves, in the order of the transaction's parts."""


ToldPrepared = Callable[[Prepared | HalfNotStoredError], None]
#: Told None once a decision is durable, `DecisionNotStoredError`, or `TransactionRefusedError` where the store knows at
#: once that another one stands.
ToldDecided = Callable[[TransactionError | None], None]
#: Told how a transaction was settled: COMMIT once a committed reader can see it, ROLLBACK, or DISCARD.
ToldSettled = Callable[[Verdict], None]


class CheckSource(Protocol):
    """The questions to one producer group. Used by one thread."""

    def take(self, timeout_s: float) -> Sequence[CheckRequest]:
        """Return the questions that are there, waiting at most `timeout_s` seconds for the first."""

    def close(self) -> None:
        """Give the source up; another producer of the group gets its questions."""


class Store(Protocol):
    """Where halves and decisions are kept, as a producer sees it. Thread-safe.

    One object may serve several producers and a coordinator of one process: starts are counted, the last stop
    disconnects.
    """

    def start(self) -> None:
        """Connect, and create what is absent."""

    def stop(self, timeout_s: float) -> None:
        """Finish what is being written, at most `timeout_s` seconds, and disconnect."""

    def require_target(self, topic: str, partition: int | None) -> None:
        """Raise `TopicNotFoundError` or `ConfigurationError` unless a message can be published there."""

    def prepare(self, halves: Sequence[Half], told: ToldPrepared, ordering_key: bytes | None = None) -> None:
        """Store the halves of one transaction, all or none, and tell once all are durable.

        Where that fails, the store has them rolled back, should one of them turn up after all. May wait for room.

        Args:
            halves: in the order of their parts, of one id and one group.
            told: told what is prepared, or why not.
            ordering_key: what chooses their half partition; the first half's key, or else the id, where it is None.
        """

    def decide(self, prepared: Prepared, verdict: Verdict, told: ToldDecided) -> None:
        """Store the producer's decision, and tell once it is durable, or why that is not known, or does not count.

        A store that learns only later which decision was the first tells that this one is durable. Decisions that one
        thread hands over for halves of one half partition keep their order.
        """

    def answer(self, request: CheckRequest, verdict: Verdict, author: Author) -> None:
        """Store the answer to a check and return once it is durable, or raise `DecisionNotStoredError`."""

    def cancel(self, transaction_id: str, group: str, wait_s: float) -> None:
        """Take a committed message back that waits for its `deliver_at`; return once it is never published.

        Args:
            transaction_id: whose.
            group: the producer group it must be of.
            wait_s: seconds to wait for a coordinator, where one has to settle it.

        Raises:
            TransactionRefusedError: it is due, published, or not committed.
            TransactionError: no such transaction is known.
            DecisionNotStoredError: it is not known whether it took effect.
        """

    def checks(self, group: str) -> CheckSource:
        """Return the questions to a producer group."""

    def watch(self, transaction_id: str, told: ToldSettled) -> None:
        """Tell how a transaction is settled. Called before its halves are stored, so that nothing is missed.

        The one `told` that may never be called: for what is never settled, or after `forget`.
        """

    def forget(self, transaction_id: str) -> None:
        """Give a watch up."""

    def waits_for(self, transaction_id: str, topics: Sequence[str]) -> str:
        """Say what a committed transaction waits for, as far as that is known within seconds; empty: it is not.

        Raises nothing: it is asked where something else has failed.

        Args:
            transaction_id: whose.
            topics: where its messages go.
        """


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """What the coordinator of a store that brings its own is told: `store.settler(CoordinatorOptions(...))`.

    Times are in seconds. The store in Kafka has `Coordinator`, whose options are its arguments.

    Attributes:
        transaction_timeout_s: from the birth of a half to its first check.
        check_interval_s: between two checks of a half.
        check_max: answered checks after which an undecided half meets the discard policy.
        check_backoff: factor by which the interval grows from check to check, to an hour at most.
        check_timeout_s: how long a discard policy that is a function may take; one that takes longer has said UNKNOWN.
        discard: what becomes of a half whose checks are exhausted: `"topic"`, `"commit"`, `"rollback"` or a function.
        session_timeout_s: after which a coordinator that fell silent loses its shards to the others; a file store has
            one coordinator, and no use for it.
        telemetry: metrics `penstock.transactions.*`, by OpenTelemetry; None for none, at no cost.

    Raises:
        ConfigurationError: one of them is wrong.
    """

    transaction_timeout_s: float = 6.0
    check_interval_s: float = 30.0
    check_max: int = 15
    check_backoff: float = 1.0
    check_timeout_s: float = 30.0
    discard: DiscardPolicy = "topic"
    session_timeout_s: float = 6.0
    telemetry: Telemetry | None = None

    def __post_init__(self) -> None:
        for name in ("transaction_timeout_s", "check_interval_s", "check_timeout_s", "session_timeout_s"):
            positive(name, getattr(self, name))
        require_checks(self.check_max, self.check_backoff)
        require_discard(self.discard)
        a_telemetry(self.telemetry)


class Settler(Protocol):
    """A coordinator on one kind of store. Thread-safe."""

    def start(self) -> Any:
        """Connect and begin to settle."""

    def stop(self, timeout: float = 30.0) -> None:
        """Finish what is under way and end, or raise `StoppedError`."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, at most `timeout` seconds, and tell whether it has."""

    def statistics(self) -> CoordinatorStatistics:
        """Return counts since the start and what is pending now."""


class Administration(Protocol):
    """What `penstock tx` does on a store. Needs no running coordinator to look, but one to settle."""

    def pending(self) -> Sequence[PendingTransaction]:
        """Return what is not settled, oldest first."""

    def show(self, transaction_id: str) -> PendingTransaction | None:
        """Return one pending transaction, or None."""

    def decide(self, transaction_id: str, verdict: Verdict, actor: str) -> None:
        """Store an operator's decision; it counts if it is the first. Raises `DecisionNotStoredError`."""

    def resume(self, transaction_id: str, actor: str) -> object:
        """Bring a discarded transaction back with a fresh count of checks."""


class SettledStore(Store, Protocol):
    """A store that brings its own coordinator and administration."""

    def settler(self, options: CoordinatorOptions) -> Settler:
        """Return a coordinator for this store, not started."""

    def administration(self) -> Administration:
        """Return what an operator may do."""


__all__ = [
    "Administration",
    "CheckSource",
    "CoordinatorOptions",
    "Prepared",
    "SettledStore",
    "Settler",
    "Store",
    "ToldDecided",
    "ToldPrepared",
    "ToldSettled",
]
