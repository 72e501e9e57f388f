"""Partitions read without a group: how far reading came, what errors mean, and what ends it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from fixed_consumer import FixedConsumer, end, failed, record
from penstock.clients import factory
from penstock.clients.kafka_errors import ErrorKind, kind_of
from penstock.clients.reading import NotReadInTimeError, PartitionReader, Place, reading_settings
from penstock.devbroker import DevBroker

FIRST, SECOND = ("orders", 0), ("orders", 1)


class RefusedError(Exception):
    """An error of a reader's owner."""


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PartitionReader]:
    """Return a function that makes a reader with the client of a test."""

    def make(consumer: FixedConsumer, *failed: Any) -> PartitionReader:
        monkeypatch.setattr(factory, "Consumer", Mock(return_value=consumer, left_out=()))
        return PartitionReader("127.0.0.1:1", {}, "nobody", *failed)

    return make


def offsets(batches: Iterable[list[Message]]) -> list[int | None]:
    return [message.offset() for message in chain.from_iterable(batches)]


def refuse(kind: ErrorKind, error: KafkaError, place: Place) -> None:
    raise RefusedError(kind, error.code(), place)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError._PARTITION_EOF, ErrorKind.END),
        (KafkaError._AUTO_OFFSET_RESET, ErrorKind.OUT_OF_RANGE),
        (KafkaError.OFFSET_OUT_OF_RANGE, ErrorKind.OUT_OF_RANGE),
        (KafkaError.GROUP_AUTHORIZATION_FAILED, ErrorKind.GROUP),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, ErrorKind.MISSING_RIGHT),
        (KafkaError.CLUSTER_AUTHORIZATION_FAILED, ErrorKind.MISSING_RIGHT),
        (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, ErrorKind.MISSING_RIGHT),
        (KafkaError._AUTHENTICATION, ErrorKind.FATAL),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, ErrorKind.GONE),
        (KafkaError._UNKNOWN_PARTITION, ErrorKind.GONE),
        (KafkaError._TRANSPORT, ErrorKind.PASSING),
        (KafkaError.NOT_LEADER_FOR_PARTITION, ErrorKind.PASSING),
        (KafkaError._FATAL, ErrorKind.FATAL),
        (KafkaError.INVALID_REQUEST, ErrorKind.FATAL),
    ],
)
def test_what_an_error_says(code: int, kind: ErrorKind) -> None:
    assert kind_of(KafkaError(code)) is kind


def test_a_reader_joins_no_group_and_commits_nothing_with_any_setting() -> None:
    mine = {
        "group.id": "mine",
        "group.instance.id": "one",
        "group.protocol": "consumer",
        "enable.auto.commit": True,
        "auto.offset.reset": "latest",
        "on_commit": print,
        "stats_cb": print,
        "client.id": "me",
    }

    settings = reading_settings(mine, "nobody", "read_uncommitted", {"fetch.wait.max.ms": 7})

    assert settings == {
        "client.id": "me",
        "group.id": "nobody",
        "isolation.level": "read_uncommitted",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",
        "fetch.wait.max.ms": 7,
        "fetch.queue.backoff.ms": 5,
    }


def test_reading_ends_before_the_end_and_leaves_the_rest(reader: Callable[..., PartitionReader]) -> None:
    client = FixedConsumer(record(3), record(4), record(5), record(6))
    reading = reader(client)

    assert offsets(reading.read({FIRST: 3}, {FIRST: 5})) == [3, 4]
    assert [part.offset for part in client.assigned] == [3]
    assert client.is_unassigned


def test_a_log_that_ends_in_markers_is_read_when_the_client_names_its_end(
    reader: Callable[..., PartitionReader],
) -> None:
    reading = reader(FixedConsumer(record(0), end(2), end(4)))

    assert offsets(reading.read({FIRST: 0}, {FIRST: 4})) == [0]
    assert reading.positions == {FIRST: 4}


def test_a_partition_at_its_end_keeps_no_records_of_others_from_coming(reader: Callable[..., PartitionReader]) -> None:
    client = FixedConsumer(record(0), record(1))
    reading = reader(client)
    batches = reading.read({FIRST: 0, SECOND: 0}, {FIRST: 2, SECOND: 1}, limit_s=5)

    assert offsets([next(batches)]) == [0, 1]
    client._given += [record(0, 1)]
    assert offsets(batches) == [0]
    assert client.paused == [FIRST]


def test_what_is_not_read_in_time_is_named_with_what_hindered_it(reader: Callable[..., PartitionReader]) -> None:
    reading = reader(FixedConsumer(record(0), failed(KafkaError.NOT_LEADER_FOR_PARTITION)))

    with pytest.raises(NotReadInTimeError, match=r"within 1 s: orders:0 to 1 of 9 \(.*NOT_LEADER"):
        offsets(reading.read({FIRST: 0}, {FIRST: 9}, limit_s=1.0))


