"""The guard: a process between a `Child` and its command. It ends the command however the parent ends.

It is run by its path under `python -I -S` and imports nothing of penstock. Orders arrive on stdin: each byte is the
number of a signal for the command. Reports leave through a pipe of their own, one line each: the command's process id,
`stopped`, `continued`. When the command ends, the guard ends with the same exit code or signal.

PR_SET_PDEATHSIG alone is not enough: it fires when the *thread* that forked dies. So the guard notices the parent's
death by the end of stdin or, if a fork of the parent keeps that open, by a new parent process. The death signal
protects the link between guard and command.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import sys

#: `prctl` option of Linux, from <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1

#: Seconds between two checks of the parent's id. Orders, the end of stdin and changes of the command are seen at once.
_PARENT_INTERVAL_S = 1.0


def main(arguments: list[str]) -> None:
    """Guard `REPORT_FD PARENT_PID GRACE_S FOLDER_TO_REMOVE COMMAND...`; an empty folder name removes nothing.

    When the parent dies, the command gets SIGTERM, and SIGKILL after the grace; with a grace of 0, SIGKILL at once.
    """
    report, parent, grace_s, folder, *command = arguments
    os.set_inheritable(int(report), False)  # noqa: FBT003 - it takes no keyword
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the parent's setting ignores it, no end would be reported
    guard = os.getpid()
    # Before the handlers below: a signal that reaches the child before its exec must end it.
    child = os.fork()
    if child == 0:
        _become(command, guard)
    code = _watch(child, int(parent), int(report))
    if code is not None:
        _end_as(code)
    # The child is not waited for yet, so its process id is still its own.
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    os.kill(child, signal.SIGTERM if int(grace_s) else signal.SIGKILL)
    os.kill(child, signal.SIGCONT)  # a stopped process does not receive SIGTERM
    signal.alarm(int(grace_s))
    os.waitpid(child, 0)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _become(command: list[str], guard: int) -> None:
    """Turn this process, a fork of the guard, into the command."""
    try:
        if sys.platform == "linux":
            # Without its guard the command counts as killed: one that went on would meet its successor.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard:  # died between the fork and the line above
                os._exit(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp(command[0], command)  # noqa: S606 - the command is the parent's own
    except OSError as error:
        os.write(2, f"{command[0]} could not be started: {error}; check that it can be executed\n".encode())
    os._exit(127)  # as a shell does


def _watch(child: int, parent: int, report: int) -> int | None:
    """Pass orders and reports on; return the command's exit code when it ends, None when the parent has gone."""
    awake, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking)
    # Handlers that do nothing: SIGCHLD wakes the loop, and what systemd sends to all is for the others to answer.
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    _report(report, str(child))
    while os.getppid() == parent:
        pid, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        if pid and os.WIFSTOPPED(status):  # the kernel says so when the last of its threads stands still
            _report(report, "stopped")
        elif pid and os.WIFCONTINUED(status):
            _report(report, "continued")
        elif pid:
            return os.waitstatus_to_exitcode(status)
        readable, _, _ = select.select([0, awake], [], [], _PARENT_INTERVAL_S)
        if awake in readable:
            os.read(awake, 4096)
        if 0 in readable:
            orders = os.read(0, 4096)
            if not orders:
                break
            for order in orders:
                os.kill(child, order)
    return None


def _report(report: int, line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # a parent that has gone is noticed by the loop
        os.write(report, line.encode() + b"\n")


def _end_as(code: int) -> None:
    """End this process by the exit code or the signal of the command."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has left its own core
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
