"""A `key=` function is the user's code: however slow it is, the poll thread goes on (I6)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.consumer import ConsumerSettings, LitePushConsumer, handler
from penstock.message import Message
from penstock.testing import TestBroker
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
            self.go.wait(60)
        return (message.value or b"")[:1]


class Seen:
    """Keeps the values, by key."""

    def __init__(self) -> None:
        self.values: dict[bytes, list[bytes | None]] = {}

    def __call__(self, message: Message) -> None:
        """Keep it."""
        self.values.setdefault((message.value or b"")[:1], []).append(message.value)

    def count(self) -> int:
        """Return how many came."""
        return sum(map(len, list(self.values.values())))


@contextmanager
def consumer_of(broker: TestBroker, slow: SlowKey, seen: Seen, **settings: object) -> Iterator[LitePushConsumer]:
    """Run a consumer on threads; the broker's clock goes on whenever the poll thread waits."""
    consumer = LitePushConsumer(
        "g",
        {"t": handler(seen, key=slow)},
        bootstrap_servers="memory:9092",
        settings=ConsumerSettings(**{"workers": 4, **settings}),  # type: ignore[arg-type] # the tests name options
        cluster=broker,
    )
    try:
        with consumer:
            yield consumer
    finally:
        slow.go.set()


def values(count: int) -> list[bytes]:
    return [b"%d-%d" % (number % 7, number) for number in range(count)]


def fill(broker: TestBroker, count: int) -> None:
    broker.create_topic("t", 1)
    for value in values(count):
        broker.produce("t", value, key=b"not-this-one")


def test_a_key_function_that_hangs_keeps_neither_the_poll_thread_nor_what_came_before() -> None:
    broker = TestBroker()
    fill(broker, 100)
    slow, seen = SlowKey(b"2-23"), Seen()

    with consumer_of(broker, slow, seen, commit_interval=0.5) as consumer:
        wait_until(lambda: seen.count() == 23)
        before = broker.clock.monotonic()
        # It polls, or the clock would stand; it commits; and it says where the message is.
        wait_until(lambda: broker.clock.monotonic() > before + 5)
        wait_until(lambda: broker.committed("g")["t", 0].offset == 23)
        (found,) = consumer.explain()
        members = broker.members("g")
        slow.go.set()
        wait_until(lambda: seen.count() == 100)

    assert len(members) == 1
    assert (found.blocking_offset, found.state, found.worker) == (23, "in handler", "penstock-keys-g")
    assert slow.threads == {"penstock-keys-g"}
    assert slow.calls == 100
    for key, of_key in seen.values.items():
        assert of_key == [value for value in values(100) if value.startswith(key)]


def test_a_drain_waits_for_what_has_no_lane_yet() -> None:
    broker = TestBroker()
    fill(broker, 50)
    slow, seen = SlowKey(b"3-10"), Seen()

    with consumer_of(broker, slow, seen, stop_timeout=1e6) as consumer:
        wait_until(lambda: consumer.statistics().received == 50 and seen.count() == 10)
        consumer.request_stop()
        before = broker.clock.monotonic()
        wait_until(lambda: broker.clock.monotonic() > before + 5)
        early = seen.count()
        slow.go.set()
        drained = consumer.stop()

    assert early == 10
    assert drained
    assert seen.count() == 50
    assert broker.committed("g")["t", 0].offset == 50


def test_a_stop_does_not_wait_for_a_key_function_that_hangs() -> None:
    broker = TestBroker()
    fill(broker, 20)
    slow, seen = SlowKey(b"5-5"), Seen()

    with consumer_of(broker, slow, seen, stop_timeout=0.1, revoke_timeout=0.1) as consumer:
        wait_until(lambda: seen.count() == 5)
        drained = consumer.stop()
        slow.go.set()

    assert not drained
    assert seen.count() == 5
    assert broker.committed("g")["t", 0].offset == 5
