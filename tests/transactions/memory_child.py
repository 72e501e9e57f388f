"""A coordinator in a process of its own that tells how much memory it takes.

Arguments: bootstrap servers, prefix. For each line that it reads it prints pending and delayed transactions, resident
bytes, and milliseconds of processor time since the line before, by elapsed second.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from penstock.transactions import Coordinator


def resident_bytes() -> int:
    """Return how much of this process is in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    servers, prefix = sys.argv[1:]
    with Coordinator(bootstrap_servers=servers, prefix=prefix) as coordinator:
        print("started", resident_bytes(), flush=True)  # noqa: T201 - the test reads it
        used, at = time.process_time(), time.monotonic()
        for _ in sys.stdin:
            now = coordinator.statistics()
            load = (time.process_time() - used) * 1000 / (time.monotonic() - at)
            used, at = time.process_time(), time.monotonic()
            print(now.pending, now.delayed, resident_bytes(), round(load), flush=True)  # noqa: T201 - as above


if __name__ == "__main__":
    main()
