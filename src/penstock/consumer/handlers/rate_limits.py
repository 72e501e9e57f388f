"""Rate limits: a token bucket for each handler, a key rate limiter for its keys. Times are given, never read."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Hashable
from itertools import count

#: Seconds' worth of messages that may be begun at once after a lull.
_BURST_S = 0.1
#: The part of a token that adding up floats may cost. What is lent so is paid back: tokens may fall below none.
_SLACK = 1e-6
#: Keys remembered before those whose time has passed are forgotten.
_PRUNE_AT = 10_000


class TokenBucket:
    """A token bucket: so many messages a second may be begun. Thread-safe.

    Who found it empty waits here, by arrival, and is woken as tokens come: one for each token, so that a thousand who
    wait do not ask a thousand times. Who comes later than one who waits gets nothing before him.
    """

    def __init__(self, rate: float | None) -> None:
        self._lock = threading.Lock()
        self._rate = rate
        self._tokens = 1.0
        self._at: float | None = None
        self._waiting: list[tuple[int, int, Callable[[], object]]] = []
        self._order = count()

    @property
    def rate(self) -> float | None:
        """Messages/s; 0 holds all, None sets no limit."""
        return self._rate

    @rate.setter
    def rate(self, rate: float | None) -> None:
        with self._lock:
            self._rate = rate
            self._tokens = min(self._tokens, 1.0)

    def take(self, now: float, arrival: int = 0) -> bool:
        """Take a token if there is one, and nobody of a lower arrival waits for it."""
        if self._rate is None:
            return True
        with self._lock:
            self._fill(now)
            # What was left from before the rate became 0 is held too.
            if self._tokens < 1.0 - _SLACK or not self._rate:
                return self._rate is None
            if self._waiting and self._waiting[0][0] < arrival:
                return False
            self._tokens -= 1.0
            return True

    def wait(self, arrival: int, wake: Callable[[], object]) -> None:
        """Wait for a token: `wake` is called when it is worth asking again, for lower arrivals first."""
        with self._lock:
            heapq.heappush(self._waiting, (arrival, next(self._order), wake))

    def release(self, now: float) -> list[Callable[[], object]]:
        """Return what is to be called of those who wait, at most one for each token."""
        if not self._waiting or self._rate == 0:
            return []
        with self._lock:
            self._fill(now)
            tokens = len(self._waiting) if self._rate is None else int(self._tokens + _SLACK)
            return [heapq.heappop(self._waiting)[2] for _ in range(min(len(self._waiting), tokens))]

    def next_release(self, now: float) -> float | None:
        """Return when `release` should be asked next, or None while nothing waits or all are held."""
        if not self._waiting:
            return None
        with self._lock:
            if not self._rate:
                return now if self._rate is None else None
            self._fill(now)
            missing = 1.0 - self._tokens
            # Else the time may be so near that it is now again, and whoever waits for it would wait for ever.
            return now if missing <= _SLACK else now + missing / self._rate

    def _fill(self, now: float) -> None:
        if self._at is not None and self._rate is not None:
            most = max(1.0, self._rate * _BURST_S)
            self._tokens = min(most, self._tokens + max(0.0, now - self._at) * self._rate)
        # Never back: a time that was read before another's would count the time in between twice.
        self._at = now if self._at is None else max(self._at, now)


class KeyRateLimiter:
    """The least time between two messages of one key. A key is asked for by the holder of its lane alone."""

    def __init__(self, rate: float | None) -> None:
        #: Messages/s of each key, or None for no limit. Any thread may change it; the times of all keys follow.
        self.rate = rate
        # When the last message of a key began.
        self._begun: dict[Hashable, float] = {}
        self._prune_at = _PRUNE_AT

    def free_at(self, key: Hashable) -> float:
        """Return when a message of the key may begin; a time in the past where it may begin now."""
        rate = self.rate
        begun = None if rate is None else self._begun.get(key)
        return 0.0 if rate is None or begun is None else begun + 1.0 / rate

    def begin(self, key: Hashable, now: float) -> None:
        """Count a message of the key as begun."""
        rate = self.rate
        if rate is None:
            return
        if len(self._begun) >= self._prune_at:
            # A copy, made in one step, for other holders add keys meanwhile; a list of items is not, for the collector
            # may run at any tuple of it. A key dropped by mistake begins one message early.
            for other, begun in self._begun.copy().items():
                if begun + 1.0 / rate <= now:
                    self._begun.pop(other, None)
            # Those that are left must wait: looking at them at each message would cost more than their memory.
            self._prune_at = max(_PRUNE_AT, 2 * len(self._begun))
        self._begun[key] = now
