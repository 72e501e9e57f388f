"""An event that a signal handler may set, also while the thread that it interrupts waits for it or sets it.

`threading.Event` takes a lock in both, and a handler runs on the main thread wherever that is: it would wait for a lock
that its own thread holds. `SimpleQueue.put` is reentrant by contract, for such uses.
"""

from __future__ import annotations

from queue import Empty, SimpleQueue


class SignalEvent:
    """Set once, for good. Any thread may call anything, and so may a signal handler save for `wait`."""

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
