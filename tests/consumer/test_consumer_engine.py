"""The consumer on a real broker: order, commit points, back-pressure."""

from __future__ import annotations

import threading

import pytest
from broker_consumers import NewTopic, consumer_of

from kafka_tools import Recorder, committed, ends, produce, transactional, wait_for_markers
from penstock.consumer import ConsumerSettings, LitePushConsumer, handler
from penstock.devbroker import DevBroker
from penstock.message import Message
from penstock.offsets import decode, owner_of
from waiting import wait_until


def test_each_key_is_handled_in_order_and_never_twice_at_once_while_keys_run_in_parallel(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=3)
    produce(broker.bootstrap_servers, topic, ((b"k%d" % (i % 20), b"%d" % i) for i in range(1000)))
    seen = Recorder(seconds=0.001)

    with consumer_of(broker, topic, seen) as consumer:
        wait_until(lambda: len(seen.calls) == 1000)
        statistics = consumer.statistics()

    assert seen.overlaps == []
    assert all(offsets == sorted(offsets) for offsets in seen.by_key().values())
    assert len(set(seen.places())) == 1000
    assert len({call.thread for call in seen.calls}) > 1
    assert statistics.received == 1000
    assert {
        p: one.offset for p, one in committed(broker.bootstrap_servers, f"group-{topic}", topic, 3).items()
    } == ends(broker.bootstrap_servers, topic, 3)


