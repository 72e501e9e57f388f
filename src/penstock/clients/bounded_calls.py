"""Calls into a library that may never return: each has a time limit that we hold, on a thread that can be abandoned.

The Kafka client ignores its own time-outs in places (confluentinc/librdkafka#5456), and Python cannot end a thread. So
such a call goes to a `Disposable`, which is abandoned at the limit: its clients are closed on its own daemon thread,
if the call ever returns. How many hang is counted, for a process has no endless memory. Where an answer is not as
wanted, `ask_again` asks again until a limit; tenacity decides.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

import tenacity

from penstock.errors import PenstockError, raised

_log = logging.getLogger("penstock.clients.bounded_calls")

T = TypeVar("T")

#: Threads of one owner that may hang at a time; with more it gives up.
MOST_LEFT_BEHIND = 50
#: Seconds that closing a client may take: one that does not hang has closed within one, at a load of 30 too.
CLOSE_S = 10.0


class NotAnsweredError(PenstockError):
    """A call did not return within its limit: its thread was abandoned, with the clients that it uses."""


class TooManyLeftBehindError(PenstockError):
    """So many threads hang in calls that never return that the process should be restarted."""


class LeftBehind:
    """Counts the threads of one owner that were abandoned and have not returned. Thread-safe."""

    def __init__(self, owner: str, most: int = MOST_LEFT_BEHIND) -> None:
        self._owner = owner
        self._most = most
        self._lock = threading.Lock()
        #: How many hang. Written under the lock; reading one number is safe.
        self.hanging = 0

    def require_few(self) -> None:
        """Raise `TooManyLeftBehindError` where too many hang."""
        if self.hanging > self._most:
            raise TooManyLeftBehindError(
                f"{self.hanging} calls of {self._owner} hang, and {self._most} may: each holds "
                "a thread and a client; restart the process, and see whether the brokers answer"
            )

    def add(self, threads: int) -> None:
        """Count a thread that was abandoned, or, with -1, that one of those has returned."""
        with self._lock:
            self.hanging += threads


class Call(Future[T]):
    """A call handed to a thread at the monotonic second `since`. Ended once, by that thread; read by its owner."""

    def __init__(self, label: str, function: Callable[[], T]) -> None:
        super().__init__()
        self.label = label
        self.since = time.monotonic()
        self._function = function

    def done(self, timeout_s: float = 0.0) -> bool:
        """Tell whether it has returned or raised, waiting at most `timeout_s` seconds for it."""
        return super().done() or (timeout_s > 0 and bool(wait([self], timeout_s).done))

    @property
    def age_s(self) -> float:
        """Seconds since it was handed over."""
        return time.monotonic() - self.since

    def run(self) -> None:
        """Make it, on its thread."""
        try:
            result = self._function()
        except:  # noqa: E722 - see `raised`; whatever it is, the owner gets it
            self.set_exception(raised())
        else:
            self.set_result(result)


class Disposable:
    """A thread that makes one call after another, and can be abandoned in any of them. Used by one owner thread.

    What the calls use, Kafka clients above all, is made, used and closed in calls: the owner never waits in one.
    """

    def __init__(self, name: str, left: LeftBehind) -> None:
        self._left = left
        self._calls: queue.SimpleQueue[Call[Any] | None] = queue.SimpleQueue()
        # Guards the two below: what is called at the end of a thread that was abandoned, and whether it has ended.
        self._lock = threading.Lock()
        self._cleanup: Callable[[], object] | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def start(self, label: str, function: Callable[[], T], then: Callable[[], object] = lambda: None) -> Call[T]:
        """Have a call made, after those that were started before; once it is done, its thread calls `then`."""
        call = Call(label, function)
        call.add_done_callback(lambda _: then())
        self._calls.put(call)
        return call

    def has_returned(
        self,
        call: Call[T],
        limit_s: float,
        cleanup: Callable[[], object],
        is_stuck: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Tell whether a call of this thread has returned or raised: asked now and then, for it waits for nothing.

        `NotAnsweredError`: it took over `limit_s` seconds, or `is_stuck` said so; it was abandoned, as `abandon` says:
        use this no more.
        """
        if call.done():
            return True
        if call.age_s < limit_s and not is_stuck():
            return False
        self.abandon(cleanup)
        raise NotAnsweredError(f"{call.label} did not return in {call.age_s:.1f} s: it was abandoned")

    def abandon(self, cleanup: Callable[[], object]) -> None:
        """Go on without it, at once: its owner abandons it to the call that hangs.

        `cleanup` closes what its calls use, on the thread itself once its call returns; what it raises is logged.
        """
        with self._lock:
            if self._cleanup is not None or self._has_ended:
                return
            self._cleanup = cleanup
            # Counted here already, so that nobody sees it neither at work nor abandoned.
            self._left.add(1)
        self._calls.put(None)

    def close(self) -> None:
        """Let the thread end once its calls have returned."""
        self._calls.put(None)

    def stack(self) -> str:
        """Return where its thread is, as lines for a log."""
        frame = sys._current_frames().get(self._thread.ident or 0)  # noqa: SLF001 - documented
        return "its thread has ended" if frame is None else "".join(traceback.format_stack(frame)[-3:])

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._cleanup is None:
                call.run()
            # Its result may be a client, which shall not live on until the next call.
            del call
        with self._lock:
            self._has_ended = True
            cleanup = self._cleanup
        if cleanup is None:
            return
        try:
            cleanup()
        except:  # noqa: E722 - a client that was fenced may raise anything when it is closed
            _log.info("what was abandoned by %s did not close well", self._thread.name, exc_info=raised())
        finally:
            self._left.add(-1)


