"""Logs: the view of a reader on transactions, holes, and logs that change meanwhile."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError
from memory_tools import Reader, broker_of, offsets

from penstock.clients.topics import TopicSpec
from penstock.errors import PenstockError, TopicNotFoundError
from penstock.testing import TestBroker


@pytest.fixture
def memory() -> TestBroker:
    """A broker with the topic `t` of one partition."""
    return broker_of()


def test_a_record_comes_with_all_that_was_produced(memory: TestBroker) -> None:
    memory.produce("t", b"v", key=b"k", headers=[("a", b"1"), ("a", "2"), ("b", None)], timestamp_ms=17)

    (message,) = Reader(memory, "t").drain()

    assert (message.topic(), message.partition(), message.offset()) == ("t", 0, 0)
    assert (message.key(), message.value(), message.error()) == (b"k", b"v", None)
    assert message.headers() == [("a", b"1"), ("a", b"2"), ("b", None)]
    assert message.timestamp() == (1, 17)
    assert len(message) == 1


def test_a_key_always_goes_to_one_partition_and_keyless_records_go_round(memory: TestBroker) -> None:
    memory.create_topic("wide", 4)

    keyed = {memory.produce("wide", b"v", key=b"same").partition() for _ in range(10)}
    keyless = [memory.produce("wide", b"v").partition() for _ in range(8)]

    assert len(keyed) == 1
    assert sorted(keyless) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_compaction_leaves_holes_and_keeps_the_newest_of_each_key(memory: TestBroker) -> None:
    for key in (b"a", b"b", b"a", b"c", b"b"):
        memory.produce("t", b"v", key=key)

    memory.compact("t")

    assert offsets(Reader(memory, "t").drain()) == [2, 3, 4]


def test_a_log_that_went_back_is_read_again_from_where_the_policy_says(memory: TestBroker) -> None:
    for _ in range(6):
        memory.produce("t", b"old")
    reader = Reader(memory, "t")
    assert offsets(reader.drain()) == [0, 1, 2, 3, 4, 5]

    memory.truncate("t", 0, 2)
    memory.produce("t", b"new")

    assert [(message.offset(), message.value()) for message in reader.drain()] == [
        (0, b"old"),
        (1, b"old"),
        (2, b"new"),
    ]


def test_a_deleted_topic_is_an_error_and_lost(memory: TestBroker) -> None:
    reader = Reader(memory, "t")
    reader.drain()

    memory.delete_topic("t")

    assert [error.code() for message in reader.drain() if (error := message.error()) is not None] == [
        KafkaError.UNKNOWN_TOPIC_OR_PART
    ]
    assert [event for event in reader.events if event[1]] == [("assign", (0,)), ("lost", (0,))]


def test_what_does_not_exist_is_named(memory: TestBroker) -> None:
    assert memory.require_topics(["t"]) == {"t": 1}
    memory.ensure_topics([TopicSpec("t", 9), TopicSpec("u", 2)])
    assert memory.require_topics(["t", "u"]) == {"t": 1, "u": 2}
    with pytest.raises(TopicNotFoundError, match="nope, other"):
        memory.require_topics(["other", "t", "nope"])
    with pytest.raises(TopicNotFoundError, match="no partition 7"):
        memory.produce("t", b"v", partition=7)
    with pytest.raises(PenstockError, match="exists"):
        memory.create_topic("t")


def test_a_group_whose_offset_was_deleted_gets_each_message_once() -> None:
    broker = broker_of(records=6)
    assert Reader(broker).commit(1) is None
    broker.delete_records("t", 0, 3)

    reader = Reader(broker, "t")
    # Without asking for the offset first, so that the client finds it by itself.
    reader._assign = lambda client, partitions: client.incremental_assign(partitions)  # type: ignore[method-assign] # the test's own way
    reader.client.subscribe(["t"], on_assign=reader._assign, on_revoke=reader._revoke, on_lost=reader._lost)

    assert offsets(reader.drain()) == [3, 4, 5]
