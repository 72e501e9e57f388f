"""The registry of an app: its decorators for handlers, lifespans and worker resources, and its topic patterns.

A handler takes topics by name or by pattern. A pattern matches a whole topic name. A pattern never takes Kafka's
internal topics, retry topics, dead-letter topics of these handlers, topics with a handler of their own, or topics that
are excluded.
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
    """The patterns of one consumer, in the order of registration. Immutable, so any thread may use it.

    Raises `ConfigurationError` if a pattern is no regular expression, or matches the topic its handler publishes to.
    """

    #: The handler of each pattern.
    patterns: Mapping[str, Handler]
    #: The handler of each topic that is registered by name.
    named: Mapping[str, Handler]
    #: Topics that are excluded from all patterns.
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
        """Return the handlers whose patterns match a topic. The topic belongs to the first of them."""
        found = [handler for pattern, handler in self._compiled if pattern.fullmatch(topic)]
        return [] if self._is_reserved(topic) else found

    def matches(self, topics: Iterable[str]) -> dict[str, Handler]:
        """Return the handler of each of these topics that a pattern matches."""
        return {topic: found[0] for topic in topics if (found := self.candidates(topic))}

    def without_topic(self, topics: Collection[str]) -> dict[str, Handler]:
        """Return the patterns that match none of these topics, each with its handler."""
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
    """Check and compile a user's pattern, for a handler that publishes to the topic `to`."""
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
    """Return a function that recognizes the dead-letter topics of all topics that a pattern matches."""
    first, *rest = map(re.escape, handler.dead_letter_topic.split("{topic}"))
    # Each `{topic}` stands for the same name.
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
    """The handlers of an app, with its lifespans and worker resources. Only one thread may register."""

    #: Name of the app.
    name: str
    _middlewares: Sequence[MiddlewareSpec]
    _lifespans: list[Lifespan]
    _resources: list[WorkerResource[Any]]
    _handlers: dict[str, Handler]
    #: Topics whose handlers run on Spark.
    _spark_topics: set[str]
    _patterns: dict[str, Handler]

    @takes_options(HandlerOptions, DEFAULTS)
    def handler(
        self, *topics: str, pattern: str | None = None, **options: Unpack[HandlerOptions]
    ) -> Callable[[FunctionT], FunctionT]:
        """Register a function for the messages of one topic or several. The function itself is returned unchanged.

        A plain function runs on a worker thread, an `async def` on the app's event loop. An exception is a failure of
        the message. An `Outgoing` that it returns is published, or several in a list or by `yield`; then the message is
        done. If brokers refuse a result, its message fails. The function may return a `DeferredCompletion` and finish
        later. It may have a second parameter annotated `penstock.Context`, and gets one.

        Args:
            topics: names of the topics.
            pattern: instead of topics, a regular expression that matches whole topic names, also of topics that are
                created while the app runs. A topic that a handler names belongs to that handler.
            order: "key" (default): messages with the same key are handled one at a time and in order, in all topics
                of the handler. "partition": messages of the same partition. "none": no message waits for another.
            keyless: the order of messages without a key: "partition" (default), "together" or "spread".
            key: replaces the record's key: "header:name", or a function of the message. The function must be quick,
                because the thread that fetches and commits calls it.
            key_space: a name, such as "customer", for handlers whose keys mean the same. Messages of one key then wait
                for each other across these handlers. All must be plain functions, or all `async def`. None (default):
                the handler has its own keys.
            filter: called with a message. If it returns false, the message is done at once and counted.
            decoder: "json", a pydantic model, a msgspec struct, a dataclass or another type of JSON content such as
                `list[Model]`, a deserializer of confluent-kafka or a callable of bytes. It makes `message.body`.
            to: topic for returned values that are no `Outgoing`: one value, published with the message's key. A handler
                of batches returns a list with one value per message. None (default): only `Outgoing` is published.
            encoder: "json", a pydantic model, a msgspec struct, a serializer of confluent-kafka or a callable. It makes
                bytes from returned values that are no bytes.
            batch: most messages in one call; with more than 1 the function gets a list. Failed messages come in batches
                again, and each message alone before it is given up; see `BatchError`.
            linger: seconds that a batch with free places waits for more, from the arrival of its first message.
            retry: made by `penstock.retry`; by default five tries with growing waits.
            retry_delays: seconds. A message with exhausted tries waits in a retry topic, one delay after the other:
                `retry.<app>.<topic>.<delay>`, such as `retry.sms.orders.60s`. Meanwhile it holds neither its key nor
                the watermark.
            on_failure: what happens to a message whose retries are exhausted. "stop" (default): the app stops and keeps
                the offset. "dead_letter": it is written to the dead-letter topic. "drop": it is logged and counted.
                "hold": its key stays parked, everything else goes on, and log, statistics and `explain` report it.
            dead_letter_topic: name of the dead-letter topic, which is created if it does not exist. The default depends
                on the format: `dlq.{topic}` or `{topic}-dlt`.
            dead_letter_format: "kafka" (default, KIP-1191) or "spring".
            rate: messages/s that may start, over all keys; 0 holds all; None (default) for no limit.
            key_rate: messages/s of each key; None (default) for no limit.
            time_limit: seconds that a call may take; None (default) for the app's `time_limit`. At the limit an
                `async def` is cancelled, and a plain function gets a `HandlerTimeLimitError`: a failure. A call that
                does not return within 5 s more is given up by `on_failure` at once. Its key waits until it returns,
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
            wrap(registered, self._middlewares)  # checks the middlewares now, so the error shows the decorator's line
            if pattern is not None:
                TopicPatterns({pattern: registered}, {})  # checks the pattern, for the same reason
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

        The first registered lifespan starts first and ends last. An error at the start keeps the app from starting. An
        `async def` runs on the event loop of the app's async handlers. The yielded value is `Context.state`.
        """
        require_yield("lifespan", function, may_be_async=True)
        self._lifespans.append(function)
        return function

    def worker_resource(self, function: Callable[[], Generator[ResourceT, Any, Any]]) -> WorkerResource[ResourceT]:
        """Register a generator function that makes a resource for each worker; handlers get it with `.get()`.

        The part before `yield` runs on a worker at the first `get()` there, the rest when the worker ends.
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
        """The handlers by topic, without the handlers that run on Spark."""
        return {topic: handler for topic, handler in self._handlers.items() if topic not in self._spark_topics}

    @property
    def consumes(self) -> bool:
        """Whether it has handlers that do not run on Spark."""
        return bool(self.consumed or self._patterns)
