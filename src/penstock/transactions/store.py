"""The interface between producers and stores of halves and decisions.

`KafkaStore` keeps them in topics, `SqlStore` in a database, `FileStore` in a folder; the producer and its checks do not
know the difference. A store completes the requests of a message with a callback, so one thread can have thousands of
transactions in flight. It calls back exactly once for each request, from any thread, soon after its own time limit at
the latest. A callback must neither raise nor wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from penstock.errors import HalfNotStoredError, TransactionError
from penstock.transactions.wire.half import CheckRequest, Half
from penstock.transactions.wire.ops import Author, Verdict


class Prepared(Protocol):
    """The halves of one transaction, after all were stored."""

    @property
    def halves(self) -> Sequence[Half]:
        """The halves, in the order of their parts."""


#: Called when the halves are stored, or with the error if they are not known to be.
PreparedCallback = Callable[[Prepared | HalfNotStoredError], None]
#: Called with None when a decision is durable, with `DecisionNotStoredError`, or with `TransactionRefusedError` if the
#: store knows at once that another decision counts.
DecidedCallback = Callable[[TransactionError | None], None]
#: Called with the final outcome of a transaction: COMMIT when a committed reader can see it, ROLLBACK, or DISCARD.
SettledCallback = Callable[[Verdict], None]


class CheckSource(Protocol):
    """The checks of one producer group. For one thread."""

    def take(self, timeout_s: float, running: Collection[str] = ()) -> Sequence[CheckRequest]:
        """Return the available checks; wait at most `timeout_s` seconds for the first.

        `running` are the transactions whose check runs here. A store whose producers choose their checks leaves these
        out.
        """

    def close(self) -> None:
        """Close the source; another producer of the group gets its checks."""


class Store(Protocol):
    """A store of halves and decisions, as a producer sees it. Thread-safe.

    One object may serve several producers and a coordinator of one process: it counts the starts, and the last stop
    disconnects.
    """

    def start(self) -> None:
        """Connect, and create absent topics, tables or files."""

    def stop(self, timeout_s: float) -> None:
        """Finish the writes under way, within `timeout_s` seconds, and disconnect."""

    def require_target(self, topic: str, partition: int | None) -> None:
        """Raise `TopicNotFoundError` or `ConfigurationError` unless a message can be published there."""

    def prepare(self, halves: Sequence[Half], callback: PreparedCallback, ordering_key: bytes | None = None) -> None:
        """Store the halves of one transaction, all or none, and call back when all are durable.

        After a failure the store rolls them back, in case one of them was stored after all. May wait for room.

        Args:
            halves: in the order of their parts, with one id and one group.
            callback: called with the prepared halves, or with the error.
            ordering_key: chooses the half partition; None: the first half's key, or the id if that is None, too.
        """

    def decide(self, prepared: Prepared, verdict: Verdict, callback: DecidedCallback) -> None:
        """Store the producer's decision, and call back when it is durable, or with the error.

        A store that learns only later which decision was the first calls back as for a durable one. Decisions of one
        thread for halves of one half partition keep their order.
        """

    def answer(self, request: CheckRequest, verdict: Verdict, author: Author) -> None:
        """Store the answer to a check and return when it is durable, or raise `DecisionNotStoredError`."""

    def cancel(self, transaction_id: str, group: str, wait_s: float) -> None:
        """Take a committed message back that waits for its `deliver_at`; after this returns it is never published.

        The transaction must belong to the group. `wait_s` are the seconds to wait for a coordinator, if that has to
        settle the transaction.

        Raises:
            TransactionRefusedError: the message is due, published, or not committed.
            TransactionError: no such transaction is known.
            DecisionNotStoredError: it is not known whether the cancellation took effect.
        """

    def checks(self, group: str) -> CheckSource:
        """Return the checks of a producer group."""

    def watch(self, transaction_id: str, callback: SettledCallback) -> None:
        """Call back when a transaction is settled. The producer calls this before it stores the halves.

        The only callback that may never come: if the transaction is never settled, or after `forget`.
        """

    def forget(self, transaction_id: str) -> None:
        """End the watch of a transaction."""
