"""What of an app takes what its consumer runs: handlers, lifespans and worker resources, by decorator.

A handler takes topics by name or by pattern. A pattern matches a topic as a whole. Never matched: Kafka's internal
topics, retry topics, the dead letters of these handlers, and topics that have a handler of their own or are left to
somebody else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, Unpack

from penstock import options as check
from penstock.consumer.handlers.environment import Lifespan, MiddlewareSpec, WorkerResource, wrap
from penstock.consumer.handlers.functions import require_yield
from penstock.consumer.handlers.handler import DEFAULTS, Handler, handler
from penstock.consumer.handlers.options import HandlerOptions, OnFailure
from penstock.consumer.retry_topics import is_retry_topic
from penstock.errors import ConfigurationError
from penstock.option_list import takes_options


@dataclass(slots=True, eq=False)
class TopicPatterns:
    """The patterns of one consumer, in the order they were registered. Never changed: any thread.

    `ConfigurationError` where a pattern is no regular expression, or its handler would consume what it publishes.
    """

    #: The handler of each pattern.
    patterns: Mapping[str, Handler]
    #: Those of topics by name.
    named: Mapping[str, Handler]
    #: Topics that no pattern takes.
    left_out: Collection[str] = ()
    _compiled: list[tuple[re.Pattern[str], Handler]] = field(init=False)
    _is_dead_letter: list[Callable[[str], bool]] = field(init=False)

    def __post_init__(self) -> None:
        self._compiled = [(_compiled(pattern, handler.to), handler) for pattern, handler in self.patterns.items()]
        named = [(re.compile(re.escape(topic)), handler) for topic, handler in self.named.items()]
        self._is_dead_letter = [
            _dead_letters_of(pattern, handler)
            for pattern, handler in (*named, *self._compiled)
            if handler.on_failure is OnFailure.DEAD_LETTER
        ]

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def candidates(self, topic: str) -> list[Handler]:
        """Return the handlers whose patterns match a topic: it is for the first, which was registered first."""
        found = [handler for pattern, handler in self._compiled if pattern.fullmatch(topic)]
        return [] if self._is_reserved(topic) else found

    def matches(self, topics: Iterable[str]) -> dict[str, Handler]:
        """Return the handler of each of those topics that patterns match."""
        return {topic: found[0] for topic in topics if (found := self.candidates(topic))}

    def without_topic(self, topics: Collection[str]) -> dict[str, Handler]:
        """Return the patterns, with their handlers, that match none of these topics."""
        return {
            pattern.pattern: handler for pattern, handler in self._compiled if not any(map(pattern.fullmatch, topics))
        }

    def _is_reserved(self, topic: str) -> bool:
        return (
            topic.startswith("__")
            or topic in self.named
            or topic in self.left_out
            or is_retry_topic(topic)
            or any(is_dead_letter(topic) for is_dead_letter in self._is_dead_letter)
        )


def _compiled(pattern: str, to: str | None) -> re.Pattern[str]:
    """Return a pattern as a user gave it, for a handler that publishes to the topic `to`."""
    if not isinstance(pattern, str) or not pattern.strip():
        raise ConfigurationError(
            f"pattern must be a regular expression as text, such as r'orders\\..*', or r'.+' for all topics, but is "
            f"{pattern!r}"
        )
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise ConfigurationError(f"pattern {pattern!r} is no regular expression of Python's: {error}") from error
    if to is not None and found.fullmatch(to):
        raise ConfigurationError(
            f"the handler of pattern {pattern!r} publishes to {to}, which the pattern matches: one message would go "
            "round for ever; narrow the pattern, or give `to` another topic"
        )
    return found


def _dead_letters_of(pattern: re.Pattern[str], handler: Handler) -> Callable[[str], bool]:
    """Return what knows the dead-letter topics of all topics that a pattern matches."""
    first, *rest = map(re.escape, handler.dead_letter_topic.split("{topic}"))
    # Each place holds the same name.
    text = first + "".join(("(?P<topic>.+)" if place == 0 else "(?P=topic)") + part for place, part in enumerate(rest))
    dead_letter_topic = re.compile(text)

    def is_dead_letter_topic(name: str) -> bool:
        found = dead_letter_topic.fullmatch(name)
        return found is not None and (not rest or pattern.fullmatch(found["topic"]) is not None)

    return is_dead_letter_topic


FunctionT = TypeVar("FunctionT", bound=Callable[..., object])
ResourceT = TypeVar("ResourceT")
LifespanT = TypeVar("LifespanT", bound=Lifespan)


class HandlerRegistry:
    """The handlers of an app, and what runs around them. Registering is for one thread."""

    #: Name of the app.
    name: str
    _middlewares: Sequence[MiddlewareSpec]
    _lifespans: list[Lifespan]
    _resources: list[WorkerResource[Any]]
    _handlers: dict[str, Handler]
    #: Topics whose handlers are left to Spark.
    _spark_topics: set[str]
    _patterns: dict[str, Handler]

    @takes_options(HandlerOptions, DEFAULTS)
    def handler(
        self, *topics: str, pattern: str | None = None, **options: Unpack[HandlerOptions]
    ) -> Callable[[FunctionT], FunctionT]:
        """Register a function for the messages of one topic or several. The function itself is returned unchanged.

        A plain function runs on a worker thread, an `async def` on the app's event loop. What it raises is a failure.
        What it returns is published, an `Outgoing` or several in a list or by `yield`, and then its message is done;
        what brokers refuse of it is a failure of that message. It may return a `DeferredCompletion` and finish later.
        It may have a second parameter, annotated `penstock.Context`: see there.

        Args:
            topics: names of the topics.
            pattern: instead of them, a regular expression: topics that match as a whole, also those that come up
                while the app runs. A topic that a handler names is that handler's.
            order: "key" (default): messages with the same key are handled one at a time and in order, in all topics
                of the handler. "partition": those of the same partition. "none": none wait.
            keyless: what stands for the key where there is none: "partition" (default), "together" or "spread".
            key: what stands for the record's key: "header:name", or a function of the message, which must be quick: the
                thread that fetches and commits calls it.
            key_space: name that handlers share whose keys mean the same, such as "customer": their messages of one key
                wait for each other too; all are plain functions, or all `async def`. None (default): the keys are the
                handler's own.
            filter: called with a message; where it returns false the message is done at once, and counted.
            decoder: "json", a pydantic model, a msgspec struct, a dataclass or another type that JSON is to have, such
                as `list[Model]`, a deserializer of confluent-kafka or a callable of bytes: makes `message.body`.
            to: topic of what the function returns, where that is no `Outgoing`: one value, with the message's key; a
                handler of batches returns a list with one for each message. None (default): only `Outgoing` is
                published.
            encoder: "json", a pydantic model, a msgspec struct, a serializer of confluent-kafka or a callable: makes
                bytes of the values that it returns and that are no bytes.
            batch: messages given at once, at most; more than 1 gives the function a list. What fails comes in batches
                again, and each message alone before it is given up; see `BatchError`.
            linger: seconds that a batch which is not full waits for more, from the arrival of its first message.
            retry: made by `penstock.retry`; five tries with growing waits when left out.
            retry_delays: seconds; when the tries are exhausted the message waits in the topic
                `retry.<app>.<topic>.<delay>` of one after the other, such as `retry.sms.orders.60s`, and holds neither
                its key nor the watermark meanwhile.
            on_failure: what becomes of a message whose retries are exhausted. "stop" (default): the app stops and keeps
                the offset. "dead_letter": it is written to the dead-letter topic. "drop": it is logged and counted.
                "hold": its key stays parked, everything else goes on, and log, statistics and `explain` say so.
            dead_letter_topic: name of the dead-letter topic; created when absent. By the format, `dlq.{topic}` or
                `{topic}-dlt`.
            dead_letter_format: "kafka" (default, KIP-1191) or "spring".
            rate: messages/s that are begun, over all keys; 0 holds all; None (default) for no limit.
            key_rate: messages/s of each key; None (default) for no limit.
            time_limit: seconds that the function may take; None (default) as the app's `time_limit` says. An
                `async def` is cancelled then, and a plain function gets a `HandlerTimeLimitError`: a failure. One that
                does not return within 5 s more is given up by `on_failure` at once: its key waits until it returns,
                and another thread or task takes its place.

        Raises:
            ConfigurationError: an option is wrong, the function cannot be called, or a topic has a handler already.
        """
        if pattern is not None and topics:
            raise ConfigurationError(
                f"a handler has topics, {', '.join(topics)}, or a pattern, {pattern!r}, not both: give one of them, or "
                "register the function once with each"
            )
        kind, taken = ("topic", self._handlers) if pattern is None else ("pattern", self._patterns)
        names = check.names("topic", topics) if pattern is None else (pattern,)

        def register(function: FunctionT) -> FunctionT:
            registered = handler(function, **options)
            wrap(registered, self._middlewares)  # to refuse what does not fit where it is written
            if pattern is not None:
                TopicPatterns({pattern: registered}, {})  # as above
            for name in names:
                if name in taken:
                    raise ConfigurationError(
                        f"{kind} {name} has the handler {taken[name].name} already; a {kind} has one handler in an "
                        "app: call both from one, or make a second App with another name"
                    )
                taken[name] = registered
            return function

        return register

    def lifespan(self, function: LifespanT) -> LifespanT:
        """Register a generator function that runs around the app: up to its `yield` at the start, the rest at the end.

        Those registered first start first and end last. What fails at the start keeps the app from starting. An
        `async def` runs on the event loop of the app's async handlers. What one of them yields is `Context.state`.
        """
        require_yield("lifespan", function, may_be_async=True)
        self._lifespans.append(function)
        return function

    def worker_resource(self, function: Callable[[], Generator[ResourceT, Any, Any]]) -> WorkerResource[ResourceT]:
        """Register a generator function that makes what each worker has one of; handlers ask it with `.get()`.

        What stands before its `yield` runs on a worker at the first `get()` there, the rest when the worker ends.
        """
        require_yield("worker_resource", function)
        resource = WorkerResource(function)
        self._resources.append(resource)
        return resource

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers by topic."""
        return dict(self._handlers)

    @property
    def patterns(self) -> Mapping[str, Handler]:
        """The handlers by pattern."""
        return dict(self._patterns)

    @property
    def consumed(self) -> dict[str, Handler]:
        """The handlers by topic, without those that are left to Spark."""
        return {topic: handler for topic, handler in self._handlers.items() if topic not in self._spark_topics}

    @property
    def consumes(self) -> bool:
        """Whether it has handlers of its own: those that are left to Spark do not count."""
        return bool(self.consumed or self._patterns)
