"""Routes: a handler at run time with the limits that may change, and the table of routes by topic.

A pattern finds topics while the consumer runs, so routes are added, and topics go. A route is never removed: messages
of its topic may still be in flight, and the topic may come back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.clients.cluster import Clock
from penstock.consumer.handlers.call_guard import AbandonedCall
from penstock.consumer.handlers.environment import Invoke, MiddlewareSpec, cancelled_after, wrap
from penstock.consumer.handlers.functions import Context
from penstock.consumer.handlers.handler import Handler, Kind, SpaceNumbers, ordering_of
from penstock.consumer.handlers.options import Filter, RetryPolicy
from penstock.consumer.handlers.ordering import Ordering
from penstock.consumer.handlers.rate_limits import KeyRateLimiter, TokenBucket
from penstock.consumer.handlers.results import ResultMaker, Results, with_results
from penstock.consumer.handlers.serialization import Decoder, RecordDecoder, describe
from penstock.consumer.retry_topics import RetriedRecord, RetryHeaders, former_retry_topics, retry_topics, tries_before
from penstock.errors import HandlerTimeLimitError, MessageFormatError, PenstockError, RegistryConnectionError, raised
from penstock.message import DecodedMessage, FetchedMessage, Message, Record, RetriedMessage
from penstock.routing import Lane

if TYPE_CHECKING:
    from penstock.telemetry.consumer import ConsumerTelemetry

#: Makes the results to publish. Arguments: the handler's return value, and the message or batch it was called with.
MakeResults = Callable[[object, Any], Results | None]
#: Makes the message of a record for its first try, or None if the filter refuses the record. Raises the error of the
#: filter, and a `PenstockError` if the value cannot be decoded.
Prepare = Callable[[Record], Message | None]


@dataclass(frozen=True, slots=True)
class Failed:
    """The failure of a message."""

    error: BaseException = field(repr=False)
    #: Whether another try cannot help.
    permanent: bool = False
    #: The call that was given up and has not returned. The key waits for its return.
    call: AbandonedCall | None = None


class RateLimited:
    """No token is left: the message waits for the token bucket, with all messages of its handler in its lane."""


RATE_LIMITED = RateLimited()


def failure_of(error: BaseException) -> Failed:
    """Return the failure of a message from an error of its preparation or its handler.

    A format error is permanent: the bytes of the message or of its result stay the same.
    """
    return Failed(error, permanent=isinstance(error, MessageFormatError))


#: A message to hand over; its failure; a lack of tokens; or the time, on the engine's clock, until which it waits.
Answer = Message | Failed | RateLimited | float


@dataclass(slots=True, eq=False, repr=False)
class Route:
    """A handler with its order, its limits and the callable that runs it. All topics of a handler share one route.

    Any thread may change `retry` and the rates at any time. Each is one reference, read once for each message.
    """

    handler: Handler
    ordering: Ordering
    #: The handler's function within its middlewares, time limit and span.
    invoke: Invoke
    _: KW_ONLY
    #: The lanes of this handler; `ordering` returns an index into them.
    lanes: Sequence[Lane[Any, Record]] = ()
    #: Seconds that a call may take, or None for no limit.
    time_limit: float | None = None
    #: Makes the results of the return value of `invoke`.
    make_results: MakeResults
    #: For a retry topic, the topic that its messages come from; else None.
    source: str | None = field(default=None, init=False)
    #: Reads the headers of a retry topic; else None. The retry time of a message is read once and then kept.
    retry_headers: RetryHeaders | None = field(default=None, init=False)
    batch: int = field(init=False)
    linger: float = field(init=False)
    retry: RetryPolicy = field(init=False)
    token_bucket: TokenBucket = field(init=False)
    key_rate_limiter: KeyRateLimiter = field(init=False)
    #: Whether a message may have to wait for a rate or a retry time. Then `admit` is called for each message.
    gated: bool = field(init=False)
    #: Whether there is a filter.
    filters: bool = field(init=False)
    prepare: Prepare = field(init=False)
    _decoded: Callable[..., DecodedMessage] | None = field(init=False)

    def __post_init__(self) -> None:
        handler = self.handler
        self.batch, self.linger, self.retry = handler.batch, handler.linger, handler.retry
        self.token_bucket, self.key_rate_limiter = TokenBucket(handler.rate), KeyRateLimiter(handler.key_rate)
        self.gated = self._is_gated()
        self.filters = handler.filter is not None
        self._decoded = None if handler.decoder is None else _decoding(handler.decoder)
        self.prepare = _preparing(handler.filter, self._decoded or Message)

    def for_retries(self, source: str, headers: RetryHeaders) -> Route:
        """Return a route for a retry topic of the topic `source`. It shares the limits of this route."""
        route = copy(self)
        route.source, route.retry_headers, route.gated = source, headers, True
        return route

    def _is_gated(self) -> bool:
        limits = (self.token_bucket.rate, self.key_rate_limiter.rate, self.retry_headers)
        return any(limit is not None for limit in limits)

    def change(self, *, retry: RetryPolicy | None, rate: float | None, key_rate: float | None) -> None:
        """Change the retry policy (None keeps it) and both rates (None removes a limit)."""
        if retry is not None:
            self.retry = retry
        self.token_bucket.rate = rate
        self.key_rate_limiter.rate = key_rate
        self.gated = self._is_gated()

    def as_seen(self, record: Record) -> Record:
        """Return a fetched record as the functions of its handler see it."""
        return record if self.source is None else RetriedRecord.of(record, self.source)

    def screen(self, record: Record) -> Failed | bool:
        """Return whether the filter accepts a record, or the failure of the filter."""
        accept = self.handler.filter
        if accept is None:
            return True
        try:
            return bool(accept(Message(self.as_seen(record))))
        except:  # noqa: E722 - see `raised`; an error of the user's code is the message's failure
            return failure_of(raised())

    def admit(self, identity: Hashable, record: Record, now: float, arrival: int, attempts: int = 0) -> Answer:
        """Return the message to hand over now, or the reason why it waits.

        `identity` is the record's identity by `ordering`. Of the messages that wait for tokens, the lowest `arrival`
        goes first. `attempts`: see `message`.
        """
        if (at := self.key_rate_limiter.free_at(identity)) > now:
            return at
        message = self.message(record, attempts)
        if isinstance(message, Failed):
            return message
        if not self.token_bucket.take(now, arrival):
            return RATE_LIMITED
        self.key_rate_limiter.begin(identity, now)
        return message

    def message(self, record: Record, attempts: int = 0) -> Message | Failed:
        """Return the handler's message for a record that was tried `attempts` times since it was fetched."""
        if self.source is not None:
            attempts += tries_before(record, self.source)
        record = self.as_seen(record)
        if self._decoded is None:
            return RetriedMessage(record, attempts) if attempts else Message(record)
        try:
            return self._decoded(record, attempts)
        except PenstockError as error:
            return failure_of(error)


