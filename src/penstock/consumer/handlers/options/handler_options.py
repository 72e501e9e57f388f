"""The options of a handler, as users give them: the one list, for `App.handler` and for `penstock.consumer.handler`.

Here are also the checks that look at several options, or at more than a type and a range. What is wrong raises
`ConfigurationError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TypedDict

from penstock import options as check
from penstock.consumer.handlers.functions import is_async
from penstock.consumer.handlers.options.ordering import KeyFunction, Keyless, Order
from penstock.consumer.handlers.options.retry_policy import RetryPolicy, retry
from penstock.consumer.handlers.serialization.decoding import DecoderSpec
from penstock.consumer.handlers.serialization.encoding import EncoderSpec
from penstock.dead_letters.headers import DeadLetterFormat
from penstock.errors import ConfigurationError
from penstock.message import Message

#: Says whether a message is to be handled; where not, it is done at once.
Filter = Callable[[Message], bool]
#: Seconds: the longest delay of a retry topic.
MAX_RETRY_DELAY_S = 7 * 24 * 3600.0


class OnFailure(Enum):
    """What becomes of a message whose retries are exhausted."""

    #: It is written to the dead-letter topic; then its offset is done.
    DEAD_LETTER = "dead_letter"
    #: It is logged and counted; then its offset is done.
    DROP = "drop"
    #: Its key stays parked and its offset open, and everything else goes on. The log, `statistics().held_keys` and
    #: `explain()` say so. The next owner of its partition tries it again.
    HOLD = "hold"
    #: The app stops, and the offset stays open.
    STOP = "stop"


class HandlerOptions(TypedDict, total=False):
    """The options of a handler: `App.handler` explains them. A function of yours that hands them on can take them so.

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
