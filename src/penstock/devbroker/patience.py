"""How long a starting broker is waited for: longer the busier the machine is.

A start takes some ten seconds of CPU time, and on a busy machine minutes: its limit is that of a machine with nothing
else to do.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

#: Seconds between two log lines that say what is waited for.
_LOG_INTERVAL_S = 20.0


def load_per_cpu() -> float:
    """Return how many processes want each CPU."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


class Patience:
    """For one start. Used by one thread.

    Args:
        what: what starts, for the log.
        limit_s: seconds for which it is waited for, times the most processes that wanted each CPU meanwhile.
        clock: seconds that only rise.
        load: how many processes want each CPU.
    """

    def __init__(
        self,
        what: str,
        limit_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        load: Callable[[], float] = load_per_cpu,
    ) -> None:
        self._what = what
        self._limit_s = limit_s
        self._clock = clock
        self._load = load
        self._most = 1.0
        self._begun = self._said = clock()

    def is_over(self) -> bool:
        """Tell whether it is not waited for any longer."""
        now = self._clock()
        self._most = max(self._most, self._load())
        limit_s = self._limit_s * self._most
        if now - self._said >= _LOG_INTERVAL_S:
            self._said = now
            text = "%s is still starting after %.0f s, of %.0f at most on this machine"
            _log.warning(text, self._what, now - self._begun, limit_s)
        return now - self._begun > limit_s
