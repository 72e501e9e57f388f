"""Which messages wait for each other: keys of headers and functions, also slow ones, and the other orders."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest
from stepped import Stepped
from stepped_engine import SteppedEngine

from kafka_tools import read_all
from penstock.consumer import handler
from penstock.consumer.handlers.handler import orderings_of
from penstock.consumer.handlers.ordering import Keyless, Order, Ordering
from penstock.consumer.inspect.statistics import longest_in_handler
from penstock.devbroker import DevBroker
from penstock.message import FixedRecord, Headers, Message
from penstock.testing import TestApp, TestBroker
from raw_produce import produce_raw
from support.consumers import ONCE, Handled, NewTopic, app_of, consumer_of, nothing
from waiting import wait_until


def test_a_header_stands_for_the_key_and_without_it_the_order_is_that_of_the_partition() -> None:
    ordering = orderings_of({"t": handler(nothing, key="header:user")}, 64)["t"]
    users: list[Headers] = [(("user", b"u%d" % (number % 6)),) if number % 7 else () for number in range(300)]
    records = [FixedRecord("t", 0, number, b"k%d" % number, b"x", user, None) for number, user in enumerate(users)]
    found: dict[object, set[bytes | None]] = defaultdict(set)
    for record in records:
        found[ordering.identity(record)].add(dict(record.headers() or ()).get("user"))

    # As pairs, for a dict would keep one lane of each key, however many it has.
    pairs = set(zip(map(ordering.identity, records), ordering.lane_numbers("t", 0, records), strict=True))
    assert all(len(those) == 1 for those in found.values())
    assert len(found) == len(pairs) == 7


def test_a_function_that_stands_for_the_key_may_fail_for_some_messages() -> None:
    app, seen = app_of(), list[tuple[bytes | None, int]]()
    names = ["raises", "number", "text", "bytes", "nothing"]

    def own_key(message: Message) -> bytes | str | None:
        if message.key == b"raises":
            raise LookupError("no such customer")
        answers: dict[bytes | None, object] = {b"number": 7, b"text": "k", b"bytes": b"k", b"nothing": None}
        return answers[message.key]  # type: ignore[return-value] # one of them is wrong, and that is what is tested

    app.handler("t", key=own_key, on_failure="dead_letter")(lambda m: seen.append((m.key, m.offset)))
    with TestApp(app) as test:
        for number in range(50):
            test.send("t", "x", key=names[number % 5])
        test.advance(60)
        letters = test.dead_letters("t")

    # Text and bytes are one key; those without follow their partition.
    for keys in ({b"text", b"bytes"}, {b"nothing"}):
        offsets = [offset for key, offset in seen if key in keys]
        assert offsets == sorted(offsets)
    assert len(seen) == 30
    assert {letter.key for letter in letters} == {b"raises", b"number"}
    assert {letter.header("__dlq.errors.message") for letter in letters} == {
        b"the key function failed with LookupError; correct it",
        b"the key function returned a int; it must return bytes, text or None",
    }


def test_a_header_whose_name_is_not_text_fails_only_handlers_that_read_headers(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    by_header, reads, asks_for_none = new_topic(), new_topic(), new_topic()
    for topic in (by_header, reads, asks_for_none):
        produce_raw(
            broker.bootstrap_servers,
            topic,
            [(b"1", [(b"user", b"u")]), (b"2", [(b"user", b"u"), (b"\xff\xfe", b"v")]), (b"3", [(b"user", b"u")])],
        )
    seen: dict[str, list[bytes | None]] = defaultdict(list)

    def note(message: Message) -> None:
        seen[message.topic].append(message.key)

    def read(message: Message) -> None:
        if message.key == b"2":
            with pytest.raises(UnicodeDecodeError):
                message.header("user")
        # Again and again.
        assert message.headers is not None
        note(message)

    handlers = {
        by_header: handler(note, key="header:user", on_failure="dead_letter"),
        reads: handler(read, on_failure="dead_letter", retry=ONCE),
        asks_for_none: handler(note),
    }
    with consumer_of(broker, handlers) as consumer:
        wait_until(lambda: consumer.statistics().dead_letters == 2 and consumer.statistics().handled == 7)

    (letter,) = read_all(broker.bootstrap_servers, f"dlq.{by_header}")
    headers = dict(letter.headers() or [])
    assert {topic: sorted(filter(None, keys)) for topic, keys in seen.items()} == {
        by_header: [b"1", b"3"],
        reads: [b"1", b"3"],
        asks_for_none: [b"1", b"2", b"3"],
    }
    assert letter.key() == b"2"
    assert b"a header's name is not UTF-8" in headers["__dlq.errors.message"]
    assert headers["penstock-headers-lost"] == b"a header name is not UTF-8"
    (letter,) = read_all(broker.bootstrap_servers, f"dlq.{reads}")
    assert dict(letter.headers() or [])["penstock-exception-class"] == b"builtins.UnicodeDecodeError"


@pytest.mark.parametrize("keyless", ["partition", "together", "spread"])
def test_a_message_without_a_key_that_waits_holds_only_those_that_must_wait(keyless: str) -> None:
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

    held = {"partition": [b"bad", b"b1"], "together": [b"bad"], "spread": [b"bad", b"a2", b"b1"]}
    assert tried == held[keyless]


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


def test_the_same_offset_of_other_partitions_waits_in_a_lane_of_its_own_where_nothing_is_ordered() -> None:
    ordering = Ordering(Order.NONE, Keyless.PARTITION, 256)

    lanes = [
        ordering.lane_numbers("t", partition, [FixedRecord("t", partition, 7, None, b"x", (), None)])[0]
        for partition in range(12)
    ]

    assert len(set(lanes)) == 12


class SlowKey:
    """A key function that waits at a message until the test lets it go on."""

    def __init__(self, stuck: bytes) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.calls = 0
        self._stuck = stuck

    def __call__(self, message: Message) -> bytes | None:
        """Return the value's first byte."""
        self.calls += 1
        if message.value == self._stuck:
            self.begun.set()
            self.go.wait()
        return (message.value or b"")[:1]


