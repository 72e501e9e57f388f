"""What a user's function is: its name, whether it is to be awaited, what it can be called with, and its `Context`.

A handler may be given a `Context` with its message, asked for by the annotation of its second parameter. Which handlers
take one is found out when they are registered. The others are called as if there were no such thing.
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
    kind: str, function: Callable[..., object], what: str, count: int, *, may_yield: bool = False, more: str = ""
) -> None:
    """Raise `ConfigurationError` unless a function can be called with `count` arguments, and does its work when it is.

    `kind` is what it is for, such as "handler", `what` the arguments, in words, and `more` what else it may have.
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
            f"{kind} {name_of(function)}{signature} cannot be called with {what}; give it "
            f"{'one parameter' if count == 1 else 'two parameters'}{more}, and further ones with defaults"
        ) from None


def require_yield(kind: str, function: Callable[..., object], *, may_be_async: bool = False) -> None:
    """Raise `ConfigurationError` unless a function has a `yield`."""
    if not (inspect.isgeneratorfunction(function) or (may_be_async and inspect.isasyncgenfunction(function))):
        raise ConfigurationError(
            f"{kind} takes a function with one `yield`, but {getattr(function, '__qualname__', function)} is none"
        )


#: What an annotation that is text has: as behind `from __future__ import annotations`.
_BY_NAME = re.compile(r"(?<![\w.])(?:\w+\.)*Context\b")


@dataclass(slots=True, kw_only=True)
class Context:
    """What surrounds the calls of handlers. Given to those whose second parameter is annotated `penstock.Context`.

    A running app has one for all calls. Handlers read it. Make one by hand to call a handler in a test.

    Attributes:
        app: the `penstock.App`; None where there is none: on a Spark executor, or in a consumer of its own.
        state: what the app's lifespan gave by its `yield`; None without. Set before the first handler is called.
        group: the consumer group, which is the app's name.
    """

    app: Any = None
    state: Any = None
    group: str = ""


def takes_context(function: Callable[..., object]) -> bool:
    """Tell whether the second parameter of a handler is annotated `Context`.

    Raises `ConfigurationError` where another parameter is, which nobody would fill.
    """
    found = context_parameters(function)
    if not found:
        return False
    place, wanted = found[0]
    if len(found) > 1 or place != 1 or wanted.kind not in (wanted.POSITIONAL_ONLY, wanted.POSITIONAL_OR_KEYWORD):
        raise ConfigurationError(
            f"handler {name_of(function)} has its Context as {wanted.name!r}, where nobody gives it one; make it the "
            "second parameter, behind the message or the list of messages"
        )
    return True


def context_parameters(function: Callable[..., object]) -> list[tuple[int, inspect.Parameter]]:
    """Return a function's parameters that are annotated `Context`, each with its place."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []  # of a callable written in C, say
    known = getattr(inspect.unwrap(called_by(function)), "__globals__", {})
    return [(place, found) for place, found in enumerate(parameters) if _is_context(found.annotation, known)]


def _is_context(annotation: object, known: Mapping[str, object]) -> bool:
    if isinstance(annotation, str):
        # Not evaluated: that fails where something else in it is imported for type checkers only.
        return any(_is_named(name, known) for name in _BY_NAME.findall(annotation))
    return annotation is Context or Context in get_args(annotation)


def _is_named(name: str, known: Mapping[str, object]) -> bool:
    """Tell whether a name is that of `Context`; other libraries have one too."""
    first, *others = name.split(".")
    if first not in known:
        return first in ("Context", "penstock")
    return functools.reduce(lambda found, other: getattr(found, other, None), others, known[first]) is Context
