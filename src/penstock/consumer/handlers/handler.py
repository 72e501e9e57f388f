"""A handler: a function, and how messages are given to it. Everything is checked when it is made."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from penstock import options as check
from penstock.consumer.handlers.decoding import Decoder, DecoderSpec, decoder_of
from penstock.consumer.handlers.ordering import KeyFunction, Keyless, Order, Ordering, key_function
from penstock.consumer.handlers.retry_policy import RetryPolicy, retry
from penstock.consumer.retry_topics import retry_topics
from penstock.dead_letters.headers import DeadLetterFormat, default_topic
from penstock.errors import ConfigurationError
from penstock.message import Message

_log = logging.getLogger(__name__)

#: Called with a message, or with a list of messages where `batch` is more than one; may be an `async def`.
HandlerFunction = Callable[..., object]
Filter = Callable[[Message], bool]

#: Seconds: the longest delay of a retry topic. What a header asks beyond it is cut to it.
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


class Kind(Enum):
    """Where a handler runs."""

    #: On a worker thread.
    THREAD = "thread"
    #: On the event loop: an `async def`.
    TASK = "task"


@dataclass(frozen=True, slots=True)
class Handler:
    """A function and how messages are given to it. Made by `handler`, whose arguments these are.

    Attributes:
        function: called with each message, or with a list of them.
        kind: where it runs.
        order: which messages wait for each other.
        keyless: how messages without a key are ordered under `Order.KEY`.
        key: what stands for the record's key, or None for the key itself.
        key_space: name of the key space it shares with others, or None for one of its own.
        filter: which messages are handled at all.
        decoder: makes a message's `body` of its value, or None.
        batch: how many messages are given at once, at most; 1 gives messages, more gives lists.
        linger: seconds that a batch which is not full waits, from the arrival of its first message.
        retry: whether and when a failed message is tried again.
        retry_delays: seconds that a message waits in the retry topic, each time it comes there.
        on_failure: what becomes of a message whose retries are exhausted.
        dead_letter_topic: where dead letters go; `{topic}` stands for the message's topic.
        dead_letter_format: names of the dead letters' headers.
        rate: messages/s that are begun, over all keys, or None for no limit; 0 holds all.
        key_rate: messages/s of one key, or None for no limit.
        deferred_timeout: seconds that a completion may be put off, or None for ever.
    """

    function: HandlerFunction
    kind: Kind
    order: Order
    keyless: Keyless
    key: KeyFunction | None
    key_space: str | None
    filter: Filter | None
    decoder: Decoder | None
    batch: int
    linger: float
    retry: RetryPolicy
    retry_delays: tuple[float, ...]
    on_failure: OnFailure
    dead_letter_topic: str
    dead_letter_format: DeadLetterFormat
    rate: float | None
    key_rate: float | None
    deferred_timeout: float | None

    @property
    def name(self) -> str:
        """The function's name, for logs and reports."""
        return name_of(self.function)


