"""The size of a group commit: as many decisions as end within the target latency.

A group costs a fixed time (begin, end, markers) plus a time for each decision. All of a group become visible together.
So groups are as large as the target latency allows, but not so small that the fixed time is more than half of the
whole. Smaller groups would spend most of the time on the fixed part, and decisions would wait longer. Both costs are
estimated from the times of groups with different sizes. The bytes of a group are counted on its own messages when it is
chosen: no mean of earlier groups tells the size of the first one. If a group does not fit into the client's buffer,
the next ones are at most half as large. Pure: the caller reports what happened, and no clock is read.
"""

from __future__ import annotations

#: Groups are never made smaller than this because of their time: the size of smaller groups does not explain it.
_MIN_LIMIT = 500
_MAX_LIMIT = 20_000
#: Most bytes of messages in one group: they pass the buffers of the client and the broker in one go.
_MAX_BYTES = 4 << 20
#: While the costs are unknown: a group faster than this part of the target lets the next ones grow.
_EASY = 0.7
#: The most by which one group makes the next ones larger or smaller: a slow group may be a pause of the machine.
_GROWTH = 1.5
_CUT = 0.5
#: Growth if larger groups did not take longer: that may be true, or the costs have just changed.
_TRIAL = 1.1
#: Weight of the last group in the means.
_WEIGHT = 0.2
#: Groups after a refusal before larger ones are tried. Each refusal of those doubles the number, up to the maximum.
_CALM = 16
_MAX_CALM = 4_096
#: The spread of sizes, relative to their mean, that separates one cost from the other.
_SPREAD = 0.1


class BatchLimit:
    """The limit that was estimated from the last groups. Used by one thread.

    A group may take `target_s` seconds from its beginning until its end is answered.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._limit = float(2 * _MIN_LIMIT)
        self._mean_bytes = 0.0
        # Most decisions and bytes that probably fit into the client's buffer.
        self._fits, self._fits_bytes = _MAX_LIMIT, _MAX_BYTES
        # Whether they were raised since the last refusal. Groups between two raises, and until the next one.
        self._is_raised = False
        self._calm = self._calm_left = _CALM
        # Means over groups: size, time, size squared, and size times time.
        self._size = self._took_s = self._square = self._product = 0.0

    @property
    def decisions(self) -> int:
        """Most decisions of the next group, estimated without its messages."""
        by_bytes = self._fits_bytes / self._mean_bytes if self._mean_bytes else _MAX_LIMIT
        return max(1, int(min(self._limit, self._fits, by_bytes)))

    @property
    def bytes(self) -> int:
        """Most bytes of messages of the next group. A single transaction may have more."""
        return self._fits_bytes

    def refused(self, decisions: int, size_bytes: int) -> bool:
        """Note that a group did not fit into the client's buffer. Tell whether a smaller one may fit.

        A single transaction that does not fit cannot be split, and says nothing about others.
        """
        if decisions <= 1:
            return False
        self._fits = max(1, min(self._fits, decisions) // 2)
        self._fits_bytes = max(1, min(self._fits_bytes, size_bytes) // 2)
        if self._is_raised:
            self._calm = min(2 * self._calm, _MAX_CALM)
        self._is_raised, self._calm_left = False, self._calm
        return True

    def measured(self, decisions: int, size_bytes: int, took_s: float) -> None:
        """Note the size and the time of a committed group."""
        if not decisions:
            return
        if self._fits < _MAX_LIMIT or self._fits_bytes < _MAX_BYTES:
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
            self._limit = max(_MIN_LIMIT, min(_MAX_LIMIT, self._limit * _GROWTH, max(self._limit * _CUT, wanted)))

    def _grow(self) -> None:
        """Try larger groups again: their messages may be smaller than those that were refused."""
        self._calm_left -= 1
        if self._calm_left <= 0:
            self._fits, self._fits_bytes = min(_MAX_LIMIT, 2 * self._fits), min(_MAX_BYTES, 2 * self._fits_bytes)
            self._is_raised, self._calm_left = True, self._calm

    def _wanted(self, decisions: int, took_s: float) -> float | None:
        """Return the limit that the costs suggest. None: the group says nothing about it."""
        if 2 * decisions <= self._limit:
            return None
        variance = self._square - self._size * self._size
        if variance > (_SPREAD * self._size) ** 2:
            each_s = (self._product - self._size * self._took_s) / variance
            if each_s > 0:
                fixed_s = max(0.0, self._took_s - each_s * self._size)
                return max(self._target_s - fixed_s, fixed_s) / each_s
            return self._limit * _TRIAL  # the size does not seem to cost
        if took_s > self._target_s:
            return self._limit * self._target_s / took_s if decisions > _MIN_LIMIT else None
        return self._limit * _GROWTH if took_s < _EASY * self._target_s else None
