"""What one target, one group or one message does wrong delays no other."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import pytest
from transaction_tools import Bench

from kafka_proxy import PRODUCE, KafkaProxy, What
from penstock.errors import BrokerConnectionError
from penstock.transactions import Coordinator, TransactionState
from penstock.transactions.targets import NOT_KNOWN, Pauses, Targets
from waiting import wait_until


@pytest.fixture
def proxy(bench: Bench) -> Iterator[KafkaProxy]:
    with KafkaProxy(bench.servers) as made:
        yield made


def values(bench: Bench, topic: str | None = None) -> Counter[bytes | None]:
    return Counter(value for _, value in bench.visible(topic))


def test_a_target_without_a_leader_delays_no_other_target(
    bench: Bench, proxy: KafkaProxy, new_topic: Callable[..., str]
) -> None:
    dead = new_topic()
    producer = bench.producer()
    with Coordinator(bootstrap_servers=proxy.bootstrap_servers, prefix=bench.topics.prefix) as coordinator:
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


def test_a_missing_discard_topic_stops_nobody(bench: Bench) -> None:
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


def test_what_failed_rests_longer_from_time_to_time_and_not_without_end() -> None:
    pauses = Pauses()

    rests = [pauses.fail("topic", 100.0) for _ in range(10)]

    assert rests[0] < rests[1] < rests[2]
    assert rests[-1] == rests[-2] == 30.0
    assert pauses.rests("topic", 129.0)
    assert not pauses.rests("topic", 131.0)
    assert not pauses.rests("other", 0.0)
    pauses.keep([])
    assert "topic" not in pauses


class Broker:
    """Tells of topics, or does not answer."""

    def __init__(self) -> None:
        self.topics: Mapping[str, int] | None = None
        self.asked = 0

    def __call__(self) -> Mapping[str, int]:
        self.asked += 1
        if self.topics is None:
            raise BrokerConnectionError("no answer")
        return self.topics


def test_a_target_that_failed_is_tried_with_one_message_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.transactions.targets._LOOK_S", 0.0)
    broker = Broker()
    broker.topics = {"a": 1, "b": 1}
    targets = Targets(broker, "test")
    assert targets.takes("a", 1, 0.0) is not None
    wait_until(targets.is_fresh)

    first = [targets.takes("a", 1, 0.0), targets.takes("a", 1, 0.0), targets.takes("a", 2, 0.0)]
    pause_s = targets.failed("a", 0.0)
    resting = [targets.takes("a", 1, 0.0), targets.takes("b", 1, 0.0)]
    later = pause_s + 0.1
    tried = [targets.takes("a", 1, later), targets.takes("a", 1, later)]
    targets.not_published()
    tried_again = [targets.takes("a", 1, later), targets.takes("a", 1, later)]
    well = [targets.published({"b"}), targets.takes("a", 1, later) is None, targets.published({"a", "b"})]

    assert [why is None for why in first] == [True, True, False]
    assert [why is None for why in resting] == [False, True]
    assert [why is None for why in tried] == [True, False]
    assert [why is None for why in tried_again] == [True, False]
    assert well == [False, True, True]
    assert [targets.takes("a", 1, later) for _ in range(2)] == [None, None]


def test_a_list_of_topics_that_does_not_come_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.transactions.targets._LOOK_S", 0.01)
    broker = Broker()
    targets = Targets(broker, "test")

    targets.look(0.0)
    wait_until(lambda: broker.asked == 1)
    broker.topics = {"a": 1}

    def known() -> bool:
        targets.look(float(broker.asked))
        return targets.is_fresh()

    wait_until(known)
    assert targets.takes("a", 1, 100.0) is None


def test_a_topic_is_called_missing_only_when_a_list_that_was_asked_for_since_lacks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.transactions.targets._LOOK_S", 0.0)
    broker = Broker()
    broker.topics = {"old": 1}
    targets = Targets(broker, "test")
    targets.await_first(30)

    first = targets.takes("new", 1, time.monotonic())
    wait_until(lambda: targets.takes("new", 1, time.monotonic()) is not NOT_KNOWN)

    assert first is NOT_KNOWN
    assert "create it" in str(targets.takes("new", 1, time.monotonic()))
    assert broker.asked >= 2