def handler(  # noqa: C901, PLR0912 - one check for each option
    function: HandlerFunction,
    *,
    order: str | Order = Order.KEY,
    keyless: str | Keyless = Keyless.PARTITION,
    key: str | KeyFunction | None = None,
    key_space: str | None = None,
    filter: Filter | None = None,  # noqa: A002 - the word of the field
    decoder: DecoderSpec = None,
    batch: int = 1,
    linger: float = 0.0,
    retry_policy: RetryPolicy | None = None,
    retry_delays: Sequence[float] = (),
    on_failure: str | OnFailure = OnFailure.STOP,
    dead_letter_topic: str | None = None,
    dead_letter_format: str | DeadLetterFormat = DeadLetterFormat.KAFKA,
    rate: float | None = None,
    key_rate: float | None = None,
    deferred_timeout: float | None = None,
) -> Handler:
    """Check what a user gave for a handler and return it in one piece.

    Args:
        function: called with each message, on a worker thread, or on the event loop where it is an `async def`. What
            it raises is a failure. It may return a `DeferredCompletion`; anything else that it returns is ignored.
        order: "key" (default), "partition" or "none".
        keyless: "partition" (default), "together" or "spread".
        key: the name of a header as "header:name", or a function of the message that returns bytes, text or None.
        key_space: name that handlers share whose keys mean the same: their messages of one key wait for each other.
            None (default): the keys are this handler's own, in all of its topics.
        filter: called with a message; where it returns false the message is done at once, and counted.
        decoder: "json", a pydantic model, a msgspec struct, or a callable of the value's bytes. The handler finds the
            result in `message.body`; a value that cannot be decoded is never handed over nor tried again.
        batch: messages given at once, at most; more than 1 calls the function with a list. What fails comes in
            batches again, and each message alone before it is given up; see `BatchError`.
        linger: seconds that a batch which is not full waits for more.
        retry_policy: made by `penstock.retry`; five tries with growing waits when left out.
        retry_delays: seconds; when the tries are exhausted the message goes through a retry topic of each, one after
            the other.
        on_failure: what becomes of a message whose retries are exhausted: "stop" (default), "dead_letter", "drop" or
            "hold"; see `OnFailure`.
        dead_letter_topic: name of the dead-letter topic; by the format, `dlq.{topic}` or `{topic}-dlt`.
        dead_letter_format: "kafka" (default, KIP-1191) or "spring".
        rate: messages/s, over all keys; 0 holds all; None (default) for no limit.
        key_rate: messages/s of each key; None (default) for no limit. With `order="key"` only.
        deferred_timeout: seconds that a `DeferredCompletion` may stay out before it counts as failed; None (default)
            for ever.

    Raises:
        ConfigurationError: one of them is wrong.
    """
    check.a_callable("handler", function)
    _require_parameter(function)
    if inspect.isgeneratorfunction(called_by(function)) or inspect.isasyncgenfunction(called_by(function)):
        raise ConfigurationError(f"handler {name_of(function)} has a `yield`: called, it would do nothing; take it out")
    for option, given in (("filter", filter), ("decoder", decoder), ("key", key)):
        if callable(given) and is_async(given):
            raise ConfigurationError(f"{option} is an `async def`, which nothing awaits; make it a plain function")
    if retry_policy is not None and not isinstance(retry_policy, RetryPolicy):
        raise ConfigurationError(
            f"retry must be made by penstock.retry(...), but is a {type(retry_policy).__name__}; "
            "pass tenacity's stop, wait and retry objects to penstock.retry"
        )
    if key_space is not None:
        check.not_empty("key_space", key_space)
    if filter is not None:
        check.a_callable("filter", filter)
    check.positive_int("batch", batch)
    check.not_negative("linger", linger)
    if linger and batch == 1:
        raise ConfigurationError("linger waits for a batch to fill, but batch is 1; give batch=, or leave linger out")
    for option, value in (("rate", rate), ("key_rate", key_rate)):
        if value is not None:
            check.not_negative(option, value)
    if key_rate == 0:
        raise ConfigurationError("key_rate must be above 0; rate=0 holds a handler, None sets no limit")
    if key_rate is not None:
        check_paced(check.choice("order", order, Order))
    if deferred_timeout is not None:
        check.positive("deferred_timeout", deferred_timeout)
        if batch > 1:
            raise ConfigurationError("deferred_timeout has no use with batch: a batch's completion cannot be put off")
    if not isinstance(retry_delays, Iterable):
        raise ConfigurationError(f"retry_delays must be a list of seconds, such as (60, 3600), but is {retry_delays!r}")
    retry_delays = tuple(retry_delays)
    for delay in retry_delays:
        check.positive("retry_delays", delay)
        if delay > MAX_RETRY_DELAY_S:
            raise ConfigurationError(f"retry_delays holds {delay:g} s; the longest delay is {MAX_RETRY_DELAY_S:g} s")
    fate = check.choice("on_failure", on_failure, OnFailure)
    letter_format = check.choice("dead_letter_format", dead_letter_format, DeadLetterFormat)
    topic = default_topic(letter_format) if dead_letter_topic is None else dead_letter_topic
    check.not_empty("dead_letter_topic", topic)
    for option, is_given in (
        ("dead_letter_topic", dead_letter_topic is not None),
        ("dead_letter_format", letter_format is not DeadLetterFormat.KAFKA),
    ):
        if is_given and fate is not OnFailure.DEAD_LETTER:
            raise ConfigurationError(
                f"{option} has no use with on_failure={fate.value!r}, which writes no dead letters; give "
                f"on_failure='dead_letter', or leave {option} out"
            )
    order, keyless = check.choice("order", order, Order), check.choice("keyless", keyless, Keyless)
    for option, told in (
        ("key", key is not None),
        ("key_space", key_space is not None),
        ("keyless", keyless is not Keyless.PARTITION),
    ):
        if told and order is not Order.KEY:
            # Refusing would be too much: an app may give all of its handlers the same options.
            _log.warning("handler %s: %s means nothing with order=%r", name_of(function), option, order.value)
    return Handler(
        function=function,
        kind=Kind.TASK if is_async(function) else Kind.THREAD,
        order=order,
        keyless=keyless,
        key=key_function(key),
        key_space=key_space,
        filter=filter,
        decoder=decoder_of(decoder),
        batch=batch,
        linger=linger,
        retry=retry_policy or retry(),
        retry_delays=retry_delays,
        on_failure=fate,
        dead_letter_topic=topic,
        dead_letter_format=letter_format,
        rate=rate,
        key_rate=key_rate,
        deferred_timeout=deferred_timeout,
    )


