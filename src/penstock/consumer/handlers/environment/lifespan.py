"""Lifespans: generator functions around an app or a task. They run to their `yield` first, and from there on last.

What one of them yields is the state that handlers find in their `Context`.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from typing import Any

from penstock.consumer.handlers.functions import name_of
from penstock.errors import ConfigurationError

Lifespan = Callable[[], Generator[Any, Any, Any]] | Callable[[], AsyncGenerator[Any, Any]]
#: Runs something on the event loop of the `async def` handlers, and returns its result when it has ended.
RunAsync = Callable[[Awaitable[Any]], object]


def enter_all(lifespans: Iterable[Lifespan], around: ExitStack, run_async: RunAsync | None) -> object:
    """Run lifespans up to their `yield`, and have `around`, which ends with the app or the task, run the rest.

    Returns what one of them has yielded; None without. Raises `ConfigurationError` where two have, and for an async one
    where `run_async` is None: there is no event loop.
    """
    state: object = None
    giver = ""
    for lifespan in lifespans:
        given = _enter(lifespan, around, run_async)
        if given is None:
            continue
        if giver:
            raise ConfigurationError(
                f"the lifespans {giver} and {name_of(lifespan)} both yield a state, and handlers have one; let one of "
                "them make all of it"
            )
        state, giver = given, name_of(lifespan)
    return state


def _enter(lifespan: Lifespan, around: ExitStack, run_async: RunAsync | None) -> object:
    # Its end is a callback, not a context: what one raises there is no reason for those before it not to come to
    # theirs, and none of them hears of it.
    if inspect.isasyncgenfunction(lifespan):
        if run_async is None:
            raise ConfigurationError("an async lifespan needs an `async def` handler, whose event loop it runs on")
        run = run_async
        manager = asynccontextmanager(lifespan)()
        state = run(manager.__aenter__())
        around.callback(lambda: run(manager.__aexit__(None, None, None)))
        return state
    span: AbstractContextManager[object] = contextmanager(lifespan)()  # type: ignore[arg-type] # asked just above
    state = span.__enter__()
    around.callback(span.__exit__, None, None, None)
    return state
