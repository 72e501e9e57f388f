"""What a store in Kafka depends on restarts, refuses, and is deleted: the coordinator goes on, and so do all others."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka.admin import AdminClient
from transaction_tools import Bench

from kafka_tools import limit
from penstock import clients
from penstock.clients.requests.topics import TopicSpec, ensure_topics
from penstock.devbroker import DevBroker
from penstock.transactions import Coordinator, Outgoing
from penstock.transactions.model import TransactionState
from penstock.transactions.operator.kafka_operator import Effect, KafkaAdministration
from penstock.transactions.wire.ops import Verdict
from waiting import wait_until

#: Seconds within which publishing goes on after a broker is back; and on a machine that has other things to do.
BACK_S = 10.0
BUSY_BACK_S = 30.0
FROZEN_S = 20.0


def restarted(broker: DevBroker, how: str) -> None:
    """Have a broker restart, or stand still for a while."""
    if how == "clean":
        broker.restart()
    elif how == "killed":
        broker.kill()
        assert not broker.running
        broker.restart()
    else:
        broker.freeze()
        # So long is the fault.
        time.sleep(FROZEN_S)
        broker.thaw()


@pytest.fixture(scope="module")
def fragile_broker() -> Iterator[DevBroker]:
    """The broker that the tests of this file may harm."""
    # One that was killed may register again once its former session has ended: after 9 s, by Kafka's default.
    with DevBroker(start_timeout=150) as broker:
        yield broker


@pytest.fixture
def fragile(fragile_broker: DevBroker, topic_numbers: Iterator[int]) -> Iterator[Bench]:
    """A store on that broker."""
    if not fragile_broker.running:
        fragile_broker.restart()
    topic = f"target-{next(topic_numbers)}"
    fragile_broker.create_topic(topic, 3)
    made = Bench(fragile_broker.bootstrap_servers, topic)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("faults", "within_s"),
    [
        (("killed",), BUSY_BACK_S),
        pytest.param(("clean", "killed", "frozen") * 3 + ("clean",), BACK_S, marks=pytest.mark.chaos),
    ],
)
def test_publishing_goes_on_after_each_restart_of_the_broker(
    fragile: Bench, fragile_broker: DevBroker, faults: tuple[str, ...], within_s: float
) -> None:
    coordinator = fragile.coordinator(transaction_timeout=600)
    producer = fragile.producer(send_timeout=120)
    stopping, sent = threading.Event(), list[bytes]()

    def load() -> None:
        for number in itertools.count():
            if stopping.wait(0.02):
                return
            producer.submit(fragile.topic, key=b"%d" % (number % 20), value=b"%d" % number)
            sent.append(b"%d" % number)

    thread = threading.Thread(target=load, name="load")
    thread.start()
    took = []
    try:
        for how in faults:
            # Each has worked before it is harmed: its clients know the brokers.
            before = coordinator.statistics().committed
            wait_until(lambda: coordinator.statistics().committed > before + 20)  # noqa: B023 - waited for here
            restarted(fragile_broker, how)
            back, stood = time.monotonic(), coordinator.statistics().committed
            wait_until(lambda: coordinator.statistics().committed > stood + 20, 4 * BUSY_BACK_S)  # noqa: B023 - as above
            took.append(time.monotonic() - back)
    finally:
        stopping.set()
        thread.join()
    fragile.settled(coordinator, 120, committed=len(sent))

    assert max(took) < within_s, took
    seen = Counter(value for _, value in fragile.visible())
    assert seen == Counter(sent), "each is there, and once"


def test_a_target_that_refuses_everything_keeps_no_other_from_its_messages(
    bench: Bench, new_topic: Callable[..., str], admin: AdminClient
) -> None:
    sick, well = new_topic(), bench.topic
    coordinator, producer = bench.coordinator(transaction_timeout=600), bench.producer()
    producer.send(sick, value=b"first", wait="published")
    # Smaller than the marker that ends a transaction: the broker can end none there any more.
    limit(admin, sick, 10)

    for number in range(30):
        producer.submit(sick, key=b"%d" % number, value=b"%d" % number)
        producer.send(well, key=b"%d" % number, value=b"%d" % number)

    statistics = bench.counted(coordinator, committed=31, held=30)
    assert statistics.pending == 30
    assert Counter(bench.visible(well)) == Counter((b"%d" % n, b"%d" % n) for n in range(30))
    # They go on while it is tried again.
    producer.send(well, key=b"k", value=b"later", wait="published")
    coordinator.stop()


def test_refused_messages_hold_later_ones_of_their_key_and_target_alone_and_can_be_discarded(
    bench: Bench, new_topic: Callable[..., str], admin: AdminClient
) -> None:
    narrow, other = new_topic(), bench.topic
    coordinator, producer = bench.coordinator(transaction_timeout=600), bench.producer()
    producer.send(narrow, key=b"warm", value=b"", wait="published")
    limit(admin, narrow, 2_000)

    refused = producer.send(narrow, key=b"a", value=bytes(5_000))
    held = producer.send(narrow, key=b"a", value=b"behind it")
    with producer.transaction_of([Outgoing(narrow, b"both", b"a"), Outgoing(other, b"both", b"o")]):
        pass
    producer.send(other, key=b"o", value=b"behind both")
    for number in range(20):
        producer.send(narrow, key=b"b%d" % number, value=b"%d" % number)
        producer.send(other, key=b"a", value=b"%d" % number)
    bench.counted(coordinator, committed=41, held=4)

    with KafkaAdministration(bench.servers, bench.topics.prefix) as operator:

        def reasons() -> dict[str, str] | None:
            found = {one.transaction_id: one.waits_for for one in operator.pending()}
            return found if "MSG_SIZE_TOO_LARGE" in found.get(refused.transaction_id, "") else None

        told = wait_until(reasons)
        decided = operator.decide(refused.transaction_id, Verdict.DISCARD, "eve", timeout_s=60)
    assert refused.transaction_id in told[held.transaction_id]
    assert decided.effect is Effect.DONE
    statistics = bench.settled(coordinator, committed=44, discarded=1)

    assert statistics.held == 0
    assert [value for key, value in bench.visible(narrow) if key == b"a"] == [b"behind it", b"both"]
    assert [value for key, value in bench.visible(other) if key == b"o"] == [b"both", b"behind both"]
    (message,) = bench.messages(bench.topics.discarded)
    assert len(message.value()) == 5_000


def test_the_messages_of_a_topic_that_is_mended_follow_in_their_order(
    bench: Bench, new_topic: Callable[..., str], admin: AdminClient
) -> None:
    narrow = new_topic()
    coordinator, producer = bench.coordinator(transaction_timeout=600), bench.producer()
    producer.send(narrow, key=b"k", value=b"0", wait="published")
    limit(admin, narrow, 2_000)
    values = [b"0", bytes(5_000), b"2", b"3", bytes(6_000), b"5", b"6"]
    for value in values[1:]:
        producer.send(narrow, key=b"k", value=value)
    bench.counted(coordinator, held=6)

    limit(admin, narrow, 1 << 20)
    bench.settled(coordinator, committed=7)

    assert [value for _, value in bench.visible(narrow)] == values


def test_a_topic_that_is_deleted_and_made_again_takes_transactions_of_several_messages_again(
    bench: Bench, new_topic: Callable[..., str], admin: AdminClient
) -> None:
    gone, well = new_topic(), bench.topic
    coordinator, producer = bench.coordinator(transaction_timeout=600), bench.producer()

    for life in range(3):
        if life:
            admin.delete_topics([gone])[gone].result()
            wait_until(lambda: gone not in admin.list_topics(timeout=30).topics)
        before = coordinator.statistics().committed
        for number in range(5):
            with producer.transaction_of([Outgoing(gone, b"%d" % number, b"1"), Outgoing(gone, b"%d" % number, b"2")]):
                pass
            producer.send(well, value=b"%d %d" % (life, number))
        bench.counted(coordinator, committed=before + 5)
        if life:
            ensure_topics(clients.admin(bench.servers, {}), bench.servers, [TopicSpec(gone, 1)])
        bench.settled(coordinator, committed=before + 10)
        assert Counter(bench.visible(gone)) == Counter((key, b"%d" % n) for key in (b"1", b"2") for n in range(5))

    assert len(bench.visible(well)) == 15
    assert coordinator.statistics().recoveries == 0


def test_a_hanging_call_is_named_and_its_thread_left_behind(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.transactions.coordinator.publishing.publisher import Publisher

    hang, hanging, deliver = threading.Event(), threading.Event(), Publisher._deliver

    def stands(self: Publisher, limit_s: float) -> None:
        if not hanging.is_set() and armed.is_set():
            hanging.set()
            hang.wait(60)
        deliver(self, limit_s)

    armed = threading.Event()
    monkeypatch.setattr(Publisher, "_deliver", stands)
    coordinator, producer = bench.coordinator(transaction_timeout=600), bench.producer()
    producer.send(bench.topic, value=b"0", wait="published")
    armed.set()

    result = producer.send(bench.topic, value=b"1")
    assert hanging.wait(60)
    told = wait_until(lambda: coordinator.statistics().slow_call or None)
    statistics = bench.counted(coordinator, committed=2, left_behind=1)
    hang.set()
    wait_until(lambda: coordinator.statistics().left_behind == 0)

    assert told
    assert statistics.slow_call == ""
    assert result.state is TransactionState.COMMIT
    assert sorted(bench.visible()) == [(None, b"0"), (None, b"1")]


def test_a_coordinator_stops_in_time_though_its_broker_is_gone(fragile: Bench, fragile_broker: DevBroker) -> None:
    coordinator = Coordinator(bootstrap_servers=fragile.servers, prefix=fragile.topics.prefix).start()
    fragile.producer().send(fragile.topic, value=b"v", wait="published")
    fragile_broker.kill()

    begun = time.monotonic()
    coordinator.stop(60)

    assert time.monotonic() - begun < 45
