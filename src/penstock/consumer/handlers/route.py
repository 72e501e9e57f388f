"""A route: a handler at run time, with what may change while it runs; and the routes of all topics of a consumer.

Topics that a pattern matches are found while it runs, so routes come, and topics go. A route stays: what is still in
flight of its topic needs it, and so does the topic when it comes back.
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
from penstock.errors import MessageFormatError, PenstockError, RegistryConnectionError, raised
from penstock.message import DecodedMessage, FetchedMessage, Message, Record, RetriedMessage
from penstock.routing import Lane

if TYPE_CHECKING:
    from penstock.telemetry.consumer import ConsumerTelemetry

#: Makes what is published of what a handler returned for what it was given.
MakeResults = Callable[[object, Any], Results | None]
#: Makes what is handed over of a record that nothing holds back, or None where the filter refuses it. It raises what
#: the filter raises, and a `PenstockError` where it cannot be decoded.
Prepare = Callable[[Record], Message | None]


@dataclass(frozen=True, slots=True)
class Failed:
    """A message did not get done."""

    error: BaseException = field(repr=False)
    #: Whether another try could not help.
    permanent: bool = False
    #: The call that was given up and has not returned: its key waits for it.
    call: AbandonedCall | None = None


class RateLimited:
    """The handler's rate is used up: the message waits for the token bucket, with all of its handler in its lane."""


RATE_LIMITED = RateLimited()


def failure_of(error: BaseException) -> Failed:
    """Return the failure of a message whose preparation or handler raised.

    One that cannot be read, or whose result cannot be written, is not tried again: its bytes stay what they are.
    """
    return Failed(error, permanent=isinstance(error, MessageFormatError))


#: A message to hand over; a failure; no token is left; or the time, on the engine's clock, before which it must wait.
Answer = Message | Failed | RateLimited | float


@dataclass(slots=True, eq=False, repr=False)
class Route:
    """A handler with its order, its limits and the callable that runs it, for all topics of the handler.

    `retry` and the rates may be changed by any thread at any time: each is one reference, read once for each message.
    """

    handler: Handler
    ordering: Ordering
    #: The handler's function with whatever is put around it.
    invoke: Invoke
    _: KW_ONLY
    #: The lanes that `ordering` numbers, of those of the whole consumer.
    lanes: Sequence[Lane[Any, Record]] = ()
    #: Seconds that a call may take, or None.
    time_limit: float | None = None
    #: Makes what is published of what `invoke` returns.
    make_results: MakeResults
    #: For a retry topic, the topic whose messages wait there.
    source: str | None = field(default=None, init=False)
    #: Reads the headers of a retry topic. The time of a message is read once: later its header may claim what it likes.
    retry_headers: RetryHeaders | None = field(default=None, init=False)
    batch: int = field(init=False)
    linger: float = field(init=False)
    retry: RetryPolicy = field(init=False)
    token_bucket: TokenBucket = field(init=False)
    key_rate_limiter: KeyRateLimiter = field(init=False)
    #: Whether messages may have to wait for a limit or a time, so that each is admitted by itself.
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
        """Return the route of a retry topic whose messages come from the topic `source`; it has the same limits."""
        route = copy(self)
        route.source, route.retry_headers, route.gated = source, headers, True
        return route

    def _is_gated(self) -> bool:
        limits = (self.token_bucket.rate, self.key_rate_limiter.rate, self.retry_headers)
        return any(limit is not None for limit in limits)

    def change(self, *, retry: RetryPolicy | None, rate: float | None, key_rate: float | None) -> None:
        """Take new values for what may change while running."""
        if retry is not None:
            self.retry = retry
        self.token_bucket.rate = rate
        self.key_rate_limiter.rate = key_rate
        self.gated = self._is_gated()

    def _as_seen(self, record: Record) -> Record:
        return record if self.source is None else RetriedRecord.of(record, self.source)

    def screen(self, record: Record) -> Failed | bool:
        """Tell whether the filter lets a message pass, or that it failed on it."""
        accept = self.handler.filter
        if accept is None:
            return True
        try:
            return bool(accept(Message(self._as_seen(record))))
        except:  # noqa: E722 - see `raised`; the user's code: it is this message's failure
            return failure_of(raised())

    def admit(self, identity: Hashable, record: Record, now: float, arrival: int, attempts: int = 0) -> Answer:
        """Return the message to hand over now, or why not; `identity` is the record's, by `ordering`.

        `arrival` is its claim to be let through: the lowest of those that wait is first. `attempts`: as for `message`.
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
        """Return what the handler is given for a record that was tried `attempts` times since it was fetched."""
        if self.source is not None:
            attempts += tries_before(record, self.source)
        record = self._as_seen(record)
        if self._decoded is None:
            return RetriedMessage(record, attempts) if attempts else Message(record)
        try:
            return self._decoded(record, attempts)
        except PenstockError as error:
            return failure_of(error)


def _preparing(accept: Filter | None, make: Callable[[Record], Message]) -> Prepare:
    """Return what makes messages for the first try of a record."""
    if accept is None:
        return make

    def prepare(record: Record) -> Message | None:
        message = FetchedMessage()
        message._record = record  # noqa: SLF001 - see there
        if not accept(message):
            return None
        return message if make is Message else make(record)

    return prepare


def _decoding(decoder: Decoder) -> Callable[..., DecodedMessage]:
    """Return what makes a message with a body of a record and its tries.

    That raises `RegistryConnectionError`, or `MessageFormatError` for whatever else the decoder raised.
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
        except RegistryConnectionError:
            raise
        except:  # noqa: E722 - see `raised`; a decoder raises what it likes: a panic in Rust is no Exception
            error = raised()
            raise MessageFormatError(
                f"the value cannot be decoded: {describe(error)}; correct its producer or the decoder"
            ) from error
        return DecodedMessage(record, body, attempts)

    return decoded