class BackgroundCall(Generic[T]):
    """One call on a thread of its own, whose answer is asked for: by one thread. Nobody waits for it but by `wait`.

    `TooManyLeftBehindError` where too many of the same owner hang.
    """

    def __init__(self, what: str, function: Callable[[], T], limit_s: float, left: LeftBehind) -> None:
        left.require_few()
        self._limit_s = limit_s
        self._thread = Disposable(f"penstock-{what.replace(' ', '-')}", left)
        self._call = self._thread.start(what, function)
        # The thread ends with its call, also where nobody asks for the answer.
        self._thread.close()

    def answer(self, wait_s: float = 0.0) -> T | None:
        """Return what it returned, or raise what it raised; None where it has not within `wait_s` seconds.

        `NotAnsweredError`: it took over its limit and was abandoned.
        """
        if not self._call.done(wait_s) and self._call.age_s <= self._limit_s:
            return None
        return self.wait()

    def wait(self) -> T:
        """Return what it returned, or raise what it raised, waiting for it; `NotAnsweredError` as `answer`."""
        if not self._call.done(self._limit_s - self._call.age_s):
            self._thread.abandon(lambda: None)
            raise NotAnsweredError(f"{self._call.label} did not return in {self._limit_s:g} s: it was abandoned")
        return self._call.result()


def end_within(limit_s: float, what: str, call: Callable[[], T]) -> T | None:
    """Make a call that ends something, as `Consumer.close`, and return its result, or raise what it raised.

    None where it did not return within `limit_s` seconds: it is abandoned on its thread, and that is logged.
    """
    try:
        return BackgroundCall(what, call, limit_s, LeftBehind(what)).wait()
    except NotAnsweredError as error:
        _log.warning("%s, and ends with the process at the latest", error)
        return None


class BriefQuestion:
    """A question whose answer is of use only soon: one at a time, each waited for a moment. Thread-safe.

    While one has not returned in its time, nobody waits for it, and no other is asked. What it finds out after that is
    kept by its own function, or lost.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        # Held by the caller of `ask` while it waits.
        self._lock = threading.Lock()
        self._call: Call[Any] | None = None

    def ask(self, function: Callable[[], T], wait_s: float) -> T | None:
        """Return what a function returns, or raise what it raises; None where that takes over `wait_s` seconds."""
        if not self._lock.acquire(timeout=wait_s):
            return None
        try:
            if self._call is not None and not self._call.done():
                return None
            thread = Disposable(f"penstock-{self._what.replace(' ', '-')}", LeftBehind(self._what))
            call = self._call = thread.start(self._what, function)
            thread.close()
            return call.result() if call.done(wait_s) else None
        finally:
            self._lock.release()


def ask_again(
    ask: Callable[[], T],
    limit_s: float,
    every_s: float,
    *,
    until: Callable[[T], bool] = bool,
    passes: Callable[[BaseException], bool] = lambda _error: False,
) -> T:
    """Return what `ask` gives, asked every `every_s` seconds until `until` says that it is what is waited for.

    Once `limit_s` seconds have passed, the last answer is returned as it is. What `ask` raises is raised: at once, or
    as the last answer where `passes` says that it may pass. It waits on the thread of the caller.
    """
    return tenacity.Retrying(
        stop=tenacity.stop_after_delay(limit_s),
        wait=tenacity.wait_fixed(every_s),
        retry=tenacity.retry_if_not_result(until) | tenacity.retry_if_exception(passes),
        retry_error_callback=_last,
    )(ask)


def _last(state: tenacity.RetryCallState) -> Any:
    """Return what the last try returned, or raise what it raised."""
    return state.outcome.result() if state.outcome is not None else None
