"""Middlewares and what each worker has one of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
import tenacity
from consuming import consumer_of, event_set
from stepped_engine import SteppedEngine

from kafka_tools import produce
from penstock.app import App
from penstock.consumer import Middleware, WorkerResource, handler, retry
from penstock.consumer.handlers.middleware import surround
from penstock.devbroker import DevBroker
from penstock.errors import BatchError, ConfigurationError
from penstock.message import Message
from waiting import wait_until

NewTopic = Callable[..., str]


class Told(Middleware):
    """Writes down what it is told, and raises where it should."""

    def __init__(self, name: str, log: list[str], *, raises: str = "") -> None:
        self._name = name
        self._log = log
        self._raises = raises

    def before(self, message: Message) -> None:
        """Note it."""
        self._log.append(f"{self._name} before {message.offset}")
        if self._raises == "before":
            raise LookupError(self._name)

    def after(self, message: Message, error: BaseException | None) -> None:
        """Note it, and how it ended."""
        self._log.append(f"{self._name} after {message.offset} {error!r}")
        if self._raises == "after":
            raise OSError(self._name)


def one(offset: int = 0) -> Message:
    return Message.of(b"x", offset=offset)


def test_the_first_middleware_is_outermost() -> None:
    log: list[str] = []
    call = surround(handler(lambda _: log.append("handler")), [Told("a", log), Told("b", log)])

    call(one())

    assert log == ["a before 0", "b before 0", "handler", "b after 0 None", "a after 0 None"]


@pytest.mark.parametrize("kind", [ValueError, SystemExit, StopIteration])
def test_each_middleware_is_told_what_the_handler_raised_and_so_is_the_consumer(kind: type[BaseException]) -> None:
    log: list[str] = []
    error = kind("why")

    def fails(_message: Message) -> None:
        raise error

    with pytest.raises(kind) as caught:
        surround(handler(fails), [Told("a", log), Told("b", log)])(one())

    assert caught.value is error
    assert log[2:] == [f"b after 0 {error!r}", f"a after 0 {error!r}"]


def test_a_middleware_that_fails_before_keeps_the_handler_from_being_called_and_what_began_is_ended() -> None:
    log: list[str] = []
    middlewares = [Told("a", log), Told("b", log, raises="before"), Told("c", log)]

    with pytest.raises(LookupError):
        surround(handler(lambda _: log.append("handler")), middlewares)(one())

    assert log == ["a before 0", "b before 0", "b after 0 LookupError('b')", "a after 0 LookupError('b')"]


def test_a_middleware_that_fails_after_keeps_none_further_out_from_being_told() -> None:
    log: list[str] = []
    middlewares = [Told("a", log), Told("b", log, raises="after"), Told("c", log, raises="after")]

    with pytest.raises(OSError, match="b"):
        surround(handler(lambda _: log.append("handler")), middlewares)(one())

    assert log[3:] == ["handler", "c after 0 None", "b after 0 OSError('c')", "a after 0 OSError('b')"]


def test_middlewares_are_around_what_an_async_handler_awaits() -> None:
    log: list[str] = []

    async def awaits(_message: Message) -> str:
        await asyncio.sleep(0)
        log.append("handler")
        return "returned"

    call = surround(handler(awaits), [Told("a", log)])

    assert asyncio.run(call(one())) == "returned"
    assert log == ["a before 0", "handler", "a after 0 None"]


def test_middlewares_of_an_async_handler_are_told_of_its_cancellation() -> None:
    log: list[str] = []

    async def hangs(_message: Message) -> None:
        await asyncio.sleep(3600)

    async def cancels() -> None:
        task = asyncio.ensure_future(surround(handler(hangs), [Told("a", log)])(one()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancels())

    assert log == ["a before 0", "a after 0 CancelledError()"]


def test_middlewares_are_called_for_each_message_of_a_batch() -> None:
    log: list[str] = []
    error = BatchError({1: ValueError()})

    def fails(_messages: list[Message]) -> None:
        raise error

    with pytest.raises(BatchError):
        surround(handler(fails, batch=2), [Told("a", log)])([one(0), one(1)])

    assert log == ["a before 0", "a before 1", f"a after 1 {error!r}", f"a after 0 {error!r}"]


def test_what_a_middleware_raises_is_retried_like_the_handlers_own_failure(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"a", b"1"), (b"b", b"2")])
    calls: list[bytes | None] = []
    awaited: list[bytes | None] = []
    other = new_topic()
    produce(broker.bootstrap_servers, other, [(b"c", b"3")])

    class Fails(Middleware):
        """Fails the first try of each message, after its handler returned."""

        def after(self, message: Message, error: BaseException | None) -> None:
            """Fail it."""
            assert error is None
            if (calls + awaited).count(message.value) == 1:
                raise ConnectionError

    async def keeps(message: Message) -> None:
        await asyncio.sleep(0)
        awaited.append(message.value)

    policy = retry(attempts=3, wait=tenacity.wait_fixed(0.02))
    handlers = {
        topic: handler(lambda message: calls.append(message.value), retry_policy=policy),
        other: handler(keeps, retry_policy=policy),
    }
    with consumer_of(broker, handlers, middlewares=[Fails()]) as consumer:
        wait_until(lambda: consumer.statistics().handled == 3)
        statistics = consumer.statistics()

    assert sorted(value or b"" for value in calls) == [b"1", b"1", b"2", b"2"]
    assert awaited == [b"3", b"3"]
    assert (statistics.failed, statistics.retried) == (3, 3)


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


def test_what_is_no_middleware_and_what_makes_no_resource_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="but one is a type"):
        App("app", bootstrap_servers="unused:1", middlewares=[Middleware])  # type: ignore[list-item] # that is what is tested
    with pytest.raises(ConfigurationError, match="worker_resource takes a function with one `yield`"):
        App("app", bootstrap_servers="unused:1").worker_resource(lambda: iter(()))  # type: ignore[arg-type,return-value] # as above


def test_hooks_are_not_called_for_what_the_filter_refuses() -> None:
    log: list[str] = []
    stepped = SteppedEngine({"t": handler(lambda _: None, filter=lambda message: message.offset > 0)}, [Told("a", log)])

    stepped.feed("t", (b"k", b"0"), (b"k", b"1"))
    stepped.serve()

    assert log == ["a before 1", "a after 1 None"]
