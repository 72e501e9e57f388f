"""The seam between producers and the place where halves and decisions are stored.

`KafkaStore` has them in topics, `SqlStore` in a database, `FileStore` in a folder; the producer and its checks do not
know which one they speak to. Requests on the way of a message are completed by a callback: so one thread has thousands
of transactions in flight. A callback is called exactly once for each request, from any thread, soon after the store's
own time limit at the latest; it neither raises nor waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from penstock.errors import HalfNotStoredError, TransactionError
from penstock.transactions.wire.half import CheckRequest, Half
from penstock.transactions.wire.ops import Author, Verdict


class Prepared(Protocol):
    """The halves of one transaction, all stored."""

    @property
    def halves(self) -> Sequence[Half]:
        """The halves, in the order of the transaction's parts."""


#: Called with what is prepared, or why it is not known to be stored.
PreparedCallback = Callable[[Prepared | HalfNotStoredError], None]
#: Called with None once a decision is durable, with `DecisionNotStoredError`, or, where the store knows at once that
#: another one stands, with `TransactionRefusedError`.
DecidedCallback = Callable[[TransactionError | None], None]
#: Called with how a transaction was settled: COMMIT once a committed reader can see it, ROLLBACK, or DISCARD.
SettledCallback = Callable[[Verdict], None]


class CheckSource(Protocol):
    """The checks of one producer group. Used by one thread."""

    def take(self, timeout_s: float, running: Collection[str] = ()) -> Sequence[CheckRequest]:
        """Return the checks that are there, waiting at most `timeout_s` seconds for the first.

        `running` are the transactions whose check runs here: where producers choose, they leave those to others.
        """

    def close(self) -> None:
        """Give the source up; another producer of the group gets its checks."""


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

    def prepare(self, halves: Sequence[Half], callback: PreparedCallback, ordering_key: bytes | None = None) -> None:
        """Store the halves of one transaction, all or none, and call back once all are durable.

        Where that fails, the store has them rolled back, should one of them turn up after all. May wait for room.

        Args:
            halves: in the order of their parts, of one id and one group.
            callback: called with what is prepared, or why not.
            ordering_key: what chooses their half partition; the first half's key, or else the id, where it is None.
        """

    def decide(self, prepared: Prepared, verdict: Verdict, callback: DecidedCallback) -> None:
        """Store the producer's decision; call back once it is durable, or why that is not known, or does not count.

        A store that learns only later which decision was the first completes this one as durable. Decisions that one
        thread hands over for halves of one half partition keep their order.
        """

    def answer(self, request: CheckRequest, verdict: Verdict, author: Author) -> None:
        """Store the answer to a check and return once it is durable, or raise `DecisionNotStoredError`."""

    def cancel(self, transaction_id: str, group: str, wait_s: float) -> None:
        """Take a committed message back that waits for its `deliver_at`; return once it is never published.

        The transaction must be of that group; `wait_s` are the seconds to wait for a coordinator, where one has to
        settle it.

        Raises:
            TransactionRefusedError: it is due, published, or not committed.
            TransactionError: no such transaction is known.
            DecisionNotStoredError: it is not known whether it took effect.
        """

    def checks(self, group: str) -> CheckSource:
        """Return the checks of a producer group."""

    def watch(self, transaction_id: str, callback: SettledCallback) -> None:
        """Call back once a transaction is settled. Called before its halves are stored, so that nothing is missed.

        The one callback that may never be called: for what is never settled, or after `forget`.
        """

    def forget(self, transaction_id: str) -> None:
        """Give a watch up."""
