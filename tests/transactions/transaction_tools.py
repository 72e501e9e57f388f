"""Shared tools of the transaction tests: a store for each test, producers and coordinators on it, and readers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

from kafka_tools import ANSWER_S, read_all
from penstock import clients
from penstock.transactions import (
    Coordinator,
    CoordinatorStatistics,
    HalfMessage,
    Transaction,
    TransactionalProducer,
    TransactionState,
)
from penstock.transactions.stores.kafka.sends import StoredHalves
from penstock.transactions.wire.ops import Author, Op, Verdict, decode_ops, encode_op
from penstock.transactions.wire.topics import StoreTopics, open_topics
from waiting import wait_until

#: Seconds: short enough for a test, long enough that a decision is stored well before the first check.
TIMEOUT_S = 0.6
INTERVAL_S = 0.4

Seen = tuple[bytes | None, bytes | None]


class Bench:
    """One store with its own prefix, and a test's producers and coordinators on it."""

    def __init__(self, bootstrap_servers: str, topic: str, partitions: int = 2) -> None:
        self.servers = bootstrap_servers
        self.topic = topic
        self.admin = clients.admin(bootstrap_servers, {})
        self.topics: StoreTopics = open_topics(self.admin, f"store.{topic}", partitions)
        self._open = contextlib.ExitStack()

    def producer(
        self, group: str = "orders", check: Callable[[HalfMessage], TransactionState] | None = None, **more: Any
    ) -> TransactionalProducer:
        place = {"bootstrap_servers": self.servers, "prefix": self.topics.prefix}
        made = TransactionalProducer(group, check=check, **{**place, **more}).start()
        self._open.callback(made.stop)
        return made

    def coordinator(self, **more: Any) -> Coordinator:
        place: dict[str, Any] = {"bootstrap_servers": self.servers, "prefix": self.topics.prefix}
        times = {"transaction_timeout": TIMEOUT_S, "check_interval": INTERVAL_S, "session_timeout": 6.0}
        made = Coordinator(**{**place, **times, **more}).start()
        self._open.callback(made.stop)
        return made

    def await_checkers(self, count: int, group: str = "orders") -> None:
        """Wait until so many producers share the checks of a group."""
        name = self.topics.checkers(group)

        def all_have_partitions() -> bool:
            try:
                members = self.admin.describe_consumer_groups([name])[name].result().members
            except KafkaException:
                return False  # a new broker has no coordinator of groups for a moment
            return len(members) == count and all(member.assignment.topic_partitions for member in members)

        wait_until(all_have_partitions, 60)

    def settled(self, coordinator: Coordinator, timeout: float = 60.0, **counts: int) -> CoordinatorStatistics:
        """Wait until the coordinator owns all, holds nothing, and its counts are at least those given; return them.

        Where none are given, only what was stored before the coordinator started is sure to be settled.
        """
        return settled(coordinator, timeout, **{"partitions": self.topics.partitions, **counts})

    def counted(self, coordinator: Coordinator, timeout: float = 60.0, **counts: int) -> CoordinatorStatistics:
        """Wait until the coordinator's counts are at least those given; return them."""
        return counted(coordinator, timeout, **counts)

    def visible(self, topic: str | None = None) -> list[Seen]:
        """Return keys and values of all that a read_committed reader sees in a topic, once no transaction is open."""
        return [(m.key(), m.value()) for m in self.messages(topic)]

    def messages(self, topic: str | None = None, isolation: str = "read_committed") -> list[Any]:
        """Return all records that a reader sees in a topic; one of committed records waits for open transactions."""
        return read_all(self.servers, topic or self.topic, committed_only=isolation == "read_committed")

    def write(self, topic: str, partition: int, key: bytes | None, value: bytes | None, headers: Any = None) -> None:
        """Write a record by hand, past penstock."""
        producer = Producer({"bootstrap.servers": self.servers, "enable.idempotence": True})
        producer.produce(topic, value, key, partition, headers=headers or [])
        assert producer.flush(30) == 0

    def alter(self, topic: str, settings: dict[str, str]) -> None:
        """Change settings of a topic."""
        entries = [ConfigEntry(name, it, incremental_operation=AlterConfigOpType.SET) for name, it in settings.items()]
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
        for future in self.admin.incremental_alter_configs([resource]).values():
            future.result()

    def ends(self, topic: str, isolation: str) -> int:
        """Return the sum of the ends of a topic's partitions, as a reader of that isolation sees them."""
        with closing_consumer(self.servers, isolation) as consumer:
            numbers = consumer.list_topics(topic, ANSWER_S).topics[topic].partitions
            return sum(consumer.get_watermark_offsets(TopicPartition(topic, p), ANSWER_S)[1] for p in numbers)

    def positions(self, isolation: str, *logs: str) -> list[int]:
        """Return the coordinators' committed positions in these logs, by partition.

        Raises what a position that is not stable yet raises, where only committed ones are read.
        """
        settings = {"bootstrap.servers": self.servers, "group.id": self.topics.coordinators}
        consumer = Consumer({**settings, "isolation.level": isolation})
        try:
            places = [TopicPartition(log, number) for log in logs for number in range(self.topics.partitions)]
            return [place.offset for place in consumer.committed(places, ANSWER_S)]
        finally:
            consumer.close()

    def close(self) -> None:
        """Stop all; a coordinator that had died by itself fails the test."""
        self._open.close()


