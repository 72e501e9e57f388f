"""Middlewares: their order around a call, what they may leave out, and what they must not lose."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import tenacity

import penstock
from penstock.app import App
from penstock.consumer import CallNext, Middleware, handler, retry
from penstock.consumer.handlers.environment import wrap
from penstock.errors import BatchError, ConfigurationError, PenstockError
from penstock.message import Message
from penstock.spark_sink import HandlerSink
from penstock.testing import TestApp
from support.consumers import app_of


def noted(name: str, log: list[str]) -> Callable[[Any, CallNext], object]:
    """Return a middleware that writes down when it begins and how it ends."""

    def middleware(message: Any, call_next: CallNext) -> object:
        log.append(f"{name} begins")
        try:
            return call_next(message)
        except BaseException as error:
            log.append(f"{name} sees {error!r}")
            raise
        finally:
            log.append(f"{name} ends")

    return middleware


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
    """Call it, and await an awaitable result."""

    async def awaits() -> object:
        return await call(work)

    return asyncio.run(awaits()) if asyncio.iscoroutinefunction(call) else call(work)


def both(log: list[str]) -> Middleware:
    return Middleware(plain=noted("a", log), async_=noted_async("a", log))


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
    app = app_of(middlewares=middlewares)
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


def test_a_middleware_that_forgets_to_await_fails_its_message_and_loses_none() -> None:
    seen: list[bytes | None] = []

    async def forgets(message: Message, call_next: CallNext) -> None:
        call_next(message)

    async def takes(message: Message) -> None:
        seen.append(message.value)

    app = app_of(middlewares=[noted_async("a", []), forgets])
    app.handler("t", retry=retry(attempts=1))(takes)

    with TestApp(app) as test:
        test.send("t", "1")
        with pytest.raises(PenstockError, match="failed t") as stopped:
            test.settle()

    assert "forgets did not await call_next, so the handler has not run" in str(stopped.value.__cause__)
    assert seen == []
    assert test.committed("t").get(0, 0) == 0


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_the_right_messages_fail_if_a_middleware_passes_on_a_part_of_a_batch(
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

    app = app_of(middlewares=[Middleware(plain=plain, async_=awaits)] * 2)
    policy = retry(attempts=3, wait=tenacity.wait_fixed(1))
    app.handler("t", batch=10, linger=0.5, retry=policy)(takes if kind == "plain" else takes_async)

    with TestApp(app) as test:
        for number in range(4):
            test.send("t", str(number), key="k")
        test.advance(5)

        assert calls == [[b"1", b"2", b"3"], [b"2"], [b"3"]]
        assert test.statistics().handled == 4


async def takes_async(_message: Message) -> None: ...


def takes(_message: Message) -> None: ...


class Callable2:
    """A middleware that is an object."""

    async def __call__(self, message: Message, call_next: CallNext) -> object:
        """Pass it on."""
        return await call_next(message)


PLAIN, ASYNC = noted("a", []), Callable2()


@pytest.mark.parametrize(
    ("middleware", "function", "sentence"),
    [
        (PLAIN, takes_async, "takes_async is an `async def`, but middleware .*middleware is a plain function; make it"),
        (ASYNC, takes, "takes is a plain function, but middleware Callable2 is an `async def`; make it a plain"),
        (functools.partial(ASYNC), takes, "takes is a plain function, but middleware"),
    ],
)
def test_a_middleware_of_the_other_kind_is_refused_where_the_handler_is_registered(
    middleware: Any, function: Callable[..., Any], sentence: str
) -> None:
    app = App("app", bootstrap_servers="unused:1", middlewares=[middleware])

    with pytest.raises(ConfigurationError, match=sentence):
        app.handler("t")(function)
    assert app.handlers == {}
    with pytest.raises(ConfigurationError, match=sentence):
        penstock.LitePushConsumer("g", {"t": handler(function)}, bootstrap_servers="x:1", middlewares=[middleware])
    with pytest.raises(ConfigurationError, match=sentence):
        HandlerSink({"t": handler(function)}, group="g", parallelism=1, middlewares=[middleware])


def yields(_message: Message, call_next: CallNext) -> Iterator[object]:
    yield call_next


async def yields_async(_message: Message, call_next: CallNext) -> AsyncIterator[object]:
    yield call_next


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (PLAIN, "middlewares must be a list of functions .*, but is a function"),
        ([7], "a middleware must be a function .*, but one is a int"),
        ([Callable2], "a middleware must be a function .*, but one is the class Callable2"),
        ([takes], r"middleware takes.* cannot be called with a message and call_next"),
        ([yields], "middleware yields has a `yield`"),
        ([yields_async], "middleware yields_async has a `yield`"),
    ],
)
def test_what_is_no_middleware_is_refused(given: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        App("app", bootstrap_servers="unused:1", middlewares=given)
