"""Child processes of the demo: started, read from, ended with their parent.

A child prints one JSON object per line on its standard output. It ends at SIGTERM, which it also gets when the parent
dies. The last lines of its standard error, in a file, are shown when it fails.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from penstock.errors import PenstockError
from penstock.supervisor.child import Child
from penstock.supervisor.stopping import SignalEvent

#: Seconds a part has to end after SIGTERM.
_END_TIMEOUT_S = 20

_LAST_LINES = 15


class DemoError(PenstockError):
    """A part of the demo failed; the message says which, and what it said last."""


class Part:
    """A running child process and the newest report of each `kind`; its standard error is added to the log.

    Reports are written by the reader thread and read by any thread: replacing a value in a dict is one step.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], log_path: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._log_path = log_path
        self._reports: dict[str, dict[str, Any]] = {}
        with log_path.open("ab") as log:
            self.process = Child(
                [sys.executable, *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                environment={**os.environ, **(environment or {})},
                grace_s=_END_TIMEOUT_S,
            )
        self._reader = threading.Thread(target=self._read, name=f"penstock-demo-{name}", daemon=True)
        self._reader.start()

    def report(self, kind: str) -> dict[str, Any]:
        """Return the newest report of a kind, or an empty one."""
        return self._reports.get(kind, {})

    def require_running(self) -> None:
        """Return if it runs; raise `DemoError` with the end of its log if not."""
        code = self.process.wait(0)
        if code is not None:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
            raise DemoError(
                f"{self.name} {how} before its work was done; run it again, with --keep to keep its log, "
                "which ends with:\n" + ("\n".join(lines) or "(it printed nothing)")
            )

    def end(self, number: signal.Signals = signal.SIGTERM) -> int | None:
        """End it by that signal, by SIGKILL when it takes too long, and return the code that its end gave."""
        code = self.process.end(number, _END_TIMEOUT_S)
        self._reader.join(_END_TIMEOUT_S)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.end()
        self.process.close()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            try:
                report = json.loads(line)
                self._reports[report["kind"]] = report
            except (ValueError, KeyError, TypeError):
                # A library wrote to standard output, or SIGKILL cut a line: it belongs to the log, not to us.
                with self._log_path.open("ab") as log:
                    log.write(line)


class Reporter:
    """The child's side: prints reports, and knows when it is to end. Made by the main thread, used by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.ending = SignalEvent()
        signal.signal(signal.SIGTERM, lambda _number, _frame: self.ending.set())

    def report(self, kind: str, **values: object) -> None:
        """Print a report."""
        line = json.dumps({"kind": kind, **values})
        with self._lock:
            print(line, flush=True)