def counted(coordinator: Coordinator, timeout: float = 60.0, **counts: int) -> CoordinatorStatistics:
    """Wait until the coordinator's counts are at least those given; return them."""

    def reached() -> CoordinatorStatistics | None:
        now = coordinator.statistics()
        return now if all(getattr(now, name) >= count for name, count in counts.items()) else None

    # A store in a database asks that.
    return wait_until(reached, timeout, 0.1)


def settled(coordinator: Coordinator, timeout: float = 60.0, **counts: int) -> CoordinatorStatistics:
    """Wait until the coordinator holds nothing, and its counts are at least those given; return them."""

    def reached() -> CoordinatorStatistics | None:
        now = coordinator.statistics()
        enough = all(getattr(now, name) >= count for name, count in counts.items())
        return now if enough and not now.pending and now.partitions else None

    # A store in a database asks that.
    return wait_until(reached, timeout, 0.1)


@contextlib.contextmanager
def closing_consumer(servers: str, isolation: str) -> Iterator[Consumer]:
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "transaction-tests",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": isolation,
        }
    )
    try:
        yield consumer
    finally:
        consumer.close()


@contextlib.contextmanager
def child(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script below this folder as a process; kill it at the end if it still runs."""
    path = Path(__file__).parent / script
    command = [sys.executable, str(path), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()
        assert process.stdin is not None
        process.stdin.close()


def kill(process: subprocess.Popen[str]) -> None:
    """End a process as a power cut would."""
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL


def line_of(process: subprocess.Popen[str]) -> str:
    """Wait for the next line a child prints."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, "the child ended without a word"
    return line


def unknown(_: Transaction) -> TransactionState:
    """Be a local transaction whose end is left to a check."""
    return TransactionState.UNKNOWN


def prepared(producer: TransactionalProducer, topic: str, value: bytes = b"v") -> StoredHalves:
    """Store a half and leave it undecided; return its place."""
    transaction = producer.transaction(topic, value=value)
    transaction.unknown()
    with transaction:
        stored = transaction._prepared
    assert isinstance(stored, StoredHalves)
    return stored


def decide(bench: Bench, stored: StoredHalves, verdict: Verdict, **other: Any) -> None:
    """Write a decision by hand."""
    half = stored.halves[0]
    op = Op(half.transaction_id, verdict, Author.PRODUCER, half.group, stored.partition, stored.offsets, 0)
    bench.write(bench.topics.op, stored.partition, None, encode_op(op._replace(**other)))


def ops_of(bench: Bench) -> list[Op]:
    """Return the decisions in the op log, in their order within each half partition."""
    records = sorted(bench.messages(bench.topics.op), key=lambda record: (record.partition(), record.offset()))
    return [op for record in records for op in decode_ops(record.value()) if op.verdict is not Verdict.TICK]
