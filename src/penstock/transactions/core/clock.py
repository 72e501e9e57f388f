"""The broker's time, as its append times tell it. Pure: the caller gives the monotonic time.

Ages of halves and times of delivery are the broker's: it stamps every half and op as it appends them. The clock of the
machine that a coordinator runs on may be an hour off, and nobody would notice. So it is not asked: the newest append
time that was read, moved on by the monotonic clock, is behind the broker only by what it took to read that record.

One record does not move it for good. A mark that this coordinator wrote itself tells more than a record that somebody
wrote at some time: the broker stamped it between its sending and its acknowledgement. What is ahead of the newest mark
is not believed until another mark says so, and where a mark says that the clock is ahead, because the broker's was set
back, it goes back.
"""

from __future__ import annotations

from typing import NamedTuple

#: Seconds for which a first mark is waited for before what records say is taken for sure.
_UNMARKED_S = 30.0
#: Milliseconds by which the clocks of two brokers may differ, and part by which clocks may run apart.
_APART_MS = 1_000
_DRIFT = 0.001


class _Mark(NamedTuple):
    """A record of our own: its append time in milliseconds, and the monotonic seconds between which it was stamped."""

    append_ms: int
    sent: float
    acknowledged: float


class BrokerClock:
    """The broker's time. `saw` is called by one thread, `marked` by another one, and any may read it."""

    def __init__(self) -> None:
        # Append time in milliseconds and the monotonic seconds at which it was read. One tuple, replaced as a whole,
        # so that other threads never see one of the two without the other; the same for the mark.
        self._seen: tuple[float, float] | None = None
        self._mark: _Mark | None = None
        # When a record first gave the time, in monotonic seconds.
        self._begun = float("inf")
        #: Monotonic seconds at which the clock was last set.
        self.set_at = float("-inf")
        #: Whether a record claimed a time that cannot be: a new mark shall tell.
        self.is_disputed = False
        #: How often a mark gave the time for the first time, or set it back: what was taken for the times of records
        #: may lie ahead. `marked` alone changes it.
        self.revision = 0

    def saw(self, append_ms: int, now: float) -> int:
        """Take in the append time of a record that was read at `now`, in monotonic seconds.

        Returns the time to take for that of the record: its own, or the broker's time now where its own is ahead of
        that.
        """
        latest_ms = self._latest_ms(now)
        self._begun = min(self._begun, now)
        if append_ms > latest_ms + _APART_MS:
            self.is_disputed = True
            return self.now_ms(now)
        seen = self._seen
        if seen is None or append_ms >= seen[0] + (now - seen[1]) * 1000:
            self._seen = append_ms, now
            self.set_at = now
        return append_ms

    def marked(self, append_ms: int, sent: float, acknowledged: float) -> None:
        """Take in the append time of a mark that was sent and acknowledged at these monotonic seconds."""
        is_first, self._mark = self._mark is None, _Mark(append_ms, sent, acknowledged)
        seen = self._seen
        is_ahead = seen is not None and seen[0] + (acknowledged - seen[1]) * 1000 > self._latest_ms(acknowledged)
        if is_ahead:
            self._seen = append_ms, acknowledged
        # After that: whoever finds it sees the new time.
        self.revision += is_first or is_ahead
        self.set_at = acknowledged
        self.is_disputed = False

    def assume(self, time_ms: int, now: float) -> None:
        """Take a time for the broker's as long as no record gave it."""
        self._begun = min(self._begun, now)
        if self._seen is None and self._mark is None:
            self._seen = time_ms, now

    def sure_ms(self, now: float) -> int:
        """Return the broker's time as `now_ms` does, for what cannot be undone: 0 before a mark gave it.

        Where no mark can be written for some time, records are believed.
        """
        is_sure = self._mark is not None or now - self._begun >= _UNMARKED_S
        return self.now_ms(now) if is_sure else 0

    def _latest_ms(self, now: float) -> float:
        """Return the latest that the broker's time can be, as the newest mark tells."""
        mark = self._mark
        return float("inf") if mark is None else mark.append_ms + (now - mark.sent) * 1000 * (1 + _DRIFT)

    def now_ms(self, now: float) -> int:
        """Return the broker's time in milliseconds since the epoch at `now`; 0 as long as no record gave it."""
        seen, mark = self._seen, self._mark
        time_ms = 0.0 if seen is None else seen[0] + (now - seen[1]) * 1000
        if mark is None:
            return int(time_ms)
        earliest_ms = mark.append_ms + (now - mark.acknowledged) * 1000
        return int(min(max(time_ms, earliest_ms), max(self._latest_ms(now), earliest_ms)))
