"""`WorkerResource`: what each worker has one of."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeVar, cast

_log = logging.getLogger(__name__)

ResourceT = TypeVar("ResourceT")


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
        return f"<WorkerResource {getattr(self._make, '__qualname__', 'resource')}>"
