"""`TestClock`: a clock that moves only on request, so that a test decides what time it is."""

from __future__ import annotations

import threading

#: The times at the start: an arbitrary uptime, and an arbitrary day.
_MONOTONIC_S = 1_000.0
_EPOCH_S = 1_700_000_000.0


class TestClock:
    """A `Clock` that moves only by `advance` and `sleep`. Safe to use from any thread.

    Waiting code moves it: `sleep` moves the clock and returns at once. So code that waits for a deadline reaches it.
    """

    __test__ = False  # pytest would take the name for a test case

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._elapsed = 0.0

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return _MONOTONIC_S + self._elapsed

    def time(self) -> float:
        """Return seconds since the epoch."""
        return _EPOCH_S + self._elapsed

    def sleep(self, seconds: float) -> None:
        """Move the clock and return at once. Zero and less do nothing, as after a deadline."""
        if seconds > 0:
            self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Move the clock forward; `ValueError` if `seconds` is negative."""
        if not seconds >= 0:
            raise ValueError(f"a clock does not go back: advance by {seconds!r} seconds; give zero or more")
        with self._lock:
            self._elapsed += seconds
