"""A `key=` function is the user's code: however slow it is, the poll thread goes on (I6)."""

from __future__ import annotations

import threading

from penstock.consumer import handler
from penstock.message import Message
from penstock.testing import TestBroker
from support.consumers import Handled, consumer_of, group_of
from waiting import wait_until


class SlowKey:
    """A key function that waits at some messages until the test lets it go on."""

    def __init__(self, *stuck: bytes) -> None:
        self.go = threading.Event()
        self.threads: set[str] = set()
        self.calls = 0
        self._stuck = stuck

    def __call__(self, message: Message) -> bytes | None:
        """Return the value's first byte."""
        self.calls += 1
        self.threads.add(threading.current_thread().name)
        if message.value in self._stuck:
            self.go.wait()
        return (message.value or b"")[:1]


def values(count: int) -> list[bytes]:
    return [b"%d-%d" % (number % 7, number) for number in range(count)]


def fill(broker: TestBroker, count: int) -> None:
    broker.create_topic("t", 1)
    for value in values(count):
        broker.produce("t", value, key=b"not-this-one")


def test_a_key_function_that_hangs_keeps_neither_the_poll_thread_nor_what_came_before() -> None:
    broker = TestBroker()
    fill(broker, 100)
    slow, seen = SlowKey(b"2-23"), Handled()

    with consumer_of(broker, {"t": handler(seen, key=slow)}, commit_interval=0.5) as consumer:
        wait_until(lambda: len(seen.calls) == 23)
        before = broker.clock.monotonic()
        # It polls, or the clock would stand; it commits; and it says where the message is.
        wait_until(lambda: broker.clock.monotonic() > before + 5)
        wait_until(lambda: broker.committed(group_of("t"))["t", 0].offset == 23)
        (found,) = consumer.explain()
        members = broker.members(group_of("t"))
        slow.go.set()
        wait_until(lambda: len(seen.calls) == 100)

    assert len(members) == 1
    assert (found.blocking_offset, found.state, found.worker) == (23, "in handler", "penstock-keys-group-t")
    assert slow.threads == {"penstock-keys-group-t"}
    assert slow.calls == 100
    for key in range(7):
        of_key = [value for value in seen.calls if value.startswith(f"{key}-")]
        assert of_key == [value.decode() for value in values(100) if value.startswith(b"%d-" % key)]


def test_a_drain_waits_for_what_has_no_lane_yet() -> None:
    broker = TestBroker()
    fill(broker, 50)
    slow, seen = SlowKey(b"3-10"), Handled()

    with consumer_of(broker, {"t": handler(seen, key=slow)}, stop_timeout=1e6) as consumer:
        wait_until(lambda: consumer.statistics().received == 50 and len(seen.calls) == 10)
        consumer.request_stop()
        before = broker.clock.monotonic()
        wait_until(lambda: broker.clock.monotonic() > before + 5)
        early = len(seen.calls)
        slow.go.set()
        drained = consumer.stop()

    assert early == 10
    assert drained
    assert len(seen.calls) == 50
    assert broker.committed(group_of("t"))["t", 0].offset == 50


def test_a_stop_does_not_wait_for_a_key_function_that_hangs() -> None:
    broker = TestBroker()
    fill(broker, 20)
    slow, seen = SlowKey(b"5-5"), Handled()

    with consumer_of(broker, {"t": handler(seen, key=slow)}, stop_timeout=0.1, revoke_timeout=0.1) as consumer:
        wait_until(lambda: len(seen.calls) == 5)
        drained = consumer.stop()
        slow.go.set()

    assert not drained
    assert len(seen.calls) == 5
    assert broker.committed(group_of("t"))["t", 0].offset == 5
