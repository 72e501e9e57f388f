"""A `key=` function is the user's code, and runs on the poll thread: what is slow there is named."""

from __future__ import annotations

import threading

import pytest
from stepped import Stepped

from penstock.consumer import handler
from penstock.consumer.inspect.statistics import longest_in_handler
from penstock.message import Message
from penstock.testing import TestBroker
from support.consumers import Handled, consumer_of
from waiting import wait_until


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

    assert str(longest) == "t[0]@23 has been in Handled for 5.0 s on penstock-poll-group-t"
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
    assert caplog.text.count("<lambda> took 1.2 s for 4 messages of t[0], and the poll thread, which calls it") == 1
    assert caplog.text.count("<lambda> took") == 1
