"""`penstock run --processes N`: a supervisor that starts N members of the group and keeps them running.

A member that dies is restarted after a growing wait; one that asks for a restart (code 4), at once. Wrong use (code 2),
which a restart cannot fix, ends the whole run. One loop notices ended members and starts due ones. A thread for each
stream of a member prints its lines. The signal handler passes signals on itself, so that nothing delays them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

from penstock.options import MEMBERS_VARIABLE, PROCESS_VARIABLE
from penstock.supervisor.child import Child
from penstock.supervisor.exit_codes import EXIT_CONNECTION, EXIT_FAILED, EXIT_RESTART, EXIT_USAGE
from penstock.supervisor.stopping import StopRequests

_log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: The signals that members get at our first and second signal; the next one kills them. systemd may send each signal to
#: members, too. With two kinds, a member counts our late copy and systemd's signal as one request, and the second kind
#: as a second request.
_PASSED_ON = {1: signal.SIGTERM, 2: signal.SIGINT}
_MEMBERS_INTERVAL_S = 0.1
#: Longer lines are printed in parts.
_MAX_LINE_BYTES = 65_536
#: Seconds to print the last lines of an ended member. A process that it left behind may keep its streams open.
_LAST_LINES_S = 5.0
#: Seconds for a member to end in order after this process has died, before it is killed.
_END_BUDGET_S = 60


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a dead member is restarted."""

    #: Restarts of one member in a row before the run ends.
    max_restarts: int = 10
    #: Seconds after which a member counts as up, and its restarts in a row start at zero.
    reset_after_s: float = 60.0
    #: Seconds before the first restart in a row; they double each time, up to `most_wait_s`.
    first_wait_s: float = 0.5
    most_wait_s: float = 30.0

    def delay_before(self, restart: int) -> float | None:
        """Return the seconds before the n-th restart in a row, from 1; None: no more restarts."""
        if restart > self.max_restarts:
            return None
        # Bounded, because `2.0 ** 1024` raises.
        return min(self.most_wait_s, self.first_wait_s * 2.0 ** min(restart - 1, 64))


@dataclass(slots=True)
class _Member:
    """One member of the run: its present process, or the time of its next start."""

    number: int
    process: Child | None = None
    #: The threads that print its output.
    printers: list[threading.Thread] = field(default_factory=list)
    started: float = 0.0
    #: When the next process is due; None while one runs, and if none will follow.
    due: float | None = 0.0
    #: Restarts in a row.
    restarts: int = 0
    #: Whether one of its processes ran long enough, or ended for another reason than an unreachable broker.
    came_up: bool = False


