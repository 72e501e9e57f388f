"""`Durations`: a histogram of times that are recorded together where each comes long after the last.

A call of OpenTelemetry's SDK takes 7 us in a loop, and four times that when other code ran since: what it needs is in
no cache any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from opentelemetry.context import Context
from opentelemetry.metrics import Histogram
from opentelemetry.util.types import AttributeValue

#: Times that are kept at most: each keeps the span of its exemplar.
_MOST = 1_000


class Durations:
    """Records the times of a histogram, at most `every_s` seconds late while others come. Any thread.

    The first is recorded at once, and so is each that comes later than that after the last. What is kept when no more
    come is recorded by `flush`, which is to be called before metrics are read, and at the end.
    """

    def __init__(self, histogram: Histogram, clock: Callable[[], float], *, every_s: float) -> None:
        self._histogram = histogram
        self._clock = clock
        self._every_s = every_s
        self._lock = threading.Lock()
        # Under the lock.
        self._kept: list[tuple[float, Mapping[str, AttributeValue], Context]] = []
        # Written under the lock; who reads an old one keeps one more.
        self._next = float("-inf")

    def record(self, seconds: float, attributes: Mapping[str, AttributeValue], context: Context) -> None:
        """Record a time, now or soon; an exemplar of it points to the span in the context."""
        now = self._clock()
        with self._lock:
            self._kept.append((seconds, attributes, context))
            if now < self._next and len(self._kept) < _MOST:
                return
            self._next = now + self._every_s
        self.flush()

    def flush(self) -> None:
        """Record what is kept."""
        with self._lock:
            kept, self._kept = self._kept, []
        for seconds, attributes, context in kept:
            self._histogram.record(seconds, attributes, context)
