"""What each worker has one of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import tenacity
from consuming import consumer_of, event_set

from kafka_tools import produce
from penstock.app import App
from penstock.consumer import WorkerResource, handler, retry
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError
from penstock.message import Message
from waiting import wait_until

NewTopic = Callable[..., str]


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


def test_each_worker_has_one_of_its_own_and_closes_it_itself_when_it_ends(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    sessions = Sessions()
    used: list[tuple[object, str]] = []
    together = threading.Barrier(3)

    def uses(message: Message) -> None:
        used.append((sessions.resource.get(), threading.current_thread().name))
        if message.value == b"together":
            # All three workers are in here at once, so each has made its own.
            together.wait(60)

    consumer = consumer_of(broker, {topic: handler(uses, order="none")}, workers=3, resources=[sessions.resource])
    with consumer:
        produce(broker.bootstrap_servers, topic, [(b"%d" % i, b"together") for i in range(3)])
        wait_until(lambda: consumer.statistics().handled == 3)
        consumer.change(workers=1)
        wait_until(lambda: len(sessions.closed) == 2)
        left = set(sessions.made) - {name for name, _ in sessions.closed}
        produce(broker.bootstrap_servers, topic, [(b"%d" % i, b"alone") for i in range(20)])
        wait_until(lambda: consumer.statistics().handled == 23)

    assert len(sessions.made) == len(set(sessions.made)) == 3
    assert len(left) == 1
    assert all(session == thread for session, thread in used)
    assert {thread for _, thread in used[3:]} == left
    assert sorted(sessions.closed) == sorted((name, name) for name in sessions.made)


def test_a_resource_that_cannot_be_made_is_the_failure_of_its_message_and_made_at_the_next(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"1"), (b"k", b"2")])
    sessions = Sessions()
    sessions.failures = 2
    used: list[bytes | None] = []

    def uses(message: Message) -> None:
        sessions.resource.get()
        used.append(message.value)

    policy = retry(attempts=3, wait=tenacity.wait_fixed(0.02))
    handlers = {topic: handler(uses, retry_policy=policy)}
    with consumer_of(broker, handlers, workers=1, resources=[sessions.resource]) as consumer:
        wait_until(lambda: consumer.statistics().handled == 2)
        statistics = consumer.statistics()

    assert used == [b"1", b"2"]
    assert (statistics.failed, len(sessions.made), len(sessions.closed)) == (2, 1, 1)


def test_handlers_on_the_loop_share_one_that_is_made_and_closed_there(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"%d" % i, b"x") for i in range(20)])
    sessions, go = Sessions(), threading.Event()
    used: list[object] = []

    async def uses(_message: Message) -> None:
        used.append(sessions.resource.get())
        await event_set(go)

    with consumer_of(broker, {topic: handler(uses)}, resources=[sessions.resource]):
        wait_until(lambda: len(used) == 20)
        go.set()

    assert set(used) == {f"penstock-loop-group-{topic}"}
    assert sessions.closed == [(sessions.made[0], sessions.made[0])]


def test_a_resource_that_fails_to_close_ends_its_worker_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    def makes() -> Iterator[int]:
        yield 7
        raise OSError("cannot close")

    resource = WorkerResource(makes)

    first = resource.get()
    resource.close()
    resource.close()

    assert first == 7
    assert caplog.text.count("closing a resource of") == 1
    assert resource.get() == 7


def test_what_makes_no_resource_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="worker_resource takes a function with one `yield`"):
        App("app", bootstrap_servers="unused:1").worker_resource(lambda: iter(()))  # type: ignore[arg-type,return-value] # that is what is tested
