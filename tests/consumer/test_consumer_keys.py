"""Which messages wait for each other: keys of headers and functions, messages without one, and the other orders."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable

import pytest
import tenacity
from confluent_kafka import Producer
from consuming import consumer_of
from stepped_engine import SteppedEngine

from kafka_tools import produce, read_all
from penstock.consumer import ConsumerSettings, handler, retry
from penstock.consumer.handlers.options.ordering import Keyless, Order, Ordering
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError
from penstock.message import FixedRecord, Message
from penstock.routing import lane_of
from raw_produce import produce_raw
from waiting import wait_until

NewTopic = Callable[..., str]


class Watch:
    """A handler that finds overlaps and keeps the offsets of whatever stands for the key.

    Args:
        key: what stands for it.
        together: how many of the first calls wait for each other before any goes on; 1 for none.
    """

    def __init__(self, key: Callable[[Message], object], together: int = 1) -> None:
        self.offsets: dict[object, list[int]] = defaultdict(list)
        self.overlaps: list[object] = []
        self._key = key
        self._running: set[object] = set()
        self._begun = 0
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(together)

    def __call__(self, message: Message) -> None:
        """Take a message."""
        key = self._key(message)
        with self._lock:
            if key in self._running:
                self.overlaps.append(key)
            self._running.add(key)
            self._begun += 1
            waits = self._begun <= self._barrier.parties
        if waits:
            self._barrier.wait(60)
        with self._lock:
            self._running.discard(key)
            self.offsets[key].append(message.offset)

    def count(self) -> int:
        """Return how many calls have ended."""
        with self._lock:
            return sum(map(len, self.offsets.values()))


def test_a_header_that_stands_for_the_key_orders_by_it(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    write(broker, topic, ((b"k%d" % i, [("user", b"u%d" % (i % 6))] if i % 7 else []) for i in range(300)))
    # Without the header: the order of the partition.
    watch = Watch(lambda message: message.header("user"))

    with consumer_of(broker, {topic: handler(watch, key="header:user")}):
        wait_until(lambda: watch.count() == 300)

    assert watch.overlaps == []
    assert len(watch.offsets) == 7
    assert all(offsets == sorted(offsets) for offsets in watch.offsets.values())


def write(broker: DevBroker, topic: str, records: Iterable[tuple[bytes | None, list[tuple[str, bytes]]]]) -> None:
    """Write keys with headers, in order."""
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "enable.idempotence": True})
    for key, headers in records:
        producer.produce(topic, b"x", key=key, headers=headers)
    assert producer.flush(60) == 0


def test_a_function_that_stands_for_the_key_may_fail_for_some_messages(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    names = [b"raises", b"number", b"text", b"bytes", b"nothing"]
    produce(broker.bootstrap_servers, topic, [(names[i % 5], b"%d" % i) for i in range(50)])

    def own_key(message: Message) -> bytes | str | None:
        if message.key == b"raises":
            raise LookupError("no such customer")
        answers: dict[bytes | None, object] = {b"number": 7, b"text": "k", b"bytes": b"k", b"nothing": None}
        return answers[message.key]  # type: ignore[return-value] # one of them is wrong, and that is what is tested

    # Text and bytes are one key; those without follow their partition.
    watch = Watch(lambda message: "k" if message.key in {b"text", b"bytes"} else message.key)
    with consumer_of(broker, {topic: handler(watch, key=own_key, on_failure="dead_letter")}) as consumer:
        wait_until(lambda: consumer.statistics().dead_letters == 20 and watch.count() == 30)
        wait_until(lambda: consumer.statistics().in_flight == 0)

    letters = read_all(broker.bootstrap_servers, f"dlq.{topic}")
    said = {dict(letter.headers() or [])["__dlq.errors.message"] for letter in letters}
    assert {letter.key() for letter in letters} == {b"raises", b"number"}
    assert said == {
        b"the key function failed with LookupError; mend it",
        b"the key function returned a int; it must return bytes, text or None",
    }
    assert watch.overlaps == []
    assert all(offsets == sorted(offsets) for offsets in watch.offsets.values())


def test_a_header_whose_name_is_not_text_costs_its_message_and_not_the_consumer(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce_raw(
        broker.bootstrap_servers,
        topic,
        [(b"1", [(b"user", b"u")]), (b"2", [(b"user", b"u"), (b"\xff\xfe", b"v")]), (b"3", [(b"user", b"u")])],
    )
    seen: list[bytes | None] = []

    one = handler(lambda message: seen.append(message.key), key="header:user", on_failure="dead_letter")
    with consumer_of(broker, {topic: one}) as consumer:
        wait_until(lambda: consumer.statistics().dead_letters == 1 and consumer.statistics().handled == 2)

    (letter,) = read_all(broker.bootstrap_servers, f"dlq.{topic}")
    headers = dict(letter.headers() or [])
    assert seen == [b"1", b"3"]
    assert letter.key() == b"2"
    assert b"a header's name is not UTF-8" in headers["__dlq.errors.message"]
    assert headers["penstock-headers-lost"] == b"a header name is not UTF-8"


def test_a_handler_may_read_headers_whose_names_are_not_text_again_and_again(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce_raw(broker.bootstrap_servers, topic, [(b"1", [(b"\xff", b"v")])])
    tries = 0

    def reads(message: Message) -> None:
        nonlocal tries
        tries += 1
        with pytest.raises(UnicodeDecodeError):
            message.header("user")
        assert message.headers == ()

    policy = retry(attempts=3, wait=tenacity.wait_fixed(0.02))
    one = handler(reads, retry_policy=policy, on_failure="dead_letter")
    with consumer_of(broker, {topic: one}) as consumer:
        wait_until(lambda: consumer.statistics().dead_letters == 1)

    (letter,) = read_all(broker.bootstrap_servers, f"dlq.{topic}")
    assert tries == 3
    assert dict(letter.headers() or [])["penstock-exception-class"] == b"builtins.UnicodeDecodeError"


def test_a_handler_that_asks_for_no_headers_gets_a_message_whose_header_names_are_not_text(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce_raw(broker.bootstrap_servers, topic, [(b"1", [(b"\xff", b"v")])])
    seen: list[bytes | None] = []

    with consumer_of(broker, {topic: handler(lambda message: seen.append(message.key))}):
        wait_until(lambda: seen)

    assert seen == [b"1"]


@pytest.mark.parametrize("keyless", ["partition", "together", "spread"])
def test_messages_without_a_key_wait_for_each_other_as_they_were_told(
    broker: DevBroker, new_topic: NewTopic, keyless: str
) -> None:
    # Two partitions may share a lane, and then they wait for each other; not all of four.
    topic = new_topic(partitions=4)
    for partition in range(4):
        produce(broker.bootstrap_servers, topic, [(None, b"%d" % i) for i in range(20)], partition=partition)
    # The first two run together: if none could run beside another, this would never end.
    together = 1 if keyless == "together" else 2
    alike: dict[str, Callable[[Message], object]] = {
        "partition": lambda message: message.partition,
        "together": lambda _: "all",
        "spread": lambda message: (message.partition, message.offset),
    }
    watch = Watch(alike[keyless], together)

    with consumer_of(broker, {topic: handler(watch, keyless=keyless)}):
        wait_until(lambda: watch.count() == 80)

    assert watch.overlaps == []
    if keyless == "partition":
        assert all(offsets == list(range(20)) for offsets in watch.offsets.values())


@pytest.mark.parametrize("keyless", ["partition", "together", "spread"])
def test_a_message_without_a_key_that_waits_holds_only_those_that_are_told_to_wait(keyless: str) -> None:
    tried: list[bytes | None] = []

    def fails(message: Message) -> None:
        tried.append(message.value)
        if message.value == b"bad":
            raise ValueError

    one = handler(fails, keyless=keyless)
    stepped = SteppedEngine({"a": one, "b": one})
    stepped.feed("a", (None, b"bad"), (None, b"a2"))
    stepped.feed("b", (None, b"b1"))
    stepped.serve()

    assert (
        tried
        == {
            "partition": [b"bad", b"b1"],
            "together": [b"bad"],
            "spread": [b"bad", b"a2", b"b1"],
        }[keyless]
    )


@pytest.mark.parametrize(("order", "expected"), [("key", 2), ("partition", 1), ("none", 3)])
def test_a_message_that_waits_holds_what_its_order_says(order: str, expected: int) -> None:
    tried: list[bytes | None] = []

    def fails(message: Message) -> None:
        tried.append(message.value)
        if message.value == b"bad":
            raise ValueError

    stepped = SteppedEngine({"t": handler(fails, order=order)})
    stepped.feed("t", (b"k", b"bad"), (b"k", b"same key"), (b"other", b"other key"))
    stepped.serve()

    assert len(tried) == expected


def test_without_an_order_messages_of_one_key_run_beside_each_other(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"%d" % i) for i in range(40)])
    # The first four run together: if they waited for each other, this would never end.
    watch = Watch(lambda message: message.offset, together=4)

    with consumer_of(broker, {topic: handler(watch, order="none")}, workers=4):
        wait_until(lambda: watch.count() == 40)

    assert len(watch.offsets) == 40


def test_the_same_offset_of_other_partitions_waits_in_a_lane_of_its_own_where_nothing_is_ordered() -> None:
    ordering = Ordering(Order.NONE, Keyless.PARTITION, 256)

    lanes = [
        ordering.lane_numbers("t", partition, [FixedRecord("t", partition, 7, None, b"x", (), None)])[0]
        for partition in range(12)
    ]

    assert len(set(lanes)) == 12


@pytest.mark.parametrize("given", ["user", "header:", "", 7, b"header:user"])
def test_what_names_no_key_is_refused(given: object) -> None:
    with pytest.raises(ConfigurationError, match="key"):
        handler(print, key=given)  # type: ignore[arg-type] # that is what is tested


def test_a_hot_key_holds_no_cold_ones(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    lanes = 2 * ConsumerSettings().lanes_per_worker
    lane = lane_of(b"hot", lanes)
    # Those of its own lane wait while it is in a handler; the others are a hundred times as many.
    cold = [key for i in range(600) if lane_of(key := b"c%d" % i, lanes) != lane]
    produce(broker.bootstrap_servers, topic, ((b"hot", b"x") for _ in range(2000)))
    produce(broker.bootstrap_servers, topic, ((key, b"x") for key in cold))
    gate = threading.Event()
    done: list[tuple[bytes | None, int]] = []

    def function(message: Message) -> None:
        if message.key == b"hot":
            gate.wait(120)
        done.append((message.key, message.offset))

    with consumer_of(broker, {topic: handler(function)}, workers=2) as consumer:
        wait_until(lambda: len(done) == len(cold))
        before = list(done)
        held = next(one for one in consumer.explain() if one.topic == topic)
        gate.set()
        wait_until(lambda: len(done) == len(cold) + 2000)

    assert sorted(key or b"" for key, _ in before) == sorted(cold)
    assert (held.blocking_offset, held.state, held.key) == (0, "in handler", b"hot")
    assert [offset for key, offset in done if key == b"hot"] == list(range(2000))
