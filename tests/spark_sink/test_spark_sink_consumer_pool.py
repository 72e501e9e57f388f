"""Consumers of the source that are kept between tasks: lent to one at a time, bounded, and with nothing of before."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql.pandas.types import to_arrow_schema

from kafka_tools import NewTopic, Write
from penstock import clients
from penstock.clients.requests.topics import TopicSpec, ensure_topics
from penstock.devbroker import DevBroker
from penstock.errors import SourceError
from penstock.spark_sink.source import partition_reader as reading
from penstock.spark_sink.source.consumer_pool import ConsumerPool
from penstock.spark_sink.source.offsets.planning import OffsetRange
from penstock.spark_sink.source.options.options import SourceOptions
from penstock.spark_sink.source.tasks import source_schema
from waiting import wait_until

SCHEMA = to_arrow_schema(source_schema(include_headers=False), timezone="UTC")


class FixedConsumer:
    """A consumer that gives what it was told to, and notes what it is asked for."""

    def __init__(self, *given: Message, failing: str = "") -> None:
        self._given = list(given)
        self._failing = failing
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Write:
        def note(*_: object) -> None:
            self.calls.append(name)
            if name == self._failing:
                raise KafkaException(KafkaError(KafkaError._STATE))

        return note

    def consume(self, count: int, _timeout: float) -> list[Message]:
        taken, self._given = self._given[:count], self._given[count:]
        return taken


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the consumers that were made, real ones."""
    found: list[Any] = []
    make = clients.consumer

    def noting(servers: str, config: dict[str, Any]) -> Any:
        found.append(make(servers, config))
        return found[-1]

    monkeypatch.setattr(clients, "consumer", noting)
    return found


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> list[FixedConsumer]:
    """Return the consumers that were made, none of which is real."""
    found: list[FixedConsumer] = []

    def make(_servers: str, _config: object) -> FixedConsumer:
        found.append(FixedConsumer())
        return found[-1]

    monkeypatch.setattr(clients, "consumer", make)
    return found


@pytest.fixture
def pool() -> Any:
    """Return a pool that is closed with the test."""
    made = ConsumerPool()
    yield made
    made.close()


def lend(pool: ConsumerPool, setting: str = "any") -> tuple[Any, bool]:
    """Lend a consumer for a task that does nothing; return it, and whether it was kept."""
    with pool.lend("127.0.0.1:1", {"client.id": setting}) as lent:
        return lent.consumer, lent.is_kept


def options_for(broker: DevBroker, topic: str, **options: str) -> SourceOptions:
    settings = {"kafka.bootstrap.servers": broker.bootstrap_servers, "subscribe": topic}
    return SourceOptions.parse({**settings, **options})


def read(options: SourceOptions, pool: ConsumerPool, *wanted: OffsetRange) -> dict[tuple[str, int], list[int]]:
    """Read a task's ranges; return the offsets of each partition's rows, in their order."""
    found: dict[tuple[str, int], list[int]] = {}
    for batch in reading.read_ranges(options, SCHEMA, wanted, pool):
        for row in batch.to_pylist():
            assert row["value"] == f"{row['partition']} {row['offset']}".encode()
            found.setdefault((row["topic"], row["partition"]), []).append(row["offset"])
    return found


def test_tasks_that_follow_one_another_read_by_one_consumer_each_its_own_offsets(
    broker: DevBroker, new_topic: NewTopic, write: Write, made: list[Any], pool: ConsumerPool
) -> None:
    """The former task leaves thousands of messages fetched ahead, before, at and behind where the next one begins."""
    topic, count, tasks = new_topic(partitions=3), 3_000, 60
    for partition in range(3):
        write(topic, partition, [(None, f"{partition} {n}".encode()) for n in range(count)])
    options, dice = options_for(broker, topic), random.Random(4711)  # noqa: S311 - which tasks are tried

    for _ in range(tasks):
        wanted = []
        for partition in dice.sample(range(3), dice.randint(1, 3)):
            begin = dice.randrange(count)
            wanted.append(OffsetRange(topic, partition, begin, min(count, begin + dice.choice([1, 7, 300, count]))))
        assert read(options, pool, *wanted) == {
            (topic, one.partition): list(range(one.start, one.end)) for one in wanted
        }

    assert len(made) < tasks  # one that has nothing for half a second is replaced, as on a busy machine


