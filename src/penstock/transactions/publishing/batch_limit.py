"""How many decisions go into one Kafka transaction: as many as end within the target latency.

A group costs a fixed time, for beginning, ending and markers, and a time for each decision. All of a group become
visible together, the first with the last, so groups are as large as the target allows; but no smaller than where the
fixed time is half of the whole: smaller ones would spend most of the time on the fixed part, and wait all the longer.
Both costs are learnt from what groups of different sizes took. What a group may hold in bytes is bound as it is chosen,
by the messages themselves: no mean of former groups says how large the first one is. A group that the client's buffer
could not take counts, too, and those after it are at most half as large. Pure: it is given what happened, and reads
no clock.
"""

from __future__ import annotations

#: Groups of so few are never made smaller: what they take is not their size.
_LEAST = 500
_MOST = 20_000
#: Bytes of messages in one group: they pass the client's buffer and the broker's in one go.
_BYTES = 4 << 20
#: A group that took less than this part of the target lets the next ones grow, while the costs are not known.
_EASY = 0.7
#: Most by which one group makes the next ones larger or smaller: a slow one may be a pause of the machine's.
_GROWTH = 1.5
_CUT = 0.5
#: Growth where larger groups did not take longer: it may be so, or the costs have just changed.
_TRIAL = 1.1
#: Weight of the last group in the means.
_WEIGHT = 0.2
#: Groups that pass after a refusal before larger ones are tried; twice as many where that is refused, up to so many.
_CALM = 16
_MOST_CALM = 4_096
#: Groups must differ by this part of their mean size before they tell one cost from the other.
_SPREAD = 0.1


class BatchLimit:
    """The limit, as the last groups taught it. Used by one thread.

    A group may take `target_s` seconds from its begin until its end is answered.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._limit = float(2 * _LEAST)
        self._mean_bytes = 0.0
        # Most decisions and bytes that the client's buffer is thought to take, whether that was raised since the last
        # refusal, and how many groups pass before it is.
        self._fits, self._fits_bytes = _MOST, _BYTES
        self._is_raised = False
        self._calm = self._calm_left = _CALM
        # Means of the size of groups, of their time, of the size squared, and of size times time.
        self._size = self._took_s = self._square = self._product = 0.0

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
        if self._is_raised:
            self._calm = min(2 * self._calm, _MOST_CALM)
        self._is_raised, self._calm_left = False, self._calm
        return True

    def measured(self, decisions: int, size_bytes: int, took_s: float) -> None:
        """Take in what a group held and took."""
        if not decisions:
            return
        if self._fits < _MOST or self._fits_bytes < _BYTES:
            self._grow()
        mean = size_bytes / decisions
        self._mean_bytes = mean if not self._mean_bytes else self._mean_bytes + _WEIGHT * (mean - self._mean_bytes)
        weight = _WEIGHT if self._size else 1.0
        self._size += weight * (decisions - self._size)
        self._took_s += weight * (took_s - self._took_s)
        self._square += weight * (decisions * decisions - self._square)
        self._product += weight * (decisions * took_s - self._product)
        wanted = self._wanted(decisions, took_s)
        if wanted is not None:
            self._limit = max(_LEAST, min(_MOST, self._limit * _GROWTH, max(self._limit * _CUT, wanted)))

    def _grow(self) -> None:
        """Try larger groups again: those that come may be others than the one that was refused."""
        self._calm_left -= 1
        if self._calm_left <= 0:
            self._fits, self._fits_bytes = min(_MOST, 2 * self._fits), min(_BYTES, 2 * self._fits_bytes)
            self._is_raised, self._calm_left = True, self._calm

    def _wanted(self, decisions: int, took_s: float) -> float | None:
        """Return the limit that the costs speak for; None where the group says nothing about it."""
        if 2 * decisions <= self._limit:
            return None
        variance = self._square - self._size * self._size
        if variance > (_SPREAD * self._size) ** 2:
            each_s = (self._product - self._size * self._took_s) / variance
            if each_s > 0:
                fixed_s = max(0.0, self._took_s - each_s * self._size)
                return max(self._target_s - fixed_s, fixed_s) / each_s
            return self._limit * _TRIAL  # size does not seem to be what costs
        if took_s > self._target_s:
            return self._limit * self._target_s / took_s if decisions > _LEAST else None
        return self._limit * _GROWTH if took_s < _EASY * self._target_s else None