def filled(count: int) -> TestBroker:
    broker = TestBroker()
    broker.create_topic("t", 1)
    for number in range(count):
        broker.produce("t", b"%d-%d" % (number % 7, number), key=b"not-this-one")
    return broker


def test_a_key_function_that_hangs_is_named_with_its_message_and_goes_on_with_each_message_asked_once() -> None:
    broker, slow, seen = filled(100), SlowKey(b"2-23"), Handled()

    with consumer_of(broker, {"t": handler(seen, key=slow)}) as consumer:
        assert slow.begun.wait(60)
        longest = longest_in_handler(consumer._engine.slots(), broker.clock.monotonic() + 5)
        slow.go.set()
        wait_until(lambda: len(seen.calls) == 100)

    assert str(longest) == "t:0@23 has been in Handled for 5.0 s on penstock-poll-group-t"
    assert slow.calls == 100
    for key in range(7):
        places = [int(value.split("-")[1]) for value in seen.calls if value.startswith(f"{key}-")]
        assert places == list(range(key, 100, 7))


def test_a_stop_does_not_wait_for_a_key_function_that_hangs() -> None:
    broker, slow, seen = filled(20), SlowKey(b"5-5"), Handled()

    with consumer_of(broker, {"t": handler(seen, key=slow)}, stop_timeout=0.1, revoke_timeout=0.1) as consumer:
        assert slow.begun.wait(60)
        consumer.request_stop()
        broker.advance(60)
        drained, handled = consumer.stop(), list(seen.calls)
        slow.go.set()
        wait_until(lambda: consumer._thread is not None and not consumer._thread.is_alive())

    assert not drained
    assert handled == []


def test_a_key_function_that_keeps_the_poll_thread_from_its_commits_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def look_up(message: Message) -> bytes | None:
        stepped.broker.clock.advance(0.3)
        return message.key

    stepped = Stepped({"t": handler(lambda _message: None, key=look_up)})

    stepped.feed("t", [(b"k", b"x")] * 3)
    quick = "key function" in caplog.text
    stepped.feed("t", [(b"k", b"x")] * 4)
    stepped.feed("t", [(b"k", b"x")] * 5)

    assert not quick
    assert caplog.text.count("<lambda> took 1.2 s for 4 messages of t:0, and the poll thread, which calls it") == 1
    assert caplog.text.count("<lambda> took") == 1
