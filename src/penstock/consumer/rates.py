"""Rate limits: a meter for all messages of a handler, a pace for each of its keys. Times are given, never read."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Hashable
from typing import TypeVar

LaneT = TypeVar("LaneT")

#: Seconds' worth of messages that may be begun at once after a lull.
_BURST_S = 0.1
#: Seconds between two looks of a parked key at a handler that is held.
_HELD_LOOK_S = 1.0
#: Keys remembered before those whose time has passed are forgotten.
_PRUNE_AT = 10_000


class Meter:
    """A token bucket: so many messages a second may be begun. Thread-safe.

    Lanes that found it empty wait here by the arrival of their heads, and are woken as tokens come: a lane for each
    token, so that a thousand waiting lanes do not ask a thousand times.

    Args:
        rate: messages/s; 0 holds all, None sets no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self._lock = threading.Lock()
        self._rate = rate
        self._tokens = 1.0
        self._at: float | None = None
        self._waiting: list[tuple[int, int]] = []

    @property
    def rate(self) -> float | None:
        """Messages/s; 0 holds all, None sets no limit."""
        return self._rate

    @rate.setter
    def rate(self, rate: float | None) -> None:
        with self._lock:
            self._rate = rate
            self._tokens = min(self._tokens, 1.0)

    def take(self, now: float) -> bool:
        """Take a token if there is one."""
        if self._rate is None:
            return True
        with self._lock:
            self._fill(now)
            if self._tokens < 1.0:
                return False
            self._tokens -= 1.0
            return True

    def wait(self, arrival: int, lane: int) -> None:
        """Let a lane wait for a token. Only after the lane was given back: see `Scheduler.rest`."""
        with self._lock:
            heapq.heappush(self._waiting, (arrival, lane))

    def release(self, now: float) -> list[int]:
        """Return the numbers of the lanes that may ask again, at most one for each token."""
        if not self._waiting:
            return []
        with self._lock:
            self._fill(now)
            count = len(self._waiting) if self._rate is None else min(len(self._waiting), int(self._tokens))
            return [heapq.heappop(self._waiting)[1] for _ in range(count)]

    def next_release(self, now: float) -> float | None:
        """Return when `release` should be asked next, or None while nothing waits or all are held."""
        if not self._waiting or self._rate == 0:
            return None
        with self._lock:
            if self._rate is None:
                return now
            self._fill(now)
            return now + max(0.0, 1.0 - self._tokens) / self._rate

    def next_token(self, now: float) -> float:
        """Return when there may be a token for one who waits by himself."""
        if self._rate is None:
            return now
        return now + (1.0 / self._rate if self._rate else _HELD_LOOK_S)

    def _fill(self, now: float) -> None:
        if self._at is not None and self._rate is not None:
            most = max(1.0, self._rate * _BURST_S)
            self._tokens = min(most, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = now


class Pace:
    """The least time between two messages of one key. A key is asked for by the holder of its lane alone.

    Args:
        rate: messages/s of each key, or None for no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._next: dict[Hashable, float] = {}

    def free_at(self, key: Hashable) -> float:
        """Return when a message of the key may begin; a time in the past where it may begin now."""
        return 0.0 if self.rate is None else self._next.get(key, 0.0)

    def begin(self, key: Hashable, now: float) -> None:
        """Count a message of the key as begun."""
        rate = self.rate
        if rate is None:
            return
        if len(self._next) >= _PRUNE_AT:
            # A copy, for other holders add keys meanwhile; a key dropped by mistake begins one message early.
            for other, passed in list(self._next.items()):
                if passed <= now:
                    self._next.pop(other, None)
        self._next[key] = now + 1.0 / rate


__all__ = ["Meter", "Pace"]
