"""A handler: a function and its options. All options are checked when it is made."""

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

#: A plain function or an `async def`. It is called with a message, or with a list of messages if `batch` is above 1.
#: If its second parameter is annotated `Context`, it gets one.
HandlerFunction = Callable[..., object]
#: The numbers of key spaces, in order of appearance: see `Handler.space`.
SpaceNumbers = dict[str | int, int]


class Kind(Enum):
    """Where a handler runs."""

    #: On a worker thread.
    THREAD = "thread"
    #: On the event loop: an `async def`.
    TASK = "task"


@dataclass(frozen=True, slots=True)
class Handler:
    """A function and its checked options. Made by `handler`.

    Times are in seconds, rates in messages a second. `App.handler` explains the options.
    """

    function: HandlerFunction
    _: KW_ONLY
    #: Whether the function gets a `Context` besides the message.
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
        """The identity of its key space: the name, or a number of the handler's own."""
        return id(self) if self.key_space is None else self.key_space

    def dead_letter_topic_of(self, topic: str) -> str:
        """Return the dead-letter topic of one of its topics."""
        return self.dead_letter_topic.replace("{topic}", topic)


#: The default of each option. None also for options whose default depends on others.
DEFAULTS: Final[Mapping[str, object]] = {
    option.name: None if option.default is MISSING else option.default
    for option in fields(Handler)
    if option.name in HandlerOptions.__annotations__
}


@takes_options(HandlerOptions, DEFAULTS)
def handler(function: HandlerFunction, **options: Unpack[HandlerOptions]) -> Handler:
    """Make a handler of a function, and check its options.

    `function` is called with each message, on a worker thread, or on the event loop if it is an `async def`. An
    exception is a failure of the message. The return value is published, or it is a `DeferredCompletion`.
    `App.handler` explains the options.

    Raises:
        ConfigurationError: an option is wrong.
    """
    check.a_callable("handler", function)
    wants_context = takes_context(function)
    if wants_context:
        require_parameters("handler", function, "a message and its context", 2, may_yield=True)
    else:
        more = ", or a second one as penstock.Context"
        require_parameters("handler", function, "a message", 1, may_yield=True, more=more)
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
    return Handler(collected(function), takes_context=wants_context, kind=kind, **{**options, **made})


def _on_failure(options: HandlerOptions) -> dict[str, Any]:
    """Check and return the options for exhausted messages: the choice, the dead-letter topic and its format."""
    choice = check.choice("on_failure", options["on_failure"], OnFailure)
    letter_format = check.choice("dead_letter_format", options["dead_letter_format"], DeadLetterFormat)
    topic = options["dead_letter_topic"]
    name = default_topic(letter_format) if topic is None else topic
    check.not_empty("dead_letter_topic", name)
    require_topic_name("dead_letter_topic", name.replace("{topic}", "topic"))
    if choice is not OnFailure.DEAD_LETTER and (topic is not None or letter_format is not DeadLetterFormat.KAFKA):
        useless = "dead_letter_format" if topic is None else "dead_letter_topic"
        raise ConfigurationError(
            f"{useless} has no use with on_failure={choice.value!r}, which writes no dead letters; give "
            f"on_failure='dead_letter', or leave {useless} out"
        )
    return {"on_failure": choice, "dead_letter_topic": name, "dead_letter_format": letter_format}


def orderings_of(handlers: Mapping[str, Handler], lanes: int) -> dict[str, Ordering]:
    """Return the ordering of each topic's handler, with key spaces numbered in order of appearance."""
    numbers: SpaceNumbers = {}
    return {topic: ordering_of(handler, lanes, numbers) for topic, handler in handlers.items()}


def ordering_of(handler: Handler, lanes: int, numbers: SpaceNumbers, *, together: int = 1) -> Ordering:
    """Return a handler's ordering. A new key space is added to `numbers`."""
    space = numbers.setdefault(handler.space, len(numbers))
    return Ordering(handler.order, handler.keyless, lanes, handler.key, space=space, together=together)


def require_own_topics(group: str, handlers: Mapping[str, Handler]) -> None:
    """Raise `ConfigurationError` if a message would circle: by `to`, retry topics or dead-letter topics."""
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
        path, current = [topic], topic
        while current in handlers and handlers[current].on_failure is OnFailure.DEAD_LETTER:
            current = handlers[current].dead_letter_topic_of(current)
            if current in (topic, *retries):
                raise ConfigurationError(
                    f"dead letters of {' go to '.join([*path, current])}, whose handler gets them again: one message "
                    "would go round for ever; give dead_letter_topic another name"
                )
            if current in path:
                break  # a circle without `topic`: the check of one of its own topics finds it
            path.append(current)
