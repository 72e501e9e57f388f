"""The future of a message that commits as soon as its half is stored: for threads, callbacks and event loops.

It has the methods of `concurrent.futures.Future` at a fifth of the cost: a producer makes thousands a second.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial

from penstock.errors import PenstockError, raised
from penstock.transactions.model import TransactionResult, TransactionState
from penstock.transactions.producer.flight import Flight, Phase
from penstock.transactions.producer.in_flight import current_thread

_log = logging.getLogger("penstock.transactions")

# Members of enumerations are slow to look up, and every message passes here.
_DECIDING, _GIVEN_UP, _ENDED = Phase.DECIDING, Phase.GIVEN_UP, Phase.ENDED
_COMMIT = TransactionState.COMMIT


class Submission(Flight):
    """The future of one message without a local transaction. Thread-safe.

    A callback is added under the lock that guards the phase. So either the end of the flight calls it, or the adding
    thread sees the end and calls it at once.
    """

    __slots__ = ()

    _has_block = False

    def submit(self) -> None:
        """Send the message; raise if it cannot be sent."""
        self._take_off()

    def try_submit(self) -> None:
        """Send the message, or end with the error that `submit` would raise."""
        try:
            self._take_off()
        except PenstockError as error:
            self.error, self._phase = error, _ENDED

    def done(self) -> bool:
        """Tell whether the result or the error is there."""
        phase = self._phase
        return phase is _ENDED or phase is _GIVEN_UP or (phase is _DECIDING and self._wait == "sent")

    def cancelled(self) -> bool:
        """Return False: a submission is never cancelled."""
        return False

    def cancel(self) -> bool:
        """Do nothing and return False: a message on its way to Kafka cannot be taken back."""
        return False

    def result(self, timeout: float | None = None) -> TransactionResult:
        """Return the result, or raise the error of the transaction.

        Args:
            timeout: seconds to wait at most, with 0 or less not at all; None: no limit.

        Raises:
            TimeoutError: there is no result yet.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return TransactionResult(self.transaction_id, _COMMIT, self.halves[0].topic)

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Return the error of the transaction, or None; `timeout` is that of `result`."""
        if not self.done():
            gate = threading.Lock()
            gate.acquire()
            self._add(gate.release)
            if not gate.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
                raise TimeoutError(f"no result within {timeout:g} s; the transaction goes on")
        return self.error

    def add_done_callback(self, callback: Callable[[Submission], object]) -> None:
        """Call a function with this object when it is done; at once if it is done already.

        The function runs in the thread that serves all deliveries: it must not wait, nor call a function that waits. It
        may call `submit`, which raises `BufferFullError` if too many are in flight, also with `when_full="block"`. An
        exception of the function is logged.
        """
        self._add(partial(self._call, callback))

    def __await__(self) -> Generator[object, None, TransactionResult]:
        """Wait on the running event loop; cancelling the wait does not change the transaction."""
        if not self.done():
            future, wake = awaited()
            self._add(wake)
            yield from future
        return self.result()

    def _add(self, callback: Callable[[], object]) -> None:
        with self._core.lock:
            is_done = self.done()
            if not is_done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
        if is_done:
            callback()

    def _call(self, callback: Callable[[Submission], object]) -> None:
        # A callback may end another submission, whose callback runs inside this one.
        outer, current_thread.in_callback = current_thread.in_callback, True
        try:
            callback(self)
        except KeyboardInterrupt:
            # Python raises it in the main thread alone, for that thread's own code.
            raise
        except:  # noqa: E722 - see `raised`; the user's function may raise anything
            error = raised()
            _log.error("a callback of a transaction raised %s", type(error).__name__, exc_info=error)
        finally:
            current_thread.in_callback = outer


class _LoopWaker:
    """Completes futures of one event loop from any thread: one call into the loop serves all that are due."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        # Any thread adds, the loop takes.
        self._due: deque[asyncio.Future[None]] = deque()
        # Any thread sets it after adding, the loop clears it before taking: no future is missed.
        self._called = False

    def wake(self, future: asyncio.Future[None]) -> None:
        """Have the loop complete a future."""
        self._due.append(future)
        if not self._called:
            self._called = True
            loop = self._loop()
            # A loop that is closed, maybe at this moment, raises; no task of it waits.
            with suppress(RuntimeError):
                if loop is not None:
                    loop.call_soon_threadsafe(self._serve)

    def _serve(self) -> None:
        self._called = False
        while self._due:
            future = self._due.popleft()
            if not future.done():
                future.set_result(None)


#: One waker for each event loop while the loop lives, shared by all producers; guarded by the lock.
_wakers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopWaker] = weakref.WeakKeyDictionary()
_wakers_lock = threading.Lock()


def awaited() -> tuple[asyncio.Future[None], Callable[[], object]]:
    """Return a future of the running event loop, and a function that completes it from any thread."""
    loop = asyncio.get_running_loop()
    with _wakers_lock:
        waker = _wakers.get(loop)
        if waker is None:
            waker = _wakers[loop] = _LoopWaker(loop)
    future: asyncio.Future[None] = loop.create_future()
    return future, partial(waker.wake, future)
