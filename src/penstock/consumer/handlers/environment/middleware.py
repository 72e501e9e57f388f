"""Middlewares: functions around every call of a handler, which may wrap it, await it, or leave it out.

The chain is built once, when a route is made. A handler without middlewares is called as it is.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.consumer.handlers.context import ContextFactory
from penstock.consumer.handlers.functions import is_async, name_of, require_parameters
from penstock.consumer.handlers.handler import Handler, Kind
from penstock.errors import BatchError, ConfigurationError, HandlerTimeLimitError, PenstockError, raised

#: Hands a message, or a list of them, on to the next middleware and at last to the handler; awaited in an `async def`.
CallNext = Callable[[Any], Any]
#: A middleware of plain handlers: a function of a message, or a list, and what hands it on.
PlainMiddleware = Callable[[Any, CallNext], object]
#: One of `async def` handlers, which awaits `call_next`.
AsyncMiddleware = Callable[[Any, CallNext], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Middleware:
    """A middleware in two forms, for an app that has handlers of both kinds.

    Attributes:
        plain: called around plain handlers, as `plain(message, call_next)`.
        async_: awaited around `async def` handlers, as `await async_(message, call_next)`.
    """

    plain: PlainMiddleware
    async_: AsyncMiddleware

    def __post_init__(self) -> None:
        for option, given, wanted in (("plain", self.plain, False), ("async_", self.async_, True)):
            _require_middleware(given)
            if is_async(given) is not wanted:
                form = "an `async def`" if wanted else "a plain function"
                raise ConfigurationError(f"Middleware({option}=...) takes {form}, but {name_of(given)} is none")


#: What a user gives: a function of a message and `call_next`, plain or an `async def`, or both as a `Middleware`.
MiddlewareSpec = PlainMiddleware | AsyncMiddleware | Middleware

Invoke = Callable[..., object]


def middlewares_of(given: Iterable[MiddlewareSpec]) -> tuple[MiddlewareSpec, ...]:
    """Return what a user gave as middlewares; `ConfigurationError` where they cannot be that."""
    if not isinstance(given, Iterable):
        raise ConfigurationError(
            f"middlewares must be a list of functions (message, call_next), but is a {type(given).__name__}"
        )
    several = tuple(given)
    for value in several:
        if not isinstance(value, Middleware):
            _require_middleware(value)
    return several


def _require_middleware(given: Callable[..., object]) -> None:
    if not callable(given) or inspect.isclass(given):
        what = f"the class {given.__name__}" if inspect.isclass(given) else f"a {type(given).__name__}"
        raise ConfigurationError(f"a middleware must be a function (message, call_next), but one is {what}")
    require_parameters("middleware", given, "a message and call_next", 2)


def wrap(handler: Handler, middlewares: Sequence[MiddlewareSpec], contexts: ContextFactory | None = None) -> Invoke:
    """Return the handler's function within the middlewares, the first outermost; the function itself without any.

    One that asks for a context is called with those of `contexts`, which may be left out where nothing is called.
    Raises `ConfigurationError` where a middleware is not of the handler's kind.
    """
    invoke: Invoke = handler.function
    if handler.takes_context and contexts is not None:
        invoke = contexts.around(invoke)
    link = _async_link if handler.kind is Kind.TASK else _plain_link
    for middleware in reversed(middlewares):
        invoke = link(_of_kind(middleware, handler), invoke)
    return invoke


def _of_kind(middleware: MiddlewareSpec, handler: Handler) -> Callable[..., Any]:
    if isinstance(middleware, Middleware):
        return middleware.async_ if handler.kind is Kind.TASK else middleware.plain
    if is_async(middleware) is (handler.kind is Kind.TASK):
        return middleware
    # Not adapted: a plain one would be over before the handler has run, and a worker thread has no event loop.
    forms = ("an `async def`", "a plain function")
    own, other = forms if handler.kind is Kind.TASK else forms[::-1]
    raise ConfigurationError(
        f"handler {handler.name} is {own}, but middleware {name_of(middleware)} is {other}; make it {own} too, or give "
        "both forms as penstock.Middleware(plain=..., async_=...)"
    )


def _plain_link(middleware: PlainMiddleware, inner: Invoke) -> Invoke:
    def call(work: object) -> object:
        result: object = None

        def call_next(given: object) -> object:
            nonlocal result
            try:
                result = inner(given)
            except:  # noqa: E722 - see `raised`; the middleware gets what it can catch
                raise _passed_on(raised(), given, work)  # noqa: B904 - it is what was caught, as a rule
            return result

        returned = middleware(work, call_next)
        # Else a middleware that only looks on would lose the handler's `DeferredCompletion`.
        return result if returned is None else returned

    return call


def _async_link(middleware: AsyncMiddleware, inner: Invoke) -> Invoke:
    async def call(work: object) -> object:
        result: object = None
        begun: list[Coroutine[Any, Any, object]] = []

        async def await_next(given: object) -> object:
            nonlocal result
            try:
                result = await inner(given)  # type: ignore[misc] # an `async def`, or a link around one
            except:  # noqa: E722 - as in `_plain_link`
                raise _passed_on(raised(), given, work)  # noqa: B904 - as above
            return result

        def call_next(given: object) -> Coroutine[Any, Any, object]:
            begun.append(await_next(given))
            return begun[-1]

        returned = await middleware(work, call_next)
        if any(inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED for coroutine in begun):
            for coroutine in begun:
                coroutine.close()
            raise PenstockError(
                f"middleware {name_of(middleware)} did not await call_next, so the handler has not run; write "
                "`await call_next(message)`"
            )
        return result if returned is None else returned

    return call


def cancelled_after(limit_s: float, handler: str, invoke: Invoke) -> Invoke:
    """Return an `async def` that awaits another for so many seconds at most, and then fails the message."""

    async def call(work: object) -> object:
        try:
            async with asyncio.timeout(limit_s) as timer:
                return await invoke(work)  # type: ignore[misc] # an `async def`
        except TimeoutError as error:
            if not timer.expired():  # the handler's own
                raise
            raise HandlerTimeLimitError(f"{handler} was cancelled at its time_limit of {limit_s:g} s") from error

    return call


def _passed_on(error: BaseException, given: object, work: object) -> BaseException:
    """Return what a middleware is to see of a failure further in: a `BatchError` by the places of its own list."""
    if given is work or not isinstance(error, BatchError) or not isinstance(work, list):
        return error
    places = {id(message): place for place, message in enumerate(work)}
    try:
        return BatchError({places[id(given[place])]: why for place, why in error.failed.items()})  # type: ignore[index] # tried
    except (IndexError, KeyError, TypeError):
        # Which of the batch's messages failed is not known, so none counts as done.
        failed = PenstockError("a BatchError names messages that a middleware put into the batch; pass on those it got")
        failed.__cause__ = error
        return failed
