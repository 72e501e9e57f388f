"""The environment of handlers: lifespans, middlewares and worker resources.

Lifespans are generator functions around an app or a task. The part before `yield` runs at the start, the rest at the
end. The yielded value of one lifespan is the state in the handlers' `Context`.

Middlewares are functions around every call of a handler. They may wrap it, await it, or leave it out. The chain is
built once, when a route is made. A handler without middlewares is called directly.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import pkgutil
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from penstock.consumer.handlers.functions import Context, is_async, name_of, require_parameters
from penstock.consumer.handlers.handler import Handler, Kind
from penstock.errors import BatchError, ConfigurationError, HandlerTimeLimitError, PenstockError, raised

_log = logging.getLogger(__name__)

Lifespan = Callable[[], Generator[Any, Any, Any]] | Callable[[], AsyncGenerator[Any, Any]]
#: Runs an awaitable on the event loop of the `async def` handlers and returns its result.
RunAsync = Callable[[Awaitable[Any]], object]


def enter_all(lifespans: Iterable[Lifespan], exit_stack: ExitStack, run_async: RunAsync | None) -> object:
    """Run lifespans up to their `yield`; `exit_stack`, which ends with the app or the task, runs the rest.

    Returns the value that one of them yielded, or None. Raises `ConfigurationError` if two yielded a value, or if one
    is async and `run_async` is None, because there is no event loop.
    """
    state: object = None
    owner = ""
    for lifespan in lifespans:
        yielded = _enter(lifespan, exit_stack, run_async)
        if yielded is None:
            continue
        if owner:
            raise ConfigurationError(
                f"the lifespans {owner} and {name_of(lifespan)} both yield a state, but there is only one state; let "
                "one of them yield all of it"
            )
        state, owner = yielded, name_of(lifespan)
    return state


def _enter(lifespan: Lifespan, exit_stack: ExitStack, run_async: RunAsync | None) -> object:
    # The end is a callback, not a context: an error at the end of one lifespan must neither skip the end of the
    # others nor be raised in them.
    if inspect.isasyncgenfunction(lifespan):
        if run_async is None:
            raise ConfigurationError("an async lifespan needs an `async def` handler, whose event loop it runs on")
        run = run_async
        manager = asynccontextmanager(lifespan)()
        state = run(manager.__aenter__())
        exit_stack.callback(lambda: run(manager.__aexit__(None, None, None)))
        return state
    span: AbstractContextManager[object] = contextmanager(lifespan)()  # type: ignore[arg-type] # checked above
    state = span.__enter__()
    exit_stack.callback(span.__exit__, None, None, None)
    return state


ResourceT = TypeVar("ResourceT")


class WorkerResource(Generic[ResourceT]):
    """A resource with one instance per worker: a database session, or a client that is not thread-safe.

    Made by `App.worker_resource`. A worker makes its instance at the first use, and closes it when the worker ends.
    Handlers on the event loop share one instance, made on the loop.
    """

    def __init__(self, make: Callable[[], Generator[ResourceT, Any, Any]]) -> None:
        self._make = contextmanager(make)
        self._local = threading.local()

    def get(self) -> ResourceT:
        """Return this worker's instance.

        Raises:
            Exception: the error of making it, which is then the failure of the message.
        """
        if not hasattr(self._local, "manager"):
            manager: AbstractContextManager[ResourceT] = self._make()
            self._local.value = manager.__enter__()
            self._local.manager = manager
        return cast("ResourceT", self._local.value)

    def close(self) -> None:
        """Close this thread's instance, if it has one. An error is logged."""
        manager: AbstractContextManager[ResourceT] | None = getattr(self._local, "manager", None)
        if manager is None:
            return
        del self._local.manager, self._local.value
        try:
            manager.__exit__(None, None, None)
        except:  # noqa: E722 - see `raised`; an error of the user's code: the worker ends, after its other resources
            _log.error("closing a resource of %s failed", threading.current_thread().name, exc_info=raised())

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object]]:
        """Pickle it for Spark's executors: by name if a module holds it, because handlers there use that object."""
        make: Any = self._make.__wrapped__  # type: ignore[attr-defined] # `contextmanager` keeps it there
        module, name = make.__module__, make.__qualname__
        if module != "__main__" and getattr(sys.modules.get(module), name, None) is self:
            return pkgutil.resolve_name, (f"{module}:{name}",)
        return WorkerResource, (make,)

    def __repr__(self) -> str:
        return f"<WorkerResource {getattr(self._make, '__qualname__', 'resource')}>"


#: Passes a message, or a list of them, to the next middleware or to the handler. An `async def` awaits it.
CallNext = Callable[[Any], Any]
#: A middleware of plain handlers: a function of a message or a list, and of `call_next`.
PlainMiddleware = Callable[[Any, CallNext], object]
#: A middleware of `async def` handlers, which awaits `call_next`.
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


