"""The consumer on a real broker: order, commit points, back-pressure."""

from __future__ import annotations

import threading

from kafka_tools import Recorder, committed, ends, produce, transactional, wait_for_markers
from penstock.consumer import handler
from penstock.devbroker import DevBroker
from penstock.message import Message
from penstock.offsets import decode, owner_of
from support.consumers import NewTopic, all_committed, consumer_of, group_of
from waiting import wait_until


def test_each_key_is_handled_in_order_and_never_twice_at_once_while_keys_run_in_parallel(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=3)
    produce(broker.bootstrap_servers, topic, ((b"k%d" % (i % 20), b"%d" % i) for i in range(1000)))
    seen = Recorder(seconds=0.001)

    with consumer_of(broker, {topic: handler(seen)}) as consumer:
        wait_until(lambda: len(seen.calls) == 1000)
        statistics = consumer.statistics()

    assert seen.overlaps == []
    assert all(offsets == sorted(offsets) for offsets in seen.by_key().values())
    assert len(set(seen.places())) == 1000
    assert len({call.thread for call in seen.calls}) > 1
    assert statistics.received == 1000
    assert {
        p: place.offset for p, place in committed(broker.bootstrap_servers, group_of(topic), topic, 3).items()
    } == ends(broker.bootstrap_servers, topic, 3)


def test_the_commit_point_waits_for_the_slowest_message_and_work_above_it_survives_a_restart(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, ((b"slow" if i == 10 else b"k%d" % i, b"x") for i in range(200)))
    release = threading.Event()
    first, second = Recorder(), Recorder()

    def blocks_on_slow(message: Message) -> None:
        if message.key == b"slow":
            release.wait(120)
            return
        first(message)

    one = consumer_of(broker, {topic: handler(blocks_on_slow)}, revoke_timeout=0.2).start()
    wait_until(lambda: len(first.calls) == 199 and one.statistics().in_flight == 1)
    drained = one.stop(timeout=0.5)
    between = committed(broker.bootstrap_servers, group_of(topic), topic, 1)[0]
    with consumer_of(broker, {topic: handler(second)}):
        wait_until(lambda: len(second.calls) == 1)
        wait_until(lambda: committed(broker.bootstrap_servers, group_of(topic), topic, 1)[0].offset == 200)
    release.set()

    assert not drained
    assert between.offset == 10
    done = decode(10, between.metadata, owner_of(group_of(topic), topic, 0))
    assert done is not None
    assert done.done == (range(11, 200),)
    assert [call.offset for call in second.calls] == [10]


def test_markers_and_aborted_ranges_at_the_tail_do_not_hold_the_commit_back(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=4)
    producer = transactional(broker.bootstrap_servers)
    for ending in (producer.commit_transaction, producer.abort_transaction):
        producer.begin_transaction()
        for i in range(40):
            producer.produce(topic, b"x", key=b"k%d" % i, partition=i % 4)
        producer.flush()
        ending()
    seen = Recorder()
    wait_for_markers(broker.bootstrap_servers, topic)
    log_ends = ends(broker.bootstrap_servers, topic, 4)

    with consumer_of(broker, {topic: handler(seen)}):
        wait_until(lambda: all_committed(broker.bootstrap_servers, group_of(topic), topic, 4))

    # Ten committed, a marker, ten aborted, a marker.
    assert log_ends == dict.fromkeys(range(4), 22)
    assert len(seen.calls) == 40


def test_messages_of_every_shape_reach_the_handler(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    headers = [(f"h{i}", b"\xff%d" % i) for i in range(1000)]
    produce(broker.bootstrap_servers, topic, [(None, b"no key"), (b"k", None), (b"\xff\xfe", b"\xc3\x28"), (b"", b"")])
    produce(broker.bootstrap_servers, topic, [(b"many", b"headers")], headers=headers)
    seen: list[Message] = []

    with consumer_of(broker, {topic: handler(seen.append)}):
        wait_until(lambda: len(seen) == 5)

    by_offset = {value.offset: value for value in seen}
    assert by_offset[0].key is None
    assert by_offset[1].value is None
    assert (by_offset[2].key, by_offset[2].value) == (b"\xff\xfe", b"\xc3\x28")
    assert by_offset[3].value == b""
    assert by_offset[4].headers == tuple(headers)
    assert by_offset[4].header("h7") == b"\xff7"