def _preparing(accept: Filter | None, make: Callable[[Record], Message]) -> Prepare:
    """Return the function that makes a message for the first try of a record."""
    if accept is None:
        return make

    def prepare(record: Record) -> Message | None:
        message = FetchedMessage()
        message._record = record  # noqa: SLF001 - see `FetchedMessage`
        if not accept(message):
            return None
        return message if make is Message else make(record)

    return prepare


def _decoding(decoder: Decoder) -> Callable[..., DecodedMessage]:
    """Return the function that makes a message with a decoded body, from a record and its number of tries.

    It raises `RegistryConnectionError` and `HandlerTimeLimitError` as they come, and `MessageFormatError` for any other
    error of the decoder.
    """
    of_value = None if isinstance(decoder, RecordDecoder) else decoder
    of_record = decoder.decode if isinstance(decoder, RecordDecoder) else None

    def decoded(record: Record, attempts: int = 0) -> DecodedMessage:
        value = record.value()
        body: object = None
        try:
            if value is None:
                pass
            elif of_value is not None:
                body = of_value(value)
            elif of_record is not None:
                body = of_record(record, value)
        except (RegistryConnectionError, HandlerTimeLimitError):
            raise  # the value is not at fault
        except:  # noqa: E722 - see `raised`; a panic of a decoder in Rust is no `Exception`
            error = raised()
            raise MessageFormatError(
                f"the value cannot be decoded: {describe(error)}; correct its producer or the decoder"
            ) from error
        return DecodedMessage(record, body, attempts)

    return decoded


