"""A consumer among members of its group that are not as it expects: of another protocol, or with its own name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import Consumer

from kafka_tools import Recorder, produce
from penstock.consumer import handler
from penstock.consumer.poll import refusals as refusals_module
from penstock.devbroker import DevBroker
from penstock.errors import PenstockError
from support.consumers import NewTopic, consumer_of, group_of
from waiting import wait_until


@contextmanager
def eager_member(broker: DevBroker, group: str, topic: str) -> Iterator[None]:
    """Keep a member of another make in a group, with the client library's default strategies."""
    consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": group})
    stopping, joined = threading.Event(), threading.Event()
    consumer.subscribe([topic], on_assign=lambda *_: joined.set())

    def poll() -> None:
        while not stopping.is_set():
            consumer.poll(0.1)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        wait_until(joined.is_set)
        yield
    finally:
        stopping.set()
        thread.join()
        consumer.close()


def test_a_group_that_rebalances_otherwise_is_said_with_the_remedy_until_it_lets_the_consumer_in(
    broker: DevBroker, new_topic: NewTopic, caplog: pytest.LogCaptureFixture
) -> None:
    topic, seen = new_topic(), Recorder()
    consumer = consumer_of(broker, {topic: handler(seen)})

    with caplog.at_level(logging.WARNING, refusals_module.__name__):
        with eager_member(broker, group_of(topic), topic):
            consumer.start()
            wait_until(lambda: consumer.explain()[0].state == "shut out")
            (said,) = consumer.explain()
            # A second refusal, so that it would be said a second time.
            refusals = consumer._loop.refusals
            refused = refusals._of_group
            wait_until(lambda: refusals._of_group != refused)
        produce(broker.bootstrap_servers, topic, [(b"k", b"x")])
        wait_until(lambda: seen.calls)
        (now,) = consumer.explain()
        consumer.stop()

    warnings = [line.getMessage() for line in caplog.records if "INCONSISTENT_GROUP_PROTOCOL" in line.getMessage()]
    assert (said.topic, said.partition, said.state) == (topic, -1, "shut out")
    assert str(said) == f"{topic}: no partition; {said.paused}"
    assert warnings == [said.paused]
    assert "stop them first, or give them cooperative-sticky" in warnings[0]
    assert now.partition == 0


def test_a_static_member_whose_name_another_takes_ends_with_the_reason_and_the_other_goes_on(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic, first_seen, second_seen = new_topic(), Recorder(), Recorder()
    named = {"config": {"group.instance.id": "same"}}
    produce(broker.bootstrap_servers, topic, [(b"k", b"x")])
    first = consumer_of(broker, {topic: handler(first_seen)}, **named).start()
    wait_until(lambda: first_seen.calls)

    with consumer_of(broker, {topic: handler(second_seen)}, **named):
        with pytest.raises(PenstockError, match=r"cannot go on: .*fenced.*; give each member a group\.instance\.id of"):
            wait_until(first.wait)
        with pytest.raises(PenstockError, match="cannot go on"):
            first.stop()
        produce(broker.bootstrap_servers, topic, [(b"k", b"later")])
        wait_until(lambda: b"later" in [call.value for call in list(second_seen.calls)])

    assert [call.value for call in first_seen.calls] == [b"x"]
