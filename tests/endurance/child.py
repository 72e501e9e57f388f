"""The common parts of a campaign's processes: their options, history, clock and end.

A child writes its history to its standard output, a pipe that another process keeps in a file: so it survives SIGKILL,
and a limit on the size of this process's files does not touch it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psycopg

#: Seconds between two looks at whether the clock shall jump, or sending shall end.
_LOOK_S = 0.2

options: dict[str, Any] = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
#: A pipe takes what is longer than its page in pieces.
_writing = threading.Lock()
#: Set by SIGTERM.
stopping = threading.Event()


def begin(*, signals: bool = True) -> None:
    """Begin logging, follow the clock of this process, and, unless the program has its own way, note SIGTERM."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(threadName)s %(name)s %(levelname)s: %(message)s"
    )
    _follow_clock(Path(options["folder"]) / f"{options['role']}.clock")
    if signals:
        signal.signal(signal.SIGTERM, lambda *_: stopping.set())
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def write_down(*lines: object) -> None:
    """Append lines to the history: they are in the pipe when this returns."""
    data = memoryview(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    with _writing:
        while data:
            data = data[os.write(1, data) :]


def connect() -> psycopg.Connection:
    """Return a connection to PostgreSQL; a restarted server does not answer for a moment, and this raises."""
    return psycopg.connect(options["database"], connect_timeout=10)


def _follow_clock(path: Path) -> None:
    """Let the wall clock of this process be off by the seconds that a file says, while the file is there.

    penstock reads the wall clock as `time.time` and `time.time_ns`, so they are replaced. Kafka's client library, the
    brokers and PostgreSQL keep the machine's clock.
    """
    real, real_ns, off = time.time, time.time_ns, [0.0]
    time.time = lambda: real() + off[0]
    time.time_ns = lambda: real_ns() + int(off[0] * 1e9)

    def follow() -> None:
        while True:
            try:
                off[0] = float(path.read_text())
            except (FileNotFoundError, ValueError):
                off[0] = 0.0
            # The file is polled: a frozen process cannot be signalled.
            time.sleep(_LOOK_S)

    threading.Thread(target=follow, name="clock", daemon=True).start()
