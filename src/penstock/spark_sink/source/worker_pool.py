"""What a process of Spark keeps from one task or batch to the next: connections that would be made again for each.

Lent to one task at a time, bounded in number and in age, and never used by a process that was forked since. Closed
where a task fails or is given up, and at the end of the process.
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


@dataclass(frozen=True, slots=True)
class _Idle(Generic[KeptT]):
    key: Hashable = field(repr=False)  # it may hold secrets
    kept: KeptT
    made_at: float
    since: float


class WorkerPool(Generic[KeptT]):
    """Keeps things of one kind, each by a key. Any thread may use it; a forked process begins with none.

    `most` are kept at most; of 0 none is. What is too old is closed when something is lent, and in a process that lives
    on without, such as Spark's driver, by a timer: with `closes_idle`.
    """

    def __init__(
        self, most: int = MOST_KEPT, clock: Callable[[], float] = time.monotonic, *, closes_idle: bool = False
    ) -> None:
        self._most = most
        self._clock = clock
        self._closes_idle = closes_idle
        #: Guards what follows: tasks borrow and return, the process's end closes.
        self._lock = threading.Lock()
        self._idle: list[_Idle[KeptT]] = []
        self._process = os.getpid()
        self._timer: threading.Timer | None = None
        #: Those of the process that this one was forked from. Their threads are not here, so they are never touched.
        self._of_parent: list[_Idle[KeptT]] = []

    @contextmanager
    def lend(self, key: Hashable, make: Callable[[], KeptT]) -> Iterator[KeptT]:
        """Lend what is kept by a key, or is made; where the task ends by an exception, or is given up, it is closed."""
        now = self._clock()
        found = self._taken(key, now)
        lent, made_at = (make(), now) if found is None else (found.kept, found.made_at)
        is_returned = False
        try:
            yield lent
            is_returned = self._most > 0 and lent.release() and self._returned(key, lent, made_at)
        finally:
            if not is_returned:
                lent.close()

    def close(self) -> None:
        """Close all that is kept; another task begins with something new."""
        with self._lock:
            self._leave_to_parent()
            idle, self._idle = self._idle, []
        for one in idle:
            one.kept.close()

    def _taken(self, key: Hashable, now: float) -> _Idle[KeptT] | None:
        """Return what was returned last by this key, which is kept no longer; close what is too old."""
        self._close_old(now)
        with self._lock:
            found = next((one for one in reversed(self._idle) if one.key == key), None)
            if found is not None:
                self._idle.remove(found)
        return found

    def _close_old(self, now: float) -> None:
        with self._lock:
            self._leave_to_parent()
            old = [one for one in self._idle if self._is_old(one, now)]
            self._idle = [one for one in self._idle if not self._is_old(one, now)]
        for one in old:
            one.kept.close()

    def _returned(self, key: Hashable, kept: KeptT, made_at: float) -> bool:
        """Keep something, and close what has waited longest where there is too much."""
        with self._lock:
            if self._process != os.getpid():
                return False  # the task itself has forked
            if not self._idle:
                atexit.unregister(self.close)
                atexit.register(self.close)
            self._idle.append(_Idle(key, kept, made_at, self._clock()))
            surplus = self._idle[: -self._most]
            self._idle = self._idle[-self._most :]
            if self._closes_idle:
                self._restart_timer()
        for one in surplus:
            one.kept.close()
        return True

    def _restart_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(MOST_IDLE_S, lambda: self._close_old(self._clock()))
        self._timer.daemon = True
        self._timer.start()

    @staticmethod
    def _is_old(one: _Idle[KeptT], now: float) -> bool:
        return now - one.made_at > MOST_AGE_S or now - one.since > MOST_IDLE_S

    def _leave_to_parent(self) -> None:
        if self._process != os.getpid():
            self._of_parent += self._idle
            self._idle = []
            self._process = os.getpid()
