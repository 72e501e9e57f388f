"""How many decisions go into one Kafka transaction: as many as end within the target latency.

All of a group become visible together, the first with the last, so groups grow while they end well within the target,
and shrink when they take longer. What a group may hold in bytes is bound as it is chosen, by the messages themselves:
no mean of former groups says how large the first one is. A group that the client's buffer could not take counts, too,
and those after it are at most half as large. Pure: it is given what happened, and reads no clock.
"""

from __future__ import annotations

#: Groups of so few are never made smaller: what they take is not their size.
_LEAST = 500
_MOST = 20_000
#: Bytes of messages in one group: they pass the client's buffer and the broker's in one go.
_BYTES = 4 << 20
#: A group that took less than this part of the target lets the next ones grow.
_EASY = 0.7
#: Most by which one group makes the next ones larger or smaller: a slow one may be a pause of the machine's.
_GROWTH = 1.5
_CUT = 0.5
#: Weight of the last group in the mean size of messages.
_WEIGHT = 0.2
#: Groups that pass after a refusal before larger ones are tried.
_CALM = 256


class BatchLimit:
    """The limit, as the last groups taught it. Used by one thread.

    A group may take `target_s` seconds from its begin until its end is answered.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._limit = float(2 * _LEAST)
        self._mean_bytes = 0.0
        # Most decisions and bytes that the client's buffer is thought to take, and how many groups pass before that is
        # raised.
        self._fits, self._fits_bytes = _MOST, _BYTES
        self._calm = _CALM

    @property
    def decisions(self) -> int:
        """Most decisions of the next group, as far as that is known without looking at its messages."""
        by_bytes = self._fits_bytes / self._mean_bytes if self._mean_bytes else _MOST
        return max(1, int(min(self._limit, self._fits, by_bytes)))

    @property
    def bytes(self) -> int:
        """Most bytes of messages of the next group, as it is chosen; a single transaction goes whatever its size."""
        return self._fits_bytes

    def refused(self, decisions: int, size_bytes: int) -> bool:
        """Take in that the client's buffer was too small for a group, and tell whether smaller ones are worth a try.

        They are not where it was a single transaction: it does not fit by itself, and says nothing about others.
        """
        if decisions <= 1:
            return False
        self._fits = max(1, min(self._fits, decisions) // 2)
        self._fits_bytes = max(1, min(self._fits_bytes, size_bytes) // 2)
        self._calm = _CALM
        return True

    def measured(self, decisions: int, size_bytes: int, took_s: float) -> None:
        """Take in what a group held and took."""
        if not decisions:
            return
        self._calm -= 1
        if self._calm <= 0:
            # Those that come may be others than the group that was refused.
            self._fits, self._fits_bytes, self._calm = (
                min(_MOST, 2 * self._fits),
                min(_BYTES, 2 * self._fits_bytes),
                _CALM,
            )
        mean = size_bytes / decisions
        self._mean_bytes = mean if not self._mean_bytes else self._mean_bytes + _WEIGHT * (mean - self._mean_bytes)
        if 2 * decisions <= self._limit:
            return  # its size says nothing about the limit
        if took_s > self._target_s and decisions > _LEAST:
            self._limit = max(_LEAST, self._limit * max(_CUT, self._target_s / took_s))
        elif took_s < _EASY * self._target_s:
            self._limit = min(_MOST, self._limit * _GROWTH)
