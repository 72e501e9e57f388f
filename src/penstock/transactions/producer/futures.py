"""A result to come, for threads, for callbacks and for event loops.

Like `concurrent.futures.Future` to look at, at a fifth of its cost: thousands are made and ended a second.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, TypeVar, cast

from penstock.errors import raised

_log = logging.getLogger("penstock.transactions")

T = TypeVar("T")

#: Held while the list of a future's callbacks is made.
_lists_lock = threading.Lock()

#: Whether this thread runs callbacks: it is the one that serves all deliveries, and may not wait for one.
_here = threading.local()


def in_callback() -> bool:
    """Tell whether the caller is a callback of a future that has just ended."""
    return bool(getattr(_here, "in_callback", False))


class ResultFuture(Generic[T]):
    """A result to come. Ended once, by any thread; asked by any number of them.

    There is no lock: the outcome is set before the callbacks are taken, and a callback is either taken by who ends the
    future or taken back by who added it, since taking from a list is one step under the interpreter lock. The list is
    made for the first callback, before it is looked whether the future has ended: who ends it finds the list, or who
    adds finds the end.
    """

    __slots__ = ("_callbacks", "_result", "_set", "error")

    def __init__(self) -> None:
        self._set = False
        self._result: T | None = None
        #: Why there is no result, once that is so.
        self.error: Exception | None = None
        self._callbacks: list[Callable[[ResultFuture[T]], object]] | None = None

    def done(self) -> bool:
        """Tell whether the result, or the error, is there."""
        return self._set

    def cancelled(self) -> bool:
        """Tell whether it was cancelled: never."""
        return False

    def cancel(self) -> bool:
        """Do nothing and return False: what is on its way to Kafka cannot be called back."""
        return False

    def result(self, timeout: float | None = None) -> T:
        """Return the result, or raise the error it ended with.

        Args:
            timeout: seconds to wait at most; None: as long as it takes.

        Raises:
            TimeoutError: it is not there yet.
        """
        self._wait(timeout)
        if self.error is not None:
            raise self.error
        return self._outcome()

    def _outcome(self) -> T:
        """Return the result, which is there."""
        return cast("T", self._result)

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Return the error it ended with, or None; the timeout is that of `result`."""
        self._wait(timeout)
        return self.error

    def add_done_callback(self, callback: Callable[[ResultFuture[T]], object]) -> None:
        """Have a function called with this object once it is done; at once where it is.

        It runs in the thread that serves all deliveries: it must not wait, nor call what waits. It may `submit`; where
        too many are in flight, that raises `BufferFullError` whatever was chosen. What it raises is logged.
        """
        callbacks = self._callbacks
        if callbacks is None:
            with _lists_lock:
                callbacks = self._callbacks
                if callbacks is None:
                    callbacks = self._callbacks = []
        callbacks.append(callback)
        if self._set:
            try:
                callbacks.remove(callback)
            except ValueError:
                return
            self._call(callback)

    def __await__(self) -> Generator[object, None, T]:
        """Wait on the running event loop; cancelling the wait changes nothing of the transaction."""
        if not self._set:
            loop = asyncio.get_running_loop()
            there: asyncio.Future[None] = loop.create_future()
            wake = _waker(loop).wake
            self.add_done_callback(lambda _: wake(there))
            yield from there
        return self.result()

    def succeed(self, result: T) -> None:
        """End it with a result."""
        self._result = result
        self._end()

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        self.error = error
        self._end()

    def _end(self) -> None:
        self._set = True
        callbacks = self._callbacks
        while callbacks:
            try:
                callback = callbacks.pop(0)
            except IndexError:
                return
            # A callback may end another future, and be within its own afterwards.
            outer, _here.in_callback = in_callback(), True
            try:
                self._call(callback)
            finally:
                _here.in_callback = outer

    def _call(self, callback: Callable[[ResultFuture[T]], object]) -> None:
        try:
            callback(self)
        except KeyboardInterrupt:
            # It is meant for the thread that this is: the main one.
            raise
        except:  # noqa: E722 - see `raised`; the user's function may raise anything
            error = raised()
            _log.error("a callback of a transaction raised %s", type(error).__name__, exc_info=error)

    def _wait(self, timeout: float | None) -> None:
        if self._set:
            return
        gate = threading.Lock()
        gate.acquire()
        self.add_done_callback(lambda _: gate.release())
        if not gate.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError(f"no result within {timeout:g} s; the transaction goes on")


class _LoopWaker:
    """Wakes futures of one event loop. One call into the loop serves all futures that were added until it runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        # Added by any thread, taken by the loop.
        self._due: deque[asyncio.Future[None]] = deque()
        # Set by any thread after adding, cleared by the loop before taking: nothing that was added is missed.
        self._called = False

    def wake(self, there: asyncio.Future[None]) -> None:
        """Have a future ended."""
        self._due.append(there)
        if not self._called:
            self._called = True
            loop = self._loop()
            if loop is not None and not loop.is_closed():
                loop.call_soon_threadsafe(self._serve)

    def _serve(self) -> None:
        self._called = False
        while self._due:
            there = self._due.popleft()
            if not there.done():
                there.set_result(None)


#: One waker for each event loop, for as long as the loop lives, guarded by the lock. Whose future it is does not matter
#: to a waker, only whose loop: so they are shared by all.
_wakers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopWaker] = weakref.WeakKeyDictionary()
_wakers_lock = threading.Lock()


def _waker(loop: asyncio.AbstractEventLoop) -> _LoopWaker:
    with _wakers_lock:
        waker = _wakers.get(loop)
        if waker is None:
            waker = _wakers[loop] = _LoopWaker(loop)
        return waker