class Routes(Mapping[str, Route]):
    """Routes by topic, those of retry topics included.

    Written by who starts the consumer, then by the poll thread alone; read by any thread. Each change replaces a whole
    mapping, so that nobody meets one that changes, and no lock is needed. `lanes_of` returns the lanes of a handler.
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
        # Of handlers that state none.
        self._time_limit = time_limit
        self._spaces: SpaceNumbers = {}
        self._by_topic: Mapping[str, Route] = {}
        #: The handlers of the topics that are consumed, without retry topics.
        self.handlers: Mapping[str, Handler] = {}
        #: Topics that came up while the consumer ran. On the poll thread.
        self.new: set[str] = set()
        #: One for each handler that has a topic: its routes share it. On the poll thread.
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
        """Tell whether a topic that the group has no offset of is read from its first message in any case.

        A retry topic is the group's own, and the messages that wait there count as done where they came from. A topic
        that came up while the consumer ran was written to before that was noticed. On the poll thread.
        """
        return self._by_topic[topic].source is not None or topic in self.new

    def add(self, topic: str, handler: Handler) -> None:
        """Have a handler take a topic, with its retry topics."""
        if topic not in self._by_topic:
            route = next(iter(self.of_handler(handler)), None) or self._route(handler)
            self._by_topic = {**self._by_topic, topic: route}
            self._add_retry_topics(topic, retry_topics(self._group, topic, handler.retry_delays))
        self.handlers = {**self.handlers, topic: handler}

    def let_go(self, topics: Collection[str]) -> None:
        """Consume these topics no more, nor their retry topics."""
        self.handlers = {topic: handler for topic, handler in self.handlers.items() if topic not in topics}

    def add_former_delays(self, existing: Iterable[str]) -> None:
        """Read the retry topics of delays that handlers have no more, so that what waits there is not forgotten."""
        existing = list(existing)
        for topic, handler in self.handlers.items():
            # A handler without delays reads its own topics alone: with the last one goes what waits for it.
            if handler.retry_delays:
                self._add_retry_topics(topic, former_retry_topics(self._group, topic, existing))

    def _add_retry_topics(self, topic: str, delays: Mapping[str, float]) -> None:
        """Read retry topics of a topic, given with their delays in seconds."""
        route = self._by_topic[topic]
        rounds = len(route.handler.retry_delays)
        made = {
            name: route.for_retries(topic, RetryHeaders(delay, rounds, self._clock))
            for name, delay in delays.items()
            if name not in self._by_topic
        }
        self._by_topic = {**self._by_topic, **made}

    def of_handler(self, handler: Handler) -> list[Route]:
        """Return the routes of a handler, that of its own topics first. Any thread."""
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
            # Results are sent within the span. Where there is none, whoever called the handler makes them.
            within = with_results(invoke, maker, is_async=is_async)
            traced = self._telemetry.processing.around
            invoke = traced(invoke, within=within, batches=handler.batch > 1, is_async=is_async)
        ordering = ordering_of(handler, len(lanes), self._spaces, together=handler.batch)
        route = Route(handler, ordering, invoke, make_results=maker.make, lanes=lanes, time_limit=limit)
        self.token_buckets.append(route.token_bucket)
        return route
