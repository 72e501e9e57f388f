"""What each worker has one of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import tenacity

from penstock.consumer import WorkerResource, handler, retry
from penstock.message import Message
from penstock.testing import TestBroker
from support.consumers import consumer_of
from waiting import wait_until


class Sessions:
    """Makes a resource and notes on which threads each was made, used and closed."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.closed: list[tuple[str, str]] = []
        self.failures = 0
        self.resource: WorkerResource[object] = WorkerResource(self.make)

    def make(self) -> Iterator[object]:
        """Make one for the calling thread."""
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no session to be had")
        name = threading.current_thread().name
        self.made.append(name)
        yield name
        self.closed.append((name, threading.current_thread().name))


def fed(count: int, value: bytes = b"x", broker: TestBroker | None = None) -> TestBroker:
    """Return a broker with so many messages in topic "t", each with its own key."""
    broker = broker or TestBroker()
    if "t" not in broker.topics():
        broker.create_topic("t", 1)
    for number in range(count):
        broker.produce("t", value, key=b"%d" % number)
    return broker


def test_each_worker_has_one_of_its_own_and_closes_it_itself_when_it_ends() -> None:
    broker, sessions, together = fed(3, b"together"), Sessions(), threading.Barrier(3)
    used: list[tuple[object, str]] = []

    def uses(message: Message) -> None:
        used.append((sessions.resource.get(), threading.current_thread().name))
        if message.value == b"together":
            # All three workers are in here at once, so each has made its own.
            together.wait()

    with consumer_of(broker, {"t": handler(uses)}, workers=3, resources=[sessions.resource]) as consumer:
        wait_until(lambda: consumer.statistics().handled == 3)
        consumer.change(workers=1)
        wait_until(lambda: len(sessions.closed) == 2)
        left = set(sessions.made) - {name for name, _ in sessions.closed}
        fed(20, b"alone", broker)
        wait_until(lambda: consumer.statistics().handled == 23)

    assert len(sessions.made) == len(set(sessions.made)) == 3
    assert len(left) == 1
    assert all(session == thread for session, thread in used)
    assert {thread for _, thread in used[3:]} == left
    assert sorted(sessions.closed) == sorted((name, name) for name in sessions.made)


def test_a_resource_that_cannot_be_made_is_the_failure_of_its_message_and_made_at_the_next() -> None:
    sessions, used = Sessions(), list[bytes | None]()
    sessions.failures = 2

    def uses(message: Message) -> None:
        sessions.resource.get()
        used.append(message.key)

    one = handler(uses, order="partition", retry=retry(attempts=3, wait=tenacity.wait_fixed(0.02)))
    with consumer_of(fed(2), {"t": one}, workers=1, resources=[sessions.resource]) as consumer:
        wait_until(lambda: consumer.statistics().handled == 2)
        failed = consumer.statistics().failed

    assert used == [b"0", b"1"]
    assert (failed, len(sessions.made), len(sessions.closed)) == (2, 1, 1)


def test_handlers_on_the_loop_share_one_that_is_made_and_closed_there() -> None:
    sessions, used, ended = Sessions(), list[object](), list[int]()

    async def uses(_message: Message) -> None:
        used.append(sessions.resource.get())
        while len(used) < 20:  # noqa: ASYNC110 - until all have begun
            await asyncio.sleep(0)
        ended.append(1)

    with consumer_of(fed(20), {"t": handler(uses)}, resources=[sessions.resource]):
        wait_until(lambda: len(ended) == 20)

    assert set(used) == {"penstock-loop-group-t"}
    assert sessions.closed == [(sessions.made[0], sessions.made[0])]


def test_a_resource_that_fails_to_close_ends_its_worker_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    def makes() -> Iterator[int]:
        yield 7
        raise SystemExit("cannot close")

    resource = WorkerResource(makes)
    first = resource.get()
    resource.close()
    resource.close()

    assert first == 7
    assert caplog.text.count("closing a resource of") == 1
    assert resource.get() == 7
