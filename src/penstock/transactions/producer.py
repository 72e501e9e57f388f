"""The transactional producer: a half before the local transaction, a decision after it.

What becomes of a half is decided by how the `with` block is left::

    with producer.transaction("orders", key=b"42", value=b"...") as tx:   # the half is durable here
        db.insert_order(...)                                              # the local transaction
    # left normally: COMMIT; by an exception: ROLLBACK; after tx.unknown(): left to a check
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from penstock.config import ClientConfig, a_callable, not_empty, not_negative, positive, positive_int
from penstock.errors import (
    ConfigurationError,
    DecisionNotStoredError,
    HalfNotStoredError,
    StoppedError,
    TransactionError,
)
from penstock.message import Headers
from penstock.transactions.checker import VERDICTS, Check, Checker
from penstock.transactions.ids import new_id
from penstock.transactions.kafka_store import KafkaStore
from penstock.transactions.model import ProducerStatistics, TransactionResult, TransactionState
from penstock.transactions.records import RESERVED_PREFIX, Half, Verdict, is_topic_name
from penstock.transactions.store import Prepared, Store
from penstock.transactions.topics import DEFAULT_PARTITIONS

_log = logging.getLogger("penstock.transactions")

_MAX_GROUP_LENGTH = 200

UserHeaders = Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]]


class Transaction:
    """One transaction: a context manager, made by `TransactionalProducer.transaction` and entered once.

    Entering stores the half; leaving stores the decision. Used by one thread.

    Attributes:
        transaction_id: a UUID of version 7; write it beside your own data, so that a check can find it.
    """

    __slots__ = ("_half", "_prepared", "_producer", "_state", "transaction_id")

    def __init__(self, producer: TransactionalProducer, half: Half) -> None:
        self.transaction_id = half.transaction_id
        self._producer = producer
        self._half = half
        self._prepared: Prepared | None = None
        self._state = TransactionState.COMMIT

    def unknown(self) -> None:
        """Leave the decision to a check, however the block is left."""
        self._state = TransactionState.UNKNOWN

    def rollback(self) -> None:
        """Roll the message back when the block is left, without an exception."""
        self._state = TransactionState.ROLLBACK

    def __enter__(self) -> Self:
        if self._prepared is not None:
            raise TransactionError(
                f"transaction {self.transaction_id} was entered before; call producer.transaction() for a new one"
            )
        self._prepared = self._producer._prepare(self._half)  # noqa: SLF001 - two halves of one idea
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._prepared is not None  # noqa: S101 - __enter__ set it
        state = self._state
        if isinstance(error, Exception):
            state = TransactionState.UNKNOWN if state is TransactionState.UNKNOWN else TransactionState.ROLLBACK
        elif error is not None:
            # KeyboardInterrupt and its like may strike after the local commit: they say nothing about it.
            state = TransactionState.UNKNOWN
        self._producer._finish(self._prepared, state, error)  # noqa: SLF001 - two halves of one idea


Execute = Callable[[Transaction], TransactionState | None]


class TransactionalProducer:
    """Sends messages that become visible only if a local transaction commits.

    Thread-safe: any number of threads may have transactions in flight. It connects at the first use, or at `start`;
    call `start` (or use it as a context manager) in a process that shall answer checks without sending first.

    Args:
        group: name of the producer group, 1 to 200 characters: any live producer of the group may be asked to check a
            transaction, so all of them must see the same data.
        bootstrap_servers: Kafka's addresses.
        check: says what became of an undecided local transaction; runs on threads of its own. Without one, this
            producer answers no checks, and only a producer of the group that has one can.
        prefix: what the names of the store's topics begin with; the coordinator has the same.
        partitions: partitions of half, op and done, if they have to be created.
        config: settings of the Kafka clients, by librdkafka's names.
        check_workers: threads that run checks.
        send_timeout: seconds after which an unacknowledged half or decision counts as not stored.

    Raises:
        ConfigurationError: an argument is wrong. Nothing was started.
    """

    def __init__(
        self,
        group: str,
        *,
        bootstrap_servers: str,
        check: Check | None = None,
        prefix: str = "penstock",
        partitions: int = DEFAULT_PARTITIONS,
        config: ClientConfig | None = None,
        check_workers: int = 4,
        send_timeout: float = 15.0,
    ) -> None:
        not_empty("group", group)
        if len(group.encode()) > _MAX_GROUP_LENGTH:
            raise ConfigurationError(f"group must have at most {_MAX_GROUP_LENGTH} bytes, but has {len(group)}")
        if check is not None:
            a_callable("check", check)
        positive_int("partitions", partitions)
        positive_int("check_workers", check_workers)
        positive("send_timeout", send_timeout)
        self._group = group
        self._store: Store = KafkaStore(
            bootstrap_servers,
            prefix=prefix,
            partitions=partitions,
            config=config or {},
            send_timeout_s=send_timeout,
            name=group,
        )
        self._checker = Checker(self._store, group, check, check_workers) if check is not None else None
        self._start_lock = threading.Lock()
        # Written under the start lock; read without it, for it only ever goes on.
        self._state = "new"
        # Counts, under a lock of their own: transactions of many threads add to them.
        self._count_lock = threading.Lock()
        self._entered = self._left = self._failed = 0
        self._ended = dict.fromkeys(TransactionState, 0)

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
                if self._checker is not None:
                    self._checker.start()
                self._state = "started"
        return self

    def stop(self, timeout: float = 30.0) -> None:
        """Stop answering checks and wait for what is being sent, at most `timeout` seconds for each. May be repeated.

        Transactions still open in other threads are left to a check.
        """
        with self._start_lock:
            if self._state == "started":
                if self._checker is not None:
                    self._checker.stop(timeout)
                self._store.stop(timeout)
            self._state = "stopped"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def transaction(
        self,
        topic: str,
        *,
        key: bytes | str | None = None,
        value: bytes | str | None,
        headers: UserHeaders = (),
        partition: int | None = None,
        check_immunity: float | None = None,
    ) -> Transaction:
        """Return a transaction to enter with `with`: the half is durable inside, the decision is stored on leaving.

        Left normally it commits; left by an exception it rolls back and the exception goes on; left by an interrupt
        (KeyboardInterrupt, SystemExit), or after `tx.unknown()`, it is left to a check. Committed means decided for
        good: the message becomes visible some milliseconds later.

        Args:
            topic: where the message is published; it must exist.
            key: its key; text is encoded as UTF-8. Messages of one key are published in the order of their decisions.
            value: its value, or None for a tombstone.
            headers: its headers; names must not begin with `penstock-`.
            partition: the partition to publish to; Kafka's partitioner chooses where it is None.
            check_immunity: seconds from now before the first check, where that is more than the coordinator's
                transaction timeout: for local transactions that are known to take long.

        Raises:
            ConfigurationError: an argument is wrong. (All that follow are raised on entering or leaving.)
            TopicNotFoundError: there is no such topic.
            BrokerConnectionError: no broker answered at the first use.
            HalfNotStoredError: on entering: the half is not known to be durable, and the block did not run.
            DecisionNotStoredError: on leaving normally: a check will settle the transaction.
        """
        if not isinstance(topic, str) or not is_topic_name(topic):
            raise ConfigurationError(f"topic must be a topic's name, but is {topic!r}")
        if check_immunity is not None:
            not_negative("check_immunity", check_immunity)
        half = Half(
            transaction_id=new_id(),
            group=self._group,
            topic=topic,
            partition=partition,
            key=_bytes("key", key),
            value=_bytes("value", value),
            headers=_headers(headers) if headers else (),
            immunity_ms=None if check_immunity is None else int(check_immunity * 1000),
        )
        return Transaction(self, half)

    def send(
        self,
        topic: str,
        *,
        key: bytes | str | None = None,
        value: bytes | str | None,
        headers: UserHeaders = (),
        partition: int | None = None,
        check_immunity: float | None = None,
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
            execute: the local transaction: called with the `Transaction` once the half is durable. It returns a
                `TransactionState`; None means COMMIT. If it raises, the message is rolled back and the exception goes
                on, as in the context manager. Anything else it returns leaves the message to a check and raises
                `ConfigurationError`. Without a function the message commits at once.

        Returns:
            The id and the stored decision.
        """
        transaction = self.transaction(
            topic, key=key, value=value, headers=headers, partition=partition, check_immunity=check_immunity
        )
        with transaction as tx:
            answer: object = execute(tx) if execute is not None else None
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
        return TransactionResult(tx.transaction_id, tx._state, topic)  # noqa: SLF001 - two halves of one idea

    def statistics(self) -> ProducerStatistics:
        """Return counts since the start. Safe from any thread."""
        checker = self._checker
        with self._count_lock:
            return ProducerStatistics(
                in_flight=self._entered - self._left,
                committed=self._ended[TransactionState.COMMIT],
                rolled_back=self._ended[TransactionState.ROLLBACK],
                unknown=self._ended[TransactionState.UNKNOWN],
                failed=self._failed,
                checks=checker.answered if checker else 0,
                failed_checks=checker.failed if checker else 0,
                skipped_checks=checker.skipped if checker else 0,
            )

    def _prepare(self, half: Half) -> Prepared:
        if self._state != "started":
            self.start()
        self._store.require_target(half.topic, half.partition)
        try:
            prepared = _prepared(self._store, half)
        except TransactionError:
            with self._count_lock:
                self._failed += 1
            raise
        with self._count_lock:
            self._entered += 1
        return prepared

    def _finish(self, prepared: Prepared, state: TransactionState, error: BaseException | None) -> None:
        stored = True
        try:
            if state is not TransactionState.UNKNOWN:
                _decide(self._store, prepared, VERDICTS[state])
        except DecisionNotStoredError as lost:
            stored = False
            if error is None:
                raise
            # The user's own exception says more; a check finds out that the local transaction did not commit.
            _log.warning("%s", lost)
        finally:
            with self._count_lock:
                self._left += 1
                if stored:
                    self._ended[state] += 1
                else:
                    self._failed += 1