def orderings_of(handlers: Mapping[str, Handler], lanes: int, *, batches: bool = False) -> dict[str, Ordering]:
    """Return the ordering of each topic's handler, with the key spaces numbered as they come.

    Args:
        handlers: a handler for each topic.
        lanes: number of lanes.
        batches: whether batches are gathered from lanes: then messages that nothing orders share them in rows.
    """
    numbers: dict[str | int, int] = {}
    found = {}
    for topic, one in handlers.items():
        space = numbers.setdefault(id(one) if one.key_space is None else one.key_space, len(numbers))
        together = one.batch if batches else 1
        found[topic] = Ordering(one.order, one.keyless, lanes, one.key, space=space, together=together)
    return found


def require_own_topics(group: str, handlers: Mapping[str, Handler]) -> None:
    """Raise `ConfigurationError` where handlers would feed each other what they give up, or themselves."""
    for topic, one in handlers.items():
        retries = retry_topics(group, topic, one.retry_delays)
        for name in retries.keys() & handlers.keys():
            raise ConfigurationError(
                f"topic {name} has a handler, but it is where messages of {topic} wait for their retry and are "
                f"given to {one.name}; leave it out"
            )
        way, at = [topic], topic
        while at in handlers and handlers[at].on_failure is OnFailure.DEAD_LETTER:
            at = handlers[at].dead_letter_topic.replace("{topic}", at)
            if at in (topic, *retries):
                raise ConfigurationError(
                    f"dead letters of {' go to '.join([*way, at])}, whose handler gets them again: one message would "
                    "go round for ever; give dead_letter_topic another name"
                )
            if at in way:
                break  # a round that does not pass here is found from one of its own topics
            way.append(at)


def _require_parameter(function: HandlerFunction) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # of a callable written in C, say: what it takes is seen when it is called
    try:
        signature.bind(None)
    except TypeError:
        raise ConfigurationError(
            f"handler {name_of(function)}{signature} cannot be called with a message; give it one parameter, and those "
            "beside it defaults"
        ) from None


def check_paced(order: Order) -> None:
    """Check that a handler of this order can have a `key_rate`.

    Raises:
        ConfigurationError: its messages do not wait for those of their key.
    """
    if order is not Order.KEY:
        raise ConfigurationError(
            f"key_rate lets the messages of a key wait for each other, which order={order.value!r} does not; take "
            "order='key' (the default), or rate= for all messages of the handler"
        )


def called_by(function: HandlerFunction) -> HandlerFunction:
    """Return the function or method that runs when this is called."""
    while isinstance(function, functools.partial):
        function = function.func
    plain = inspect.isroutine(function) or inspect.isclass(function)
    return function if plain else getattr(function, "__call__", function)  # noqa: B004 - the bound method is what is inspected


def is_async(function: HandlerFunction) -> bool:
    """Tell whether calling this gives something to await."""
    # The first sees what was marked as one without being one.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called_by(function))


def name_of(function: object) -> str:
    """Return a function's name, for logs and reports."""
    return getattr(function, "__qualname__", type(function).__name__)


__all__ = [
    "MAX_RETRY_DELAY_S",
    "Filter",
    "Handler",
    "HandlerFunction",
    "Kind",
    "OnFailure",
    "called_by",
    "check_paced",
    "handler",
    "is_async",
    "name_of",
    "orderings_of",
    "require_own_topics",
]
