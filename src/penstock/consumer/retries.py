"""Retries: tenacity's objects decide whether and when, a timer queue brings the key back. No thread sleeps."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import tenacity
from tenacity.retry import retry_base
from tenacity.stop import stop_base
from tenacity.wait import wait_base

from penstock import config as check
from penstock.errors import ConfigurationError, RetryLater

StopFunction = Callable[[tenacity.RetryCallState], bool]
WaitFunction = Callable[[tenacity.RetryCallState], float]
RetryFunction = Callable[[tenacity.RetryCallState], bool]

#: Timers that were cancelled and may stand in the heap until they are due.
_MAX_CANCELLED = 1_000


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a failed message is tried again. Made by `retry`. Thread-safe, as tenacity's objects are."""

    stop: StopFunction
    wait: WaitFunction
    retry: RetryFunction

    def delay_after(self, attempts: int, elapsed: float, error: BaseException) -> float | None:
        """Return the seconds to wait before the next try, or None when the message is exhausted.

        Args:
            attempts: how often the message was tried.
            elapsed: seconds since it was tried first.
            error: what the last try raised.

        Tenacity's objects read the attempt, the outcome, the seconds since the first try and, as in tenacity itself,
        where `stop` is asked the wait that would come next. `idle_for` stays 0: the sum of the waits is kept nowhere.
        """
        state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
        state.attempt_number = attempts
        state.set_exception((type(error), error, error.__traceback__))
        # Both were read from the system's clock, which is not the engine's in a test.
        state.start_time, state.outcome_timestamp = 0.0, elapsed
        # `retry` sorts failures, and this is a wish. So it is with tenacity's own TryAgain.
        if not isinstance(error, RetryLater | tenacity.TryAgain) and not self.retry(state):
            return None
        # Before `stop` is asked: `stop_before_delay` counts it in.
        state.upcoming_sleep = error.seconds if isinstance(error, RetryLater) else max(0.0, float(self.wait(state)))
        return None if self.stop(state) else state.upcoming_sleep


def retry(
    attempts: int = 5,
    *,
    wait: wait_base | WaitFunction | None = None,
    stop: stop_base | StopFunction | None = None,
    retry: retry_base | RetryFunction | None = None,
) -> RetryPolicy:
    """Make a retry policy of tenacity's objects; penstock schedules what they decide.

    Args:
        attempts: how often a message is tried in all, the first time included; 1 means no retry. Not used when
            `stop` is given.
        wait: seconds before the next try, as tenacity's `wait_*`; by default exponential from 0.1 s to 10 s with
            jitter.
        stop: when to give up, as tenacity's `stop_*`.
        retry: which failures are worth a retry, as tenacity's `retry_if_exception*`; by default all. `RetryLater` is
            not asked about: it is tried again unless `stop` says no.

    Raises:
        ConfigurationError: an argument is of the wrong kind.
    """
    check.positive_int("attempts", attempts)
    for option, value in (("wait", wait), ("stop", stop), ("retry", retry)):
        if value is not None and not callable(value):
            raise ConfigurationError(
                f"retry({option}=...) takes one of tenacity's {option}_* objects, but is {value!r}"
            )
        if isinstance(value, type):
            # It can be called, and what it makes of the call would stand for a yes.
            raise ConfigurationError(
                f"retry({option}=...) takes one of tenacity's {option}_* objects, but is the class {value.__name__}"
                + (f"; give tenacity.retry_if_exception_type({value.__name__})" if option == "retry" else "")
            )
    return RetryPolicy(
        stop=stop or tenacity.stop_after_attempt(attempts),
        wait=wait or tenacity.wait_exponential_jitter(multiplier=0.1, max=10),
        retry=retry or tenacity.retry_if_exception_type(BaseException),
    )


class Timer:
    """Something that is to be called, until it was or was cancelled. Guarded by the lock of its `Timers`."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], object]) -> None:
        #: None once it was taken or cancelled: what it would have touched is let go at once, not when it is due.
        self.call: Callable[[], object] | None = call


class Timers:
    """What is to be called when: a heap. Any thread adds and cancels, the poll thread calls what is due."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = count()
        self._cancelled = 0

    def __len__(self) -> int:
        """How many stand in the heap, some of those that were cancelled included."""
        return len(self._heap)

    def add(self, due: float, call: Callable[[], object]) -> Timer:
        """Have something called at `due`, on the engine's clock, or soon after it."""
        timer = Timer(call)
        with self._lock:
            heapq.heappush(self._heap, (due, next(self._order), timer))
        return timer

    def cancel(self, timer: Timer) -> None:
        """Have it not called, unless it was or is being called. May be said more than once."""
        with self._lock:
            if timer.call is None:
                return
            timer.call = None
            self._cancelled += 1
            # Each time as many go as stay, so that it costs little for each; a far timeout holds no room until then.
            if self._cancelled > _MAX_CANCELLED and 2 * self._cancelled > len(self._heap):
                self._heap = [one for one in self._heap if one[2].call is not None]
                heapq.heapify(self._heap)
                self._cancelled = 0

    def serve(self, now: float) -> None:
        """Call what is due, the earliest first."""
        # Without the lock: a heap that is replaced meanwhile is looked at in the next turn.
        heap = self._heap
        if not heap or heap[0][0] > now:
            return
        due = []
        with self._lock:
            while self._heap and self._heap[0][0] <= now:
                timer = heapq.heappop(self._heap)[2]
                if timer.call is None:
                    self._cancelled -= 1
                else:
                    due.append(timer.call)
                    timer.call = None
        for call in due:
            call()

    def next_due(self) -> float | None:
        """Return when the earliest is due, or None."""
        with self._lock:
            while self._heap and self._heap[0][2].call is None:
                heapq.heappop(self._heap)
                self._cancelled -= 1
            return self._heap[0][0] if self._heap else None


__all__ = ["RetryPolicy", "Timer", "Timers", "retry"]
