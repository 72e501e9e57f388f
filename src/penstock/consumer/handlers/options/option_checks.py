"""Checks of a handler's options that look at several of them, or at more than a value's type and range.

What is wrong raises `ConfigurationError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from penstock import options as check
from penstock.consumer.handlers.functions import is_async
from penstock.consumer.handlers.options.ordering import Order
from penstock.consumer.handlers.options.retry_policy import RetryPolicy, retry
from penstock.errors import ConfigurationError

#: Seconds: the longest delay of a retry topic.
MAX_RETRY_DELAY_S = 7 * 24 * 3600.0


def check_plain(functions: Mapping[str, object]) -> None:
    """Check that functions which nothing awaits are plain ones."""
    for option, given in functions.items():
        if callable(given) and is_async(given):
            raise ConfigurationError(f"{option} is an `async def`, which nothing awaits; make it a plain function")


def check_batch(batch: int, linger: float) -> None:
    """Check what speaks of batches: the ranges, and that each option has a use."""
    check.positive_int("batch", batch)
    check.not_negative("linger", linger)
    if linger and batch == 1:
        raise ConfigurationError("linger waits for a batch to fill, but batch is 1; give batch=, or leave linger out")


def check_rates(order: Order, rate: float | None, key_rate: float | None) -> None:
    """Check the rates, and that the order has keys to limit."""
    for option, value in (("rate", rate), ("key_rate", key_rate)):
        if value is not None:
            check.not_negative(option, value)
    if key_rate == 0:
        raise ConfigurationError("key_rate must be above 0; rate=0 holds a handler, None sets no limit")
    if key_rate is not None:
        check_paced(order)


def check_paced(order: Order) -> None:
    """Check that a handler of this order can have a `key_rate`: that its messages wait for those of their key."""
    if order is not Order.KEY:
        raise ConfigurationError(
            f"key_rate lets the messages of a key wait for each other, which order={order.value!r} does not; take "
            "order='key' (the default), or rate= for all messages of the handler"
        )


def policy_of(given: RetryPolicy | None) -> RetryPolicy:
    """Return the policy for failures: the default one where none is given."""
    if given is not None and not isinstance(given, RetryPolicy):
        raise ConfigurationError(
            f"retry must be made by penstock.retry(...), but is a {type(given).__name__}; "
            "pass tenacity's stop, wait and retry objects to penstock.retry"
        )
    return given or retry()


def delays_of(given: Sequence[float]) -> tuple[float, ...]:
    """Return the delays of retry topics, in seconds."""
    if not isinstance(given, Iterable):
        raise ConfigurationError(f"retry_delays must be a list of seconds, such as (60, 3600), but is {given!r}")
    delays = tuple(given)
    for delay in delays:
        check.positive("retry_delays", delay)
        if delay > MAX_RETRY_DELAY_S:
            raise ConfigurationError(f"retry_delays holds {delay:g} s; the longest delay is {MAX_RETRY_DELAY_S:g} s")
    return delays
