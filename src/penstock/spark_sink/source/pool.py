"""What a Python worker of Spark keeps from one task to the next: clients that each task would have to connect again.

Lent to one task at a time, bounded in number and in age, and never used by a forked process. Closed where a task fails
or is given up, and at the end of the process.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

#: What a process keeps at most, of a kind, and for how many seconds: from when it was made, and from its last task.
#: Spark itself ends a worker that has had no task for a minute.
MOST_KEPT = 4
MOST_AGE_S = 300.0
MOST_IDLE_S = 60.0


class Kept(Protocol):
    """What may be kept."""

    def release(self) -> bool:
        """Let go of what the task had; tell whether another task may begin with what is left."""

    def close(self) -> None:
        """Close what is open."""


KeptT = TypeVar("KeptT", bound=Kept)


@dataclass(frozen=True, slots=True, eq=False)
class _Idle(Generic[KeptT]):
    key: Hashable = field(repr=False)  # it may hold secrets
    kept: KeptT
    made_at: float
    until: float


class WorkerPool(Generic[KeptT]):
    """Keeps things of one kind, each by a key. Any thread may use it; a forked process begins with none.

    `most` are kept at most; of 0 none is. What is too old is closed when something is lent.
    """

    def __init__(self, most: int = MOST_KEPT, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        #: Guards `_idle`: tasks borrow and return, the process's end closes.
        self._lock = threading.Lock()
        self._idle: list[_Idle[KeptT]] = []
        #: Those of the process that this one was forked from. Their threads are not here, so they are never touched.
        self._of_parent: list[_Idle[KeptT]] = []
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._leave_to_parent)

    @contextmanager
    def lend(self, key: Hashable, make: Callable[[], KeptT]) -> Iterator[KeptT]:
        """Lend what is kept by a key, or is made; where the task ends by an exception, or is given up, it is closed."""
        self._sweep()
        with self._lock:
            found = next((entry for entry in reversed(self._idle) if entry.key == key), None)
            if found is not None:
                self._idle.remove(found)
        lent, made_at = (make(), self._clock()) if found is None else (found.kept, found.made_at)
        is_released = False
        try:
            yield lent
            is_released = lent.release()
        finally:
            if is_released:
                until = min(made_at + MOST_AGE_S, self._clock() + MOST_IDLE_S)
                with self._lock:
                    self._idle.append(_Idle(key, lent, made_at, until))
                self._sweep()
            else:
                lent.close()

    def close(self) -> None:
        """Close all that is kept; another task begins with something new."""
        self._sweep(0)

    def _sweep(self, most: int | None = None) -> None:
        """Close what is too old, and what has waited longest where there is too much."""
        now = self._clock()
        with self._lock:
            young = [entry for entry in self._idle if entry.until >= now]
            kept = young[max(0, len(young) - (self._most if most is None else most)) :]
            closing, self._idle = [entry for entry in self._idle if entry not in kept], kept
        for entry in closing:
            entry.kept.close()

    def _leave_to_parent(self) -> None:
        # Another thread of the parent may have held the lock.
        self._lock = threading.Lock()
        self._of_parent, self._idle = self._idle, []
