"""Lifespans: generator functions around an app or a task. They run to their `yield` first, and from there on last."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from typing import Any

from penstock.errors import ConfigurationError

Lifespan = Callable[[], Generator[None, Any, Any]] | Callable[[], AsyncGenerator[None, Any]]
#: Runs something on the event loop of the `async def` handlers, and returns when it has ended.
RunAsync = Callable[[Awaitable[Any]], object]


def enter(lifespan: Lifespan, around: ExitStack, run_async: RunAsync | None) -> None:
    """Run a lifespan up to its `yield`, and have `around`, which ends with the app or the task, run the rest.

    Raises `ConfigurationError` for an async one where `run_async` is None: there is no event loop.
    """
    # Its end is a callback, not a context: what one raises there is no reason for those before it not to come to
    # theirs, and none of them is told of it.
    if inspect.isasyncgenfunction(lifespan):
        if run_async is None:
            raise ConfigurationError("an async lifespan needs an `async def` handler, whose event loop it runs on")
        run = run_async
        manager = asynccontextmanager(lifespan)()
        run(manager.__aenter__())
        around.callback(lambda: run(manager.__aexit__(None, None, None)))
        return
    span: AbstractContextManager[None] = contextmanager(lifespan)()  # type: ignore[arg-type] # asked just above
    span.__enter__()
    around.callback(span.__exit__, None, None, None)
