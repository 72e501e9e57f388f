"""How many decisions go into one Kafka transaction: as many as end within the target latency.

Larger groups cost less for each decision, for beginning, ending and markers cost the same for few as for many; but all
of a group become visible together, the first with the last. Pure: it is told what groups took, and reads no clock.
"""

from __future__ import annotations

#: Groups of so few are never made smaller: what they take is not their size.
_LEAST = 500
_MOST = 20_000
#: Bytes of messages in one group: they pass the client's buffer and the broker's in one go.
_BYTES = 4 << 20
#: A group that took less than this part of the target lets the next ones grow.
_EASY = 0.7
_GROWTH = 1.5
#: Not cut by more than this at once: one slow group may be a pause of the machine's.
_CUT = 0.5
#: Weight of the last group in the mean size of a message.
_WEIGHT = 0.2


class GroupLimit:
    """The limit, as the last groups taught it. Used by one thread.

    Args:
        target_s: seconds that a group may take from its begin until its end is answered.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._limit = float(2 * _LEAST)
        self._mean_bytes = 0.0

    @property
    def decisions(self) -> int:
        """Most decisions of the next group."""
        by_bytes = _BYTES / self._mean_bytes if self._mean_bytes else _MOST
        return max(1, int(min(self._limit, by_bytes)))

    def measured(self, decisions: int, size_bytes: int, took_s: float) -> None:
        """Take in what a group held and took."""
        if not decisions:
            return
        mean = size_bytes / decisions
        self._mean_bytes = mean if not self._mean_bytes else self._mean_bytes + _WEIGHT * (mean - self._mean_bytes)
        if took_s > self._target_s:
            if decisions > _LEAST:
                self._limit = max(_LEAST, min(self._limit, decisions * max(_CUT, self._target_s / took_s)))
        elif took_s < _EASY * self._target_s and 2 * decisions > self._limit:
            self._limit = min(_MOST, self._limit * _GROWTH)


__all__ = ["GroupLimit"]
