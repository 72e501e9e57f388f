"""A route: a handler at run time, with what may change while it runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any

from penstock.consumer.handlers.call_guard import AbandonedCall
from penstock.consumer.handlers.handler import Handler, Kind
from penstock.consumer.handlers.options.handler_options import Filter
from penstock.consumer.handlers.options.ordering import Ordering
from penstock.consumer.handlers.options.rate_limits import KeyRateLimiter, TokenBucket
from penstock.consumer.handlers.options.retry_policy import RetryPolicy
from penstock.consumer.handlers.results import ResultMaker, Results
from penstock.consumer.handlers.serialization.decoding import Decoder
from penstock.consumer.handlers.serialization.serdes import RecordDecoder, describe
from penstock.consumer.retry_topics import RetriedRecord, tries_before
from penstock.errors import MessageFormatError, RegistryConnectionError, raised
from penstock.message import DecodedMessage, FetchedMessage, Message, Record, RetriedMessage
from penstock.routing import Lane

Invoke = Callable[..., object]
#: Makes what is published of what a handler returned for what it was given.
MakeResults = Callable[[object, Any], Results | None]
#: Makes what is handed over of a record that nothing holds back, or None where the filter refuses it. It raises what
#: the filter raises, and `UndecodableError`.
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


class UndecodableError(Exception):
    """A message was not prepared, for it cannot be decoded."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed)
        self.failed = failed


def failure_of(error: BaseException) -> Failed:
    """Return the failure of a message whose preparation or handler raised."""
    return error.failed if isinstance(error, UndecodableError) else Failed(error)


#: A message to hand over; a failure; no token is left; or the time, on the engine's clock, before which it must wait.
Answer = Message | Failed | RateLimited | float


@dataclass(slots=True, eq=False, repr=False)
class Route:
    """A handler with its order, its limits and the callable that runs it.

    `retry` and the rates may be changed by any thread at any time: each is one reference, read once for each message.
    """

    handler: Handler
    ordering: Ordering
    #: The handler's function with whatever is put around it.
    invoke: Invoke
    _: KW_ONLY
    #: The lanes that `ordering` numbers, of those of the whole consumer.
    lanes: Sequence[Lane[Any, Record]] = ()
    #: Makes what is published of what that returns; by default as the handler says.
    results_by: InitVar[ResultMaker | None] = None
    #: Seconds that a call may take, or None.
    time_limit: float | None = None
    #: For a retry topic, the topic whose messages wait there.
    source: str | None = None
    #: Another route of the same handler, whose limits it shares: of another topic, or, of a retry topic, of that topic.
    shares: InitVar[Route | None] = None
    #: When a record may be handled, on the engine's clock; for retry topics only, and asked once for each message: from
    #: then on that time counts, whatever its header claims.
    not_before: Callable[[Record], float] | None = None
    #: How often a record has been through the retry topic; for retry topics only.
    retried: Callable[[Record], int] | None = None
    make_results: MakeResults = field(init=False)
    kind: Kind = field(init=False)
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

    def __post_init__(self, results_by: ResultMaker | None, shares: Route | None) -> None:
        handler = self.handler
        self.make_results = (results_by or ResultMaker.of(handler)).make if shares is None else shares.make_results
        self.kind, self.batch, self.linger = handler.kind, handler.batch, handler.linger
        # It may have been changed since: of a topic that is found later, the others' counts.
        self.retry = handler.retry if shares is None else shares.retry
        self.token_bucket = TokenBucket(handler.rate) if shares is None else shares.token_bucket
        self.key_rate_limiter = KeyRateLimiter(handler.key_rate) if shares is None else shares.key_rate_limiter
        self.gated = self._is_gated()
        self.filters = handler.filter is not None
        self._decoded = None if handler.decoder is None else _decoding(handler.decoder)
        self.prepare = _preparing(handler.filter, self._decoded or Message)

    def _is_gated(self) -> bool:
        return (
            self.token_bucket.rate is not None or self.key_rate_limiter.rate is not None or self.not_before is not None
        )

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
            return Failed(raised())

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
        except UndecodableError as error:
            return error.failed


def _decoding(decoder: Decoder) -> Callable[..., DecodedMessage]:
    """Return what makes a message with a body of a record and its tries. That raises `UndecodableError`."""
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
        except:  # noqa: E722 - see `raised`; a decoder raises what it likes: a panic in Rust is no Exception
            raise UndecodableError(_decoding_failure(raised()))  # noqa: B904 - it has its cause
        return DecodedMessage(record, body, attempts)

    return decoded


def _preparing(accept: Filter | None, make: Callable[[Record], Message]) -> Prepare:
    if accept is None:
        return make

    def prepare(record: Record) -> Message | None:
        message = FetchedMessage()
        message._record = record  # noqa: SLF001 - see there
        if not accept(message):
            return None
        return message if make is Message else make(record)

    return prepare


def _decoding_failure(error: BaseException) -> Failed:
    if isinstance(error, RegistryConnectionError):
        return Failed(error)
    failure = MessageFormatError(f"the value cannot be decoded: {describe(error)}; correct its producer or the decoder")
    failure.__cause__ = error
    return Failed(failure, permanent=True)
