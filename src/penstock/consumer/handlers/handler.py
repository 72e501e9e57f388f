"""A handler: a function, and how messages are given to it. Everything is checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from enum import Enum
from typing import Any, Final, Unpack

from penstock import options as check
from penstock.consumer.handlers.functions import (
    collected,
    is_async,
    is_async_generator,
    name_of,
    require_parameters,
    takes_context,
)
from penstock.consumer.handlers.options import (
    Filter,
    HandlerOptions,
    OnFailure,
    RetryPolicy,
    check_batch,
    check_plain,
    check_rates,
    delays_of,
    policy_of,
)
from penstock.consumer.handlers.ordering import KeyFunction, Keyless, Order, Ordering, key_function
from penstock.consumer.handlers.serialization import Decoder, Encoder, decoder_of, encoder_of
from penstock.consumer.retry_topics import retry_topics
from penstock.dead_letters.headers import DeadLetterFormat, default_topic
from penstock.errors import ConfigurationError
from penstock.option_list import takes_options
from penstock.outgoing import require_topic_name

#: Called with a message, or with a list of messages where `batch` is more than one, and with a `Context` where its
#: second parameter is annotated so; may be an `async def`.
HandlerFunction = Callable[..., object]
#: The numbers of key spaces, as they come: see `Handler.space`.
SpaceNumbers = dict[str | int, int]


class Kind(Enum):
    """Where a handler runs."""

    #: On a worker thread.
    THREAD = "thread"
    #: On the event loop: an `async def`.
    TASK = "task"


@dataclass(frozen=True, slots=True)
class Handler:
    """A function and how messages are given to it. Made by `handler`, whose arguments these are.

    Times are in seconds, rates in messages a second. `App.handler` explains the options.
    """

    function: HandlerFunction
    _: KW_ONLY
    #: Whether the function is given a `Context` as well as the message.
    takes_context: bool
    kind: Kind
    order: Order = Order.KEY
    keyless: Keyless = Keyless.PARTITION
    key: KeyFunction | None = None
    key_space: str | None = None
    filter: Filter | None = None
    decoder: Decoder | None = None
    to: str | None = None
    encoder: Encoder | None = None
    batch: int = 1
    linger: float = 0.0
    retry: RetryPolicy
    retry_delays: tuple[float, ...] = ()
    on_failure: OnFailure = OnFailure.STOP
    dead_letter_topic: str
    dead_letter_format: DeadLetterFormat = DeadLetterFormat.KAFKA
    rate: float | None = None
    key_rate: float | None = None
    time_limit: float | None = None

    @property
    def name(self) -> str:
        """The function's name, for logs and reports."""
        return name_of(self.function)

    @property
    def space(self) -> str | int:
        """What stands for its key space: the name, or the handler itself."""
        return id(self) if self.key_space is None else self.key_space


#: What counts for an option that is left out: None also where it depends on others.
DEFAULTS: Final[Mapping[str, object]] = {
    option.name: None if option.default is MISSING else option.default
    for option in fields(Handler)
    if option.name in HandlerOptions.__annotations__
}


@takes_options(HandlerOptions, DEFAULTS)
def handler(function: HandlerFunction, **options: Unpack[HandlerOptions]) -> Handler:
    """Check what a user gave for a handler and return it in one piece.

    `function` is called with each message, on a worker thread, or on the event loop where it is an `async def`. What it
    raises is a failure. What it returns is published, or it is a `DeferredCompletion`. The options are
    those of `App.handler`, where they are explained.

    Raises:
        ConfigurationError: one of them is wrong.
    """
    check.a_callable("handler", function)
    asks = takes_context(function)
    what, more = ("a message and its context", "") if asks else ("a message", ", or a second one as penstock.Context")
    require_parameters("handler", function, what, 2 if asks else 1, may_yield=True, more=more)
    check_plain({option: options[option] for option in ("filter", "decoder", "key", "encoder")})
    if options["filter"] is not None:
        check.a_callable("filter", options["filter"])
    if options["to"] is not None:
        require_topic_name("to", options["to"])
    if options["key_space"] is not None:
        check.not_empty("key_space", options["key_space"])
    order = check.choice("order", options["order"], Order)
    check_batch(options["batch"], options["linger"])
    check_rates(order, options["rate"], options["key_rate"])
    if options["time_limit"] is not None:
        check.positive("time_limit", options["time_limit"])
    made: dict[str, Any] = {
        "order": order,
        "keyless": check.choice("keyless", options["keyless"], Keyless),
        "key": key_function(options["key"]),
        "decoder": decoder_of(options["decoder"]),
        "encoder": encoder_of(options["encoder"]),
        "retry": policy_of(options["retry"]),
        "retry_delays": delays_of(options["retry_delays"]),
        **_on_failure(options),
    }
    kind = Kind.TASK if is_async(function) or is_async_generator(function) else Kind.THREAD
    return Handler(collected(function), takes_context=asks, kind=kind, **{**options, **made})


def _on_failure(options: HandlerOptions) -> dict[str, Any]:
    """Return what becomes of messages that are given up, where dead letters go and how they are written."""
    fate = check.choice("on_failure", options["on_failure"], OnFailure)
    chosen = check.choice("dead_letter_format", options["dead_letter_format"], DeadLetterFormat)
    topic = options["dead_letter_topic"]
    written_to = default_topic(chosen) if topic is None else topic
    check.not_empty("dead_letter_topic", written_to)
    require_topic_name("dead_letter_topic", written_to.replace("{topic}", "topic"))
    if fate is not OnFailure.DEAD_LETTER and (topic is not None or chosen is not DeadLetterFormat.KAFKA):
        useless = "dead_letter_format" if topic is None else "dead_letter_topic"
        raise ConfigurationError(
            f"{useless} has no use with on_failure={fate.value!r}, which writes no dead letters; give "
            f"on_failure='dead_letter', or leave {useless} out"
        )
    return {"on_failure": fate, "dead_letter_topic": written_to, "dead_letter_format": chosen}


def orderings_of(handlers: Mapping[str, Handler], lanes: int) -> dict[str, Ordering]:
    """Return the ordering of each topic's handler, with the key spaces numbered as they come."""
    numbers: SpaceNumbers = {}
    return {topic: ordering_of(handler, lanes, numbers) for topic, handler in handlers.items()}


def ordering_of(handler: Handler, lanes: int, numbers: SpaceNumbers, *, together: int = 1) -> Ordering:
    """Return a handler's ordering; `numbers` are those of the key spaces so far, and gets that of a new one."""
    space = numbers.setdefault(handler.space, len(numbers))
    return Ordering(handler.order, handler.keyless, lanes, handler.key, space=space, together=together)


def require_own_topics(group: str, handlers: Mapping[str, Handler]) -> None:
    """Raise `ConfigurationError` where handlers would feed each other what they give up, or themselves."""
    for topic, handler in handlers.items():
        if handler.to == topic:
            raise ConfigurationError(
                f"handler {handler.name} consumes {topic} and publishes to it: one message would go round for ever; "
                "give `to` another topic"
            )
        retries = retry_topics(group, topic, handler.retry_delays)
        for name in retries.keys() & handlers.keys():
            raise ConfigurationError(
                f"topic {name} has a handler, but it is where messages of {topic} wait for their retry and are "
                f"given to {handler.name}; leave it out"
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
