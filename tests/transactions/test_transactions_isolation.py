"""What one target, one group or one message does wrong delays no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from confluent_kafka.admin import NewPartitions
from transaction_tools import Bench

from kafka_proxy import PRODUCE, KafkaProxy, What
from penstock.transactions import TransactionState
from waiting import wait_until


def values(bench: Bench, topic: str | None = None) -> Counter[bytes | None]:
    return Counter(value for _, value in bench.visible(topic))


def test_a_target_without_a_leader_delays_no_other_target(
    bench: Bench, proxy: KafkaProxy, new_topic: Callable[..., str]
) -> None:
    dead = new_topic()
    producer = bench.producer()
    coordinator = bench.coordinator(bootstrap_servers=proxy.bootstrap_servers)
    with proxy.fault(PRODUCE, What.DROP_REQUEST, times=10_000, holding=dead.encode()) as lost:
        for number in range(3):
            producer.send(dead, value=b"waits %d" % number)
        wait_until(lambda: lost.fired)
        for number in range(50):
            producer.send(bench.topic, key=b"%d" % number, value=b"%d" % number)
        statistics = bench.counted(coordinator, committed=50)
        fired = lost.fired

    assert statistics.committed == 50
    # Once for all who wait, then one at a time with pauses that grow: not again and again.
    assert fired < 20
    bench.settled(coordinator, committed=53)

    assert values(bench) == Counter(b"%d" % number for number in range(50))
    assert values(bench, dead) == Counter(b"waits %d" % number for number in range(3))


def test_a_missing_discard_topic_stops_no_other_transaction(bench: Bench) -> None:
    producer = bench.producer(check=lambda _: TransactionState.UNKNOWN)
    coordinator = bench.coordinator(check_max=1)
    bench.admin.delete_topics([bench.topics.discarded])[bench.topics.discarded].result(30)
    wait_until(lambda: bench.topics.discarded not in bench.admin.list_topics(timeout=30).topics)
    for _ in range(3):
        producer.send(bench.topic, value=b"undecided", execute=lambda _: TransactionState.UNKNOWN)
    bench.counted(coordinator, answered_checks=3)

    for number in range(50):
        producer.send(bench.topic, key=b"%d" % number, value=b"%d" % number)
    bench.counted(coordinator, committed=50)

    assert coordinator.statistics().discarded == 0
    assert values(bench) == Counter(b"%d" % number for number in range(50))


def test_a_topic_that_refused_takes_its_messages_of_half_partitions_that_were_added(
    bench: Bench, new_topic: Callable[..., str]
) -> None:
    narrow, topics = new_topic(config={"max.message.bytes": "1000"}), bench.topics
    added = [NewPartitions(log, 4) for log in (topics.half, topics.op, topics.done)]  # not to the discarded topic
    for future in bench.admin.create_partitions(added).values():
        future.result(30)
    coordinator, producer = bench.coordinator(), bench.producer()
    for number in range(12):
        producer.send(narrow, key=b"%d" % number, value=bytes(2_000))
    wait_until(lambda: coordinator.statistics().held == 12)

    bench.alter(narrow, {"max.message.bytes": "100000"})

    bench.settled(coordinator, committed=12)
    assert len(bench.visible(narrow)) == 12


@pytest.mark.thorough
def test_one_message_that_its_topic_refuses_is_found_among_many_without_sending_all_alone(
    bench: Bench, new_topic: Callable[..., str]
) -> None:
    narrow = new_topic(config={"max.message.bytes": "1000"})
    producer = bench.producer()
    for number in range(100):
        producer.send(narrow, key=b"%d" % number, value=b"%d" % number)
        if number == 50:
            producer.send(narrow, value=bytes(5_000))

    # All of them at once: batches of them are larger than the topic takes, though each but one is small.
    coordinator = bench.coordinator()
    statistics = bench.counted(coordinator, timeout=150, committed=100)

    assert statistics.groups < 30
    assert statistics.committed == 100
    wait_until(lambda: coordinator.statistics().held == 1)
    assert values(bench, narrow) == Counter(b"%d" % number for number in range(100))
