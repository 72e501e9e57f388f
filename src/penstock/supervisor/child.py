"""`Child`: a child process that ends when this process ends, even by SIGKILL. The parent's side of `guard.py`."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

_log = logging.getLogger(__name__)

_GUARD = Path(__file__).with_name("guard.py")

#: Seconds that the guard, a bare interpreter, may take to start, to report, or to end.
_GUARD_TIMEOUT_S = 20.0


class Child:
    """A command that runs once, accepts signals, and never outlives this process.

    One thread at a time may use it, any thread. Signal handlers may call `signal`.

    Args:
        command: the program and its arguments. It has no standard input.
        stdout: target of its output, as in `subprocess.Popen`.
        stderr: target of its errors.
        environment: its environment; None: that of this process.
        grace_s: whole seconds between SIGTERM and SIGKILL when this process dies or the child is closed; 0: SIGKILL at
            once.
        remove: a folder that is removed when this process dies.
        lock: descriptor of a locked file, which stays locked until the command ends.

    Raises:
        OSError: the machine cannot start another process.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        environment: Mapping[str, str] | None = None,
        grace_s: int = 0,
        remove: Path | None = None,
        lock: int | None = None,
    ) -> None:
        self._grace_s = grace_s
        self._pid: int | None = None
        self._stopped = self._closed = False
        self._reports, report = os.pipe()
        options = [str(report), str(os.getpid()), str(grace_s), str(remove or "")]
        try:
            self._guard = subprocess.Popen(  # noqa: S603 - our own script under our own interpreter
                [sys.executable, "-I", "-S", str(_GUARD), *options, *command],
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                bufsize=0,
                env=environment,
                pass_fds=(report,) if lock is None else (report, lock),
                start_new_session=True,  # Ctrl-C in a terminal goes to us alone: we stop the child in order
            )
        except BaseException:
            os.close(self._reports)
            raise
        finally:
            os.close(report)
        assert self._guard.stdin is not None  # noqa: S101 - it is a pipe
        self._orders = self._guard.stdin

    @property
    def stdout(self) -> IO[bytes] | None:
        """The command's output, if `stdout` is a pipe."""
        return self._guard.stdout

    @property
    def stderr(self) -> IO[bytes] | None:
        """The command's errors, if `stderr` is a pipe."""
        return self._guard.stderr

    @property
    def pid(self) -> int | None:
        """Process id of the command; None if it could not be started."""
        self._take_reports(_GUARD_TIMEOUT_S, lambda: self._pid is not None)
        return self._pid

    @property
    def suspended(self) -> bool:
        """Whether the command is stopped by a signal."""
        self._take_reports(0, lambda: False)
        return self._stopped

    def signal(self, number: int) -> None:
        """Send a signal to the command; no effect if it has ended."""
        if not self._closed:
            with contextlib.suppress(BrokenPipeError):
                self._orders.write(bytes([number]))

    def suspend(self) -> bool:
        """Stop the command with SIGSTOP, and wait until it has stopped, because the signal takes effect later.

        Returns False if the command has ended, or does not stop within 20 s.
        """
        self.signal(signal.SIGSTOP)
        self._take_reports(_GUARD_TIMEOUT_S, lambda: self._stopped)
        return self._stopped and self.wait(0) is None

    def resume(self) -> bool:
        """Continue a stopped command with SIGCONT; return whether it runs or has ended within 20 s."""
        self.signal(signal.SIGCONT)
        self._take_reports(_GUARD_TIMEOUT_S, lambda: not self._stopped)
        return not self._stopped or self.wait(0) is not None

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code (negative: the signal that ended it), or None if it still runs after `timeout_s`."""
        try:
            return self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self, number: int, timeout_s: float) -> int | None:
        """End the command by a signal, after `timeout_s` by SIGKILL; return its exit code as `wait` does."""
        self.signal(number)
        if self.wait(timeout_s) is None:
            self.signal(signal.SIGKILL)
        return self.wait(_GUARD_TIMEOUT_S)

    def close(self) -> None:
        """End the command as if this process died."""
        if self._closed:
            return
        self._closed = True
        self._orders.close()
        if self.wait(self._grace_s + _GUARD_TIMEOUT_S) is None:
            self._guard.kill()  # the command has the death signal set and goes with it
            if self.wait(_GUARD_TIMEOUT_S) is None:
                _log.warning("process %d does not end though it was killed: it is abandoned", self._guard.pid)
        os.close(self._reports)

    def _take_reports(self, timeout_s: float, until: Callable[[], bool]) -> None:
        """Read reports until a condition holds or the time is over. The end of the pipe: the command has ended."""
        deadline = time.monotonic() + timeout_s
        while not self._closed and not until():
            readable, _, _ = select.select([self._reports], [], [], max(0.0, deadline - time.monotonic()))
            received = os.read(self._reports, 4096) if readable else b""  # written whole: they are short
            if not received:
                return
            for report in received.split():
                if report.isdigit():
                    self._pid = int(report)
                else:
                    self._stopped = report == b"stopped"