def _prepared(store: Store, half: Half) -> Prepared:
    heard: SimpleQueue[Prepared | HalfNotStoredError] = SimpleQueue()
    store.prepare((half,), heard.put)
    answer = heard.get()
    if isinstance(answer, HalfNotStoredError):
        raise answer
    return answer


def _decide(store: Store, prepared: Prepared, verdict: Verdict) -> None:
    heard: SimpleQueue[DecisionNotStoredError | None] = SimpleQueue()
    store.decide(prepared, verdict, heard.put)
    error = heard.get()
    if error is not None:
        raise error


def _bytes(option: str, content: bytes | str | None) -> bytes | None:
    if content is None or isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode()
    raise ConfigurationError(
        f"{option} must be bytes, text or None, but is a {type(content).__name__}; encode it first"
    )


def _headers(headers: UserHeaders) -> Headers:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    checked = []
    for name, content in pairs:
        if not isinstance(name, str) or name.startswith(RESERVED_PREFIX):
            raise ConfigurationError(
                f"header names must be text that does not begin with {RESERVED_PREFIX!r}, but one is {name!r}"
            )
        checked.append((name, _bytes(f"header {name}", content)))
    return tuple(checked)


__all__ = ["Execute", "Transaction", "TransactionalProducer", "UserHeaders"]
