"""The ledger in Kafka on a real broker (I9): rows are published once, by new and by kept producers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession

from kafka_tools import read_all, transactional
from penstock.clients import factory as making
from penstock.clients import reading as partition_reader
from penstock.clients.reading import PartitionReader
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.clients.transactional.writer import TransactionalWriter
from penstock.devbroker import DevBroker
from penstock.errors import SinkError
from penstock.spark_sink.ledger.rules import Batch, LedgerEntry
from penstock.spark_sink.sinks.kafka_ledger import (
    PARTITIONS,
    TOPIC_CONFIG,
    KafkaLedger,
    Target,
    ledger_key,
    ledger_partition,
    slot_of,
)
from penstock.spark_sink.sinks.kafka_publisher import Row, SinkPublisher, change_ledger
from penstock.spark_sink.sinks.kafka_sink import publish_rows, slot_column
from penstock.spark_sink.source.pool import WorkerPool
from waiting import wait_until

SOURCE, OTHER = SOURCES = [("orders", 0), ("orders", 1)]


class Worker:
    """The work of one Python worker of Spark for a sink: task after task, with its kept clients."""

    def __init__(self, target: Target, topic: str) -> None:
        self.target = target
        self._topic = topic
        self.kept: WorkerPool[SinkPublisher] = WorkerPool()

    def row(self, offset: int, source: tuple[str, int] = SOURCE) -> Row:
        """Return a row whose value is its place."""
        return Row(source, offset, self._topic, b"k", b"%d-%d" % (source[1], offset), ())

    def publish(self, rows: list[Row], batch: int = 0) -> list[int]:
        """Publish rows in a task, and return how many of each source partition had been published before."""
        applied = publish_rows(self.target, Batch("sink", batch, "query"), rows, self.kept).applied
        return [applied.get(source, 0) for source in dict.fromkeys(row.source for row in rows)]

    def applied(self, first: int, last: int, batch: int = 0) -> list[int]:
        """Publish offsets of both source partitions; returns as `publish`."""
        return self.publish([self.row(n, source) for source in SOURCES for n in range(first, last + 1)], batch)

    def seen(self) -> dict[int, list[int]]:
        """Return a topic reader's view, by source partition, in order."""
        found: dict[int, list[int]] = {0: [], 1: []}
        for message in read_all(self.target.servers, self._topic):
            partition, number = (message.value() or b"").split(b"-")
            found[int(partition)].append(int(number))
        return found

    def writers(self) -> list[TransactionalWriter]:
        """Return the producers that it keeps."""
        return [writer for _, kept in self.kept._idle for writer in kept._idle.values()]


