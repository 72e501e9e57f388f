"""Handler options: the one list, for `App.handler` and `penstock.consumer.handler`, and the retry policy.

The checks in this file look at several options, or at more than a type and a range. A wrong option raises
`ConfigurationError`. In a retry policy, tenacity's objects decide whether and when; timers wake the key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypedDict

import tenacity
from tenacity.retry import retry_base
from tenacity.stop import stop_base
from tenacity.wait import wait_base

from penstock import options as check
from penstock.consumer.handlers.functions import is_async
from penstock.consumer.handlers.ordering import KeyFunction, Keyless, Order
from penstock.consumer.handlers.serialization import DecoderSpec, EncoderSpec
from penstock.dead_letters.headers import DeadLetterFormat
from penstock.errors import ConfigurationError, RetryLater
from penstock.message import Message

#: Returns whether to give up: a `tenacity.stop_*`.
StopFunction = Callable[[tenacity.RetryCallState], bool]
#: Returns the seconds to wait before the next try: a `tenacity.wait_*`.
WaitFunction = Callable[[tenacity.RetryCallState], float]
#: Returns whether to retry a failure: a `tenacity.retry_if_*`.
RetryFunction = Callable[[tenacity.RetryCallState], bool]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a failed message is tried again. Made by `retry`. Thread-safe, as tenacity's objects are."""

    stop: StopFunction
    wait: WaitFunction
    retry: RetryFunction

    def delay_after(self, attempts: int, elapsed: float, error: BaseException) -> float | None:
        """Return the seconds to wait before the next try, or None if the message is exhausted.

        It was tried `attempts` times, first `elapsed` seconds ago. `error` is the error of the last try. Tenacity's
        objects read the attempt, the outcome and the seconds since the first try. As in tenacity itself, `stop` also
        reads the next wait. `idle_for` stays 0, because the sum of the waits is not kept.
        """
        state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
        state.attempt_number = attempts
        state.set_exception((type(error), error, error.__traceback__))
        # Tenacity read both from the system's clock, which differs from the engine's clock in a test.
        state.start_time, state.outcome_timestamp = 0.0, elapsed
        # `retry` judges failures, but RetryLater is a request of the handler, as tenacity's own TryAgain is.
        if not isinstance(error, RetryLater | tenacity.TryAgain) and not self.retry(state):
            return None
        # Before the call of `stop`: `stop_before_delay` includes it.
        state.upcoming_sleep = error.seconds if isinstance(error, RetryLater) else max(0.0, float(self.wait(state)))
        return None if self.stop(state) else state.upcoming_sleep


