"""Calls into a library that may never return: each has our own time limit, on a thread that can be abandoned.

The Kafka client ignores its own time-outs in places (confluentinc/librdkafka#5456), and Python cannot end a thread. So
such a call runs on a `Disposable` thread, which is abandoned at the limit. If the call ever returns, that thread closes
its clients. Abandoned threads are counted, because each costs memory. `ask_again` repeats a question until its answer
is the wanted one, or a limit has passed.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

import tenacity

from penstock.errors import PenstockError, raised

_log = logging.getLogger("penstock.clients.bounded_calls")

T = TypeVar("T")

#: Threads of one owner that may hang at a time. With more, further calls are refused.
MOST_LEFT_BEHIND = 50
#: Seconds that closing a client may take. A healthy client closes within one second, even at a load of 30.
CLOSE_S = 10.0


class NotAnsweredError(PenstockError):
    """A call did not return within its limit: its thread was abandoned, with the clients that it uses."""


class TooManyLeftBehindError(PenstockError):
    """So many threads hang in calls that never return that the process should be restarted."""


class LeftBehind:
    """Counts the abandoned threads of one owner that still hang. Thread-safe."""

    def __init__(self, owner: str, most: int = MOST_LEFT_BEHIND) -> None:
        self._owner = owner
        self._most = most
        self._lock = threading.Lock()
        #: How many hang. Written under the lock; reading one number is safe.
        self.hanging = 0

    def require_few(self) -> None:
        """Raise `TooManyLeftBehindError` if too many hang."""
        if self.hanging > self._most:
            raise TooManyLeftBehindError(
                f"{self.hanging} calls of {self._owner} hang, and {self._most} may: each holds "
                "a thread and a client; restart the process, and see whether the brokers answer"
            )

    def add(self, threads: int) -> None:
        """Count an abandoned thread; -1: an abandoned thread has returned."""
        with self._lock:
            self.hanging += threads


class Call(Future[T]):
    """A call handed to a thread at the monotonic second `since`. That thread ends it once; its owner reads it."""

    def __init__(self, label: str, function: Callable[[], T]) -> None:
        super().__init__()
        self.label = label
        self.since = time.monotonic()
        self._function = function

    def done(self, timeout_s: float = 0.0) -> bool:
        """Tell whether it has returned or raised, after waiting at most `timeout_s` seconds."""
        if timeout_s > 0:
            # `wait` of the standard library makes twice as many calls: it can wait for several.
            with suppress(TimeoutError):
                self.exception(timeout_s)
        return super().done()

    @property
    def age_s(self) -> float:
        """Seconds since it was handed over."""
        return time.monotonic() - self.since

    def run(self) -> None:
        """Run the call. Called by its thread."""
        try:
            result = self._function()
        except:  # noqa: E722 - see `raised`; the owner gets every exception
            self.set_exception(raised())
        else:
            self.set_result(result)


class Disposable:
    """A thread that runs one call after another and can be abandoned in any of them. Used by one owner thread.

    Kafka clients and other things that may hang are made, used and closed inside its calls, so the owner never waits.
    """

    def __init__(self, name: str, left: LeftBehind) -> None:
        self._left = left
        self._calls: queue.SimpleQueue[Call[Any] | None] = queue.SimpleQueue()
        # Guards the next two: the function that an abandoned thread calls at its end, and whether it has ended.
        self._lock = threading.Lock()
        self._cleanup: Callable[[], object] | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def start(self, label: str, function: Callable[[], T], then: Callable[[], object] = lambda: None) -> Call[T]:
        """Queue a call. Its thread calls `then` after it."""
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
        """Tell whether a call of this thread has returned or raised. Never waits: the owner asks repeatedly.

        After `limit_s` seconds, or if `is_stuck` says so, it abandons the thread (see `abandon`) and raises
        `NotAnsweredError`. Do not use this object afterwards.
        """
        if call.done():
            return True
        if call.age_s < limit_s and not is_stuck():
            return False
        self.abandon(cleanup)
        raise NotAnsweredError(f"{call.label} did not return in {call.age_s:.1f} s: it was abandoned")

    def abandon(self, cleanup: Callable[[], object]) -> None:
        """Go on without this thread, at once.

        If its call ever returns, the thread calls `cleanup`, which closes what the calls used. Errors of it are logged.
        """
        with self._lock:
            if self._cleanup is not None or self._has_ended:
                return
            self._cleanup = cleanup
            # Counted here, so that the thread is always seen as either working or abandoned.
            self._left.add(1)
        self._calls.put(None)

    def close(self) -> None:
        """Let the thread end after the calls that are queued."""
        self._calls.put(None)

    def stack(self) -> str:
        """Return the stack of its thread, as lines for a log."""
        frame = sys._current_frames().get(self._thread.ident or 0)  # noqa: SLF001 - documented
        return "its thread has ended" if frame is None else "".join(traceback.format_stack(frame)[-3:])

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._cleanup is None:
                call.run()
            # Its result may be a client, which must not live until the next call.
            del call
        with self._lock:
            self._has_ended = True
            cleanup = self._cleanup
        if cleanup is None:
            return
        try:
            cleanup()
        except:  # noqa: E722 - a fenced client may raise anything when it is closed
            _log.info("what was abandoned by %s did not close well", self._thread.name, exc_info=raised())
        finally:
            self._left.add(-1)


class BackgroundCall(Generic[T]):
    """One call on a thread of its own. One thread asks for its answer.

    Raises `TooManyLeftBehindError` if too many calls of the same owner hang.
    """

    def __init__(self, what: str, function: Callable[[], T], limit_s: float, left: LeftBehind) -> None:
        left.require_few()
        self._limit_s = limit_s
        self._thread = Disposable(f"penstock-{what.replace(' ', '-')}", left)
        self._call = self._thread.start(what, function)
        # The thread ends after its call, even if nobody asks for the answer.
        self._thread.close()

    def answer(self, wait_s: float = 0.0) -> T | None:
        """Return or raise the result of the call, or return None if there is none within `wait_s` seconds.

        Raises `NotAnsweredError` if the call took longer than its limit. It is abandoned then.
        """
        if not self._call.done(wait_s) and self._call.age_s <= self._limit_s:
            return None
        return self.wait()

    def wait(self) -> T:
        """Wait, then return or raise the result of the call; `NotAnsweredError` as `answer`."""
        if not self._call.done(self._limit_s - self._call.age_s):
            self._thread.abandon(lambda: None)
            raise NotAnsweredError(f"{self._call.label} did not return in {self._limit_s:g} s: it was abandoned")
        return self._call.result()


def end_within(limit_s: float, what: str, call: Callable[[], T]) -> T | None:
    """Make a call that ends something, such as `Consumer.close`, and return or raise its result.

    If it takes longer than `limit_s` seconds, it is abandoned on its thread with a log line, and this returns None.
    """
    try:
        return BackgroundCall(what, call, limit_s, LeftBehind(what)).wait()
    except NotAnsweredError as error:
        _log.warning("%s, and ends with the process at the latest", error)
        return None


class BriefQuestion:
    """A question whose answer is useful only soon. One runs at a time, and is waited for briefly. Thread-safe.

    While a late question still runs, nobody waits for it and no other question is asked. Its function may keep the late
    answer itself; otherwise the answer is lost.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        # Held by `ask` while it waits.
        self._lock = threading.Lock()
        self._call: Call[Any] | None = None

    def ask(self, function: Callable[[], T], wait_s: float) -> T | None:
        """Return or raise the result of a function, or return None if it takes longer than `wait_s` seconds."""
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
    """Call `ask` every `every_s` seconds until `until` accepts its answer, and return the answer.

    After `limit_s` seconds the last answer is returned as it is. An exception of `ask` is raised at once, except if
    `passes` accepts it: then it is raised only as the last answer. Waits on the caller's thread.
    """
    return tenacity.Retrying(
        stop=tenacity.stop_after_delay(limit_s),
        wait=tenacity.wait_fixed(every_s),
        retry=tenacity.retry_if_not_result(until) | tenacity.retry_if_exception(passes),
        retry_error_callback=_last,
    )(ask)


def _last(state: tenacity.RetryCallState) -> Any:
    """Return or raise the result of the last try."""
    return state.outcome.result() if state.outcome is not None else None
