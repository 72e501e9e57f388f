"""Inspection of users' functions: name, kind, parameters; and the `Context` that a handler may take.

A handler gets a `Context` if its second parameter is annotated so. This is found out at registration. Other handlers
are called with the message alone, at no extra cost.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from penstock.errors import ConfigurationError


def called_by(function: Callable[..., object]) -> Callable[..., object]:
    """Return the function or method that runs when a callable is called."""
    while isinstance(function, functools.partial):
        function = function.func
    plain = inspect.isroutine(function) or inspect.isclass(function)
    return function if plain else getattr(function, "__call__", function)  # noqa: B004 - the bound method is inspected


def is_async(function: Callable[..., object]) -> bool:
    """Return whether a call returns an awaitable."""
    # The first check also finds functions marked by `inspect.markcoroutinefunction`.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called_by(function))


def name_of(function: object) -> str:
    """Return a function's name, for logs and reports."""
    return getattr(function, "__qualname__", type(function).__name__)


def is_async_generator(function: Callable[..., object]) -> bool:
    """Return whether a call returns an asynchronous generator."""
    return inspect.isasyncgenfunction(called_by(function))


class Yielded(list[object]):
    """The values of a generator function: several results, even if they are no `Outgoing`."""


def collected(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns a generator function's values as `Yielded`; another function unchanged."""
    if inspect.isgeneratorfunction(called_by(function)):

        @functools.wraps(function)
        def call(*arguments: object) -> Yielded:
            return Yielded(function(*arguments))

        return call
    if is_async_generator(function):

        @functools.wraps(function)
        async def await_all(*arguments: object) -> Yielded:
            return Yielded([value async for value in function(*arguments)])

        return await_all
    return function


def require_parameters(
    kind: str, function: Callable[..., object], what: str, count: int, *, may_yield: bool = False, more: str = ""
) -> None:
    """Raise `ConfigurationError` unless a function takes `count` arguments, and is no generator function.

    For the error text: `kind` is the use, such as "handler", `what` the arguments in words, `more` further options.
    `may_yield` allows a generator function.
    """
    called = called_by(function)
    if not may_yield and (inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)):
        raise ConfigurationError(f"{kind} {name_of(function)} has a `yield`: called, it would do nothing; take it out")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # such as a callable written in C: its parameters show only at the call
    try:
        signature.bind(*[None] * count)
    except TypeError:
        raise ConfigurationError(
            f"{kind} {name_of(function)}{signature} cannot be called with {what}; give it "
            f"{'one parameter' if count == 1 else 'two parameters'}{more}, and further ones with defaults"
        ) from None


def require_yield(kind: str, function: Callable[..., object], *, may_be_async: bool = False) -> None:
    """Raise `ConfigurationError` unless a function has a `yield`."""
    if not (inspect.isgeneratorfunction(function) or (may_be_async and inspect.isasyncgenfunction(function))):
        raise ConfigurationError(
            f"{kind} takes a function with one `yield`, but {getattr(function, '__qualname__', function)} is none"
        )


#: Finds `Context` in an annotation that is text, as after `from __future__ import annotations`.
_BY_NAME = re.compile(r"(?<![\w.])(?:\w+\.)*Context\b")


@dataclass(slots=True, kw_only=True)
class Context:
    """The app and its state, for handlers whose second parameter is annotated `penstock.Context`.

    A running app has one for all calls. Handlers read it. Make one by hand to call a handler in a test.

    Attributes:
        app: the `penstock.App`; None without an app: on a Spark executor, or in a consumer used alone.
        state: the value that the app's lifespan yielded, or None. Set before the first call of a handler.
        group: the consumer group, which is the app's name.
    """

    app: Any = None
    state: Any = None
    group: str = ""


def takes_context(function: Callable[..., object]) -> bool:
    """Return whether the second parameter of a handler is annotated `Context`.

    Raises `ConfigurationError` if another parameter is, because it would get no value.
    """
    found = context_parameters(function)
    if not found:
        return False
    place, wanted = found[0]
    if len(found) > 1 or place != 1 or wanted.kind not in (wanted.POSITIONAL_ONLY, wanted.POSITIONAL_OR_KEYWORD):
        raise ConfigurationError(
            f"handler {name_of(function)} has its Context as {wanted.name!r}, where it gets no value; make it the "
            "second parameter, after the message or the list of messages"
        )
    return True


def context_parameters(function: Callable[..., object]) -> list[tuple[int, inspect.Parameter]]:
    """Return a function's parameters that are annotated `Context`, each with its index."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []  # such as a callable written in C
    known = getattr(inspect.unwrap(called_by(function)), "__globals__", {})
    return [(place, found) for place, found in enumerate(parameters) if _is_context(found.annotation, known)]


def _is_context(annotation: object, known: Mapping[str, object]) -> bool:
    if isinstance(annotation, str):
        # Not evaluated: that fails if another name in it is imported for type checkers only.
        return any(_is_named(name, known) for name in _BY_NAME.findall(annotation))
    return annotation is Context or Context in get_args(annotation)


def _is_named(name: str, known: Mapping[str, object]) -> bool:
    """Return whether a name means penstock's `Context`; other libraries have a `Context` too."""
    first, *others = name.split(".")
    if first not in known:
        return first in ("Context", "penstock")
    return functools.reduce(lambda found, other: getattr(found, other, None), others, known[first]) is Context
