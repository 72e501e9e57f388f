"""The broker's time, as its append times tell it. Pure: the caller gives the monotonic time.

Ages of halves and times of delivery are the broker's: it stamps every half and op as it appends them. The clock of the
machine that a coordinator runs on may be an hour off, and nobody would notice. So it is not asked: the newest append
time that was read, moved on by the monotonic clock, is never ahead of the broker, and behind only by what it took to
read that record.
"""

from __future__ import annotations


class BrokerClock:
    """The broker's time. Written by one thread; any may read it."""

    def __init__(self) -> None:
        # Append time in milliseconds and the monotonic seconds at which it was read. One tuple, replaced as a whole,
        # so that other threads never see one of the two without the other.
        self._seen: tuple[float, float] | None = None
        #: Monotonic seconds at which the clock was last set by a record.
        self.set_at = float("-inf")

    def saw(self, append_ms: int, now: float) -> None:
        """Take in the append time of a record that was read at `now`, in monotonic seconds."""
        seen = self._seen
        if seen is None or append_ms >= seen[0] + (now - seen[1]) * 1000:
            self._seen = append_ms, now
            self.set_at = now

    def now_ms(self, now: float) -> int:
        """Return the broker's time in milliseconds since the epoch at `now`; 0 as long as no record was read."""
        seen = self._seen
        return 0 if seen is None else int(seen[0] + (now - seen[1]) * 1000)


__all__ = ["BrokerClock"]
