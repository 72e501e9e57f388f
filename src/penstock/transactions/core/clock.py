"""The broker's clock, as the append times of records show it. Pure: the caller gives the monotonic time.

Ages of halves and delivery times use the broker's clock: the broker stamps each half and op when it appends them. The
coordinator's own wall clock may be an hour off without notice, so it is not used. The estimate is the newest append
time that was read, advanced by the monotonic clock. It is behind the broker only by the time it took to read that
record.

One record cannot advance the estimate for good. A mark, which is a record that this coordinator wrote, says more than
a foreign record: the broker stamped it between its sending and its acknowledgement. A time ahead of the newest mark is
not believed until another mark confirms it. If a mark shows that the estimate is ahead, because the broker's clock was
set back, the estimate goes back.
"""

from __future__ import annotations

from typing import NamedTuple

#: Seconds to wait for a first mark before the times of records are believed.
_FIRST_MARK_TIMEOUT_S = 30.0
#: Milliseconds by which the clocks of two brokers may differ, and the relative drift of two clocks.
_SKEW_MS = 1_000
_DRIFT = 0.001


class _Mark(NamedTuple):
    """A record of our own: its append time in milliseconds. The broker stamped it between two monotonic seconds."""

    append_ms: int
    sent: float
    acknowledged: float


class BrokerClock:
    """The broker's time. One thread calls `saw`, another one `marked`; any thread may read it."""

    def __init__(self) -> None:
        # Append time in milliseconds, and the monotonic second at which it was read. One tuple, replaced as a whole, so
        # that other threads see both or neither. The same holds for the mark.
        self._seen: tuple[float, float] | None = None
        self._mark: _Mark | None = None
        # When a record first gave the time, in monotonic seconds.
        self._begun = float("inf")
        #: Monotonic second at which the clock was last set.
        self.set_at = float("-inf")
        #: Whether a record claimed an impossible time. A new mark decides.
        self.is_disputed = False
        #: How often a mark was the first, or set the clock back: times of records may be ahead. Written by `marked`.
        self.revision = 0

    def saw(self, append_ms: int, now: float) -> int:
        """Note the append time of a record that was read at `now`, in monotonic seconds.

        Returns the time to use for the record: its own, or the broker's time now if its own is ahead of that.
        """
        latest_ms = self._latest_ms(now)
        self._begun = min(self._begun, now)
        if append_ms > latest_ms + _SKEW_MS:
            self.is_disputed = True
            return self.now_ms(now)
        seen = self._seen
        if seen is None or append_ms >= seen[0] + (now - seen[1]) * 1000:
            self._seen = append_ms, now
            self.set_at = now
        return append_ms

    def marked(self, append_ms: int, sent: float, acknowledged: float) -> None:
        """Note the append time of a mark, and the monotonic seconds at which it was sent and acknowledged."""
        is_first, self._mark = self._mark is None, _Mark(append_ms, sent, acknowledged)
        seen = self._seen
        is_ahead = seen is not None and seen[0] + (acknowledged - seen[1]) * 1000 > self._latest_ms(acknowledged)
        if is_ahead:
            self._seen = append_ms, acknowledged
        # Last, so that a thread that sees the new revision also sees the new time.
        self.revision += is_first or is_ahead
        self.set_at = acknowledged
        self.is_disputed = False

    def assume(self, time_ms: int, now: float) -> None:
        """Use a time for the broker's until a record gives it."""
        self._begun = min(self._begun, now)
        if self._seen is None and self._mark is None:
            self._seen = time_ms, now

    def sure_ms(self, now: float) -> int:
        """Return the broker's time for acts that cannot be undone: 0 before a mark confirmed it.

        If no mark could be written for some time, records are believed.
        """
        is_sure = self._mark is not None or now - self._begun >= _FIRST_MARK_TIMEOUT_S
        return self.now_ms(now) if is_sure else 0

    def _latest_ms(self, now: float) -> float:
        """Return the latest possible time of the broker, given the newest mark."""
        mark = self._mark
        return float("inf") if mark is None else mark.append_ms + (now - mark.sent) * 1000 * (1 + _DRIFT)

    def now_ms(self, now: float) -> int:
        """Return the broker's time in milliseconds since the epoch at `now`; 0 until a record gives it."""
        seen, mark = self._seen, self._mark
        time_ms = 0.0 if seen is None else seen[0] + (now - seen[1]) * 1000
        if mark is None:
            return int(time_ms)
        earliest_ms = mark.append_ms + (now - mark.acknowledged) * 1000
        return int(min(max(time_ms, earliest_ms), max(self._latest_ms(now), earliest_ms)))