def test_a_topic_that_was_made_anew_is_read_by_who_has_read_the_old_one(
    broker: DevBroker, admin: AdminClient, new_topic: NewTopic, write: Write, pool: ConsumerPool
) -> None:
    topic = new_topic()
    write(topic, 0, [(None, b"0 %d" % n) for n in range(500)])
    options = options_for(broker, topic, **{"kafkaConsumer.pollTimeoutMs": "30000"})
    assert read(options, pool, OffsetRange(topic, 0, 0, 500)) == {(topic, 0): list(range(500))}

    next(iter(admin.delete_topics([topic]).values())).result(20)
    wait_until(lambda: topic not in admin.list_topics(timeout=10).topics)
    ensure_topics(admin, broker.bootstrap_servers, [TopicSpec(topic, 1)])
    write(topic, 0, [(None, b"0 %d" % n) for n in range(20)])

    assert read(options, pool, OffsetRange(topic, 0, 5, 20)) == {(topic, 0): list(range(5, 20))}


def test_a_task_that_fails_or_is_given_up_leaves_no_consumer(  # noqa: PLR0917 - fixtures
    broker: DevBroker, admin: AdminClient, new_topic: NewTopic, write: Write, made: list[Any], pool: ConsumerPool
) -> None:
    topic = new_topic()
    write(topic, 0, [(None, b"0 %d" % n) for n in range(6_000)])
    options = options_for(broker, topic)
    given_up: Any = reading.read_ranges(options, SCHEMA, [OffsetRange(topic, 0, 0, 6_000)], pool)
    next(given_up)
    given_up.close()
    assert next(iter(admin.delete_records([TopicPartition(topic, 0, 40)]).values())).result(20).low_watermark == 40

    with pytest.raises(SourceError, match="the log, which begins at 40"):
        read(options, pool, OffsetRange(topic, 0, 0, 60))
    assert read(options, pool, OffsetRange(topic, 0, 50, 60)) == {(topic, 0): list(range(50, 60))}

    assert len(made) == 3
    for one in made[:2]:
        with pytest.raises(RuntimeError, match="closed"):
            one.consume(1, 0)


def test_a_consumer_that_met_an_error_or_does_not_let_go_is_not_kept(fixed: list[FixedConsumer]) -> None:
    pool = ConsumerPool()
    with pool.lend("127.0.0.1:1", {}) as lent:
        lent.has_failed = True
    with pool.lend("127.0.0.1:1", {}) as lent:
        fixed[1]._failing = "unassign"
    with pool.lend("127.0.0.1:1", {}) as lent:
        fixed[2]._given.append(Message(topic="orders", partition=0, error=KafkaError(KafkaError._ALL_BROKERS_DOWN)))
    with pytest.raises(ZeroDivisionError), pool.lend("127.0.0.1:1", {}):
        raise ZeroDivisionError

    assert [one.calls[-1] for one in fixed] == ["close"] * 4


def test_a_forked_process_has_none_of_its_parents_consumers_and_closes_none(fixed: list[FixedConsumer]) -> None:
    pool = ConsumerPool()
    kept, _ = lend(pool)

    child = os.fork()
    if child == 0:
        own, is_kept = lend(pool)
        pool.close()
        os._exit(0 if own is not kept and not is_kept and "close" not in kept.calls and own.calls[-1] == "close" else 1)

    assert os.waitpid(child, 0)[1] == 0
    assert lend(pool) == (kept, True)
