"""Child processes of the demo: started, read from, ended with their parent.

A child prints one JSON object per line on its standard output and ends when its standard input does, so it outlives no
parent. The last lines of its standard error, in a file, are shown when it fails.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from penstock.errors import PenstockError

#: Seconds a child has to end after its standard input was closed.
_END_TIMEOUT_S = 20.0

#: Seconds a child takes at most to end by itself then.
_CHILD_END_S = 10.0

_LAST_LINES = 15


class DemoError(PenstockError):
    """A part of the demo failed; the message says which, and what it said last."""


class Child:
    """A running child process and the newest report of each `kind`; its standard error is added to the log.

    Reports are written by the reader thread and read by any thread: replacing a value in a dict is one step.
    """

    def __init__(
        self, name: str, command: Sequence[str], log_path: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._command = command
        self._log_path = log_path
        self._environment = {**os.environ, **(environment or {})}
        self._reports: dict[str, dict[str, Any]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        """Start the process. After its end, start it again."""
        with self._log_path.open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 - this interpreter with a module of this package
                [sys.executable, "-m", *self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                # Ctrl-C is for the parent, which ends its children in order.
                start_new_session=True,
            )
        self._process = process
        self._reader = threading.Thread(target=self._read, args=(process,), name=f"penstock-demo-{self.name}")
        self._reader.start()

    def report(self, kind: str) -> dict[str, Any]:
        """Return the newest report of a kind, or an empty one."""
        return self._reports.get(kind, {})

    def exit_code(self) -> int | None:
        """Return the code it ended with, negative for a signal, or None while it runs."""
        return self._process.poll() if self._process else None

    def require_running(self) -> None:
        """Return if it runs; raise `DemoError` with the end of its log if not."""
        code = self.exit_code()
        if code is not None:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            raise DemoError(
                f"{self.name} {how} before its work was done; run it again, with --keep to keep its "
                f"log, which ends with:\n{self._tail()}"
            )

    def kill(self) -> int:
        """End it with SIGKILL, and return the code that its end gave."""
        process = self._process
        if process is None:
            raise DemoError(f"{self.name} was never started; start it first")
        process.send_signal(signal.SIGKILL)
        code = process.wait(_END_TIMEOUT_S)
        self._join()
        return code

    def end(self) -> None:
        """Tell it to end by closing its standard input, and kill it when it does not."""
        process = self._process
        if process is None:
            return
        if process.stdin and not process.stdin.closed:
            process.stdin.close()
        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.end()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        for line in process.stdout or ():
            try:
                report = json.loads(line)
                self._reports[report["kind"]] = report
            except (ValueError, KeyError, TypeError):
                # A library wrote to standard output, or SIGKILL cut a line: it belongs to the log, not to us.
                with self._log_path.open("ab") as log:
                    log.write(line)

    def _join(self) -> None:
        if self._reader is not None:
            self._reader.join(_END_TIMEOUT_S)

    def _tail(self) -> str:
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_LAST_LINES:]) or "(it printed nothing)"


class Reporter:
    """The child's side: prints reports, and knows when the parent wants the end. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.ending = threading.Event()

    def report(self, kind: str, **values: object) -> None:
        """Print one report."""
        line = json.dumps({"kind": kind, **values})
        with self._lock:
            print(line, flush=True)  # noqa: T201 - the pipe to the parent

    def watch_parent(self) -> None:
        """Set `ending` when standard input ends: the parent closed it, or is gone."""
        threading.Thread(target=self._watch, name="penstock-demo-parent", daemon=True).start()

    def _watch(self) -> None:
        # The file descriptor, not sys.stdin: a daemon thread inside its buffer would disturb the interpreter's end.
        while os.read(0, 4096):
            pass
        self.ending.set()
        # With the parent the broker may be gone, and a library may wait for it: nobody needs that any more. A child
        # that ends in time takes this daemon thread with it.
        time.sleep(_CHILD_END_S)
        os._exit(1)
