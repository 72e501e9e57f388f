"""Limits repeated log lines: one of each kind every few seconds, with the number of suppressed ones."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable
from math import inf
from typing import Any

#: Most kinds of lines that are remembered. Beyond that the oldest is forgotten.
_MOST_KINDS = 1_000


class RationFilter(logging.Filter):
    """Lets a line with `extra=once_in(...)` pass once per interval. All other lines pass."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        # By kind: when a line was logged, and how many were suppressed since. Guarded by the lock.
        self._lines: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a line passes, and add the number of suppressed lines to it."""
        asked: tuple[float, Hashable, float | None] | None = getattr(record, "ration", None)
        if asked is None:
            return True
        every_s, kind, now = asked
        left_out = self.take((record.name, record.msg, kind), every_s, now)
        if left_out and isinstance(record.args, tuple):
            record.msg, record.args = f"{record.msg} (and %d more like it, left out)", (*record.args, left_out)
        return left_out is not None

    def take(self, kind: Hashable, every_s: float, now: float | None = None) -> int | None:
        """Return how many lines of a kind were suppressed before this one; None if this one is suppressed."""
        now = time.monotonic() if now is None else now
        with self._lock:
            at, left_out = self._lines.get(kind, (-inf, 0))
            # A time before `at` comes from another clock.
            if at <= now < at + every_s:
                self._lines[kind] = at, left_out + 1
                return None
            self._lines[kind] = now, 0
            self._lines.move_to_end(kind)
            if len(self._lines) > _MOST_KINDS:
                self._lines.popitem(last=False)
        return left_out

    def forget_all(self) -> None:
        """Forget all kinds: the next line of each passes."""
        with self._lock:
            self._lines.clear()


#: The one filter of all loggers with rationed lines.
lines = RationFilter()


def rationed(name: str) -> logging.Logger:
    """Return a logger whose lines may be rationed."""
    logger = logging.getLogger(name)
    logger.addFilter(lines)  # adding it twice changes nothing
    return logger


def once_in(every_s: float, kind: Hashable, now: float | None = None) -> dict[str, Any]:
    """Return the `extra` argument of a log call: one line of this text and kind per `every_s` seconds.

    `now` is a monotonic time, if it is not the system's.
    """
    return {"ration": (every_s, kind, now)}
