"""A producer whose client failed for ever is replaced: what it had is reported, and nothing overtakes."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException, Message

from penstock.clients.renewal import RENEW_AFTER_S, LastingProducer, cause_of
from penstock.testing import TestBroker

#: What a broker answers to a client that may write nowhere and asks for the id of an idempotent producer.
REFUSED = KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED, "no id is given", fatal=True)


class World:
    """A broker in memory and a lasting producer on it; the reports of its messages are written down."""

    def __init__(self) -> None:
        self.broker = TestBroker()
        self.broker.create_topic("t", 1)
        self.producer = LastingProducer(lambda: self.broker.producer({}), self.broker.clock)
        self.reports: list[tuple[bytes, int | None]] = []

    def send(self, value: bytes) -> None:
        def delivered(error: KafkaError | None, _message: Message) -> None:
            self.reports.append((value, None if error is None else error.code()))

        self.producer.produce("t", value, b"k", on_delivery=delivered)

    def values(self) -> list[bytes | None]:
        return [record.value() for record in self.broker.records("t")]


def test_what_a_failing_client_had_is_reported_with_the_reason_and_a_new_client_takes_the_next() -> None:
    world = World()
    world.broker.fail("produce", REFUSED)
    world.send(b"1")
    world.producer.poll(0)
    world.producer.poll(0)
    assert world.reports == [(b"1", KafkaError.CLUSTER_AUTHORIZATION_FAILED)]

    world.broker.advance(RENEW_AFTER_S)
    world.send(b"1")
    world.producer.poll(0)

    assert world.broker.faults.happened.total() == 1
    assert world.producer.replaced == 1
    assert world.reports[1:] == [(b"1", None)]
    assert world.values() == [b"1"]


def test_a_client_that_failed_tells_why_to_each_who_produces_and_is_not_replaced_at_every_try() -> None:
    world = World()
    world.broker.fail("produce", REFUSED)
    world.send(b"1")

    for _ in range(5):
        with pytest.raises(KafkaException) as raised:
            world.send(b"2")
        assert raised.value.args[0].code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED

    assert world.producer.replaced == 0
    assert world.values() == []


def test_no_new_client_is_made_before_all_of_the_failed_one_is_reported() -> None:
    world = World()
    world.broker.delay_answer("produce", 100)
    world.broker.fail("produce", REFUSED)
    world.send(b"on its way")
    world.send(b"1")
    world.broker.advance(50)

    with pytest.raises(KafkaException):
        world.send(b"2")
    world.broker.advance(50)
    world.send(b"2")

    assert world.producer.replaced == 1
    assert [value for value, _ in world.reports] == [b"1", b"on its way"]


def test_a_client_that_is_given_up_is_replaced_once_all_that_it_has_is_reported() -> None:
    world = World()
    world.broker.delay_answer("produce", 10)
    world.send(b"on its way")
    world.producer.give_up(KafkaError(KafkaError._MSG_TIMED_OUT))

    with pytest.raises(KafkaException):
        world.send(b"behind it")
    world.broker.advance(10)
    world.send(b"behind it")

    assert world.producer.replaced == 1
    assert world.values() == [b"on its way", b"behind it"]


def test_an_error_that_is_not_fatal_is_raised_as_it_came_and_replaces_nothing() -> None:
    world = World()
    world.broker.fail("produce", KafkaError.TOPIC_AUTHORIZATION_FAILED)
    world.broker.fail("queue", 0)

    with pytest.raises(BufferError):
        world.send(b"1")
    world.send(b"1")
    world.broker.advance(RENEW_AFTER_S)
    world.producer.flush(1)
    world.send(b"2")

    assert world.reports == [(b"1", KafkaError.TOPIC_AUTHORIZATION_FAILED)]
    assert world.producer.replaced == 0


def test_why_a_client_failed_is_heard_of_it_once_it_says_no_more_than_that_it_did() -> None:
    broker = TestBroker()
    broker.create_topic("t", 1)
    client = broker.producer({})
    broker.fail("produce", REFUSED)
    client.produce("t", b"1", b"k")
    with pytest.raises(KafkaException) as raised:
        client.produce("t", b"2", b"k")

    assert raised.value.args[0].code() == KafkaError._FATAL
    assert cause_of(raised.value, client.poll).code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED
    assert cause_of(raised.value, client.poll).code() == KafkaError._FATAL
