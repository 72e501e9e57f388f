"""A consumer while its broker is killed, frozen and brought back."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kafka_proxy import OFFSET_COMMIT, KafkaProxy, What
from kafka_tools import STEADY, Recorder, produce
from penstock.consumer import handler
from penstock.devbroker import DevBroker
from support.consumers import NewTopic, all_committed, consumer_of, group_of
from waiting import wait_until


@pytest.fixture
def fragile() -> Iterator[DevBroker]:
    """A broker that may be killed."""
    with DevBroker(start_timeout=150) as broker:
        yield broker


@pytest.fixture
def patient() -> Iterator[DevBroker]:
    """A broker that may be suspended."""
    with DevBroker(config=STEADY, start_timeout=150) as broker:
        yield broker


@pytest.mark.chaos
def test_a_killed_broker_costs_time_and_neither_messages_nor_order(fragile: DevBroker) -> None:
    fragile.create_topic("killed", 2)
    produce(fragile.bootstrap_servers, "killed", ((b"k%d" % (i % 30), b"x") for i in range(2000)))
    seen = Recorder(seconds=0.002, hold_after=300)

    with consumer_of(fragile, {"killed": handler(seen)}, max_in_flight=200, fetch_size=50):
        wait_until(lambda: len(seen.calls) == 300, timeout=60)
        fragile.kill()
        gone = not fragile.running
        seen.go.set()
        fragile.restart()
        wait_until(lambda: len(set(seen.places())) == 2000, timeout=120)
        wait_until(lambda: all_committed(fragile.bootstrap_servers, group_of("killed"), "killed", 2), timeout=120)

    assert gone
    assert seen.overlaps == []
    for key, offsets in seen.by_key().items():
        firsts = list(dict.fromkeys(offsets))
        assert firsts == sorted(firsts), f"{key!r} was handled out of order"


@pytest.mark.thorough  # a broker of its own
def test_a_frozen_broker_is_waited_for(patient: DevBroker) -> None:
    patient.create_topic("frozen", 2)
    produce(patient.bootstrap_servers, "frozen", ((b"k%d" % i, b"x" * 10_000) for i in range(1000)))
    seen = Recorder(hold_after=200)
    # The client itself may hold a small part of the topic only: the rest can come from nowhere but the broker.
    small = {"max.partition.fetch.bytes": 100_000, "queued.max.messages.kbytes": 100}

    with consumer_of(patient, {"frozen": handler(seen)}, max_in_flight=200, fetch_size=50, config=small) as consumer:
        wait_until(lambda: len(seen.calls) == 200, timeout=60)
        patient.freeze()
        try:
            seen.go.set()
            # What was fetched is handled while nothing answers; then there is no more.
            wait_until(lambda: consumer.statistics().in_flight == 0)
            stood_still = len(seen.calls) < 1000
        finally:
            patient.thaw()
        wait_until(lambda: len(set(seen.places())) == 1000, timeout=60)
        wait_until(lambda: all_committed(patient.bootstrap_servers, group_of("frozen"), "frozen", 2), timeout=60)

    assert stood_still


@pytest.mark.thorough
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_commit_that_is_not_answered_holds_a_revocation_no_longer_than_its_budget(
    broker: DevBroker, new_topic: NewTopic, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    caplog.set_level(logging.INFO, logger="penstock.consumer")
    topic = new_topic(partitions=2)
    records = [(b"k%d" % (i % 20), b"x") for i in range(200)]
    produce(broker.bootstrap_servers, topic, records)
    seen = Recorder()
    # No periodic commit: that of the revocation is the first, and the one that the fault strikes.
    config = {"group.protocol": "consumer"} if protocol == "consumer" else {"heartbeat.interval.ms": 200}
    options = {"commit_interval": 3600.0, "revoke_timeout": 1.0, "stop_timeout": 30.0, "config": config}

    with KafkaProxy(broker.bootstrap_servers) as proxy, consumer_of(proxy, {topic: handler(seen)}, **options) as first:
        wait_until(lambda: len(set(seen.places())) == 200)
        with (
            proxy.fault(OFFSET_COMMIT, What.DELAY_ANSWER) as fault,
            consumer_of(broker, {topic: handler(seen)}, **options) as second,
        ):
            wait_until(lambda: first.statistics().revoked)
            held = fault.went_on
            proxy.let_go(fault)
            wait_until(lambda: len(first.statistics().partitions) == len(second.statistics().partitions) == 1)
            produce(broker.bootstrap_servers, topic, records)
            wait_until(lambda: len(set(seen.places())) == 400)

    # The revocation ended while the answer was held, which is as long as the test likes.
    assert held == 0
    (line,) = [one.getMessage() for one in caplog.records if "not known to have the commit" in one.getMessage()]
    assert topic in line
    assert all_committed(broker.bootstrap_servers, group_of(topic), topic, 2)
