"""The tools of the conformance suite: each store with its own topic and coordinator, and the answers to checks.

The suite speaks to the seam (`penstock.transactions.store`), not to the producer: what holds here holds for whatever
stands above it.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transaction_tools import counted, settled

from databases import TestDatabase, new_database
from kafka_tools import read_all
from penstock.errors import HalfNotStoredError, TransactionError, TransactionRefusedError
from penstock.transactions import Coordinator, TransactionalProducer, new_id
from penstock.transactions.model import PendingTransaction
from penstock.transactions.store import Prepared, Store
from penstock.transactions.stores.file.store import FileStore
from penstock.transactions.stores.kafka.administration import KafkaAdministration
from penstock.transactions.stores.kafka.sends import StoredHalves
from penstock.transactions.stores.kafka.store import KafkaStore
from penstock.transactions.stores.sql.store import SqlStore
from penstock.transactions.wire.half import CheckRequest, Half
from penstock.transactions.wire.ops import Author, Verdict
from waiting import wait_until

#: Seconds: short enough for a test, long enough that a decision is stored well before the first check.
TIMEOUT_S = 0.6
INTERVAL_S = 0.3
#: A coordinator that sends no checks during the test.
NO_CHECKS = {"transaction_timeout": 600.0}
_ANSWER_S = 150.0

#: For what stands above the stores, or what they share: databases cost most, and have their turn in `make test-all`.
SQL_THOROUGH = [pytest.param(kind, marks=pytest.mark.thorough) for kind in ("sqlite", "postgresql")]
BUT_SQL = pytest.mark.parametrize("store_bench", ["kafka", "file", *SQL_THOROUGH], indirect=True)

Answer = Callable[[CheckRequest], Verdict]


class StoreBench(ABC):
    """One kind of store, with its own prefix, and a test's producers and coordinators on it."""

    #: Answered checks after which an undecided half is discarded.
    checks_allowed = 15

    def __init__(self, servers: str, topic: str) -> None:
        self.servers = servers
        self.topic = topic
        self.prefix = f"store.{topic}"
        self._open = contextlib.ExitStack()
        self._store: Store | None = None

    @abstractmethod
    def make_store(self) -> Store:
        """Return a new object for the same store, not started."""

    @abstractmethod
    def make_coordinator(self, **options: Any) -> Coordinator:
        """Return a coordinator, not started."""

    def forge(self, prepared: Prepared, halves: Sequence[Half]) -> Prepared:
        """Return what claims to be prepared halves in the same place."""
        if isinstance(prepared, tuple):
            return prepared._replace(halves=halves)  # type: ignore[attr-defined] # it is a named tuple, or a dataclass
        if isinstance(prepared, StoredHalves):
            forged = copy(prepared)
            forged.halves = halves
            return forged
        return replace(prepared, halves=halves)  # type: ignore[type-var] # the same

    @property
    def store(self) -> Store:
        """The store, started."""
        if self._store is None:
            self._store = store = self.make_store()
            store.start()
            self._open.callback(store.stop, 30)
        return self._store

    @property
    def discarded(self) -> str:
        """The topic of discarded transactions."""
        return f"{self.prefix}.discarded"

    def coordinator(self, **options: Any) -> Coordinator:
        """Return a coordinator that works."""
        times = {"transaction_timeout": TIMEOUT_S, "check_interval": INTERVAL_S}
        made = self.make_coordinator(**{**times, **options})
        made.start()
        self._open.callback(made.stop)
        return made

    def producer(self, group: str = "orders", **options: Any) -> TransactionalProducer:
        """Return a producer on this store, not started. On a store outside Kafka, its stop stops the store, too."""
        return TransactionalProducer(group, store=self.store, **options)

    def pending(self) -> dict[str, PendingTransaction]:
        """Return an operator's view of all unsettled transactions, by id, in the order of their births."""
        return {transaction.transaction_id: transaction for transaction in self.store.administration().pending()}  # type: ignore[attr-defined] # not in Kafka

    def decide_as_operator(self, transaction_id: str, verdict: Verdict, why: str = "") -> None:
        """Decide as an operator does; raise `TransactionRefusedError` where another decision stands."""
        self.store.administration().decide(transaction_id, verdict, "eve@host", why)  # type: ignore[attr-defined] # not in Kafka

    def resume(self, transaction_id: str) -> None:
        """Bring a discarded transaction back as an operator does."""
        self.store.administration().resume(transaction_id, "eve@host")  # type: ignore[attr-defined] # not in Kafka

    def until_it_can(self, act: Callable[[], object], meanwhile: str) -> None:
        """Do something; as long as it is refused in those words, try again."""

        def done() -> bool:
            try:
                act()
            except TransactionError as refusal:
                if meanwhile not in str(refusal):
                    raise
                return False
            return True

        wait_until(done)

    def reopen(self) -> None:
        """Stop all, and come back as a new process would."""
        self.close()
        self._store = None

    def close(self) -> None:
        """Stop all; a coordinator that had died by itself fails the test."""
        self._open.close()

    def half(self, value: bytes = b"v", **fields: Any) -> Half:
        """Return a half for the topic of the test."""
        plain = Half(new_id(), "orders", self.topic, None, None, value, (), None)
        return plain._replace(**fields)

    def prepare(self, *halves: Half) -> Prepared:
        """Store the halves of one transaction."""
        return prepare(self.store, halves)

    def decide(self, prepared: Prepared, verdict: Verdict) -> None:
        """Store a producer's decision."""
        decide(self.store, prepared, verdict)

    def send(self, verdict: Verdict | None, *halves: Half) -> Prepared:
        """Store halves and decide, unless there is no verdict."""
        prepared = self.prepare(*halves)
        if verdict is not None:
            self.decide(prepared, verdict)
        return prepared

    @contextlib.contextmanager
    def answering(self, answer: Answer, group: str = "orders") -> Iterator[list[CheckRequest]]:
        """Answer the checks of a group; the list has the checked halves."""
        asked: list[CheckRequest] = []
        ending = threading.Event()
        source, store = self.store.checks(group), self.store

        def run() -> None:
            try:
                while not ending.is_set():
                    for request in source.take(0.05):
                        asked.append(request)
                        store.answer(request, answer(request), Author.CHECK)
            finally:
                source.close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield asked
        finally:
            ending.set()
            thread.join(_ANSWER_S)

    def seen(self, topic: str | None = None) -> list[bytes | None]:
        """Return the values that a reader of committed records sees, once no transaction is open."""
        return [message.value() for message in self.messages(topic)]

    def messages(self, topic: str | None = None, *, committed_only: bool = True) -> list[Any]:
        """Return the records that a reader sees."""
        return read_all(self.servers, topic or self.topic, committed_only=committed_only)


