"""What is put around handlers: middlewares, and resources that belong to a worker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeVar, cast

from penstock.consumer.handlers.handler import Handler, Kind
from penstock.consumer.handlers.route import Invoke
from penstock.errors import ConfigurationError, raised
from penstock.message import Message

_log = logging.getLogger(__name__)

ResourceT = TypeVar("ResourceT")


class Middleware:
    """Hooks around every call of a handler. Subclass it and override what you need.

    The hooks run where the handler runs: on its worker thread, or on the event loop, where they must not wait. What
    they raise counts as the handler's failure. With a batch they are called once for each of its messages.
    """

    def before(self, message: Message) -> None:
        """Be told that a message is about to be handled."""

    def after(self, message: Message, error: BaseException | None) -> None:
        """Be told how it ended: None, or what the handler raised. Called in reverse order of the middlewares.

        One is called for each `before` that was, also where that raised; what one raises, those further out are told.
        """


def middlewares_of(given: Iterable[Middleware]) -> tuple[Middleware, ...]:
    """Return what a user gave as middlewares, or raise `ConfigurationError`."""
    several = tuple(given) if isinstance(given, Iterable) else None
    if several is None or not all(isinstance(one, Middleware) for one in several):
        wrong = next((one for one in several or () if not isinstance(one, Middleware)), given)
        raise ConfigurationError(
            "middlewares must be a list of objects of a subclass of penstock.Middleware, but "
            f"{'it' if several is None else 'one'} is a {type(wrong).__name__}"
        )
    return several


def surround(handler: Handler, middlewares: Sequence[Middleware]) -> Invoke:
    """Return the handler's function within the middlewares' hooks; the function itself where there are none."""
    function = handler.function
    if not middlewares:
        return function

    if handler.kind is Kind.TASK:

        async def call_async(work: Message | list[Message]) -> object:
            with _hooks(middlewares, work):
                return await cast("Awaitable[object]", function(work))

        return call_async

    def call(work: Message | list[Message]) -> object:
        with _hooks(middlewares, work):
            return function(work)

    return call


@contextmanager
def _hooks(middlewares: Sequence[Middleware], work: Message | list[Message]) -> Iterator[None]:
    messages = work if isinstance(work, list) else [work]
    # What began is told of its end, also where a later hook fails.
    begun: list[tuple[Middleware, Message]] = []
    error: BaseException | None = None
    try:
        for middleware in middlewares:
            for message in messages:
                begun.append((middleware, message))
                middleware.before(message)
        yield
    except:  # noqa: E722 - see `raised`; it is raised again below
        error = raised()
    for middleware, message in reversed(begun):
        try:
            middleware.after(message, error)
        except:  # noqa: E722 - the same; those further out are told of it
            error = raised()
    if error is not None:
        raise error


class WorkerResource(Generic[ResourceT]):
    """Something each worker has one of: a database session, a client that is not thread-safe.

    Made by `App.worker_resource`. It is made on a worker at its first use there, and closed by the same worker when it
    ends. Handlers on the event loop share one, made on the loop.
    """

    def __init__(self, make: Callable[[], Generator[ResourceT, Any, Any]]) -> None:
        self._make = contextmanager(make)
        self._local = threading.local()

    def get(self) -> ResourceT:
        """Return this worker's own.

        Raises:
            Exception: what making it raised; the message that needed it fails with it.
        """
        if not hasattr(self._local, "manager"):
            manager: AbstractContextManager[ResourceT] = self._make()
            self._local.value = manager.__enter__()
            self._local.manager = manager
        return cast("ResourceT", self._local.value)

    def close(self) -> None:
        """Close this thread's own, if it has one. What that raises is logged."""
        manager: AbstractContextManager[ResourceT] | None = getattr(self._local, "manager", None)
        if manager is None:
            return
        del self._local.manager, self._local.value
        try:
            manager.__exit__(None, None, None)
        except Exception:  # noqa: BLE001 - the user's code; the worker ends all the same
            _log.exception("closing a resource of %s failed", threading.current_thread().name)

    def __repr__(self) -> str:
        """Name it."""
        return f"<WorkerResource {getattr(self._make, '__qualname__', 'resource')}>"


__all__ = ["Middleware", "WorkerResource", "middlewares_of", "surround"]
