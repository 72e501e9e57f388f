"""One core for all worker threads of a process: the option `one_core`.

Python runs one thread at a time. A worker whose wait is over is woken on a core that is idle, finds Python's lock with
another worker, and waits again: beside handlers of a millisecond each message costs two changes of core more than
it needs. On one core a worker is woken when the other has finished.
"""

from __future__ import annotations

import logging
import os

from penstock.options import PROCESS_VARIABLE

_log = logging.getLogger(__name__)


def core_for_workers() -> int | None:
    """Return the core for this process's workers, or None where cores are not chosen.

    Each process of `--processes` has another, as far as there are: of those on which it may run, the first process has
    the last, for the first core serves most interrupts.
    """
    if not hasattr(os, "sched_setaffinity"):
        _log.warning("one_core has no effect: this system does not let a thread choose its core, as Linux does")
        return None
    cores = sorted(os.sched_getaffinity(0))
    number = os.environ.get(PROCESS_VARIABLE, "1")
    return cores[-int(number) % len(cores)] if number.isdecimal() else cores[-1]


def stay_on(core: int) -> None:
    """Keep the calling thread, and what it starts from now on, on a core. Where that is refused, it is logged."""
    try:
        os.sched_setaffinity(0, {core})
    except OSError as error:  # a sandbox forbids it, or the core was taken from the process since
        _log.warning("one_core has no effect on a worker: core %d cannot be chosen (%s)", core, error.strerror)
