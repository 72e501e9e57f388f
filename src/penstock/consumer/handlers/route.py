"""A route: a handler at run time, with what may change while it runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any

from penstock.consumer.handlers.handler import Handler, Kind
from penstock.consumer.handlers.ordering import Ordering
from penstock.consumer.handlers.rate_limits import KeyRateLimiter, TokenBucket
from penstock.consumer.handlers.results import ResultMaker, Results
from penstock.consumer.handlers.retry_policy import RetryPolicy
from penstock.consumer.handlers.serdes import RecordDecoder, describe
from penstock.consumer.retry_topics import RetriedRecord, tries_before
from penstock.errors import MessageFormatError, RegistryConnectionError, raised
from penstock.message import DecodedMessage, Message, Record, RetriedMessage

Invoke = Callable[..., object]
#: Makes what is published of what a handler returned for what it was given.
MakeResults = Callable[[object, Any], Results | None]


@dataclass(frozen=True, slots=True)
class Failed:
    """A message did not get done."""

    error: BaseException = field(repr=False)
    #: Whether another try could not help.
    permanent: bool = False


class RateLimited:
    """The handler's rate is used up: the message waits for the token bucket, with all of its handler in its lane."""


RATE_LIMITED = RateLimited()

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
    #: Makes what is published of what that returns; by default as the handler says.
    results_by: InitVar[ResultMaker | None] = None
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
    gated: bool = field(init=False)

    def __post_init__(self, results_by: ResultMaker | None, shares: Route | None) -> None:
        one = self.handler
        self.make_results = (results_by or ResultMaker.of(one)).make if shares is None else shares.make_results
        self.kind, self.batch, self.linger = one.kind, one.batch, one.linger
        # It may have been changed since: of a topic that is found later, the others' counts.
        self.retry = one.retry if shares is None else shares.retry
        self.token_bucket = TokenBucket(one.rate) if shares is None else shares.token_bucket
        self.key_rate_limiter = KeyRateLimiter(one.key_rate) if shares is None else shares.key_rate_limiter
        self.gated = self._is_gated()

    def _is_gated(self) -> bool:
        one = self.handler
        return (
            one.filter is not None
            or one.decoder is not None
            or one.key is not None
            or self.token_bucket.rate is not None
            or self.key_rate_limiter.rate is not None
            or self.not_before is not None
        )

    def change(self, *, retry: RetryPolicy | None, rate: float | None, key_rate: float | None) -> None:
        """Take new values for what may change while running."""
        if retry is not None:
            self.retry = retry
        self.token_bucket.rate = rate
        self.key_rate_limiter.rate = key_rate
        self.gated = self._is_gated()

    def _as_seen(self, record: Record) -> Record:
        return record if self.source is None else RetriedRecord(record, self.source)

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
        decode = self.handler.decoder
        if decode is None:
            return RetriedMessage(record, attempts) if attempts else Message(record)
        value = record.value()
        try:
            if value is None:
                body = None
            elif isinstance(decode, RecordDecoder):
                body = decode.decode(record, value)
            else:
                body = decode(value)
            return DecodedMessage(record, body, attempts)
        except RegistryConnectionError as passing:
            return Failed(passing)
        except:  # noqa: E722 - see `raised`; a decoder raises what it likes: a panic in Rust is no Exception
            error = raised()
            failure = MessageFormatError(
                f"the value cannot be decoded: {describe(error)}; mend its producer or the decoder"
            )
            failure.__cause__ = error
            return Failed(failure, permanent=True)
