"""The retry policy of a handler: tenacity's objects decide whether and when; the timers bring the key back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tenacity
from tenacity.retry import retry_base
from tenacity.stop import stop_base
from tenacity.wait import wait_base

from penstock import options as check
from penstock.errors import ConfigurationError, RetryLater

#: Says whether to give up: a `tenacity.stop_*`.
StopFunction = Callable[[tenacity.RetryCallState], bool]
#: Says how many seconds to wait before the next try: a `tenacity.wait_*`.
WaitFunction = Callable[[tenacity.RetryCallState], float]
#: Says whether a failure is worth another try: a `tenacity.retry_if_*`.
RetryFunction = Callable[[tenacity.RetryCallState], bool]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a failed message is tried again. Made by `retry`. Thread-safe, as tenacity's objects are."""

    stop: StopFunction
    wait: WaitFunction
    retry: RetryFunction

    def delay_after(self, attempts: int, elapsed: float, error: BaseException) -> float | None:
        """Return the seconds to wait before the next try, or None when the message is exhausted.

        It was tried `attempts` times, first `elapsed` seconds ago, and `error` is what the last try raised.
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