class Routes(Mapping[str, Route]):
    """The routes by topic, retry topics included.

    The thread that starts the consumer writes it, afterwards only the poll thread; any thread reads. Each change
    replaces a whole mapping, so readers need no lock. `lanes_of` returns the lanes of a handler.
    """

    def __init__(
        self,
        group: str,
        clock: Clock,
        lanes_of: Callable[[Handler], Sequence[Lane[Any, Record]]],
        *,
        middlewares: Sequence[MiddlewareSpec],
        context: Context,
        telemetry: ConsumerTelemetry | None,
        time_limit: float | None = None,
    ) -> None:
        self._group = group
        self._clock = clock
        self._lanes_of = lanes_of
        self._middlewares = middlewares
        self._context = context
        self._telemetry = telemetry
        # The time limit of handlers without one of their own.
        self._time_limit = time_limit
        self._spaces: SpaceNumbers = {}
        self._by_topic: Mapping[str, Route] = {}
        #: The handlers of the consumed topics, without retry topics.
        self.handlers: Mapping[str, Handler] = {}
        #: Topics that were found while the consumer ran. On the poll thread.
        self.new: set[str] = set()
        #: The token bucket of each handler that has a topic. All its routes share it. On the poll thread.
        self.token_buckets: list[TokenBucket] = []

    def __getitem__(self, topic: str) -> Route:
        return self._by_topic[topic]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_topic)

    def __len__(self) -> int:
        return len(self._by_topic)

    @property
    def topics(self) -> list[str]:
        """The topics to subscribe to, retry topics included."""
        return [name for name, route in self._by_topic.items() if (route.source or name) in self.handlers]

    def begins_at_first(self, topic: str) -> bool:
        """Return whether a topic without a committed offset is read from its first message, whatever the reset policy.

        True for retry topics: their messages count as done in the topic they came from. True for topics found while
        the consumer ran: messages were written before the topic was found. On the poll thread.
        """
        return self._by_topic[topic].source is not None or topic in self.new

    def add(self, topic: str, handler: Handler) -> None:
        """Assign a topic and its retry topics to a handler."""
        if topic not in self._by_topic:
            route = next(iter(self.of_handler(handler)), None) or self._route(handler)
            self._by_topic = {**self._by_topic, topic: route}
            self._add_retry_topics(topic, retry_topics(self._group, topic, handler.retry_delays))
        self.handlers = {**self.handlers, topic: handler}

    def let_go(self, topics: Collection[str]) -> None:
        """Stop consuming these topics and their retry topics."""
        self.handlers = {topic: handler for topic, handler in self.handlers.items() if topic not in topics}

    def add_former_delays(self, existing: Iterable[str]) -> None:
        """Read retry topics of delays that handlers no longer have, so that the messages in them are not forgotten."""
        existing = list(existing)
        for topic, handler in self.handlers.items():
            # A handler without any delay reads no retry topics: removing its last delay abandons the waiting messages.
            if handler.retry_delays:
                self._add_retry_topics(topic, former_retry_topics(self._group, topic, existing))

    def _add_retry_topics(self, topic: str, delays: Mapping[str, float]) -> None:
        """Add routes for retry topics of a topic; `delays` has the delay of each in seconds."""
        route = self._by_topic[topic]
        rounds = len(route.handler.retry_delays)
        made = {
            name: route.for_retries(topic, RetryHeaders(delay, rounds, self._clock))
            for name, delay in delays.items()
            if name not in self._by_topic
        }
        self._by_topic = {**self._by_topic, **made}

    def of_handler(self, handler: Handler) -> list[Route]:
        """Return the routes of a handler, the route of its own topics first. Any thread."""
        return [route for route in self._by_topic.values() if route.handler is handler]

    def _route(self, handler: Handler) -> Route:
        lanes, is_async = self._lanes_of(handler), handler.kind is Kind.TASK
        limit = self._time_limit if handler.time_limit is None else handler.time_limit
        limit = None if limit == math.inf else limit
        invoke = wrap(handler, self._middlewares, self._context)
        if limit is not None and is_async:
            invoke = cancelled_after(limit, handler.name, invoke)
        maker = ResultMaker(handler)
        if self._telemetry is not None:
            maker.trace = self._telemetry.publishing
            # The results are made within the span. Without telemetry, the caller of the handler makes them.
            within = with_results(invoke, maker, is_async=is_async)
            traced = self._telemetry.processing.around
            invoke = traced(invoke, within=within, batches=handler.batch > 1, is_async=is_async)
        ordering = ordering_of(handler, len(lanes), self._spaces, together=handler.batch)
        route = Route(handler, ordering, invoke, make_results=maker.make, lanes=lanes, time_limit=limit)
        self.token_buckets.append(route.token_bucket)
        return route
