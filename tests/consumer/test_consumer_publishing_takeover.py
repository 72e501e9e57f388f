"""Who takes a partition over, exactly once: it waits for what its former owner has open, which never comes twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from stepped import Stepped

import penstock
from chaos.fleet import CLASSIC, KIP848, KIP848_BROKER
from chaos.publishing import Publishers, faults_of_exactly_once
from kafka_proxy import OFFSET_FETCH, KafkaProxy
from kafka_tools import produce, read_all, transactional
from penstock.consumer import handler
from penstock.devbroker import DevBroker
from penstock.message import Message
from penstock.testing import Operation
from waiting import wait_until

pytestmark = pytest.mark.thorough


NewTopic = Callable[..., str]


@pytest.fixture
def former(broker: DevBroker) -> Producer:
    """A producer that replaces the former owner's."""
    return transactional(broker.bootstrap_servers)


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_partition_begins_only_when_the_transaction_of_its_former_owner_has_ended(
    is_committed: bool, broker: DevBroker, new_topic: NewTopic, former: Producer
) -> None:
    servers, source, target = broker.bootstrap_servers, new_topic(), new_topic()
    produce(servers, source, ((b"k", b"%d" % number) for number in range(10)))
    member = Consumer({"bootstrap.servers": servers, "group.id": source})
    former.begin_transaction()
    for number in range(5):
        former.produce(target, b"%d" % number, b"k")
    former.send_offsets_to_transaction([TopicPartition(source, 0, 5)], member.consumer_group_metadata(), 30)
    member.close()
    handled: list[bytes | None] = []

    with KafkaProxy(servers) as proxy:
        app = penstock.App(source, bootstrap_servers=proxy.bootstrap_servers, exactly_once=True)

        @app.handler(source)
        def copy(message: penstock.Message) -> penstock.Outgoing:
            handled.append(message.value)
            return penstock.Outgoing(target, message.value, message.key)

        with app.start():
            # The broker's answer is that the offset is not stable, and so it is asked again.
            wait_until(lambda: proxy.requests[OFFSET_FETCH] >= 3)
            assert handled == []
            if is_committed:
                former.commit_transaction(30)
            else:
                former.abort_transaction(30)
            wait_until(lambda: b"9" in handled)
            wait_until(lambda: len(read_all(servers, target, left_open=True)) == 10)

    assert handled[0] == (b"5" if is_committed else b"0")
    assert [message.value() for message in read_all(servers, target)] == [b"%d" % number for number in range(10)]


def test_where_offsets_must_be_known_they_are_asked_for_until_they_are() -> None:
    seen: list[int] = []

    def note(message: Message) -> None:
        seen.append(message.offset)

    former = Stepped({"t": handler(note)})
    former.feed("t", [(b"k", b"x")] * 5)
    former.serve()
    former.loop.leave()
    former.broker.fail("committed", KafkaError._TIMED_OUT, times=3)
    stepped = Stepped({"t": handler(note)}, broker=former.broker, exactly_once=True)
    stepped.feed("t", [(b"k", b"x")])
    stepped.serve()

    assert former.broker.faults.happened[Operation.COMMITTED] == 3
    assert seen == [0, 1, 2, 3, 4, 5]


@pytest.mark.chaos
@pytest.mark.parametrize("config", [CLASSIC, KIP848], ids=["classic", "kip848"])
def test_what_a_member_has_at_hand_that_was_frozen_and_put_out_never_becomes_visible(
    config: Mapping[str, str | int], tmp_path: Path
) -> None:
    count, keys = 3_000, 60
    broker_config = {**KIP848_BROKER, "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000"}
    with DevBroker(config=broker_config) as broker:
        group = Publishers(broker, tmp_path, exactly_once=True, config=config, seconds=0.01)
        try:
            group.start()
            with group.fed(count, keys, 2.0):
                wait_until(lambda: group.written() > 300)
                group.freeze_first()
                frozen = group.frozen
                assert frozen is not None
                group.start()
            # Another one has done everything when it goes on.
            wait_until(group.is_done, 120, interval=0.5)
            group.thaw()
            wait_until(lambda: group.said("was not committed") + group.said("lost without a commit"), 60)
            seen = group.seen()
            group.finish(60)

            assert frozen.returncode == 0
            assert faults_of_exactly_once(seen, group.batches(), count, keys) == []
            assert faults_of_exactly_once(group.seen(), group.batches(), count, keys) == []
            assert {value.writer for value in seen} == {"m0", "m1"}
        finally:
            group.close()
