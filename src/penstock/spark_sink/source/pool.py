"""What a Python worker of Spark keeps from one task to the next: clients that each task would have to connect again.

Lent to one task at a time, bounded in number, and never used by a forked process. Closed where a task fails or is given
up, and at the end of the process: Spark ends a worker that has had no task for a minute.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

#: What a process keeps at most, of a kind.
MOST_KEPT = 4


class Kept(Protocol):
    """What may be kept."""

    def release(self) -> bool:
        """Let go of what the task had; tell whether another task may begin with what is left."""

    def close(self) -> None:
        """Close what is open."""


KeptT = TypeVar("KeptT", bound=Kept)


class WorkerPool(Generic[KeptT]):
    """Keeps things of one kind, each by a key. Any thread may use it; a forked process begins with none."""

    def __init__(self) -> None:
        #: Guards `_idle`: tasks borrow and return, the process's end closes.
        self._lock = threading.Lock()
        #: What is kept, by keys that may hold secrets; what has waited longest first.
        self._idle: list[tuple[object, KeptT]] = []
        #: Those of the process that this one was forked from. Their threads are not here, so they are never touched.
        self._of_parent: list[tuple[object, KeptT]] = []
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._leave_to_parent)

    @contextmanager
    def lend(self, key: object, make: Callable[[], KeptT]) -> Iterator[KeptT]:
        """Lend what is kept by a key, or is made; where the task ends by an exception, or is given up, it is closed."""
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
        """Close all that is kept; another task begins with something new."""
        with self._lock:
            closing, self._idle = self._idle, []
        for _, kept in closing:
            kept.close()

    def _leave_to_parent(self) -> None:
        # Another thread of the parent may have held the lock.
        self._lock = threading.Lock()
        self._of_parent, self._idle = self._idle, []