def test_a_key_that_stands_in_two_topics_of_a_handler_is_never_handled_twice_at_once(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topics = [new_topic(), new_topic()]
    for topic in topics:
        produce(broker.bootstrap_servers, topic, [(b"one", b"x")] * 60 + [(b"two", b"x")] * 60)
    seen = Recorder(seconds=0.002)
    consumer = LitePushConsumer(
        f"group-{topics[0]}",
        dict.fromkeys(topics, handler(seen)),
        bootstrap_servers=broker.bootstrap_servers,
        settings=ConsumerSettings(workers=8),
    )

    with consumer:
        wait_until(lambda: len(seen.calls) == 240)

    assert seen.overlaps == []


def test_a_pinned_consumer_keeps_each_key_on_one_thread(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic(partitions=2)
    produce(broker.bootstrap_servers, topic, ((b"k%d" % (i % 30), b"x") for i in range(600)))
    seen = Recorder(seconds=0.0005)

    with consumer_of(broker, topic, seen, pinned=True, workers=4):
        wait_until(lambda: len(seen.calls) == 600)

    threads_of: dict[bytes | None, set[str]] = {}
    for call in seen.calls:
        threads_of.setdefault(call.key, set()).add(call.thread)
    assert all(len(threads) == 1 for threads in threads_of.values())
    assert len({call.thread for call in seen.calls}) == 4


def test_the_order_of_partitions_holds_when_asked_for(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic(partitions=2)
    produce(broker.bootstrap_servers, topic, ((b"k%d" % i, b"x") for i in range(400)))
    seen = Recorder()
    consumer = LitePushConsumer(
        f"group-{topic}",
        {topic: handler(seen, order="partition")},
        bootstrap_servers=broker.bootstrap_servers,
        settings=ConsumerSettings(workers=8),
    )

    with consumer:
        wait_until(lambda: len(seen.calls) == 400)

    for partition in (0, 1):
        offsets = [offset for place, offset in seen.places() if place == partition]
        assert offsets == sorted(offsets)


def test_messages_without_a_key_keep_the_order_of_their_partition(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(None, b"%d" % i) for i in range(300)])
    seen = Recorder()

    with consumer_of(broker, topic, seen):
        wait_until(lambda: len(seen.calls) == 300)

    assert [offset for _, offset in seen.places()] == list(range(300))


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

    one = consumer_of(broker, topic, blocks_on_slow, revoke_timeout=0.2).start()
    wait_until(lambda: len(first.calls) == 199 and one.statistics().in_flight == 1)
    drained = one.stop(timeout=0.5)
    between = committed(broker.bootstrap_servers, f"group-{topic}", topic, 1)[0]
    with consumer_of(broker, topic, second):
        wait_until(lambda: len(second.calls) == 1)
        wait_until(lambda: committed(broker.bootstrap_servers, f"group-{topic}", topic, 1)[0].offset == 200)
    release.set()

    assert not drained
    assert between.offset == 10
    done = decode(10, between.metadata, owner_of(f"group-{topic}", topic, 0))
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

    with consumer_of(broker, topic, seen):
        wait_until(
            lambda: (
                {p: one.offset for p, one in committed(broker.bootstrap_servers, f"group-{topic}", topic, 4).items()}
                == log_ends
            )
        )

    # Ten committed, a marker, ten aborted, a marker.
    assert log_ends == dict.fromkeys(range(4), 22)
    assert len(seen.calls) == 40


def test_only_aborted_messages_move_the_commit_too(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    producer = transactional(broker.bootstrap_servers)
    producer.begin_transaction()
    producer.produce(topic, b"x")
    producer.flush()
    producer.abort_transaction()
    seen = Recorder()

    with consumer_of(broker, topic, seen):
        wait_until(lambda: committed(broker.bootstrap_servers, f"group-{topic}", topic, 1)[0].offset == 2)

    assert seen.calls == []


def test_fetching_pauses_at_the_limit_with_a_reason_and_goes_on_below_half(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, ((b"k%d" % i, b"x" * 100) for i in range(3000)))
    gate = threading.Event()
    seen = Recorder()

    def waits(message: Message) -> None:
        gate.wait(120)
        seen(message)

    with consumer_of(broker, topic, waits, max_in_flight=500, fetch_size=100) as consumer:
        paused = wait_until(lambda: [one for one in consumer.statistics().partitions if one.paused])
        gate.set()
        wait_until(lambda: len(seen.calls) == 3000)
        statistics = consumer.statistics()

    assert paused[0].paused == "in-flight limit"
    assert 500 <= paused[0].in_flight <= 600
    assert statistics.pauses["in-flight limit"] >= 1
    assert len(set(seen.places())) == 3000


def test_memory_in_flight_is_bounded_by_bytes(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic(partitions=2)
    produce(broker.bootstrap_servers, topic, ((b"k%d" % i, b"x" * 100_000) for i in range(300)))
    gate = threading.Event()
    seen = Recorder()

    def waits(message: Message) -> None:
        gate.wait(120)
        seen(message)

    with consumer_of(broker, topic, waits, max_in_flight_bytes=2_000_000, fetch_size=5) as consumer:
        paused = wait_until(
            lambda: (one := consumer.statistics().partitions) and all(p.paused == "byte limit" for p in one) and one
        )
        gate.set()
        wait_until(lambda: len(seen.calls) == 300)

    assert 2_000_000 <= sum(one.bytes_in_flight for one in paused) <= 2_600_000


def test_messages_of_every_shape_reach_the_handler(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    headers = [(f"h{i}", b"\xff%d" % i) for i in range(1000)]
    produce(broker.bootstrap_servers, topic, [(None, b"no key"), (b"k", None), (b"\xff\xfe", b"\xc3\x28"), (b"", b"")])
    produce(broker.bootstrap_servers, topic, [(b"many", b"headers")], headers=headers)
    seen: list[Message] = []

    with consumer_of(broker, topic, seen.append):
        wait_until(lambda: len(seen) == 5)

    by_offset = {one.offset: one for one in seen}
    assert by_offset[0].key is None
    assert by_offset[1].value is None
    assert (by_offset[2].key, by_offset[2].value) == (b"\xff\xfe", b"\xc3\x28")
    assert by_offset[3].value == b""
    assert by_offset[4].headers == tuple(headers)
    assert by_offset[4].header("h7") == b"\xff7"


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, ValueError])
def test_whatever_a_handler_raises_is_a_failure_of_its_message_only(
    broker: DevBroker, new_topic: NewTopic, kind: type[BaseException]
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"bad", b"x"), (b"good", b"x")])
    seen = Recorder()

    def fails(message: Message) -> None:
        if message.key == b"bad":
            raise kind
        seen(message)

    consumer = LitePushConsumer(
        f"group-{topic}",
        {topic: handler(fails, on_failure="drop")},
        bootstrap_servers=broker.bootstrap_servers,
        settings=ConsumerSettings(workers=2),
    )
    with consumer:
        wait_until(lambda: consumer.statistics().dropped == 1 and len(seen.calls) == 1)

    statistics = consumer.statistics()
    assert (statistics.failed, statistics.retried, statistics.handled) == (5, 4, 1)
