"""The process between us and a Java child, so that the child ends however we end.

It is run by its path under `python -I -S` and imports nothing of penstock. Orders come as lines on stdin (`run`,
`signal N`), reports go as lines to stdout (`started PID`, `failed REASON`, `stopped`, `continued`, `ended CODE`).

PR_SET_PDEATHSIG alone would not do: it fires when the *thread* that forked dies. So the parent's death is seen as the
end of stdin or, where a fork of the parent keeps that open, as a new parent process. The signal guards the last link.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

#: `prctl` option of Linux, from <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1

#: Seconds between two looks at the child and at the parent; orders wake it at once.
_LOOK_INTERVAL_S = 0.05


class Supervisor:
    """Runs one command, as often as it is ordered to, until the parent is gone. Not for sharing between threads."""

    def __init__(self, parent_pid: int, log_path: str, command: list[str]) -> None:
        self._parent_pid = parent_pid
        self._log_path = log_path
        self._command = command
        self._child: subprocess.Popen[bytes] | None = None

    def serve(self) -> None:
        """Obey orders until stdin ends or the parent is another process, then kill the child."""
        pending = b""
        while os.getppid() == self._parent_pid:
            readable, _, _ = select.select([0], [], [], _LOOK_INTERVAL_S)
            if readable:
                received = os.read(0, 4096)
                if not received:
                    break
                *orders, pending = (pending + received).split(b"\n")
                for order in orders:
                    self._obey(order.decode())
            self._look()
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def _obey(self, order: str) -> None:
        if order == "run" and self._child is None:
            self._run()
        elif order.startswith("signal ") and self._child is not None:
            self._child.send_signal(int(order.removeprefix("signal ")))

    def _run(self) -> None:
        libc = ctypes.CDLL(None)  # loaded before the fork: the child should do as little as it can
        me = os.getpid()

        def end_with_me() -> None:
            if sys.platform == "linux":
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != me:  # died between the fork and the line above
                    os._exit(1)

        with open(self._log_path, "ab") as log:  # noqa: PTH123 - pathlib would double this process's start time
            try:
                self._child = subprocess.Popen(  # noqa: S603 - the command is the parent's own
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    preexec_fn=end_with_me,  # noqa: PLW1509 - safe: this process has a single thread
                )
            except OSError as error:
                report(f"failed {error}")
                return
        report(f"started {self._child.pid}")

    def _look(self) -> None:
        """Tell of a child that stopped, went on or ended."""
        child = self._child
        if child is None:
            return
        if child.returncode is None:  # sending a signal looks, too, and may have found the end
            pid, status = os.waitpid(child.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                return
            if os.WIFSTOPPED(status):  # the kernel says so when the last of its threads stands still
                report("stopped")
                return
            if os.WIFCONTINUED(status):
                report("continued")
                return
            child.returncode = os.waitstatus_to_exitcode(status)
        self._child = None
        report(f"ended {child.returncode}")


def report(line: str) -> None:
    """Write one line to the parent; a parent that is gone is noticed by the loop."""
    try:
        os.write(1, line.encode() + b"\n")
    except BrokenPipeError:
        return


def main(arguments: list[str]) -> None:
    """Serve `PARENT_PID LOG_PATH FOLDER_TO_REMOVE COMMAND...`; an empty folder name removes nothing."""
    parent_pid, log_path, folder, *command = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # were it ignored, as the parent may have it, no end would be seen
    try:
        Supervisor(int(parent_pid), log_path, command).serve()
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
