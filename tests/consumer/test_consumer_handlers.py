"""Functions that may be handlers, and where they run; others are refused before anything starts."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from penstock.consumer import Kind, handler
from penstock.errors import ConfigurationError
from penstock.message import Message


async def coroutine(message: Message) -> None:
    """Do nothing, on the loop."""


def yields(message: Message) -> Iterator[None]:
    """Yield, on a thread."""
    yield


async def yields_later(message: Message) -> AsyncIterator[None]:
    """Yield, on the loop."""
    yield


class AsyncCalled:
    """An object that is awaited."""

    async def __call__(self, message: Message) -> None:
        """Do nothing, on the loop."""

    async def method(self, message: Message) -> None:
        """Do nothing, on the loop."""


class Called:
    """An object that is called."""

    def __call__(self, message: Message) -> None:
        """Do nothing, on a thread."""


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (coroutine, Kind.TASK),
        (AsyncCalled(), Kind.TASK),
        (AsyncCalled().method, Kind.TASK),
        (functools.partial(coroutine), Kind.TASK),
        (functools.partial(AsyncCalled()), Kind.TASK),
        (functools.partial(functools.partial(AsyncCalled().method)), Kind.TASK),
        (yields_later, Kind.TASK),
        (yields, Kind.THREAD),
        (functools.partial(yields), Kind.THREAD),
        (print, Kind.THREAD),
        (Called(), Kind.THREAD),
        (functools.partial(Called()), Kind.THREAD),
        ([].append, Kind.THREAD),
        (Message, Kind.THREAD),
    ],
    ids=lambda one: type(one).__name__,
)
def test_whatever_is_awaited_runs_on_the_loop_and_all_else_on_threads(
    function: Callable[..., object], kind: Kind
) -> None:
    assert handler(function).kind is kind


@pytest.mark.parametrize("option", ["filter", "decoder", "key"])
def test_what_must_answer_at_once_is_no_async_function(option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{option} is an `async def`"):
        handler(print, **{option: coroutine})  # type: ignore[arg-type] # that is what is tested
