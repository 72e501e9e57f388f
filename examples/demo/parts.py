"""The demo's processes: each runs one module, has a log file, and ends with the demo.

    python -m demo.parts MODULE ARGUMENT ...

The demo holds the other end of a part's standard input, and writes nothing. The kernel closes that end when the demo
ends, also by SIGKILL. Then the part sends itself SIGTERM.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

from penstock import PenstockError

#: Seconds for a part to end.
_END_TIMEOUT_S = 30.0

_LAST_LINES = 15


class PartError(PenstockError):
    """A part of the demo failed. The message names it and shows its last lines."""


class Part:
    """A running process, and a context manager that ends it. `ends_with` is the expected exit code."""

    def __init__(self, name: str, folder: Path, module: str, *arguments: str, ends_with: int = 0) -> None:
        self._name, self._ends_with = name, ends_with
        self._log = folder / f"{name}.log"
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own modules under our own interpreter
                [sys.executable, "-m", "demo.parts", module, *arguments],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in a terminal goes only to the demo, which then ends its parts
            )

    def exit_code(self) -> int | None:
        """Return its exit code, None while it runs, or the negative number of the signal that ended it."""
        return self._process.poll()

    def require_no_failure(self) -> None:
        """Raise `PartError` with the end of its log if it has ended with an unexpected code."""
        code = self.exit_code()
        if code in (None, self._ends_with):
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        raise PartError(
            f"{self._name} {how}; run the demo again, with --keep to keep its log, which ends with:\n"
            + ("\n".join(lines) or "(it printed nothing)")
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        self._process.stdin.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _end_with_the_demo() -> None:
    os.read(sys.stdin.fileno(), 1)  # returns only when the pipe is closed
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_demo, name="penstock-demo-end", daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
