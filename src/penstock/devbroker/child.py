"""A child process that ends with this one, SIGKILL included: the near side of `_supervisor.py`."""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from penstock.errors import DevBrokerError

_log = logging.getLogger(__name__)

_SUPERVISOR = Path(__file__).with_name("_supervisor.py")

#: Seconds the supervisor may take to start, to report what its child does, or to end: it is a bare interpreter.
_SUPERVISOR_TIMEOUT_S = 20.0

#: Exit code reported when the supervisor itself was killed, and its child with it.
_KILLED = -9


class SupervisedChild:
    """One command that can be run, signalled and run again, and that never outlives this process.

    For one thread at a time; which thread makes a call, and whether it lives on, does not matter. The folder `remove`
    disappears when the child is closed or this process dies. The locked file of descriptor `lock` stays locked until
    the supervisor has ended.
    """

    def __init__(
        self, command: list[str], *, log_path: Path, remove: Path | None = None, lock: int | None = None
    ) -> None:
        self._log_path = log_path
        self._remove = remove
        self._pending = b""
        self._exit_code: int | None = None
        self._stopped = False
        self.pid: int | None = None
        arguments = [str(os.getpid()), str(log_path), str(remove or ""), *command]
        with log_path.open("ab") as log:
            self._supervisor = subprocess.Popen(  # noqa: S603 - our own script under our own interpreter
                [sys.executable, "-I", "-S", str(_SUPERVISOR), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                start_new_session=True,  # Ctrl-C in a terminal goes to us alone: we stop the child in order
                pass_fds=() if lock is None else (lock,),
            )

    def run(self) -> int:
        """Start the command and return its process id; `DevBrokerError` where that was not possible."""
        earlier, self._exit_code, self._stopped = self.pid, None, False
        self._order("run")
        self._read_reports(_SUPERVISOR_TIMEOUT_S, lambda: self.pid != earlier or self._exit_code is not None)
        if self.pid is None or self.pid == earlier:
            raise DevBrokerError(f"the supervising process did not start its child; see {self._log_path}")
        return self.pid

    def signal(self, number: int) -> None:
        """Send a signal to the command; nothing happens when it has ended."""
        self._order(f"signal {int(number)}")

    def suspend(self) -> bool:
        """Stop the command with SIGSTOP; tell whether all of its threads stand still.

        The signal alone would not do: it takes hold some time later. False when it has ended, or after 20 s.
        """
        self.signal(signal.SIGSTOP)
        self._read_reports(_SUPERVISOR_TIMEOUT_S, lambda: self._stopped or self._exit_code is not None)
        return self._stopped and self._exit_code is None

    def resume(self) -> bool:
        """Let a stopped command go on with SIGCONT; tell whether it does, within 20 s."""
        self.signal(signal.SIGCONT)
        self._read_reports(_SUPERVISOR_TIMEOUT_S, lambda: not self._stopped or self._exit_code is not None)
        return not self._stopped or self._exit_code is not None

    @property
    def suspended(self) -> bool:
        """Whether the command was stopped with SIGSTOP when the supervisor last reported; `wait(0)` takes reports."""
        return self._stopped

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code (negative: the signal that ended it), or None when it still runs after `timeout_s`."""
        self._read_reports(timeout_s, lambda: self._exit_code is not None)
        return self._exit_code

    def close(self) -> None:
        """Kill the command if it runs, remove the folder, and end the supervisor."""
        for pipe in (self._supervisor.stdin, self._supervisor.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._supervisor.wait(_SUPERVISOR_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()  # its child has the death signal set and goes with it
            try:
                self._supervisor.wait(_SUPERVISOR_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                _log.warning("process %d does not end though it was killed: it is abandoned", self._supervisor.pid)
        if self._exit_code is None:
            self._exit_code = _KILLED
        if self._remove is not None:  # still there only if the supervisor was killed
            shutil.rmtree(self._remove, ignore_errors=True)

    def _order(self, line: str) -> None:
        if self._supervisor.stdin is None or self._supervisor.stdin.closed:
            return
        try:
            self._supervisor.stdin.write(line.encode() + b"\n")
        except BrokenPipeError:
            self._exit_code = _KILLED

    def _read_reports(self, timeout_s: float, done: Callable[[], bool]) -> None:
        """Take reports until `done()` or the time is over; the end of the pipe means that both processes ended."""
        deadline = time.monotonic() + timeout_s
        stdout = self._supervisor.stdout
        while not done() and stdout is not None and not stdout.closed:
            readable, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                return
            received = os.read(stdout.fileno(), 4096)
            if not received:
                self._exit_code = _KILLED
                return
            *reports, self._pending = (self._pending + received).split(b"\n")
            for report in reports:
                self._take(report.decode())

    def _take(self, report: str) -> None:
        kind, _, rest = report.partition(" ")
        if kind == "started":
            self.pid = int(rest)
        elif kind in {"stopped", "continued"}:
            self._stopped = kind == "stopped"
        elif kind == "ended":
            self._exit_code = int(rest)
            self._stopped = False
        else:
            raise DevBrokerError(f"a child process could not be started: {rest}; check that the file can be executed")
