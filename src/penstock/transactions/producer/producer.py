"""The transactional producer: a half before the local transaction, a decision after it.

What becomes of a half is decided by how the `with` block is left::

    with producer.transaction("orders", key=b"42", value=b"...") as tx:   # the half is durable here
        db.insert_order(...)                                              # the local transaction
    # left normally: COMMIT; by an exception: ROLLBACK; after tx.unknown(): left to a check

All ways to send are thin layers on one core that waits for nothing (`core`).
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, cast

from penstock.errors import ConfigurationError, StoppedError
from penstock.options import ClientConfig, a_plain_function, a_telemetry, not_empty, positive_int, seconds
from penstock.transactions.messages import Outgoing, Terms, UserHeaders, a_half, encoded, terms
from penstock.transactions.model import Order, ProducerStatistics, TransactionResult, TransactionState, Wait
from penstock.transactions.producer.check_responder import CHECK_TIMEOUT_S, Check, CheckResponder, TimedCheck
from penstock.transactions.producer.core import Core
from penstock.transactions.producer.deadlines import RequestDeadlines
from penstock.transactions.producer.futures import in_callback
from penstock.transactions.producer.in_flight import InFlightLimit
from penstock.transactions.producer.listeners import (
    LocalTransactionExecutor,
    Run,
    TransactionCheckListener,
    TransactionListener,
    executing,
)
from penstock.transactions.producer.submission import Submission
from penstock.transactions.producer.transaction import ProducerContext, Transaction, TransactionOfSeveral
from penstock.transactions.store import Store
from penstock.transactions.stores.kafka.store import KafkaStore
from penstock.transactions.wire.half import MAX_GROUP_BYTES, Half
from penstock.transactions.wire.ids import is_id, new_id
from penstock.transactions.wire.topics import DEFAULT_PARTITIONS

if TYPE_CHECKING:
    from penstock.telemetry import SendSpans, Telemetry

_NO_TERMS = Terms()
_WAITS = ("sent", "stored", "published")

Execute = Callable[[Transaction], TransactionState | None]
AsyncExecute = Callable[[Transaction], Awaitable[TransactionState | None] | TransactionState | None]


class TransactionalProducer:
    """Sends messages that become visible only if a local transaction commits.

    Thread-safe: any number of threads may have transactions in flight, and one thread or event loop thousands of them.
    It connects at the first use, or at `start`; call `start` (or use it as a context manager, with `with` or
    `async with`) in a process that shall answer checks without sending first.

    Args:
        group: name of the producer group, 1 to 200 bytes: any live producer of the group may be asked to check a
            transaction, so all of them must see the same data.
        bootstrap_servers: Kafka's addresses.
        check: says what became of an undecided local transaction; runs on threads of its own. Without one, this
            producer answers no checks, and only a producer of the group that has one can.
        listener: a local transaction and its check in one object, in place of `check`: see `send_in_transaction`.
        check_listener: a check as an object, in place of `check`, as in RocketMQ 3.x.
        prefix: what the names of the store's topics begin with; the coordinator has the same.
        partitions: partitions of half, op and done, if they have to be created.
        config: settings of the Kafka clients, by librdkafka's names.
        check_workers: threads that run checks.
        check_timeout: seconds that a check may take. One that takes longer is given up, and its thread replaced; its
            answer counts if it comes.
        send_timeout: seconds after which an unacknowledged half or decision counts as not stored, and for which a
            send waits for room.
        order: "commit": messages of one key are published in the order of their decisions; "half": in the order in
            which their halves were stored, so that an undecided one holds the later ones of its key in this group.
        wait: what a send waits for, unless it says so itself: "sent": the decision is handed to the client (what
            becomes of it is logged and counted, and a check settles what is lost); "stored": it is durable;
            "published": a committed reader can see the message.
        max_in_flight: transactions that may be in flight at once.
        max_in_flight_bytes: bytes of their keys and values.
        when_full: "block": a send waits for room, at most `send_timeout`; "raise": it raises `BufferFullError`.
        publish_timeout: seconds that `wait="published"` waits at most, from the stored decision on.
        telemetry: spans `send {topic}`, by OpenTelemetry: who consumes a message is linked to the code that sent it.
            None (default) for none, at no cost.
        store: another store than Kafka's topics; `bootstrap_servers`, `prefix`, `partitions` and `config` are its own
            then, and refused here.

    Raises:
        ConfigurationError: an argument is wrong. Nothing was started.
    """

    def __init__(
        self,
        group: str,
        *,
        bootstrap_servers: str | None = None,
        check: Check | None = None,
        listener: TransactionListener | None = None,
        check_listener: TransactionCheckListener | None = None,
        prefix: str = "penstock",
        partitions: int = DEFAULT_PARTITIONS,
        config: ClientConfig | None = None,
        check_workers: int = 4,
        check_timeout: float = CHECK_TIMEOUT_S,
        send_timeout: float = 15.0,
        order: Order = "commit",
        wait: Wait = "stored",
        max_in_flight: int = 10_000,
        max_in_flight_bytes: int = 256 << 20,
        when_full: Literal["block", "raise"] = "block",
        publish_timeout: float = 30.0,
        telemetry: Telemetry | None = None,
        store: Store | None = None,
    ) -> None:
        not_empty("group", group)
        if len(encoded("group", group) or b"") > MAX_GROUP_BYTES:
            raise ConfigurationError(f"group must have at most {MAX_GROUP_BYTES} bytes, but has {len(group)}")
        check = _check_of(check, listener, check_listener)
        positive_int("partitions", partitions)
        positive_int("check_workers", check_workers)
        seconds("check_timeout", check_timeout)
        timed: object = check
        if isinstance(timed, TimedCheck):
            check = timed.within(check_timeout)
        a_telemetry(telemetry)
        seconds("send_timeout", send_timeout)
        positive_int("max_in_flight", max_in_flight)
        positive_int("max_in_flight_bytes", max_in_flight_bytes)
        seconds("publish_timeout", publish_timeout)
        _one_of("order", order, "commit", "half")
        _one_of("wait", wait, *_WAITS)
        _one_of("when_full", when_full, "block", "raise")
        if (store is None) == (bootstrap_servers is None):
            raise ConfigurationError("give either bootstrap_servers or a store, not both and not none of them")
        if store is not None and (prefix != "penstock" or partitions != DEFAULT_PARTITIONS or config):
            raise ConfigurationError(
                "prefix, partitions and config are the store's own: give them to it, not beside it"
            )
        self._group = group
        self._listener = listener
        self._by_half = order == "half"
        self._wait: Wait = wait
        self._store: Store = store or KafkaStore(
            bootstrap_servers or "",
            prefix=prefix,
            partitions=partitions,
            config=config or {},
            send_timeout_s=send_timeout,
            name=group,
        )
        room_timeout_s = send_timeout if when_full == "block" else 0.0
        self._deadlines = RequestDeadlines(group, math.inf if store is None else send_timeout, publish_timeout)
        self._core = Core(
            self._store,
            InFlightLimit(max_in_flight, max_in_flight_bytes, room_timeout_s),
            self._deadlines,
            has_check=check is not None,
            spans=_spans_of(telemetry, group),
        )
        self._context = ProducerContext(self._core, group, self._open, room_timeout_s)
        self._checks = (
            CheckResponder(self._store, group, check, check_workers, check_timeout) if check is not None else None
        )
        self._start_lock = threading.Lock()
        # Written under the start lock; read without it, for it only ever goes on.
        self._state = "new"
        # Cleared under the start lock, set by who stops it.
        self._is_down = threading.Event()
        self._is_down.set()

    def start(self) -> Self:
        """Connect, create the store's topics where they are absent, and begin to answer checks. May be repeated.

        Raises:
            BrokerConnectionError: no broker answered within 15 s.
            StoppedError: it was stopped before.
        """
        with self._start_lock:
            if self._state == "stopped":
                raise StoppedError(f"the producer of group {self._group} was stopped; make a new one")
            if self._state == "new":
                self._store.start()
                try:
                    if self._checks is not None:
                        self._checks.start()
                    self._deadlines.start()
                except BaseException:
                    # What was started cannot be started again.
                    self._state = "stopped"
                    self._store.stop(0)
                    raise
                self._state = "started"
                self._is_down.clear()
        return self

    def stop(self, timeout: float = 30.0) -> None:
        """Stop answering checks and wait for what was sent or submitted, at most `timeout` seconds for each.

        What is sent from now on is refused; who waits for an answer that has not come in time is told an error.
        Transactions whose block is open in another thread are not waited for, but left to a check. May be repeated,
        also from other threads: they wait for the first. From a callback of a future, which holds up what is waited
        for, it returns at once, and the rest is done by a thread of its own.
        """
        with self._start_lock:
            before, self._state = self._state, "stopped"
        if before == "started" and in_callback():
            threading.Thread(target=self._stop, args=(timeout,), name=f"penstock-stop-{self._group}").start()
        elif before == "started":
            self._stop(timeout)
        elif not in_callback():
            self._is_down.wait(timeout)

    def _stop(self, timeout_s: float) -> None:
        deadline = 0.0
        try:
            if self._checks is not None:
                self._checks.stop(timeout_s)
            deadline = time.monotonic() + timeout_s
            # Before the store refuses decisions: halves that are stored by now lead to some.
            self._deadlines.drain(timeout_s)
        finally:
            try:
                self._store.stop(max(0.0, deadline - time.monotonic()))
            finally:
                self._deadlines.stop()
                self._is_down.set()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

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
        """Return a transaction to enter with `with`: the half is durable inside, the decision is stored on leaving.

        Left normally it commits; left by an exception it rolls back and the exception goes on; left by an interrupt
        (KeyboardInterrupt, SystemExit, a cancelled task), or after `tx.unknown()`, it is left to a check. Committed
        means that the decision is stored; it stands, and the message becomes visible some milliseconds later, unless a
        check or an operator was faster. SQL and file stores tell that at once; one in Kafka learns it when it reads its
        log, so there only `wait="published"` tells. With `async with` it is the same from an event loop, which is not
        held up.

        Args:
            topic: where the message is published; it must exist.
            key: its key; text is encoded as UTF-8. Messages of one key are published in the order of their decisions,
                or of their halves, as the producer's `order` says.
            value: its value, or None for a tombstone.
            headers: its headers; names must not begin with `penstock-`.
            partition: the partition to publish to; Kafka's partitioner chooses where it is None.
            check_immunity: seconds from now before the first check, where that is more than the coordinator's
                transaction timeout: for local transactions that are known to take long.
            deliver_at: when to publish it, where that is later than its commit: a datetime with a time zone, or
                seconds since the epoch.
            wait: what leaving waits for, in place of the producer's `wait`.

        Raises:
            ConfigurationError: an argument is wrong. (All that follow are raised on entering or leaving.)
            TopicNotFoundError: there is no such topic.
            BrokerConnectionError: no broker answered at the first use.
            BufferFullError: on entering: too many transactions are in flight.
            HalfNotStoredError: on entering: the half is not known to be durable, and the block did not run.
            DecisionNotStoredError: on leaving normally: a check will settle the transaction, or an operator where the
                group has none.
            PublicationNotSeenError: on leaving with `wait="published"`: committed, but not seen to be visible in time.
            TransactionRefusedError: on leaving: a check or an operator had decided otherwise before; in a store in
                Kafka only with `wait="published"`.
        """
        half = self._half(topic, key, value, headers, partition, self._terms(check_immunity, deliver_at))
        return Transaction(self._context, half.transaction_id, (half,), None, self._chosen(wait))

    def transaction_of(
        self,
        messages: Sequence[Outgoing] = (),
        *,
        ordering_key: bytes | str | None = None,
        check_immunity: float | None = None,
        deliver_at: datetime | float | None = None,
        wait: Wait | None = None,
    ) -> TransactionOfSeveral:
        """Return a transaction of several messages, to any topics: all become visible at once, or none.

        The messages are given here, or added in the block and then stored by `prepare`::

            with producer.transaction_of() as tx:
                tx.add("orders", key=b"42", value=b"...")
                tx.add("invoices", key=b"7", value=b"...")
                tx.prepare()                                    # all halves are durable from here on
                db.insert_order(...)                            # the local transaction

        Args:
            messages: those known already; where there are any, entering stores them, and none can be added.
            ordering_key: what orders this transaction among others; the first message's key where it is None.
            check_immunity: as in `transaction`; one for all, counted from the birth of the first half.
            deliver_at: as in `transaction`; one time for all.
            wait: as in `transaction`.

        Raises:
            ConfigurationError: an argument is wrong.
        """
        under = replace(
            self._terms(check_immunity, deliver_at),
            ordering_key=encoded("ordering_key", ordering_key),
            by_half=self._by_half,
        )
        made = TransactionOfSeveral(self._context, new_id(), under, self._chosen(wait))
        if messages:
            made.give(messages)
        return made

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
        """Send a message in a transaction around a function; the arguments and errors are those of `transaction`.

        Args:
            topic: where the message is published; it must exist.
            key: its key.
            value: its value.
            headers: its headers.
            partition: the partition to publish to.
            check_immunity: seconds from now before the first check.
            deliver_at: when to publish it.
            wait: what to wait for.
            execute: the local transaction: called with the `Transaction` once the half is durable. It returns a
                `TransactionState`; None means COMMIT (in a listener it means UNKNOWN, as in RocketMQ). If it raises,
                the message is rolled back and the exception goes on, as in the context manager. Anything else it
                returns leaves the message to a check and raises `ConfigurationError`. Without a function the message
                commits at once.

        Returns:
            The id and the stored decision. In a store in Kafka an earlier one may stand against it, as in
            `transaction`.
        """
        under = self._terms(check_immunity, deliver_at)
        half = self._half(topic, key, value, headers, partition, under)
        chosen = self._chosen(wait)
        if execute is None:
            sending = self._submission(half, chosen)
            self._open()
            sending.start()
            return sending.result()
        transaction = Transaction(self._context, half.transaction_id, (half,), None, chosen)
        with transaction as tx:
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
        """Send a message without a local transaction and without waiting: thousands may be under way.

        The arguments and errors are those of `transaction`. It waits only for the first connection, for the first
        message to a topic, and for room where too many are in flight and `when_full` is "block".

        Returns:
            A future: `result(timeout)`, `exception(timeout)`, `done()`, `add_done_callback(function)`; it can be
            awaited. Its errors are those that leaving a transaction raises, and `HalfNotStoredError`.
        """
        half = self._half(topic, key, value, headers, partition, self._terms(check_immunity, deliver_at))
        sending = self._submission(half, self._chosen(wait))
        self._open()
        sending.start()
        return sending

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
        """Do what `send` does from an event loop, which is not held up.

        `execute` may be a coroutine function; a plain function runs on the event loop. A task that is cancelled while
        `execute` runs leaves the message to a check.
        """
        half = self._half(topic, key, value, headers, partition, self._terms(check_immunity, deliver_at))
        transaction = Transaction(self._context, half.transaction_id, (half,), None, self._chosen(wait))
        async with transaction as tx:
            answer: object = execute(tx) if execute is not None else None
            _apply(tx, await answer if inspect.isawaitable(answer) else answer)
        return tx.result

    def send_in_transaction(
        self,
        message: Outgoing,
        argument: object = None,
        *,
        executor: LocalTransactionExecutor | Run | None = None,
        check_immunity: float | None = None,
        deliver_at: datetime | float | None = None,
        wait: Wait | None = None,
    ) -> TransactionResult:
        """Send a message and run its local transaction by the producer's listener, or by an executor of this call.

        As RocketMQ's `sendMessageInTransaction`: what raises or returns None is UNKNOWN and left to a check, and the
        caller gets a result, not the exception. The errors are those of `transaction`.

        Args:
            message: the message.
            argument: handed to the local transaction.
            executor: the local transaction: a function of the message and the argument, or an object with
                `execute_local_transaction_branch`, as in RocketMQ 3.x; the producer's `listener` where it is None.
            check_immunity: as in `transaction`.
            deliver_at: as in `transaction`.
            wait: as in `transaction`.
        """
        if executor is not None:
            run: Run = getattr(executor, "execute_local_transaction_branch", None) or cast("Run", executor)
            a_plain_function("executor", run)
        elif self._listener is not None:
            run = self._listener.execute_local_transaction
        else:
            raise ConfigurationError("send_in_transaction needs a listener of the producer, or an executor")
        return self.send(
            message.topic,
            key=message.key,
            value=message.value,
            headers=message.headers,
            partition=message.partition,
            check_immunity=check_immunity,
            deliver_at=deliver_at,
            wait=wait,
            execute=executing(run, argument),
        )

    def cancel(self, transaction_id: str, *, timeout: float = 30.0) -> None:
        """Take a committed message back that waits for its `deliver_at`: once this returns it is never published.

        Any producer of the group may do so; one that was cancelled before is cancelled. In a store in Kafka it reads
        what is pending, for there is no index of ids, and then waits for a coordinator. An operator does the same with
        `penstock tx rollback ID`. From an event loop: `await asyncio.to_thread(producer.cancel, ...)`.

        Args:
            transaction_id: as it was sent under.
            timeout: seconds to wait until it took effect, in a store in Kafka.

        Raises:
            TransactionRefusedError: too late: it is due, or published; or it is not committed.
            TransactionError: no such transaction of this group is known: it is settled long ago, or never was.
            DecisionNotStoredError: it is not known whether it took effect; call it again.
            BrokerConnectionError: the store cannot be asked.
            ConfigurationError: that is no transaction's id.
            StoppedError: the producer was stopped.
        """
        if not isinstance(transaction_id, str) or not is_id(transaction_id):
            raise ConfigurationError("transaction_id is no transaction's id: give the one that the send returned")
        seconds("timeout", timeout)
        self.start()
        self._store.cancel(transaction_id, self._group, timeout)

    def statistics(self) -> ProducerStatistics:
        """Return counts since the start. Safe from any thread."""
        counts, checker = self._core.statistics(), self._checks
        if checker is None:
            return counts
        return replace(
            counts,
            checks=checker.answered,
            failed_checks=checker.failed,
            skipped_checks=checker.skipped,
            hung_checks=checker.hung,
        )

    def _open(self) -> None:
        if self._state != "started":
            self.start()

    def _chosen(self, wait: Wait | None) -> Wait:
        if wait is None:
            return self._wait
        _one_of("wait", wait, *_WAITS)
        return wait

    def _terms(self, check_immunity: float | None, deliver_at: datetime | float | None) -> Terms:
        if check_immunity is None and deliver_at is None:
            return _NO_TERMS
        return terms(check_immunity, deliver_at, by_half=self._by_half)

    def _half(  # noqa: PLR0917 - the arguments of a message, handed on
        self,
        topic: str,
        key: bytes | str | None,
        value: bytes | str | None,
        headers: UserHeaders,
        partition: int | None,
        under: Terms,
    ) -> Half:
        half = a_half(
            new_id(), self._group, under, topic=topic, key=key, value=value, headers=headers, partition=partition
        )
        return half._replace(order_key=half.key) if self._by_half else half

    def _submission(self, half: Half, wait: Wait) -> Submission:
        return Submission(self._core.flight((half,), None, wait))


def _spans_of(telemetry: Telemetry | None, group: str) -> SendSpans | None:
    if telemetry is None:
        return None
    from penstock.telemetry import SendSpans

    return SendSpans(telemetry, group)


def _check_of(
    check: Check | None, listener: TransactionListener | None, check_listener: TransactionCheckListener | None
) -> Check | None:
    """Return the one check among the ways to give it."""
    given = [
        *([check] if check is not None else []),
        *([listener.check_local_transaction] if listener is not None else []),
        *([check_listener.check_local_transaction_state] if check_listener is not None else []),
    ]
    if len(given) > 1:
        raise ConfigurationError("give one of check, listener and check_listener: a transaction has one check")
    if not given:
        return None
    a_plain_function("check", given[0])
    return given[0]


def _apply(tx: Transaction, answer: object) -> None:
    """Take the answer of a local transaction."""
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


def _one_of(option: str, value: object, *choices: str) -> None:
    if value not in choices:
        raise ConfigurationError(f"{option} must be one of {', '.join(map(repr, choices))}, but is {value!r}")


__all__ = ["AsyncExecute", "Execute", "TransactionalProducer"]