#: A middleware as a user gives it: a plain function or an `async def`, or both forms as a `Middleware`.
MiddlewareSpec = PlainMiddleware | AsyncMiddleware | Middleware

Invoke = Callable[..., object]


def middlewares_of(middlewares: Iterable[MiddlewareSpec]) -> tuple[MiddlewareSpec, ...]:
    """Check a user's middlewares and return them; raise `ConfigurationError` if one cannot be a middleware."""
    if not isinstance(middlewares, Iterable):
        raise ConfigurationError(
            f"middlewares must be a list of functions (message, call_next), but is a {type(middlewares).__name__}"
        )
    checked = tuple(middlewares)
    for middleware in checked:
        forms = (middleware.plain, middleware.async_) if isinstance(middleware, Middleware) else (middleware,)
        for form in forms:
            if not callable(form) or inspect.isclass(form):
                what = f"the class {form.__name__}" if inspect.isclass(form) else f"a {type(form).__name__}"
                raise ConfigurationError(f"a middleware must be a function (message, call_next), but one is {what}")
            require_parameters("middleware", form, "a message and call_next", 2)
    return checked


def wrap(handler: Handler, middlewares: Sequence[MiddlewareSpec], context: Context | None = None) -> Invoke:
    """Return the handler's function within the middlewares, the first outermost; without any, the function itself.

    A handler with a `Context` parameter gets `context`. A caller that only checks the middlewares may leave it out.
    Raises `ConfigurationError` if a middleware is not of the handler's kind.
    """
    function = invoke = handler.function
    if handler.takes_context:
        # For an `async def` too: the call returns its awaitable.
        invoke = lambda work: function(work, context)  # noqa: E731 - needs no name
    link = _async_link if handler.kind is Kind.TASK else _plain_link
    for middleware in reversed(middlewares):
        invoke = link(_of_kind(middleware, handler), invoke)
    return invoke


def _of_kind(middleware: MiddlewareSpec, handler: Handler) -> Callable[..., Any]:
    is_task, form = handler.kind is Kind.TASK, middleware
    if isinstance(form, Middleware):
        form = form.async_ if is_task else form.plain
    if is_async(form) is is_task:
        return form
    # Not adapted: a plain middleware would end before an async handler runs, and a worker thread has no event loop.
    own, other = ("an `async def`", "a plain function") if is_task else ("a plain function", "an `async def`")
    raise ConfigurationError(
        f"handler {handler.name} is {own}, but middleware {name_of(form)} is {other}; make it {own} too, or give both "
        "forms as penstock.Middleware(plain=..., async_=...)"
    )


def _plain_link(middleware: PlainMiddleware, inner: Invoke) -> Invoke:
    def call(work: object) -> object:
        result: object = None

        def call_next(passed: object) -> object:
            nonlocal result
            try:
                result = inner(passed)
            except:  # noqa: E722 - see `raised`; the middleware gets an exception that it can catch
                raise _outer_error(raised(), passed, work)  # noqa: B904 - usually it is the caught error itself
            return result

        returned = middleware(work, call_next)
        # Otherwise a middleware without a `return` would lose the handler's `DeferredCompletion`.
        return result if returned is None else returned

    return call


def _async_link(middleware: AsyncMiddleware, inner: Invoke) -> Invoke:
    async def call(work: object) -> object:
        result: object = None
        begun: list[Coroutine[Any, Any, object]] = []

        async def await_next(passed: object) -> object:
            nonlocal result
            try:
                result = await inner(passed)  # type: ignore[misc] # an `async def`, or a link around one
            except:  # noqa: E722 - as in `_plain_link`
                raise _outer_error(raised(), passed, work)  # noqa: B904 - as above
            return result

        def call_next(passed: object) -> Coroutine[Any, Any, object]:
            begun.append(await_next(passed))
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
    """Return an `async def` that awaits another for at most `limit_s` seconds, and then fails the message."""

    async def call(work: object) -> object:
        try:
            async with asyncio.timeout(limit_s) as timer:
                return await invoke(work)  # type: ignore[misc] # an `async def`
        except TimeoutError as error:
            if not timer.expired():  # a TimeoutError of the handler itself
                raise
            raise HandlerTimeLimitError(f"{handler} was cancelled at its time_limit of {limit_s:g} s") from error

    return call


def _outer_error(error: BaseException, passed: object, work: object) -> BaseException:
    """Return the error that a middleware sees of an inner failure: a `BatchError` gets the indexes of its own list."""
    if passed is work or not isinstance(error, BatchError) or not isinstance(work, list):
        return error
    places = {id(message): place for place, message in enumerate(work)}
    try:
        return BatchError({places[id(passed[place])]: why for place, why in error.failed.items()})  # type: ignore[index] # errors are caught
    except (IndexError, KeyError, TypeError):
        # It is not known which messages of the batch failed, so none counts as done.
        failed = PenstockError("a BatchError names messages that a middleware put into the batch; pass on those it got")
        failed.__cause__ = error
        return failed
