"""What a user's function is: its name, whether it is to be awaited, and what it can be called with."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from penstock.errors import ConfigurationError

_PARAMETERS = {1: "one parameter", 2: "two parameters"}


def called_by(function: Callable[..., object]) -> Callable[..., object]:
    """Return the function or method that runs when this is called."""
    while isinstance(function, functools.partial):
        function = function.func
    plain = inspect.isroutine(function) or inspect.isclass(function)
    return function if plain else getattr(function, "__call__", function)  # noqa: B004 - the bound method is what is inspected


def is_async(function: Callable[..., object]) -> bool:
    """Tell whether calling this gives something to await."""
    # The first sees what was marked as one without being one.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called_by(function))


def name_of(function: object) -> str:
    """Return a function's name, for logs and reports."""
    return getattr(function, "__qualname__", type(function).__name__)


def is_async_generator(function: Callable[..., object]) -> bool:
    """Tell whether calling this gives an asynchronous generator."""
    return inspect.isasyncgenfunction(called_by(function))


def collected(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns in a list what a generator function yields; another function as it is."""
    if inspect.isgeneratorfunction(called_by(function)):

        @functools.wraps(function)
        def call(*given: object) -> list[object]:
            return list(function(*given))

        return call
    if is_async_generator(function):

        @functools.wraps(function)
        async def await_all(*given: object) -> list[object]:
            return [value async for value in function(*given)]

        return await_all
    return function


def require_parameters(
    kind: str, function: Callable[..., object], what: str, count: int, *, may_yield: bool = False, beside: str = ""
) -> None:
    """Raise `ConfigurationError` unless a function can be called with `count` arguments, and does its work when it is.

    `kind` is what it is for, such as "handler", `what` the arguments, in words, and `beside` what else it may have.
    """
    called = called_by(function)
    if not may_yield and (inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)):
        raise ConfigurationError(f"{kind} {name_of(function)} has a `yield`: called, it would do nothing; take it out")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # of a callable written in C, say: what it takes is seen when it is called
    try:
        signature.bind(*[None] * count)
    except TypeError:
        raise ConfigurationError(
            f"{kind} {name_of(function)}{signature} cannot be called with {what}; give it {_PARAMETERS[count]}"
            f"{beside}, and those beside it defaults"
        ) from None


def require_yield(kind: str, function: Callable[..., object], *, may_be_async: bool = False) -> None:
    """Raise `ConfigurationError` unless a function has a `yield`."""
    if not (inspect.isgeneratorfunction(function) or (may_be_async and inspect.isasyncgenfunction(function))):
        raise ConfigurationError(
            f"{kind} takes a function with one `yield`, but {getattr(function, '__qualname__', function)} is none"
        )
