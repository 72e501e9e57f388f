"""How long a starting broker is waited for: as long as it gets on, however busy the machine is.

A start takes some ten seconds of CPU time, and on a busy machine minutes. So no time of the clock says that it hangs:
it is given up when it stands still, or has had far more CPU time than a start takes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_log = logging.getLogger(__name__)

#: Seconds between two looks at the process, and between two log lines that say what is waited for.
_LOOK_S = 1.0
_SAY_S = 20.0
#: The share of a second in which a process that gets on works or waits for a CPU, at least. An idle broker: 0.03.
_SHARE = 0.5
_NS = 1e9


#: By thread: seconds on a CPU, and seconds waiting for one.
ThreadTimes = Mapping[str, tuple[float, float]]


def thread_times(pid: int) -> ThreadTimes:
    """Return the times of a process's threads; none where the system does not tell them, as Linux does."""
    found = {}
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            cpu_ns, waited_ns, _ = path.read_text().split()
        except (OSError, ValueError):  # it has ended meanwhile
            continue
        found[f"{pid}/{path.parent.name}"] = int(cpu_ns) / _NS, int(waited_ns) / _NS
    return found


class Patience:
    """For one start. Used by one thread.

    Args:
        what: what starts, for the log.
        limit_s: seconds for which it may stand still, and seconds of CPU time that it may take.
        log_path: where it writes: a log that grows is progress.
        clock: seconds that only rise.
        times: what its threads had of the CPUs.
    """

    def __init__(
        self,
        what: str,
        limit_s: float,
        log_path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        times: Callable[[int], ThreadTimes] = thread_times,
    ) -> None:
        self._what = what
        self._clock = clock
        self._times = times
        self._limit_s = limit_s
        self._log_path = log_path
        self._begun = self._said = self._looked = self._moved = clock()
        # As of the last look.
        self._threads: ThreadTimes = {}
        self._cpu_s = 0.0
        self._log_bytes = 0

    def is_over(self, pid: int) -> bool:
        """Look at the process, and tell whether it is not waited for any longer."""
        now = self._clock()
        if now - self._looked >= min(_LOOK_S, self._limit_s):
            if self._gets_on(pid, now - self._looked):
                self._moved = now
            self._looked = now
        if now - self._said >= _SAY_S:
            self._said = now
            text = (
                "%s is still starting after %.0f s, in which it had %.1f s of CPU time: it is waited for as it gets on"
            )
            _log.warning(text, self._what, now - self._begun, self._cpu_s)
        return now - self._moved > self._limit_s or self._cpu_s > self._limit_s

    def _gets_on(self, pid: int, seconds: float) -> bool:
        threads, before, log_bytes = self._times(pid), self._threads, self._log_bytes
        self._threads, self._log_bytes = threads, _size(self._log_path)
        wanted_s = 0.0
        for thread, (cpu_s, waited_s) in threads.items():
            cpu_before, waited_before = before.get(thread, (0.0, 0.0))
            self._cpu_s += cpu_s - cpu_before
            wanted_s += cpu_s - cpu_before + waited_s - waited_before
        return wanted_s >= _SHARE * seconds or self._log_bytes > log_bytes


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