class Processes:
    """Keeps members running until a signal, until all have ended, or until one cannot be restarted.

    For the main thread: only that receives signals.
    """

    def __init__(self, command: Sequence[str], count: int, policy: RestartPolicy | None = None) -> None:
        self._command = list(command)
        self._policy = policy or RestartPolicy()
        self._members = [_Member(number) for number in range(1, count + 1)]
        # Unique, so that another run of the same app on this host does not fence these members.
        self._members_name = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        # Our own streams, each with a lock: one line at a time.
        self._sinks = [(sys.stdout.fileno(), threading.Lock()), (sys.stderr.fileno(), threading.Lock())]
        self._stop_requests = StopRequests()
        self._giving_up = False
        self._code = 0

    def run(self) -> int:
        """Run, and return the exit code: 0 ended in order, 1 failed, 2 wrong use, 3 no broker ever answered."""
        former = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        # A shell or container may have set it to "ignore": then no exit code of a member would be reported.
        former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            while any(member.process is not None or member.due is not None for member in self._members):
                now = time.monotonic()
                for member in self._members:
                    self._tend(member, now)
                time.sleep(_MEMBERS_INTERVAL_S)
        finally:
            # Members that still run after a failure of our own end in parallel.
            self._signal_all(signal.SIGTERM)
            for member in self._members:
                if member.process is not None:
                    member.process.close()
            for number, handler in former.items():
                signal.signal(number, handler)
        return self._code

    @property
    def _stopping(self) -> bool:
        return self._stop_requests.count > 0 or self._giving_up

    def _tend(self, member: _Member, now: float) -> None:
        if member.process is not None:
            code = member.process.wait(0)
            if code is not None:
                self._ended(member, code, now)
        if self._stopping:
            member.due = None
        elif member.due is not None and now >= member.due:
            self._start(member)

    def _start(self, member: _Member) -> None:
        member.due = None
        member.started = time.monotonic()
        try:
            process = self._spawn(member.number)
        except OSError as error:  # too many processes, no memory: that may pass
            _log.error("process %d could not be started: %s", member.number, error)
            member.came_up = True
            self._plan_restart(member, EXIT_FAILED, 0.0, member.started)
            return
        member.process = process
        prefix = b"[%d] " % member.number
        for source, (sink, lock) in zip((process.stdout, process.stderr), self._sinks, strict=True):
            name, line_args = f"penstock-output-{member.number}", (prefix, source, sink, lock)
            printer = threading.Thread(target=_print_lines, args=line_args, name=name, daemon=True)
            member.printers.append(printer)
            printer.start()
        if self._stopping:  # the signal came while the process was being made
            process.signal(signal.SIGTERM)

    def _spawn(self, number: int) -> Child:
        own = {PROCESS_VARIABLE: str(number), MEMBERS_VARIABLE: self._members_name}
        return Child(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            environment={"PYTHONUNBUFFERED": "1", **os.environ, **own},  # lines arrive when they are printed
            grace_s=_END_BUDGET_S,
        )

    def _ended(self, member: _Member, code: int, now: float) -> None:
        deadline = time.monotonic() + _LAST_LINES_S
        while member.printers:
            member.printers.pop().join(max(0.0, deadline - time.monotonic()))
        if member.process is not None:
            member.process.close()
        member.process = None
        up_s = now - member.started
        member.came_up = member.came_up or code != EXIT_CONNECTION or up_s >= self._policy.reset_after_s
        if code == 0:
            _log.info("process %d ended", member.number)
        elif self._stopping:
            # A member that starts or ends has no handler for our signal and dies of it.
            if self._code == 0 and -code not in _SIGNALS:
                _log.error("process %d %s while it was stopped", member.number, _how(code))
                self._code = EXIT_FAILED
        elif code == EXIT_USAGE:
            _log.error(
                "process %d ended with exit code 2, wrong use, which a restart cannot correct; the run ends",
                member.number,
            )
            self._give_up(EXIT_USAGE)
        elif code == EXIT_RESTART:
            # It gave the hanging messages up, and they do not come again: this is no restart in a row.
            _log.warning("process %d asks to be started again, because its handlers do not return", member.number)
            member.due = now
        else:
            self._plan_restart(member, code, up_s, now)

    def _plan_restart(self, member: _Member, code: int, up_s: float, now: float) -> None:
        if up_s >= self._policy.reset_after_s:
            member.restarts = 0
        member.restarts += 1
        delay = self._policy.delay_before(member.restarts)
        if delay is None:
            _log.error(
                "process %d %s, after %d restarts in a row; the run ends",
                member.number,
                _how(code),
                member.restarts - 1,
            )
            never_up = code == EXIT_CONNECTION and not any(self._came_up(member, now) for member in self._members)
            self._give_up(EXIT_CONNECTION if never_up else EXIT_FAILED)
            return
        member.due = now + delay
        _log.warning(
            "process %d %s; it is started again in %g s (restart %d of %d)",
            member.number,
            _how(code),
            delay,
            member.restarts,
            self._policy.max_restarts,
        )

    def _came_up(self, member: _Member, now: float) -> bool:
        return member.came_up or (member.process is not None and now - member.started >= self._policy.reset_after_s)

    def _give_up(self, code: int) -> None:
        self._code = code
        self._giving_up = True
        self._signal_all(signal.SIGTERM)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._stop_requests.add(number, time.monotonic()):
            self._signal_all(_PASSED_ON.get(self._stop_requests.count, signal.SIGKILL))

    def _signal_all(self, number: signal.Signals) -> None:
        for member in self._members:
            if member.process is not None:
                member.process.signal(number)


def _print_lines(prefix: bytes, source: IO[bytes], sink: int, lock: threading.Lock) -> None:
    """Print a member's lines, with its number as prefix, until the stream ends."""
    with source:
        while line := source.readline(_MAX_LINE_BYTES):
            rest = prefix + line + (b"" if line.endswith(b"\n") else b"\n")
            # Without a reader the output is lost, but the work goes on. Python's buffers would keep the error.
            with lock, contextlib.suppress(OSError):
                while rest:
                    rest = rest[os.write(sink, rest) :]


def run_processes(arguments: Sequence[str], count: int, max_restarts: int) -> int:
    """Run `penstock run ARGUMENTS...` in several processes; return the exit code."""
    # -P: a file in the current folder must not shadow penstock; `penstock run` adds that folder to the path itself.
    command = [sys.executable, "-P", "-m", "penstock", "run", *arguments]
    return Processes(command, count, RestartPolicy(max_restarts)).run()


def _how(code: int) -> str:
    """Return how a process ended, as text."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
