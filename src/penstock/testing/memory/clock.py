"""`TestClock`: a clock that stands until it is moved, so that a test decides what time it is."""

from __future__ import annotations

import threading

#: What the clock shows at its start: an arbitrary uptime, and an arbitrary day.
_MONOTONIC_S = 1_000.0
_EPOCH_S = 1_700_000_000.0


class TestClock:
    """A `Clock` that moves only by `advance` and `sleep`. Safe to use from any thread.

    Whoever waits moves it: `sleep` returns at once, and later. So code that waits until a deadline gets there.
    """

    __test__ = False  # pytest would take the name for a test case

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._elapsed = 0.0

    def monotonic(self) -> float:
        """Return seconds that only rise."""
        return _MONOTONIC_S + self._elapsed

    def time(self) -> float:
        """Return seconds since the epoch."""
        return _EPOCH_S + self._elapsed

    def sleep(self, seconds: float) -> None:
        """Let the time pass at once. Zero and less do nothing, as for a timeout that is over."""
        if seconds > 0:
            self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Move the clock forward; `ValueError` where that is backward."""
        if not seconds >= 0:
            raise ValueError(f"a clock does not go back: advance by {seconds!r} seconds; give zero or more")
        with self._lock:
            self._elapsed += seconds
