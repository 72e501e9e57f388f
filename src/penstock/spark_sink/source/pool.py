"""`WorkerPool` keeps clients of a Spark Python worker from one task to the next, so that tasks need not connect again.

A client is lent to one task at a time. Their number is bounded, and a forked process never uses them. A client is
closed if its task fails or is cancelled, and at the end of the process: Spark ends a worker after a minute without a
task.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

#: Most clients of a kind that a process keeps.
MOST_KEPT = 4


class Kept(Protocol):
    """An object that a pool may keep."""

    def release(self) -> bool:
        """Release the task's resources; return whether another task may use it."""

    def close(self) -> None:
        """Close it."""


KeptT = TypeVar("KeptT", bound=Kept)


class WorkerPool(Generic[KeptT]):
    """Keeps objects of one kind by key. Any thread may use it; a forked process begins with an empty pool."""

    def __init__(self) -> None:
        #: Guards `_idle`: tasks take and return objects, the end of the process closes them.
        self._lock = threading.Lock()
        #: Idle objects with their keys, which may contain secrets; the longest idle first.
        self._idle: list[tuple[object, KeptT]] = []
        #: Objects of the parent process. Their threads do not exist here, so they are never used.
        self._of_parent: list[tuple[object, KeptT]] = []
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._leave_to_parent)

    @contextmanager
    def lend(self, key: object, make: Callable[[], KeptT]) -> Iterator[KeptT]:
        """Lend a kept object, or a new one. It is closed if the task raises or is cancelled."""
        with self._lock:
            found = next((entry for entry in reversed(self._idle) if entry[0] == key), None)
            if found is not None:
                self._idle.remove(found)
        lent = make() if found is None else found[1]
        closing = lent
        try:
            yield lent
            if lent.release():
                with self._lock:
                    self._idle.append((key, lent))
                    if len(self._idle) <= MOST_KEPT:
                        return
                    closing = self._idle.pop(0)[1]
        except BaseException:
            lent.close()
            raise
        closing.close()

    def close(self) -> None:
        """Close all kept objects."""
        with self._lock:
            closing, self._idle = self._idle, []
        for _, kept in closing:
            kept.close()

    def _leave_to_parent(self) -> None:
        # Another thread of the parent may hold the old lock.
        self._lock = threading.Lock()
        self._of_parent, self._idle = self._idle, []