def retry(
    attempts: int = 5,
    *,
    wait: wait_base | WaitFunction | None = None,
    stop: stop_base | StopFunction | None = None,
    retry: retry_base | RetryFunction | None = None,
) -> RetryPolicy:
    """Make a retry policy of tenacity's objects. They decide, and penstock schedules the tries.

    Args:
        attempts: number of tries, the first included; 1 means no retry. Ignored if `stop` is given.
        wait: seconds before the next try, as tenacity's `wait_*`; by default exponential from 0.1 s to 10 s with
            jitter.
        stop: when to give up, as tenacity's `stop_*`.
        retry: which failures are retried, as tenacity's `retry_if_exception*`; by default all. `RetryLater` is always
            retried unless `stop` ends it.

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
            # A class can be called too, and its instance would count as a yes.
            raise ConfigurationError(
                f"retry({option}=...) takes one of tenacity's {option}_* objects, but is the class {value.__name__}"
                + (f"; give tenacity.retry_if_exception_type({value.__name__})" if option == "retry" else "")
            )
    return RetryPolicy(
        stop=stop or tenacity.stop_after_attempt(attempts),
        wait=wait or tenacity.wait_exponential_jitter(multiplier=0.1, max=10),
        retry=retry or tenacity.retry_if_exception_type(BaseException),
    )


#: Returns whether to handle a message. A message that is refused is done at once.
Filter = Callable[[Message], bool]
#: Seconds: the longest delay of a retry topic.
MAX_RETRY_DELAY_S = 7 * 24 * 3600.0


class OnFailure(Enum):
    """What happens to a message whose retries are exhausted."""

    #: It is written to the dead-letter topic; then its offset is done.
    DEAD_LETTER = "dead_letter"
    #: It is logged and counted; then its offset is done.
    DROP = "drop"
    #: Its key stays parked and its offset open, and everything else goes on. The log, `statistics().held_keys` and
    #: `explain()` report it. The next owner of its partition tries it again.
    HOLD = "hold"
    #: The app stops, and the offset stays open.
    STOP = "stop"


class HandlerOptions(TypedDict, total=False):
    """The options of a handler: `App.handler` explains them. For functions of yours that pass them on.

    With `**options: Unpack[HandlerOptions]` a type checker knows their names and types there, too.
    """

    order: str | Order
    keyless: str | Keyless
    key: str | KeyFunction | None
    key_space: str | None
    filter: Filter | None
    decoder: DecoderSpec
    to: str | None
    encoder: EncoderSpec
    batch: int
    linger: float
    retry: RetryPolicy | None
    retry_delays: Sequence[float]
    on_failure: str | OnFailure
    dead_letter_topic: str | None
    dead_letter_format: str | DeadLetterFormat
    rate: float | None
    key_rate: float | None
    time_limit: float | None


def check_plain(functions: Mapping[str, object]) -> None:
    """Check that these options are plain functions, because penstock does not await them."""
    for option, function in functions.items():
        if callable(function) and is_async(function):
            raise ConfigurationError(f"{option} is an `async def`, which nothing awaits; make it a plain function")
        if inspect.isgeneratorfunction(function):
            raise ConfigurationError(f"{option} yields values that no code reads; return the answer instead")


def check_batch(batch: int, linger: float) -> None:
    """Check the options of batches: their ranges, and that `linger` has a batch."""
    check.positive_int("batch", batch)
    check.seconds_or_zero("linger", linger)
    if linger and batch == 1:
        raise ConfigurationError("linger waits for a batch to fill, but batch is 1; give batch=, or leave linger out")


def check_rates(order: Order, rate: float | None, key_rate: float | None) -> None:
    """Check the rates, and that `key_rate` has keys to limit."""
    for option, value in (("rate", rate), ("key_rate", key_rate)):
        if value is not None:
            check.not_negative(option, value)
    if key_rate == 0:
        raise ConfigurationError("key_rate must be above 0; rate=0 holds a handler, None sets no limit")
    if key_rate is not None and order is not Order.KEY:
        raise ConfigurationError(
            f"key_rate lets the messages of a key wait for each other, which order={order.value!r} does not; take "
            "order='key' (the default), or rate= for all messages of the handler"
        )


def policy_of(policy: RetryPolicy | None) -> RetryPolicy:
    """Check a user's retry policy and return it, or the default policy."""
    if policy is not None and not isinstance(policy, RetryPolicy):
        raise ConfigurationError(
            f"retry must be made by penstock.retry(...), but is a {type(policy).__name__}; "
            "pass tenacity's stop, wait and retry objects to penstock.retry"
        )
    return policy or retry()


def delays_of(delays: Sequence[float]) -> tuple[float, ...]:
    """Check the delays of retry topics and return them, in seconds."""
    if not isinstance(delays, Iterable):
        raise ConfigurationError(f"retry_delays must be a list of seconds, such as (60, 3600), but is {delays!r}")
    checked = tuple(delays)
    for delay in checked:
        check.positive("retry_delays", delay)
        if delay > MAX_RETRY_DELAY_S:
            raise ConfigurationError(f"retry_delays holds {delay:g} s; the longest delay is {MAX_RETRY_DELAY_S:g} s")
    return checked
