"""The consumer in its group, on a real broker: members, protocols, stop, a log made anew."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from broker_consumers import NewTopic, consumer_of
from confluent_kafka import Producer

from kafka_tools import Recorder, committed, ends, produce
from penstock.devbroker import DevBroker
from penstock.message import Message
from waiting import wait_until


class Feed:
    """A thread that writes to a topic, 40 keys in turn, some hundred messages a second, until it is stopped."""

    def __init__(self, broker: DevBroker, topic: str) -> None:
        #: How many messages were written; final after `stop`.
        self.count = 0
        self._producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "enable.idempotence": True})
        self._topic = topic
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._feed)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _feed(self) -> None:
        while not self._stopping.wait(0.025):
            for _ in range(10):
                self._producer.produce(self._topic, b"x", key=b"k%d" % (self.count % 40))
                self.count += 1
            self._producer.poll(0)
        assert self._producer.flush(60) == 0


@contextmanager
def feeding(broker: DevBroker, topic: str) -> Iterator[Feed]:
    feed = Feed(broker, topic)
    feed.start()
    try:
        yield feed
    finally:
        feed.stop()


def test_two_members_share_the_work_and_hand_partitions_over_without_loss_or_disorder(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=4)
    produce(broker.bootstrap_servers, topic, ((b"k%d" % (i % 40), b"x") for i in range(400)))
    seen = Recorder(seconds=0.01)
    # However long a rebalance takes, there is work to be handed over, and time to finish what runs.
    options = {"workers": 4, "revoke_timeout": 60, "config": {"heartbeat.interval.ms": 200}}

    with feeding(broker, topic) as fed, consumer_of(broker, topic, seen, **options) as first:
        wait_until(lambda: len(seen.calls) > 200)
        with consumer_of(broker, topic, seen, **options) as second:
            wait_until(lambda: len(second.statistics().partitions) == 2 and len(first.statistics().partitions) == 2)
            wait_until(lambda: second.statistics().handled > 50)
        wait_until(lambda: len(first.statistics().partitions) == 4)
        fed.stop()
        wait_until(lambda: len(set(seen.places())) == 400 + fed.count, timeout=60)
        revoked = first.statistics().revoked

    assert revoked == 2
    assert all(offsets == sorted(offsets) for offsets in seen.by_key().values())
    # Both waited for their running handlers and committed before they let go: nothing was done twice.
    assert len(seen.calls) == 400 + fed.count
    assert seen.overlaps == []


def test_the_newer_group_protocol_works_too(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic(partitions=2)
    produce(broker.bootstrap_servers, topic, ((b"k%d" % i, b"x") for i in range(100)))
    seen = Recorder()

    with consumer_of(broker, topic, seen, config={"group.protocol": "consumer"}):
        wait_until(lambda: len(seen.calls) == 100)

    assert {
        p: one.offset for p, one in committed(broker.bootstrap_servers, f"group-{topic}", topic, 2).items()
    } == ends(broker.bootstrap_servers, topic, 2)


def test_a_stop_drains_what_was_taken_in(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, ((b"k%d" % i, b"x") for i in range(300)))
    seen = Recorder(seconds=0.005)
    consumer = consumer_of(broker, topic, seen).start()
    wait_until(lambda: len(seen.calls) > 10)

    drained = consumer.stop(timeout=60)

    assert drained
    assert len(seen.calls) == consumer.statistics().received
    assert (
        committed(broker.bootstrap_servers, f"group-{topic}", topic, 1)[0].offset
        == max(o for _, o in seen.places()) + 1
    )


def test_a_log_that_was_recreated_is_followed_from_its_start(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"x")] * 5)
    group = f"group-{topic}"
    from confluent_kafka import Consumer, TopicPartition

    bare = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": group})
    bare.commit(offsets=[TopicPartition(topic, 0, 4000, metadata="somebody else's words")], asynchronous=False)
    bare.close()
    seen = Recorder()

    with consumer_of(broker, topic, seen):
        wait_until(lambda: len(seen.calls) == 5)
        wait_until(lambda: committed(broker.bootstrap_servers, group, topic, 1)[0].offset == 5)

    assert [offset for _, offset in seen.places()] == [0, 1, 2, 3, 4]


def test_the_poll_thread_keeps_its_membership_while_a_handler_hangs(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic(partitions=2)
    produce(broker.bootstrap_servers, topic, ((b"k%d" % i, b"x") for i in range(20)))
    release = threading.Event()
    begun = threading.Event()

    def hangs(_message: Message) -> None:
        begun.set()
        release.wait(120)

    config = {"max.poll.interval.ms": 6000, "session.timeout.ms": 6000, "heartbeat.interval.ms": 500}
    with consumer_of(broker, topic, hangs, config=config, workers=2) as consumer:
        assert begun.wait(60)
        # Longer than the poll interval: the time is the thing under test.
        time.sleep(7)
        statistics = consumer.statistics()
        release.set()

    assert statistics.lost == 0
    assert len(statistics.partitions) == 2
