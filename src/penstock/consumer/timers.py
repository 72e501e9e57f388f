"""Timers: callbacks in the order of their times. The poll thread calls what is due; no thread sleeps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

from sortedcontainers import SortedDict

#: What a callback is cancelled by: when it is due, and a number that tells those of one time apart.
Timer = tuple[float, int]


class Timers:
    """Any thread adds and cancels, the poll thread calls what is due."""

    def __init__(self) -> None:
        # Guards the fields below.
        self._lock = threading.Lock()
        self._numbers = count()
        self._waiting: SortedDict[Timer, Callable[[], object]] = SortedDict()

    def add(self, due: float, call: Callable[[], object]) -> Timer:
        """Have something called at `due`, on the engine's clock, or soon after it."""
        timer = (due, next(self._numbers))
        with self._lock:
            self._waiting[timer] = call
        return timer

    def cancel(self, timer: Timer) -> None:
        """Have it not called, unless it was or is being called. May be repeated."""
        with self._lock:
            self._waiting.pop(timer, None)

    def serve(self, now: float) -> None:
        """Call what is due, the earliest first."""
        due = []
        with self._lock:
            while self._waiting and self._waiting.peekitem(0)[0][0] <= now:
                due.append(self._waiting.popitem(0)[1])
        for call in due:
            call()

    def next_due(self) -> float | None:
        """Return when the earliest is due, or None."""
        with self._lock:
            return self._waiting.peekitem(0)[0][0] if self._waiting else None
