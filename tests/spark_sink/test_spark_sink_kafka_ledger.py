"""The ledger in Kafka on a real broker (I9): once published stays once, whoever is killed, doubled or not heard."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from kafka_tools import read_all, transactional
from penstock.clients.reading import PartitionReader
from penstock.clients.requests.topics import TopicSpec, ensure_topics
from penstock.devbroker import DevBroker
from penstock.errors import SinkError
from penstock.spark_sink import KafkaSink
from penstock.spark_sink.ledger import kafka_ledger
from penstock.spark_sink.ledger.kafka_ledger import PARTITIONS, TOPIC_CONFIG
from penstock.spark_sink.ledger.kafka_producers import SinkPublisher, slot_id
from penstock.spark_sink.ledger.kafka_publisher import publish
from penstock.spark_sink.ledger.kafka_target import Row, Target
from penstock.spark_sink.sinks.sink import ledger_positions

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


@pytest.fixture(scope="module")
def ledger_topic(broker: DevBroker, admin: AdminClient) -> str:
    """One ledger for all tests: each has a sink name of its own."""
    name = "ledger-tests"
    ensure_topics(admin, broker.bootstrap_servers, [TopicSpec(name, PARTITIONS, TOPIC_CONFIG)])
    return name


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


def test_a_sink_tells_the_ledger_of_its_name(bench: Bench) -> None:
    bench.publish(bench.rows(0, 4))
    target = bench.target
    sink = KafkaSink(target.servers, bench.topic, name=target.name, ledger_topic=target.ledger)
    asked = [SOURCE, ("orders", 1)]

    assert ledger_positions(sink, "the query's own name", asked) == {SOURCE: 5}
    assert ledger_positions(replace(sink, name="another"), "", asked) == {}
    assert ledger_positions(replace(sink, ledger_topic="not-made-yet"), "", asked) == {}


#: A task that is killed when all is written and nothing is committed.
KILLED = """
import os, signal, sys
from confluent_kafka import Producer
from penstock.clients import factory
from penstock.spark_sink.ledger.kafka_producers import SinkPublisher, slot_id
from penstock.spark_sink.ledger.kafka_publisher import publish
from penstock.spark_sink.ledger.kafka_target import Row, Target
class Killed(Producer):
    def commit_transaction(self, timeout=-1):
        os.kill(os.getpid(), signal.SIGKILL)
factory.Producer = Killed
servers, name, ledger, topic = sys.argv[1:]
target = Target(servers, {}, name, ledger)
rows = [Row(("orders", 0), n, topic, b"k", b"%d" % n, ()) for n in range(5)]
publish(target, slot_id(name, ("orders", 0)), rows, SinkPublisher(target))
"""


def test_a_task_killed_between_produce_and_commit_published_nothing_and_its_successor_does_it_once(
    bench: Bench,
) -> None:
    target = bench.target
    child = subprocess.run(
        [sys.executable, "-c", KILLED, target.servers, target.name, target.ledger, bench.topic], check=False
    )
    written, committed = bench.seen(committed_only=False), bench.seen(left_open=True)
    applied = bench.publish(bench.rows(0, 6))

    assert child.returncode == -signal.SIGKILL
    assert written == list(range(5))  # all was on the broker
    assert committed == []
    assert applied == 0
    assert bench.seen() == list(range(7))


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
