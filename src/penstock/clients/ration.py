"""Log lines that would flood: of those that say the same, one every few seconds, with the number of the others."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable
from math import inf
from typing import Any

#: Kinds of lines that are remembered; with more the oldest are forgotten.
_MOST_KINDS = 1_000


class RationFilter(logging.Filter):
    """Lets a line pass whose call has `extra=once_in(...)` once in so many seconds; of others every one passes."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        # By kind: when a line was logged, and how many were left out since. Under the lock.
        self._lines: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a line passes; it says then how many like it were left out before."""
        asked: tuple[float, Hashable, float | None] | None = getattr(record, "ration", None)
        if asked is None:
            return True
        every_s, kind, now = asked
        left_out = self.take((record.name, record.msg, kind), every_s, now)
        if left_out and isinstance(record.args, tuple):
            record.msg, record.args = f"{record.msg} (and %d more like it, left out)", (*record.args, left_out)
        return left_out is not None

    def take(self, kind: Hashable, every_s: float, now: float | None = None) -> int | None:
        """Return how many lines of a kind were left out before this one, or None where it is left out itself."""
        now = time.monotonic() if now is None else now
        with self._lock:
            at, left_out = self._lines.get(kind, (-inf, 0))
            # A clock that has gone back is another one's.
            if at <= now < at + every_s:
                self._lines[kind] = at, left_out + 1
                return None
            self._lines[kind] = now, 0
            self._lines.move_to_end(kind)
            if len(self._lines) > _MOST_KINDS:
                self._lines.popitem(last=False)
        return left_out

    def forget_all(self) -> None:
        """Let the next line of every kind be logged at once."""
        with self._lock:
            self._lines.clear()


#: The one filter of all loggers whose lines may be rationed.
lines = RationFilter()


def rationed(name: str) -> logging.Logger:
    """Return a logger whose lines may be rationed."""
    logger = logging.getLogger(name)
    logger.addFilter(lines)  # a second time it changes nothing
    return logger


def once_in(every_s: float, kind: Hashable, now: float | None = None) -> dict[str, Any]:
    """Return what a call of such a logger takes as `extra`: of this text and kind one line in so many seconds.

    `now` is the time by a clock that only rises, where that is not the system's.
    """
    return {"ration": (every_s, kind, now)}