@pytest.fixture
def worker(broker: DevBroker, ledger_topic: str, new_topic: Callable[..., str]) -> Iterator[Callable[[], Worker]]:
    """Return a function that makes workers for one sink, which publishes to one topic."""
    topic, made = new_topic(1), list[Worker]()

    def make() -> Worker:
        made.append(Worker(Target(broker.bootstrap_servers, {}, topic, ledger_topic), topic))
        return made[-1]

    yield make
    for done in made:
        done.kept.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return how often producers took an id and committed."""
    found = {"init": 0, "commit": 0}

    class Counted(making.Producer):
        def init_transactions(self, timeout: float = -1) -> None:
            found["init"] += 1
            super().init_transactions(timeout)

        def commit_transaction(self, timeout: float = -1) -> None:
            found["commit"] += 1
            super().commit_transaction(timeout)

    monkeypatch.setattr(making, "Producer", Counted)
    return found


def once(last: int) -> dict[int, list[int]]:
    return {0: list(range(last + 1)), 1: list(range(last + 1))}


def test_batch_after_batch_a_worker_takes_its_ids_once_and_reads_the_ledger_on(
    worker: Callable[[], Worker], calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = worker()
    consumers = mock.Mock(wraps=partition_reader.new_consumer)
    monkeypatch.setattr(partition_reader, "new_consumer", consumers)

    for batch in range(6):
        assert one.applied(10 * batch, 10 * batch + 9, batch) == [0, 0]
    assert one.applied(50, 64, 5) == [10, 10]  # tried again, with more

    assert calls == {"init": 2, "commit": 14}
    assert consumers.call_count == 1
    assert one.seen() == once(64)


@pytest.mark.thorough
def test_a_kept_producer_whose_id_another_has_taken_is_shut_out_and_its_rows_are_published_once(
    worker: Callable[[], Worker], calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = worker(), worker()
    assert one.applied(0, 4, 0) == [0, 0]
    # Nothing of this is new, so that the ledger does not tell of it.
    assert other.applied(0, 4, 0) == [5, 5]
    assert one.applied(5, 9, 1) == [0, 0]
    assert calls["init"] == 6  # two each, and two for those that were refused

    overtaken: list[list[int]] = []
    counted: Any = making.Producer

    class Late(counted):
        def commit_transaction(self, timeout: float = -1) -> None:
            if not overtaken:
                # All is written, by a producer that was kept, when another task has taken over and publishes more.
                overtaken.append([])
                overtaken[0] = other.applied(10, 16, 2)
            super().commit_transaction(timeout)

    for writer in one.writers():
        writer.producer.__class__ = Late  # type: ignore[assignment]
    assert one.applied(10, 14, 2) == [5, 5]

    assert overtaken == [[0, 0]]
    assert one.seen() == once(16)


def test_a_producer_whose_commit_was_repeated_is_no_longer_used(
    worker: Callable[[], Worker], calls: dict[str, int]
) -> None:
    one = worker()
    assert one.applied(0, 4, 0) == [0, 0]
    for writer in one.writers():
        begin = writer._watch.begin

        def repeated(begin: Callable[[], None] = begin, watch: Any = writer._watch) -> None:
            begin()
            # What the client library logs where the answer to an EndTxn was lost, and it asks again by itself.
            watch.log(10, "", "ENDTXN", "producer", "EndTxn returned _TRANSPORT (retriable)")

        writer._watch.begin = repeated  # type: ignore[method-assign]
    assert one.applied(5, 9, 1) == [0, 0]
    assert calls["init"] == 2
    assert one.applied(10, 14, 2) == [0, 0]

    assert calls["init"] == 4
    assert one.seen() == once(14)


def test_what_an_operator_takes_back_and_a_recreated_ledger_are_seen_by_a_kept_reader(
    broker: DevBroker,
    admin: AdminClient,
    worker: Callable[[], Worker],
    ledger_topic: str,
    new_topic: Callable[..., str],
) -> None:
    one = worker()
    assert one.applied(0, 4, 0) == [0, 0]
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    for source in SOURCES:
        key = ledger_key(one.target.name, source)
        producer.produce(ledger_topic, None, key, ledger_partition(key))
    assert producer.flush(30) == 0
    assert one.applied(0, 4, 0) == [0, 0]
    assert one.seen() == {0: [*range(5)] * 2, 1: [*range(5)] * 2}

    own = new_topic(PARTITIONS)
    one.target = replace(one.target, ledger=own, name=f"{one.target.name}-again")
    assert one.applied(0, 4, 0) == [0, 0]
    admin.delete_topics([own])[own].result(30)
    wait_until(lambda: own not in admin.list_topics(timeout=60).topics)
    ensure_topics(admin, [TopicSpec(own, PARTITIONS, TOPIC_CONFIG)])
    assert one.applied(0, 4, 0) == [0, 0]


def test_a_source_partition_has_one_slot_for_ever_and_spark_finds_the_same(spark: SparkSession) -> None:
    sources = [(topic, partition) for topic in ("orders", "zahlungen-ü", "a/b") for partition in (0, 1, 17, 4_711)]

    found = spark.createDataFrame(sources, "topic STRING, partition INT").select(slot_column().alias("slot")).collect()

    assert [row.slot for row in found] == [slot_of(source) for source in sources]
    assert [Target("", {}, "sink", "").transactional_id(source) for source in SOURCES] == ["sink/18", "sink/4"]
    nowhere = spark.createDataFrame([(None, None)], "topic STRING, partition INT").select(slot_column().alias("slot"))
    assert nowhere.collect()[0].slot is not None


def test_where_a_query_begins_is_written_though_the_ledger_has_no_leader_at_first(
    worker: Callable[[], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, errors = worker().target, [KafkaException(KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION))]

    def read(ledger: KafkaLedger, sources: Any, real: Any = KafkaLedger.read) -> Any:
        if errors:
            raise errors.pop()
        return real(ledger, sources)

    monkeypatch.setattr(KafkaLedger, "read", read)
    change_ledger(target, [SOURCE], lambda _held: {SOURCE: LedgerEntry(7, 7)})

    assert not errors
    with closing(KafkaLedger(target)) as ledger:
        assert ledger.read_all()[target.name] == {SOURCE: LedgerEntry(7, 7)}


def test_the_ledger_is_read_past_what_others_have_open_in_it(
    worker: Callable[[], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = worker()
    key = ledger_key(one.target.name, SOURCE)
    other = transactional(one.target.servers)
    other.begin_transaction()
    other.produce(one.target.ledger, b'{"next_offset": 1}', b"another's", ledger_partition(key))
    assert other.flush(30) == 0
    # A committed record behind the open transaction: readers do not see it yet.
    own = Producer({"bootstrap.servers": one.target.servers})
    own.produce(one.target.ledger, b'{"next_offset": 9}', key, ledger_partition(key))
    assert own.flush(30) == 0
    looks, poll = [0], PartitionReader.poll

    def look(self: PartitionReader, *how: Any) -> Any:
        looks[0] += 1
        if looks[0] == 8:
            other.commit_transaction(30)
        return poll(self, *how)

    monkeypatch.setattr(PartitionReader, "poll", look)
    applied = one.publish([one.row(n) for n in range(5, 11)])

    assert looks[0] >= 8  # it waited
    assert applied == [4]
    assert one.seen()[0] == [9, 10]


def test_what_a_topic_refuses_is_named_without_its_value_and_holds_no_reader_back(
    worker: Callable[[], Worker], new_topic: Callable[..., str]
) -> None:
    one, topic = worker(), new_topic(1, {"max.message.bytes": "500"})

    with pytest.raises(SinkError, match=r"rows from orders:0@7 .*MSG_SIZE_TOO_LARGE.*tries: 1;") as caught:
        one.publish([Row(SOURCE, 7, topic, b"k", b"canary-4711" * 100, ())])

    assert "4711" not in str(caught.value)
    assert read_all(one.target.servers, topic) == []
    assert one.publish([one.row(7), one.row(8)]) == [0]


def test_a_record_that_is_no_ledger_is_named(worker: Callable[[], Worker], new_topic: Callable[..., str]) -> None:
    one = worker()
    one.target = replace(one.target, name="sink", ledger=new_topic(PARTITIONS))
    key = ledger_key("sink", SOURCE)
    producer = Producer({"bootstrap.servers": one.target.servers})
    producer.produce(one.target.ledger, b"nonsense", key, ledger_partition(key))
    assert producer.flush(30) == 0

    with pytest.raises(SinkError, match=rf":{ledger_partition(key)}@\d+ is no record of a ledger"):
        one.publish([one.row(0)])
