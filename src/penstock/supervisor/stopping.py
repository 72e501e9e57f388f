"""Stop signals of a process: counted, waited for, or used as the end of a block."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from queue import Empty, SimpleQueue

from penstock.options import PROCESS_VARIABLE

#: Seconds within which equal signals count once: no user presses a key twice so soon.
_SAME_SIGNAL_S = 0.05
#: The same in a member of `penstock run --processes`: its supervisor also gets the signal, and may pass it on late.
_SAME_SIGNAL_OF_MEMBER_S = 0.25


class SignalEvent:
    """An event that a signal handler may set, even while the interrupted thread waits for it or sets it.

    `threading.Event` takes a lock for both. A signal handler runs on the main thread, which may hold that lock: a
    deadlock. `SimpleQueue.put` is reentrant by contract. The event is set once, for good. Any thread may call any
    method; a signal handler, all except `wait`.
    """

    __slots__ = ("_is_set", "_token")

    def __init__(self) -> None:
        self._is_set = False
        self._token: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Set it."""
        self._is_set = True
        self._token.put(None)

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def wait(self, timeout: float) -> bool:
        """Wait until it is set, at most `timeout` seconds; return whether it is set."""
        if not self._is_set:
            try:
                self._token.get(timeout=timeout)
            except Empty:
                return self._is_set
            # For the next waiter.
            self._token.put(None)
        return True


class StopRequests:
    """Counts stop requests. For signal handlers: all calls come from the main thread.

    Two equal signals at once are one request: `timeout`, systemd and launchers signal a whole process group, and the
    parent process may pass the same signal on.
    """

    __slots__ = ("_former", "_same_signal_s", "count")

    def __init__(self) -> None:
        #: Requests so far.
        self.count = 0
        self._former = (0, 0.0)
        self._same_signal_s = _SAME_SIGNAL_OF_MEMBER_S if PROCESS_VARIABLE in os.environ else _SAME_SIGNAL_S

    def add(self, number: int, now: float) -> bool:
        """Count a signal at a time in seconds; return whether it is a new request."""
        former, then = self._former
        if number == former and now - then < self._same_signal_s:
            return False
        self._former = (number, now)
        self.count += 1
        return True


class _Stop(BaseException):
    """Raised in the main thread by a signal. Not an `Exception`, so that no `except Exception` catches it."""


@contextlib.contextmanager
def until_signal() -> Iterator[None]:
    """Leave the block at SIGINT or SIGTERM; context managers inside it close in order. Main thread only.

    A second signal interrupts the closing, so that a hanging command can still be ended.
    """

    def stop(_number: int, _frame: object) -> None:
        raise _Stop

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except _Stop:
        return
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
