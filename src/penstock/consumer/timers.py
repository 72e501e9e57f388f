"""Timers: a heap of callbacks and their times. The poll thread calls what is due; no thread sleeps."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from itertools import count

#: Cancelled timers that may stay in the heap until they are due.
_MAX_CANCELLED = 1_000


class Timer:
    """Something that is to be called, until it was or was cancelled. Guarded by the lock of its `Timers`."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], object]) -> None:
        #: None once it was taken or cancelled: what it refers to is freed at once, not when it is due.
        self.call: Callable[[], object] | None = call


class Timers:
    """Any thread adds and cancels, the poll thread calls what is due."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = count()
        self._cancelled = 0

    def __len__(self) -> int:
        """How many are in the heap, some of those that were cancelled included."""
        return len(self._heap)

    def add(self, due: float, call: Callable[[], object]) -> Timer:
        """Have something called at `due`, on the engine's clock, or soon after it."""
        timer = Timer(call)
        with self._lock:
            heapq.heappush(self._heap, (due, next(self._order), timer))
        return timer

    def cancel(self, timer: Timer) -> None:
        """Have it not called, unless it was or is being called. May be repeated."""
        with self._lock:
            if timer.call is None:
                return
            timer.call = None
            self._cancelled += 1
            # Each time as many go as stay, so that each costs little; a far timeout takes no memory until then.
            if self._cancelled > _MAX_CANCELLED and 2 * self._cancelled > len(self._heap):
                self._heap = [entry for entry in self._heap if entry[2].call is not None]
                heapq.heapify(self._heap)
                self._cancelled = 0

    def serve(self, now: float) -> None:
        """Call what is due, the earliest first."""
        # Without the lock: a heap that is replaced meanwhile is read at the next call.
        heap = self._heap
        if not heap or heap[0][0] > now:
            return
        due = []
        with self._lock:
            while self._heap and self._heap[0][0] <= now:
                timer = heapq.heappop(self._heap)[2]
                if timer.call is None:
                    self._cancelled -= 1
                else:
                    due.append(timer.call)
                    timer.call = None
        for call in due:
            call()

    def next_due(self) -> float | None:
        """Return when the earliest is due, or None."""
        with self._lock:
            while self._heap and self._heap[0][2].call is None:
                heapq.heappop(self._heap)
                self._cancelled -= 1
            return self._heap[0][0] if self._heap else None