def test_a_log_that_falls_silent_ends_reading_and_one_that_is_read_slowly_does_not(
    reader: Callable[..., PartitionReader],
) -> None:
    client = FixedConsumer(record(0))
    batches = reader(client).read({FIRST: 0}, {FIRST: 3}, silence_s=0.3)
    next(batches)
    time.sleep(0.5)  # what its owner does with a record
    client._given.append(record(1))

    assert offsets([next(batches)]) == [1]
    with pytest.raises(NotReadInTimeError):
        next(batches)


def test_an_error_is_raised_when_what_came_before_it_was_handed_over(reader: Callable[..., PartitionReader]) -> None:
    reading = reader(FixedConsumer(record(0), failed(KafkaError.TOPIC_AUTHORIZATION_FAILED), record(1)), refuse)
    reading.start({FIRST: 0})

    assert offsets([reading.poll(0.1)]) == [0]
    with pytest.raises(RefusedError) as raised:
        reading.poll(0.1)
    assert raised.value.args == (ErrorKind.MISSING_RIGHT, KafkaError.TOPIC_AUTHORIZATION_FAILED, FIRST)
    assert reading.positions == {FIRST: 1}


@pytest.mark.parametrize("code", [KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.UNSUPPORTED_VERSION])
def test_what_does_not_pass_ends_reading_and_what_passes_does_not(
    reader: Callable[..., PartitionReader], code: int
) -> None:
    passing = failed(KafkaError.LEADER_NOT_AVAILABLE)
    batches = reader(FixedConsumer(passing, record(0), failed(code))).read({FIRST: 0}, {FIRST: 2})

    assert offsets([next(batches)]) == [0]
    with pytest.raises(KafkaException) as caught:
        next(batches)

    assert caught.value.args[0].code() == code


def test_trouble_is_reported_until_something_comes_and_a_refused_group_is_none(
    reader: Callable[..., PartitionReader],
) -> None:
    transport, group = failed(KafkaError._TRANSPORT), failed(KafkaError.GROUP_AUTHORIZATION_FAILED)
    reading = reader(FixedConsumer(group))
    reading.start({FIRST: 0})

    assert reading.poll(0.1) == []
    assert reading.trouble is None
    reading.consumer._given.append(transport)  # type: ignore[attr-defined] # it is a fixed one
    assert reading.poll(0.1) == []
    assert "_TRANSPORT" in str(reading.trouble)
    reading.consumer._given.append(end(0))  # type: ignore[attr-defined] # the same
    assert reading.poll(0.1) == []
    assert reading.trouble is None
    assert reading.exhausted == {FIRST}


@pytest.mark.parametrize("gone", [record(7), end(5), failed(KafkaError._AUTO_OFFSET_RESET)])
def test_a_record_is_found_by_its_offset_or_it_is_gone(reader: Callable[..., PartitionReader], gone: Message) -> None:
    found = reader(FixedConsumer(record(5))).record_at(FIRST, 5, 5.0)

    assert found is not None
    assert found.offset() == 5
    assert reader(FixedConsumer(gone)).record_at(FIRST, 5, 5.0) is None


def test_committed_records_are_read_to_where_the_log_ends_behind_an_open_transaction(
    broker: DevBroker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    writer = Producer({"bootstrap.servers": broker.bootstrap_servers, "transactional.id": topic})
    writer.init_transactions(30)
    writer.begin_transaction()
    writer.produce(topic, b"in it")
    assert writer.flush(30) == 0

    with PartitionReader(broker.bootstrap_servers, {}, "nobody", isolation="read_uncommitted") as everything:
        bounds = everything.bounds(topic, [0], 30)
        assert everything.record_at((topic, 0), 0, 30) is not None
    assert bounds == {0: (0, 1)}
    looks = 0

    def step(_behind: set[Place], _idle_s: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 5:
            writer.commit_transaction(30)

    with PartitionReader(broker.bootstrap_servers, {}, "nobody") as committed:
        assert committed.bounds(topic, [0], 30) == {0: (0, 0)}
        batches = committed.read({(topic, 0): 0}, {(topic, 0): 1}, step=step, limit_s=60)
        assert [message.value() for message in chain.from_iterable(batches)] == [b"in it"]
    assert looks >= 5


def test_a_reader_reads_again_what_it_paused_at_its_end(broker: DevBroker, new_topic: Callable[..., str]) -> None:
    topic = new_topic(2)
    writer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    for partition in (0, 1, 1, 1):
        writer.produce(topic, b"x", partition=partition)
    assert writer.flush(30) == 0
    starts, ends = {(topic, 0): 0, (topic, 1): 0}, {(topic, 0): 1, (topic, 1): 3}

    with PartitionReader(broker.bootstrap_servers, {}, "nobody") as reading:
        found = [sum(map(len, reading.read(starts, ends, silence_s=30, most=1))) for _ in range(2)]

    assert found == [4, 4]
