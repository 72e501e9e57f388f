"""Consumers of the source that are kept between tasks: lent to one at a time, bounded, and with nothing of before."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient
from source_tasks import options_for, rows_of

from kafka_tools import NewTopic, Write
from penstock import clients
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.devbroker import DevBroker
from penstock.errors import SourceError
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.plan import OffsetRange
from penstock.spark_sink.source.pool import MOST_KEPT, WorkerPool
from penstock.spark_sink.source.reading import KeptConsumer, read_ranges
from waiting import wait_until

Pool = WorkerPool[KeptConsumer]


def fixed_consumer() -> Any:
    """Return a consumer that has nothing."""
    return mock.Mock(**{"consume.return_value": []})


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the consumers that were made."""
    found: list[Any] = []
    make = clients.consumer

    def noting(servers: str, config: dict[str, Any]) -> Any:
        found.append(make(servers, config))
        return found[-1]

    monkeypatch.setattr(clients, "consumer", noting)
    return found


@pytest.fixture
def pool() -> Iterator[Pool]:
    """Return a pool that is closed with the test."""
    made = Pool()
    yield made
    made.close()


def lend(pool: Pool, key: str = "any") -> tuple[Any, bool]:
    """Lend a consumer, which is none, for a task that does nothing; return it, and whether it was kept."""
    with pool.lend(key, lambda: KeptConsumer(fixed_consumer)) as lent:
        return lent.consumer, lent.is_kept


def read(options: SourceOptions, pool: Pool, *wanted: OffsetRange) -> dict[tuple[str, int], list[int]]:
    """Read a task's ranges; return the offsets of each partition's rows, in their order."""
    found = rows_of(read_ranges(options, wanted, pool))
    assert all(value == b"%d %d" % (part[1], n) for part, rows in found.items() for n, value in rows.items())
    return {part: list(rows) for part, rows in found.items()}


def test_tasks_that_follow_one_another_read_by_one_consumer_each_its_own_offsets(
    broker: DevBroker, new_topic: NewTopic, write: Write, made: list[Any], pool: Pool
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
        assert read(options, pool, *wanted) == {part.part: list(range(part.start, part.end)) for part in wanted}

    assert len(made) < tasks  # one that has nothing for half a second is replaced, as on a busy machine


def test_a_topic_that_was_created_again_is_read_by_a_consumer_that_has_read_the_old_one(
    broker: DevBroker, admin: AdminClient, new_topic: NewTopic, write: Write, pool: Pool
) -> None:
    topic = new_topic()
    write(topic, 0, [(None, b"0 %d" % n) for n in range(500)])
    options = options_for(broker, topic, **{"kafkaConsumer.pollTimeoutMs": "30000"})
    assert read(options, pool, OffsetRange(topic, 0, 0, 500)) == {(topic, 0): list(range(500))}

    next(iter(admin.delete_topics([topic]).values())).result(60)
    wait_until(lambda: topic not in admin.list_topics(timeout=60).topics)
    ensure_topics(admin, [TopicSpec(topic, 1)])
    write(topic, 0, [(None, b"0 %d" % n) for n in range(20)])

    assert read(options, pool, OffsetRange(topic, 0, 5, 20)) == {(topic, 0): list(range(5, 20))}


def test_a_task_that_fails_or_is_given_up_leaves_no_consumer(  # noqa: PLR0917 - fixtures
    broker: DevBroker, admin: AdminClient, new_topic: NewTopic, write: Write, made: list[Any], pool: Pool
) -> None:
    topic = new_topic()
    write(topic, 0, [(None, b"0 %d" % n) for n in range(6_000)])
    options = options_for(broker, topic)
    given_up: Any = read_ranges(options, [OffsetRange(topic, 0, 0, 6_000)], pool)
    next(given_up)
    given_up.close()
    assert next(iter(admin.delete_records([TopicPartition(topic, 0, 40)]).values())).result(60).low_watermark == 40

    with pytest.raises(SourceError, match=r":0: offsets from 0 are not in the log, which begins at 40"):
        read(options, pool, OffsetRange(topic, 0, 0, 60))
    assert read(options, pool, OffsetRange(topic, 0, 50, 60)) == {(topic, 0): list(range(50, 60))}

    assert len(made) == 3
    for consumer in made[:2]:
        with pytest.raises(RuntimeError, match="closed"):
            consumer.consume(1, 0)


@pytest.mark.parametrize("fault", ["has failed", "unassign", "consume", "raises"])
def test_a_consumer_that_met_an_error_or_does_not_let_go_is_not_kept(pool: Pool, fault: str) -> None:
    consumer = fixed_consumer()

    with suppress(ZeroDivisionError), pool.lend("any", lambda: KeptConsumer(lambda: consumer)) as lent:
        lent.has_failed = fault == "has failed"
        if fault == "unassign":
            consumer.unassign.side_effect = KafkaException(KafkaError(KafkaError._STATE))
        if fault == "consume":
            consumer.consume.return_value = [Message(topic="orders", partition=0)]
        if fault == "raises":
            raise ZeroDivisionError

    consumer.close.assert_called_once_with()


def test_what_is_kept_is_bounded_in_number(pool: Pool) -> None:
    consumers = [lend(pool, str(key))[0] for key in range(MOST_KEPT + 1)]

    assert [consumer.close.called for consumer in consumers] == [True] + [False] * MOST_KEPT
    assert lend(pool, "1") == (consumers[1], True)


def test_a_forked_process_has_none_of_its_parents_consumers_and_closes_none(pool: Pool) -> None:
    kept, _ = lend(pool)

    child = os.fork()
    if child == 0:
        own, is_kept = lend(pool)
        pool.close()
        os._exit(0 if own is not kept and not is_kept and not kept.close.called and own.close.called else 1)

    assert os.waitpid(child, 0)[1] == 0
    assert lend(pool) == (kept, True)
