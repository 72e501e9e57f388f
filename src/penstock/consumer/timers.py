"""Timers: callbacks in the order of their times. The poll thread calls the due ones; no thread sleeps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

from sortedcontainers import SortedDict

#: The handle of a callback: the due time, and a number that distinguishes timers of one time.
Timer = tuple[float, int]


class Timers:
    """Any thread adds and cancels timers; the poll thread calls the due ones."""

    def __init__(self) -> None:
        # Guards the fields below.
        self._lock = threading.Lock()
        self._numbers = count()
        self._waiting: SortedDict[Timer, Callable[[], object]] = SortedDict()

    def add(self, due: float, call: Callable[[], object]) -> Timer:
        """Call `call` at the time `due` of the engine's clock, or soon after it."""
        timer = (due, next(self._numbers))
        with self._lock:
            self._waiting[timer] = call
        return timer

    def cancel(self, timer: Timer) -> None:
        """Cancel a timer, unless it was called or is being called. May be repeated."""
        with self._lock:
            self._waiting.pop(timer, None)

    def serve(self, now: float) -> None:
        """Call the due timers, the earliest first."""
        due = []
        with self._lock:
            while self._waiting and self._waiting.peekitem(0)[0][0] <= now:
                due.append(self._waiting.popitem(0)[1])
        for call in due:
            call()

    def next_due(self) -> float | None:
        """Return the time of the earliest timer, or None."""
        with self._lock:
            return self._waiting.peekitem(0)[0][0] if self._waiting else None
