"""The ledger in Kafka on a real broker (I9): once published stays once, whoever is killed, doubled or not heard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from confluent_kafka import Producer

from kafka_tools import read_all, transactional
from penstock.clients.reading import PartitionReader
from penstock.devbroker import DevBroker
from penstock.errors import SinkError
from penstock.spark_sink.ledger import kafka_ledger
from penstock.spark_sink.ledger.kafka_ledger import PARTITIONS
from penstock.spark_sink.ledger.kafka_producers import SinkPublisher, slot_id
from penstock.spark_sink.ledger.kafka_publisher import publish
from penstock.spark_sink.ledger.kafka_target import Row, Target

SOURCE = ("orders", 0)


@dataclass
class Bench:
    """A ledger and a topic of one test."""

    target: Target
    topic: str
    open: list[SinkPublisher] = field(default_factory=list)

    def rows(self, first: int, last: int, size: int = 0) -> list[Row]:
        """Return rows whose value is their offset, and so many bytes more."""
        return [Row(SOURCE, n, self.topic, b"k", b"%d" % n + b" " * size, ()) for n in range(first, last + 1)]

    def publish(self, rows: list[Row]) -> int:
        """Publish with nothing that is kept, as a task that was started anew does."""
        self.open.append(SinkPublisher(self.target))
        return publish(self.target, slot_id(self.target.name, SOURCE), rows, self.open[-1])

    def seen(self, **how: bool) -> list[int]:
        """Return what a reader of the topic sees, in its order."""
        return [int(one.value() or b"") for one in read_all(self.target.servers, self.topic, **how)]


@pytest.fixture
def bench(broker: DevBroker, ledger_topic: str, new_topic: Callable[..., str]) -> Any:
    """A sink of its own with a topic."""
    topic = new_topic(1)
    made = Bench(Target(broker.bootstrap_servers, {}, topic, ledger_topic), topic)
    yield made
    for publisher in made.open:
        publisher.close()


def test_a_row_without_a_topic_moves_the_ledger_and_one_may_name_its_partition(bench: Bench) -> None:
    (row,) = bench.rows(3, 3)
    mark = row._replace(target_topic=None, key=None, value=None)

    assert bench.publish([row._replace(target_partition=0), mark._replace(offset=9)]) == 0
    assert bench.publish([row, mark._replace(offset=9)]) == 1  # of those that publish something
    assert bench.publish([mark._replace(offset=20)]) == 0
    with pytest.raises(SinkError, match="offset 21 were not published to"):
        bench.publish([row._replace(offset=21, target_partition=7)])

    assert bench.seen() == [3]
    assert bench.open[-1].ledger.read([SOURCE])[SOURCE].next_offset == 21


def test_the_ledger_is_read_past_what_others_have_open_in_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    key = kafka_ledger.ledger_key(bench.target.name, SOURCE)
    other = transactional(bench.target.servers)
    other.begin_transaction()
    other.produce(bench.target.ledger, b'{"next_offset": 1}', b"another's", kafka_ledger.ledger_partition(key))
    assert other.flush(30) == 0
    # A committed record behind the open transaction: readers do not see it yet.
    own = Producer({"bootstrap.servers": bench.target.servers})
    own.produce(bench.target.ledger, b'{"next_offset": 9}', key, kafka_ledger.ledger_partition(key))
    assert own.flush(30) == 0
    looks, poll = [0], PartitionReader.poll

    def look(self: PartitionReader, *how: Any) -> Any:
        looks[0] += 1
        if looks[0] == 8:
            other.commit_transaction(30)
        return poll(self, *how)

    monkeypatch.setattr(PartitionReader, "poll", look)
    applied = bench.publish(bench.rows(5, 10))

    assert looks[0] >= 8  # it waited
    assert applied == 4
    assert bench.seen() == [9, 10]


def test_what_a_topic_refuses_is_told_without_its_value_and_holds_no_reader_back(
    bench: Bench, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(1, {"max.message.bytes": "500"})
    row = Row(SOURCE, 7, topic, b"k", b"canary-4711" * 100, ())

    with pytest.raises(SinkError, match=r"rows from orders\[0\] offset 7 .*MSG_SIZE_TOO_LARGE.*tries: 1;") as caught:
        bench.publish([row])

    assert "4711" not in str(caught.value)
    assert read_all(bench.target.servers, topic) == []
    assert bench.publish(bench.rows(7, 8)) == 0


def test_a_record_that_is_no_ledger_is_told(bench: Bench, broker: DevBroker, new_topic: Callable[..., str]) -> None:
    bench.target = Target(broker.bootstrap_servers, {}, "sink", new_topic(PARTITIONS))
    key = kafka_ledger.ledger_key(bench.target.name, SOURCE)
    home = kafka_ledger.ledger_partition(key)
    producer = Producer({"bootstrap.servers": bench.target.servers})
    producer.produce(bench.target.ledger, b"nonsense", key, home)
    assert producer.flush(30) == 0

    with pytest.raises(SinkError, match=rf"\[{home}\] offset \d+ is no record of a ledger"):
        bench.publish(bench.rows(0, 1))
