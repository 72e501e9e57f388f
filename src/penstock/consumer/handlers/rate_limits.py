"""Rate limits: a token bucket for each handler and a key rate limiter for its keys. The caller passes the time."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Hashable
from itertools import count
from math import inf

#: Burst after an idle time: the messages of so many seconds may start at once.
_BURST_S = 0.1
#: Tolerance for rounding errors of floats, in tokens. Tokens may fall below zero by it, so it is paid back.
_SLACK = 1e-6
#: Number of keys at which expired ones are removed.
_PRUNE_AT = 10_000


class TokenBucket:
    """A token bucket: limits how many messages may start per second. Thread-safe.

    A caller that finds it empty registers a waiter. Waiters are woken by arrival, one for each new token, so a
    thousand waiters do not poll a thousand times. A later arrival never gets a token before an earlier waiter.
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
        """Take a token if there is one and no waiter has a lower arrival."""
        if self._rate is None:
            return True
        with self._lock:
            self._fill(now)
            # Tokens left from before the rate became 0 are held too.
            if self._tokens < 1.0 - _SLACK or not self._rate:
                return self._rate is None
            if self._waiting and self._waiting[0][0] < arrival:
                return False
            self._tokens -= 1.0
            return True

    def wait(self, arrival: int, wake: Callable[[], object]) -> None:
        """Register a waiter. `release` returns its `wake` when another try is worthwhile, lower arrivals first."""
        with self._lock:
            heapq.heappush(self._waiting, (arrival, next(self._order), wake))

    def release(self, now: float) -> list[Callable[[], object]]:
        """Return the wake functions to call now: one waiter for each token, at most."""
        if not self._waiting or self._rate == 0:
            return []
        with self._lock:
            self._fill(now)
            # Infinite with an infinite rate.
            tokens = inf if self._rate is None else self._tokens + _SLACK
            return [heapq.heappop(self._waiting)[2] for _ in range(int(min(len(self._waiting), tokens)))]

    def next_release(self, now: float) -> float | None:
        """Return the next time to call `release`; None if no waiter waits, or a rate of 0 holds all."""
        if not self._waiting:
            return None
        with self._lock:
            if not self._rate:
                return now if self._rate is None else None
            self._fill(now)
            missing = 1.0 - self._tokens
            # Otherwise the sum may round to `now`, and the caller would wait for that time again and again.
            return now if missing <= _SLACK else now + missing / self._rate

    def _fill(self, now: float) -> None:
        if self._at is not None and self._rate is not None:
            most = max(1.0, self._rate * _BURST_S)
            self._tokens = min(most, self._tokens + max(0.0, now - self._at) * self._rate)
        # Never back: another thread's older time would count the seconds in between twice.
        self._at = now if self._at is None else max(self._at, now)


class KeyRateLimiter:
    """Keeps a minimum time between two messages of one key. Only the holder of a key's lane asks for the key."""

    def __init__(self, rate: float | None) -> None:
        #: Messages/s of each key, or None for no limit. Any thread may change it; the times of all keys follow.
        self.rate = rate
        # The start time of the last message of each key.
        self._begun: dict[Hashable, float] = {}
        self._prune_at = _PRUNE_AT

    def free_at(self, key: Hashable) -> float:
        """Return when a message of the key may start; a time in the past if it may start now."""
        rate = self.rate
        begun = None if rate is None else self._begun.get(key)
        return 0.0 if rate is None or begun is None else begun + 1.0 / rate

    def begin(self, key: Hashable, now: float) -> None:
        """Note the start of a message of the key."""
        rate = self.rate
        if rate is None:
            return
        if len(self._begun) >= self._prune_at:
            # Copied in one step, because other holders add keys meanwhile. A list of items is not made in one step:
            # the garbage collector may run at each of its tuples. A key removed by mistake starts one message early.
            for other, begun in self._begun.copy().items():
                if begun + 1.0 / rate <= now:
                    self._begun.pop(other, None)
            # The remaining keys are not expired: to scan them at each message would cost more than their memory.
            self._prune_at = max(_PRUNE_AT, 2 * len(self._begun))
        self._begun[key] = now
