"""The ways to send a message in a transaction: around a block, around a function, without waiting, from an event loop.

All are thin layers on a flight (`flight.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import get_args

from penstock.clients.gc_pause import collection_put_off
from penstock.errors import ConfigurationError
from penstock.options import a_plain_function, one_of
from penstock.outgoing import Outgoing, UserHeaders, encoded
from penstock.transactions.messages import Terms, a_half, half_of, halves, terms
from penstock.transactions.model import TransactionResult, TransactionState, Wait
from penstock.transactions.producer.in_flight import Core
from penstock.transactions.producer.submission import Submission
from penstock.transactions.producer.transaction import Run, Transaction, TransactionListener, run_local_transaction
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id

#: The values of `wait`.
WAITS: tuple[str, ...] = get_args(Wait)

#: A local transaction. None is COMMIT, an exception is ROLLBACK.
Execute = Callable[[Transaction], TransactionState | None]
#: The same, as a coroutine function or a plain one.
AsyncExecute = Callable[[Transaction], Awaitable[TransactionState | None] | TransactionState | None]


class TransactionSender:
    """The sending half of `TransactionalProducer`. Thread-safe."""

    def __init__(self, core: Core, *, listener: TransactionListener | None, wait: Wait, by_half: bool) -> None:
        self._core = core
        self._listener = listener
        self._wait: Wait = wait
        # The terms of a message without options of its own.
        self._default_terms = Terms(by_half=by_half)

    def transaction(
        self,
        topic: str,
        *,
        key: bytes | str | None = None,
        value: bytes | str | None,
        headers: UserHeaders = (),
        partition: int | None = None,
        check_immunity: float | None = None,
        deliver_at: datetime | float | None = None,
        wait: Wait | None = None,
    ) -> Transaction:
        """Return a transaction for `with` or `async with`: its half is durable inside, leaving stores the decision.

        The end of the block decides: COMMIT if it ends normally, ROLLBACK if it raises; the exception goes on. After an
        interrupt (KeyboardInterrupt, SystemExit, a cancelled task) or `tx.unknown()` a check decides. COMMIT means that
        the decision is stored. It counts unless a check or an operator decided before, and the message becomes visible
        some milliseconds later. SQL and file stores report an earlier decision at once. A store in Kafka learns it when
        it reads its log, so there only `wait="published"` reports it.

        Args:
            topic: the target topic; it must exist.
            key: its key; text is encoded as UTF-8. Messages of one key are published in the order of their decisions or
                of their halves: see the producer's `order`.
            value: its value, or None for a tombstone.
            headers: its headers; names must not begin with `penstock-`.
            partition: the target partition; None: Kafka's partitioner chooses.
            check_immunity: seconds from now before the first check, if that is more than the coordinator's transaction
                timeout. For local transactions that take long.
            deliver_at: the time to publish the message, if that is after the commit: a datetime with a time zone, or
                seconds since the epoch.
            wait: what leaving waits for, instead of the producer's `wait`.

        Raises:
            ConfigurationError: an argument is wrong. (Entering or leaving raises all that follow.)
            TopicNotFoundError: there is no such topic.
            BrokerConnectionError: no broker answered at the first use.
            BufferFullError: on entering: too many transactions are in flight.
            HalfNotStoredError: on entering: the half is not known to be durable, and the block did not run.
            DecisionNotStoredError: on leaving normally: a check will settle the transaction, or an operator if the
                group has no check.
            PublicationNotSeenError: on leaving with `wait="published"`: committed, but not seen to be visible in time.
            TransactionRefusedError: on leaving: a check or an operator decided otherwise before. A store in Kafka
                reports this only with `wait="published"`.
        """
        chosen_terms = self._terms(check_immunity, deliver_at)
        half = a_half(new_id(), self._core.group, chosen_terms, topic, key, value, headers, partition)
        return Transaction(self._core, (half,), None, self._chosen(wait))

    def transaction_of(
        self,
        messages: Sequence[Outgoing],
        *,
        ordering_key: bytes | str | None = None,
        check_immunity: float | None = None,
        deliver_at: datetime | float | None = None,
        wait: Wait | None = None,
    ) -> Transaction:
        """Return a transaction of several messages, to any topics: all become visible at once, or none.

        In all else it works as `transaction`::

            orders, invoices = Outgoing("orders", b"..."), Outgoing("invoices", b"...")
            with producer.transaction_of([orders, invoices]) as tx:    # all halves are durable inside
                db.insert_order(...)                                   # the local transaction

        Args:
            messages: 1 to 1,000 messages.
            ordering_key: the key that orders this transaction among others; None: the first message's key.
            check_immunity: as in `transaction`; for all messages, counted from the birth of the first half.
            deliver_at: as in `transaction`; for all messages.
            wait: as in `transaction`.

        Raises:
            ConfigurationError: an argument or a message is wrong, or there is no message. (Entering or leaving raises
                the errors of `transaction`.)
        """
        ordered_by = encoded("ordering_key", ordering_key)
        chosen_terms = self._terms(check_immunity, deliver_at)
        parts = halves(new_id(), self._core.group, messages, chosen_terms, ordered_by)
        return Transaction(self._core, parts, ordered_by, self._chosen(wait))

    def send(
        self,
        topic: str,
        *,
        key: bytes | str | None = None,
        value: bytes | str | None,
        headers: UserHeaders = (),
        partition: int | None = None,
        check_immunity: float | None = None,
        deliver_at: datetime | float | None = None,
        wait: Wait | None = None,
        execute: Execute | None = None,
    ) -> TransactionResult:
        """Send a message in a transaction around a function; the other arguments and errors are those of `transaction`.

        `execute` is the local transaction: it gets the `Transaction` when the half is durable, and returns a
        `TransactionState`. None means COMMIT (in a listener it means UNKNOWN, as in RocketMQ). If it raises, the
        message is rolled back and the exception goes on, as in the context manager. Any other answer leaves the message
        to a check and raises `ConfigurationError`. Without `execute` the message commits at once.

        Returns:
            The id and the stored decision. In a store in Kafka an earlier decision may count instead, as in
            `transaction`.
        """
        chosen_terms = self._terms(check_immunity, deliver_at)
        half = a_half(new_id(), self._core.group, chosen_terms, topic, key, value, headers, partition)
        if execute is None:
            return self._submitted(half, wait).result()
        with Transaction(self._core, (half,), None, self._chosen(wait)) as tx:
            _apply(tx, execute(tx))
        return tx.result

    def submit(
        self,
        topic: str,
        *,
        key: bytes | str | None = None,
        value: bytes | str | None,
        headers: UserHeaders = (),
        partition: int | None = None,
        check_immunity: float | None = None,
        deliver_at: datetime | float | None = None,
        wait: Wait | None = None,
    ) -> Submission:
        """Send a message without a local transaction and without waiting: thousands may be in flight.

        The arguments and errors are those of `transaction`. It waits only for the first connection, for the first
        message to a topic, and for room if too many are in flight and `when_full` is "block".

        Returns:
            A future: `result(timeout)`, `exception(timeout)`, `done()`, `add_done_callback(function)`; it can be
            awaited. Its errors are those of leaving a transaction, and `HalfNotStoredError`.
        """
        chosen_terms = self._terms(check_immunity, deliver_at)
        half = a_half(new_id(), self._core.group, chosen_terms, topic, key, value, headers, partition)
        return self._submitted(half, wait)

    def submit_many(
        self,
        messages: Sequence[Outgoing],
        *,
        check_immunity: float | None = None,
        deliver_at: datetime | float | None = None,
        wait: Wait | None = None,
    ) -> list[Submission]:
        """Do what `submit` does for each of these messages: every one is a transaction of its own.

        The other arguments are those of `transaction`, the same for all. A wrong message or an absent target raises
        before anything is sent.

        Returns:
            A future for each message, in their order. If one cannot be sent, for lack of room for example, its future
            ends with that error.
        """
        chosen_terms, chosen, core = self._terms(check_immunity, deliver_at), self._chosen(wait), self._core
        with collection_put_off():
            singles = [half_of(new_id(), core.group, chosen_terms, message) for message in messages]
            sent = [Submission(core, (half,), None, chosen) for half in singles]
        core.require({(half.topic, half.partition) for half in singles})
        for submission in sent:
            submission.try_submit()
        return sent

    async def send_async(
        self,
        topic: str,
        *,
        key: bytes | str | None = None,
        value: bytes | str | None,
        headers: UserHeaders = (),
        partition: int | None = None,
        check_immunity: float | None = None,
        deliver_at: datetime | float | None = None,
        wait: Wait | None = None,
        execute: AsyncExecute | None = None,
    ) -> TransactionResult:
        """Do what `send` does from an event loop, without blocking it.

        `execute` may be a coroutine function; a plain function runs on the event loop. A task that is cancelled while
        `execute` runs leaves the message to a check.
        """
        chosen_terms = self._terms(check_immunity, deliver_at)
        half = a_half(new_id(), self._core.group, chosen_terms, topic, key, value, headers, partition)
        async with Transaction(self._core, (half,), None, self._chosen(wait)) as tx:
            answer: object = execute(tx) if execute is not None else None
            _apply(tx, await answer if inspect.isawaitable(answer) else answer)
        return tx.result

    def send_in_transaction(
        self,
        message: Outgoing,
        argument: object = None,
        *,
        executor: Run | None = None,
        check_immunity: float | None = None,
        deliver_at: datetime | float | None = None,
        wait: Wait | None = None,
    ) -> TransactionResult:
        """Send a message and run its local transaction with the producer's listener, or with an executor of this call.

        As RocketMQ's `sendMessageInTransaction`: if the local transaction raises or returns None, it is UNKNOWN and
        left to a check, and the caller gets a result, not the exception. The errors are those of `transaction`.

        Args:
            message: the message.
            argument: passed to the local transaction.
            executor: the local transaction, a function of the message and the argument; None: the producer's
                `listener`.
            check_immunity: as in `transaction`.
            deliver_at: as in `transaction`.
            wait: as in `transaction`.
        """
        if executor is not None:
            run = executor
            a_plain_function("executor", run)
        elif self._listener is not None:
            run = self._listener.execute_local_transaction
        else:
            raise ConfigurationError("send_in_transaction needs a listener of the producer, or an executor")
        half = half_of(new_id(), self._core.group, self._terms(check_immunity, deliver_at), message)
        with Transaction(self._core, (half,), None, self._chosen(wait)) as tx:
            _apply(tx, run_local_transaction(run, tx, argument))
        return tx.result

    def _chosen(self, wait: Wait | None) -> Wait:
        if wait is None:
            return self._wait
        one_of("wait", wait, *WAITS)
        return wait

    def _terms(self, check_immunity: float | None, deliver_at: datetime | float | None) -> Terms:
        if check_immunity is None and deliver_at is None:
            return self._default_terms
        return terms(check_immunity, deliver_at, by_half=self._default_terms.by_half)

    def _submitted(self, half: Half, wait: Wait | None) -> Submission:
        submission = Submission(self._core, (half,), None, self._wait if wait is None else self._chosen(wait))
        submission.submit()
        return submission


def _apply(tx: Transaction, answer: object) -> None:
    """Take the answer of a local transaction into account."""
    if answer is TransactionState.ROLLBACK:
        tx.rollback()
    elif answer is TransactionState.UNKNOWN:
        tx.unknown()
    elif answer is not None and answer is not TransactionState.COMMIT:
        tx.unknown()
        raise ConfigurationError(
            f"execute must return a TransactionState or None, but returned a {type(answer).__name__}; "
            f"transaction {tx.transaction_id} is left to a check"
        )
