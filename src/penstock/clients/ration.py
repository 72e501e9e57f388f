"""Log lines that would flood: one of a kind every few seconds."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from math import inf

#: Kinds of lines that are remembered; with more the oldest are forgotten.
_MOST_KINDS = 1_000


class Ration:
    """Says whether a line of a kind may be logged: every `every_s` seconds one may. Thread-safe."""

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        # Guards what follows.
        self._lock = threading.Lock()
        # By kind: when a line was logged, and how many were left out since.
        self._lines: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def take(self, kind: Hashable) -> int | None:
        """Return how many lines of a kind were left out before this one, or None where it is left out itself."""
        now = self._clock()
        with self._lock:
            at, left_out = self._lines.get(kind, (-inf, 0))
            if now - at < self._every_s:
                self._lines[kind] = at, left_out + 1
                return None
            self._lines[kind] = now, 0
            self._lines.move_to_end(kind)
            if len(self._lines) > _MOST_KINDS:
                self._lines.popitem(last=False)
        return left_out

    def forget(self, kind: Hashable) -> None:
        """Let the next line of a kind be logged at once."""
        with self._lock:
            self._lines.pop(kind, None)
