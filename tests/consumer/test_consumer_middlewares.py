"""Middlewares: what is around a call, in which order, what it may leave out, and what it must not lose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import tenacity
from noted_middlewares import noted
from stepped_engine import SteppedEngine

import penstock
from kafka_tools import produce
from penstock.app import App
from penstock.consumer import CallNext, Middleware, handler, retry
from penstock.consumer.handlers.environment.middleware import wrap
from penstock.devbroker import DevBroker
from penstock.errors import BatchError, PenstockError
from penstock.message import Message
from penstock.testing import TestApp
from support.consumers import NewTopic, consumer_of
from waiting import wait_until


def noted_async(name: str, log: list[str]) -> Callable[[Any, CallNext], Any]:
    """Return the same for `async def` handlers."""

    async def middleware(message: Any, call_next: CallNext) -> object:
        log.append(f"{name} begins")
        try:
            return await call_next(message)
        except BaseException as error:
            log.append(f"{name} sees {error!r}")
            raise
        finally:
            log.append(f"{name} ends")

    return middleware


def one(offset: int = 0, value: bytes = b"x") -> Message:
    return Message.of(value, offset=offset)


def run(call: Callable[..., Any], work: object) -> object:
    """Call it, and await what it gives where that is to be awaited."""

    async def awaits() -> object:
        return await call(work)

    return asyncio.run(awaits()) if asyncio.iscoroutinefunction(call) else call(work)


def both(log: list[str]) -> Middleware:
    return Middleware(plain=noted("a", log), async_=noted_async("a", log))


def test_a_handler_without_middlewares_is_called_as_it_is() -> None:
    def function(_message: Message) -> None: ...

    assert wrap(handler(function), ()) is function


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_the_first_middleware_is_outermost_and_gets_what_the_handler_returned(kind: str) -> None:
    log: list[str] = []

    def plain(_message: Message) -> str:
        log.append("handler")
        return "returned"

    async def awaits(message: Message) -> str:
        await asyncio.sleep(0)
        return plain(message)

    make = noted if kind == "plain" else noted_async
    call = wrap(handler(plain if kind == "plain" else awaits), [make("a", log), make("b", log)])

    assert run(call, one()) == "returned"
    assert log == ["a begins", "b begins", "handler", "b ends", "a ends"]


@pytest.mark.parametrize("kind", [ValueError, SystemExit, StopIteration])
def test_each_middleware_sees_what_the_handler_raised_and_so_does_the_consumer(kind: type[BaseException]) -> None:
    log: list[str] = []
    error = kind("why")

    def fails(_message: Message) -> None:
        raise error

    with pytest.raises(kind) as caught:
        wrap(handler(fails), [noted("a", log), noted("b", log)])(one())

    assert caught.value is error
    assert log[2:] == [f"b sees {error!r}", "b ends", f"a sees {error!r}", "a ends"]


def test_a_middleware_of_an_async_handler_sees_its_cancellation() -> None:
    log: list[str] = []

    async def hangs(_message: Message) -> None:
        await asyncio.sleep(3600)

    async def cancels() -> None:
        task = asyncio.ensure_future(wrap(handler(hangs), [noted_async("a", log)])(one()))  # type: ignore[arg-type] # of a task: a coroutine
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancels())

    assert log == ["a begins", "a sees CancelledError()", "a ends"]


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_middleware_that_does_not_call_the_next_ends_the_message_and_what_is_further_in_is_not_called(
    kind: str,
) -> None:
    seen: list[bytes | None] = []
    inner: list[str] = []

    def leaves_out(message: Message, call_next: CallNext) -> object:
        return None if message.value == b"seen before" else call_next(message)

    async def leaves_out_async(message: Message, call_next: CallNext) -> object:
        return None if message.value == b"seen before" else await call_next(message)

    async def awaits(message: Message) -> None:
        seen.append(message.value)

    middlewares = [Middleware(plain=leaves_out, async_=leaves_out_async), both(inner)]
    app = App("app", bootstrap_servers="memory:0", middlewares=middlewares)
    app.handler("t")(awaits if kind == "async" else lambda message: seen.append(message.value))

    with TestApp(app) as test:
        for value in ("new", "seen before", "newer"):
            test.send("t", value, key="k")
        test.settle()
        test.advance(2)

        assert seen == [b"new", b"newer"]
        assert inner == ["a begins", "a ends"] * 2
        assert test.statistics().handled == 3
        assert test.committed("t") == {0: 3}


def test_a_middleware_may_call_the_next_again_and_swallow_what_it_raised() -> None:
    tries: list[int] = []

    def fails_twice(_message: Message) -> str:
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError
        return "done"

    def again(message: Message, call_next: CallNext) -> object:
        for _ in range(2):
            try:
                return call_next(message)
            except ConnectionError:
                continue
        return call_next(message)

    assert wrap(handler(fails_twice), [again])(one()) == "done"
    assert len(tries) == 3


def test_the_completion_that_a_handler_put_off_outlives_a_middleware_that_returns_nothing() -> None:
    out: list[penstock.DeferredCompletion] = []

    def looks_on(message: Message, call_next: CallNext) -> None:
        call_next(message)

    async def looks_on_async(message: Message, call_next: CallNext) -> None:
        await call_next(message)

    def puts_off(_message: Message) -> penstock.DeferredCompletion:
        out.append(penstock.DeferredCompletion())
        return out[-1]

    async def puts_off_async(message: Message) -> penstock.DeferredCompletion:
        return puts_off(message)

    middlewares = [Middleware(plain=looks_on, async_=looks_on_async)] * 2
    app = App("app", bootstrap_servers="memory:0", middlewares=middlewares)
    app.handler("plain")(puts_off)
    app.handler("async")(puts_off_async)

    with TestApp(app) as test:
        test.send("plain", "1")
        test.send("async", "2")
        test.settle()
        assert (test.statistics().deferred, test.statistics().handled) == (2, 0)
        for completion in out:
            completion.complete()
        test.settle()
        assert test.statistics().handled == 2


def test_a_middleware_that_forgets_to_await_fails_its_message_and_loses_none() -> None:
    seen: list[bytes | None] = []

    async def forgets(message: Message, call_next: CallNext) -> None:
        call_next(message)

    async def takes(message: Message) -> None:
        seen.append(message.value)

    app = App("app", bootstrap_servers="memory:0", middlewares=[noted_async("a", []), forgets])
    app.handler("t", retry=retry(attempts=1))(takes)

    with TestApp(app) as test:
        test.send("t", "1")
        with pytest.raises(PenstockError, match="failed t") as stopped:
            test.settle()

    assert "forgets did not await call_next, so the handler has not run" in str(stopped.value.__cause__)
    assert seen == []
    assert test.committed("t").get(0, 0) == 0


def test_a_middleware_of_a_batch_handler_gets_the_batch() -> None:
    log: list[object] = []

    def notes(messages: list[Message], call_next: CallNext) -> object:
        log.append([message.offset for message in messages])
        return call_next(messages)

    stepped = SteppedEngine({"t": handler(lambda _: None, batch=3)}, [notes])
    stepped.feed("t", *((b"k", b"%d" % i) for i in range(5)))
    stepped.serve()

    assert log == [[0, 1, 2], [3, 4]]
    assert stepped.count("handled") == 5


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_of_a_batch_of_which_a_middleware_passes_on_a_part_the_messages_that_failed_are_the_right_ones(
    kind: str,
) -> None:
    calls: list[list[bytes | None]] = []

    def part(messages: list[Message]) -> list[Message]:
        return [message for message in messages if message.value != b"0"]

    def plain(messages: list[Message], call_next: CallNext) -> object:
        return call_next(part(messages))

    async def awaits(messages: list[Message], call_next: CallNext) -> object:
        return await call_next(part(messages))

    def takes(messages: list[Message]) -> None:
        values = [message.value for message in messages]
        calls.append(values)
        if b"2" in values and len(calls) == 1:
            raise BatchError({values.index(b"2"): ValueError()})

    async def takes_async(messages: list[Message]) -> None:
        takes(messages)

    app = App("app", bootstrap_servers="memory:0", middlewares=[Middleware(plain=plain, async_=awaits)] * 2)
    policy = retry(attempts=3, wait=tenacity.wait_fixed(1))
    app.handler("t", batch=10, linger=0.5, retry=policy)(takes if kind == "plain" else takes_async)

    with TestApp(app) as test:
        for number in range(4):
            test.send("t", str(number), key="k")
        test.advance(5)

        assert calls == [[b"1", b"2", b"3"], [b"2"], [b"3"]]
        assert test.statistics().handled == 4


def test_a_batch_whose_failures_name_messages_of_the_middleware_fails_whole() -> None:
    def fails(_messages: list[Message]) -> None:
        raise BatchError({0: ValueError()})

    call = wrap(handler(fails, batch=2), [lambda _messages, call_next: call_next([one(9)])])

    with pytest.raises(PenstockError, match="names messages that a middleware put into the batch"):
        call([one(0), one(1)])


def test_what_a_middleware_raises_is_retried_like_the_handlers_own_failure(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic, other = new_topic(), new_topic()
    produce(broker.bootstrap_servers, topic, [(b"a", b"1"), (b"b", b"2")])
    produce(broker.bootstrap_servers, other, [(b"c", b"3")])
    calls: list[bytes | None] = []
    awaited: list[bytes | None] = []

    def fail_first(message: Message) -> None:
        if (calls + awaited).count(message.value) == 1:
            raise ConnectionError

    def fails(message: Message, call_next: CallNext) -> None:
        call_next(message)
        fail_first(message)

    async def fails_async(message: Message, call_next: CallNext) -> None:
        await call_next(message)
        fail_first(message)

    async def keeps(message: Message) -> None:
        await asyncio.sleep(0)
        awaited.append(message.value)

    policy = retry(attempts=3, wait=tenacity.wait_fixed(0.02))
    handlers = {
        topic: handler(lambda message: calls.append(message.value), retry_policy=policy),
        other: handler(keeps, retry_policy=policy),
    }
    with consumer_of(broker, handlers, middlewares=[Middleware(plain=fails, async_=fails_async)]) as consumer:
        wait_until(lambda: consumer.statistics().handled == 3)
        statistics = consumer.statistics()

    assert sorted(value or b"" for value in calls) == [b"1", b"1", b"2", b"2"]
    assert awaited == [b"3", b"3"]
    assert (statistics.failed, statistics.retried) == (3, 3)


def test_middlewares_are_not_called_for_what_the_filter_refuses() -> None:
    log: list[str] = []
    one_handler = handler(lambda _: None, filter=lambda message: message.offset > 0)
    stepped = SteppedEngine({"t": one_handler}, [noted("a", log)])

    stepped.feed("t", (b"k", b"0"), (b"k", b"1"))
    stepped.serve()

    assert log == ["a begins", "a ends"]
