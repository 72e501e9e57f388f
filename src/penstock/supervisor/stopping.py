"""How a process hears that it is to stop: signals, counted, waited for, and as the end of a block."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from queue import Empty, SimpleQueue

from penstock.options import PROCESS_VARIABLE

#: Seconds within which the same signal counts once: nobody presses a key again so soon, and no script means to.
_SAME_SIGNAL_S = 0.05
#: The same in a member of `penstock run --processes`: the supervisor gets the signal as well, and may pass it on late.
_SAME_SIGNAL_OF_MEMBER_S = 0.25


class SignalEvent:
    """An event that a signal handler may set, also while the thread that it interrupts waits for it or sets it.

    `threading.Event` takes a lock in both, and a handler runs on the main thread wherever that is: it would wait for a
    lock that its own thread holds. `SimpleQueue.put` is reentrant by contract, for such uses. It is set once, for good;
    any thread may call anything, and so may a signal handler save for `wait`.
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
        """Wait until it is set, for `timeout` seconds at most; return whether it is."""
        if not self._is_set:
            try:
                self._token.get(timeout=timeout)
            except Empty:
                return self._is_set
            # For the next who waits.
            self._token.put(None)
        return True


class StopRequests:
    """Counts requests to stop. For signal handlers: all calls come from the main thread.

    A signal that comes twice at once is one request: `timeout`, systemd and launchers signal a whole group, and whoever
    started the process may pass the same signal on.
    """

    __slots__ = ("_former", "_same_signal_s", "count")

    def __init__(self) -> None:
        #: Requests so far.
        self.count = 0
        self._former = (0, 0.0)
        self._same_signal_s = _SAME_SIGNAL_OF_MEMBER_S if PROCESS_VARIABLE in os.environ else _SAME_SIGNAL_S

    def add(self, number: int, now: float) -> bool:
        """Take a signal that came at this time, in seconds; return whether it is a request of its own."""
        former, then = self._former
        if number == former and now - then < self._same_signal_s:
            return False
        self._former = (number, now)
        self.count += 1
        return True


class _Stop(BaseException):
    """Raised in the main thread by a signal. Not an Exception: no `except Exception` on its way may eat it."""


@contextlib.contextmanager
def until_signal() -> Iterator[None]:
    """Leave the block at SIGINT or SIGTERM; context managers inside it close in order. Main thread only.

    A second signal interrupts that closing, so that a command that hangs can still be left.
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
