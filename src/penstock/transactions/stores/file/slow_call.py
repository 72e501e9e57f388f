"""A call into the Kafka client that has not gone on for long, written beside the redo log: other processes read it."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from penstock.transactions.operator.description import hanging

_log = logging.getLogger("penstock.transactions")

_NAME = "slow-call"
#: Bytes of it that are read.
_MOST_BYTES = 1_000


class SlowCall:
    """Of one store. Written by the coordinator's thread alone, whose store is locked."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        # None: a former process may have left one.
        self._noted: str | None = None

    def note(self, call: str, age_s: float) -> None:
        """Note the call, which has not gone on for so many seconds; an empty name where all calls do."""
        if call == self._noted:
            return
        self._noted = call
        try:
            if call:
                new = self._path.with_suffix(".new")
                new.write_text(f"{time.time() - age_s:.3f} {call}")
                new.replace(self._path)
            else:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            # It is for people who look; the log and the statistics have it, too.
            _log.warning("it is not told outside that %s hangs: %s", call or "no call", error)


def read_slow_call(folder: Path) -> str:
    """Return in words what publication waits for, or an empty text."""
    try:
        since, _, call = (folder / _NAME).read_bytes()[:_MOST_BYTES].decode(errors="replace").partition(" ")
        return hanging(call, time.time() - float(since))
    except (OSError, ValueError):
        return ""