def prepare(store: Store, halves: Sequence[Half]) -> Prepared:
    """Store halves, and wait for the answer."""
    answers: list[Prepared | HalfNotStoredError] = []
    done = threading.Event()

    def tell(answer: Prepared | HalfNotStoredError) -> None:
        answers.append(answer)
        done.set()

    store.prepare(halves, tell)
    assert done.wait(_ANSWER_S), "the store did not answer"
    if isinstance(answers[0], HalfNotStoredError):
        raise answers[0]
    return answers[0]


def decide(store: Store, prepared: Prepared, verdict: Verdict) -> None:
    """Store a decision, and wait for the answer. A store may know at once of an earlier decision, or not."""
    answers: list[TransactionError | None] = []
    done = threading.Event()

    def tell(answer: TransactionError | None) -> None:
        answers.append(answer)
        done.set()

    store.decide(prepared, verdict, tell)
    assert done.wait(_ANSWER_S), "the store did not answer"
    if answers[0] is not None and not isinstance(answers[0], TransactionRefusedError):
        raise answers[0]


class FileBench(StoreBench):
    """The file store, in a folder of the test's own."""

    def __init__(self, servers: str, topic: str, folder: Path) -> None:
        super().__init__(servers, topic)
        self.folder = folder
        self.segment_bytes = 64 << 10

    def make_store(self) -> FileStore:
        return FileStore(
            self.folder, bootstrap_servers=self.servers, prefix=self.prefix, segment_bytes=self.segment_bytes
        )

    @property
    def file_store(self) -> FileStore:
        """The store, started."""
        store = self.store
        assert isinstance(store, FileStore)
        return store

    def make_coordinator(self, **options: Any) -> Coordinator:
        return Coordinator(store=self.file_store, **options)


class SqlBench(StoreBench):
    """The store in a database of the test's own."""

    def __init__(self, servers: str, topic: str, database: TestDatabase) -> None:
        super().__init__(servers, topic)
        self.database = database
        # One: the suite asks for an order of decisions where keys differ.
        self.shards = 1

    def make_store(self) -> SqlStore:
        return SqlStore(self.database.url, bootstrap_servers=self.servers, prefix=self.prefix, shards=self.shards)

    @property
    def sql_store(self) -> SqlStore:
        """The store, started."""
        store = self.store
        assert isinstance(store, SqlStore)
        return store

    def make_coordinator(self, **options: Any) -> Coordinator:
        return Coordinator(store=self.sql_store, **options)


class KafkaBench(StoreBench):
    """The store in Kafka's topics."""

    # Each waits for a mark in the op log; with 15, it is one of the scenarios.
    checks_allowed = 4

    def make_store(self) -> Store:
        return KafkaStore(
            self.servers,
            prefix=self.prefix,
            partitions=1,
            config={},
            send_timeout_s=120.0,
            name="test",
            in_flight=lambda: 0,
        )

    def make_coordinator(self, **options: Any) -> Coordinator:
        return Coordinator(bootstrap_servers=self.servers, prefix=self.prefix, partitions=1, **options)

    def producer(self, group: str = "orders", **options: Any) -> TransactionalProducer:
        return TransactionalProducer(group, bootstrap_servers=self.servers, prefix=self.prefix, **options)

    def administration(self) -> KafkaAdministration:
        """Return an operator's hands."""
        assert self.store
        return KafkaAdministration(self.servers, self.prefix)

    def pending(self) -> dict[str, PendingTransaction]:
        with self.administration() as hands:
            return {transaction.transaction_id: transaction for transaction in hands.pending()}

    def decide_as_operator(self, transaction_id: str, verdict: Verdict, why: str = "") -> None:
        with self.administration() as hands:
            hands.decide(transaction_id, verdict, "eve@host", why, 30.0)

    def resume(self, transaction_id: str) -> None:
        with self.administration() as hands:
            hands.resume(transaction_id, "eve@host")


def bench_of(
    kind: str, servers: str, topic: str, folder: Path, database_url: Callable[[], str] = lambda: ""
) -> StoreBench:
    """Return the bench of a kind of store, whose files are in that folder."""
    if kind == "kafka":
        return KafkaBench(servers, topic)
    if kind == "file":
        return FileBench(servers, topic, folder / "store")
    if kind == "sqlite":
        return SqlBench(servers, topic, TestDatabase("sqlite", f"sqlite:///{folder / 'store.db'}"))
    return SqlBench(servers, topic, new_database(database_url()))


__all__ = ["BUT_SQL", "INTERVAL_S", "NO_CHECKS", "SQL_THOROUGH", "TIMEOUT_S"]
__all__ += ["StoreBench", "bench_of", "counted", "settled"]
