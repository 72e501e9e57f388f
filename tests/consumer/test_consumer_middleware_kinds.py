"""Which middlewares are refused where they are registered: of the other kind, and what is none."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from noted_middlewares import noted, takes, takes_async

import penstock
from penstock.app import App
from penstock.consumer import CallNext, Middleware, handler
from penstock.errors import ConfigurationError
from penstock.message import Message
from penstock.spark_sink import HandlerSink


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


def test_a_middleware_of_two_forms_says_which_is_of_the_wrong_kind() -> None:
    with pytest.raises(ConfigurationError, match=r"Middleware\(async_=...\) takes an `async def`"):
        Middleware(plain=PLAIN, async_=PLAIN)  # type: ignore[arg-type] # that is what is tested
    with pytest.raises(ConfigurationError, match=r"Middleware\(plain=...\) takes a plain function"):
        Middleware(plain=ASYNC, async_=ASYNC)
