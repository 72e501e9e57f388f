"""Results: the messages that a handler's return value becomes; and deferred completions."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from penstock.consumer.handlers.functions import Yielded
from penstock.consumer.handlers.serialization import RecordEncoder, describe
from penstock.dead_letters.headers import HeaderList
from penstock.errors import (
    ConfigurationError,
    HandlerTimeLimitError,
    MessageFormatError,
    PenstockError,
    RegistryConnectionError,
    raised,
)
from penstock.options import seconds
from penstock.outgoing import Outgoing, as_headers, encoded, require_place

if TYPE_CHECKING:
    from penstock.consumer.handlers.handler import Handler
    from penstock.message import Message

_log = logging.getLogger(__name__)

#: Called with the error of a failed completion, or with None after success.
OnDecided = Callable[[BaseException | None], None]


class DeferredCompletion:
    """A completion that comes later. A handler returns it if its work goes on in another thread pool or a callback.

    `complete` marks the message done. `fail` makes it a failure, which its policy retries. Until then its key waits,
    and no offset at or above its own is committed. Thread-safe: the first call decides, later calls change nothing.
    It belongs to one message. A handler that returns it for a second message fails that message.

    Args:
        timeout: seconds from its return until it counts as failed; None (default) for no limit.

    Raises:
        ConfigurationError: `timeout` is not a number above zero.
    """

    __slots__ = ("_bound", "_lock", "_on_decided", "_outcome", "timeout")

    def __init__(self, timeout: float | None = None) -> None:
        if timeout is not None:
            seconds("timeout", timeout)
        self.timeout = timeout
        self._lock = threading.Lock()
        self._bound = False
        self._outcome: tuple[BaseException | None] | None = None
        self._on_decided: OnDecided | None = None

    def complete(self) -> bool:
        """Mark the message done. Returns whether this call decided the outcome."""
        return self._decide(None)

    def fail(self, error: BaseException) -> bool:
        """Mark the message failed. Returns whether this call decided the outcome.

        Args:
            error: the cause. An object that is no exception, such as a client's error object, counts as a failure too.
        """
        cause: object = error
        if isinstance(cause, BaseException):
            return self._decide(cause)
        return self._decide(
            PenstockError(f"the completion was failed with a {type(cause).__name__}, which is no exception")
        )

    @property
    def decided(self) -> bool:
        """Whether the message is done or failed."""
        return self._outcome is not None

    def _decide(self, error: BaseException | None) -> bool:
        with self._lock:
            if self._outcome is not None:
                return False
            self._outcome = (error,)
            # Released: a user who keeps the completion must not keep the message in memory.
            on_decided, self._on_decided = self._on_decided, None
        if on_decided is not None:
            on_decided(error)
        return True

    def _take(self) -> bool:
        """Bind it to a message; return False if it is bound already. The engine calls this before `_attach`."""
        with self._lock:
            bound, self._bound = self._bound, True
        return not bound

    def _attach(self, on_decided: OnDecided) -> None:
        """Set the engine's callback, or call it at once if the outcome is known."""
        with self._lock:
            outcome = self._outcome
            if outcome is None:
                self._on_decided = on_decided
        if outcome is not None:
            on_decided(outcome[0])


class ResultError(MessageFormatError):
    """A handler's return value cannot be published, and another try cannot help."""


@dataclass(slots=True)
class Result:
    """A message to write. Partition -1 leaves the choice to the partitioner."""

    topic: str
    value: bytes | None = field(repr=False)
    key: bytes | None = field(repr=False)
    headers: HeaderList = field(repr=False)
    partition: int


@dataclass(slots=True)
class Results:
    """The messages of one return value. Never changed; a frozen dataclass would cost three times as much to make.

    Attributes:
        messages: the results of a single message, or of a batch as a whole.
        each: instead of them, the results of each message of a batch, in the batch's order.
    """

    messages: Sequence[Result] = field(default=(), repr=False)
    each: Sequence[Sequence[Result]] | None = field(default=None, repr=False)


#: Types that are one value: neither an `Outgoing`, nor several, nor an awaitable.
_PLAIN = (bytes, str, dict)

#: Returns the headers of a message for a topic with a trace added.
Trace = Callable[[str, HeaderList], HeaderList]


class ResultMaker:
    """Makes results from the return values of one handler. Thread-safe."""

    def __init__(self, handler: Handler) -> None:
        self._name = handler.name
        # The topic of plain values, or None if only `Outgoing` is published.
        self._to = handler.to
        self._encoder = handler.encoder
        #: Set before the start if telemetry is on.
        self.trace: Trace | None = None
        self._has_warned = False

    def make(self, returned: object, work: Message | list[Message]) -> Results | None:
        """Return the messages to write, or None. `Results` are returned as they are.

        Raises:
            ResultError: a part of the return value cannot be a message.
            RegistryConnectionError: the encoder's registry was not reached.
            Exception: an error of the handler's generator.
        """
        # First, for speed: most handlers return a plain value. The topic was checked when the handler was made.
        if isinstance(returned, _PLAIN) and self._to is not None and not isinstance(work, list):
            headers: HeaderList = [] if self.trace is None else self.trace(self._to, [])
            value = returned if isinstance(returned, bytes) else self._encoded(self._to, returned, headers)
            return Results((Result(self._to, value, work.key, headers, -1),))
        if isinstance(returned, Results):
            return returned
        if isinstance(work, list):
            return self._of_batch(returned, work)
        found = self._several(returned, work.key)
        return Results(found) if found else None

    def _of_batch(self, returned: object, work: list[Message]) -> Results | None:
        # A list in it can only be the results of one message.
        is_whole = _are_outgoing(returned) and not any(isinstance(value, list | tuple) for value in returned)
        if isinstance(returned, list) and len(returned) == len(work) and not is_whole:
            each = [
                () if value is None else self._several(value, message.key)
                for value, message in zip(returned, work, strict=True)
            ]
            return Results(each=each) if any(each) else None
        if self._to is not None and not is_whole:
            raise ResultError(
                f"handler {self._name} returned {_type_of(returned)} for {len(work)} messages; return a list with a "
                "value for each of them, None for those without, or penstock.Outgoing"
            )
        found = self._several(returned, None)
        return Results(found) if found else None

    def _several(self, returned: object, key: bytes | None) -> list[Result]:
        """Return the messages of a value that was returned for one message, or for a batch as a whole."""
        if isinstance(returned, Outgoing):
            return [self._result(returned)]
        if isinstance(returned, Iterator) or _are_outgoing(returned) or (self._to and isinstance(returned, Yielded)):
            values = cast("Iterable[object]", returned)
            return [self._result(self._addressed(value, key)) for value in values if value is not None]
        parts = returned if self._to is None and isinstance(returned, list | tuple) else (returned,)
        for value in parts:
            if _is_pending(value):
                if inspect.iscoroutine(value):
                    value.close()
                raise ResultError(
                    f"handler {self._name} returned {_type_of(value)}, and no code waits for its work: make the "
                    "handler itself an `async def` that awaits it, wait for it in the handler, or return a "
                    "DeferredCompletion"
                )
        if self._to is not None:
            return [self._result(Outgoing(self._to, returned, key))]
        if not self._has_warned and any(value is not None for value in parts):
            self._has_warned = True
            _log.warning(
                "handler %s returned %s, which is not published: return penstock.Outgoing, name the topic with to=, or "
                "return None; this is logged once",
                self._name,
                _type_of(returned),
            )
        return []

    def _addressed(self, value: object, key: bytes | None) -> Outgoing:
        if isinstance(value, Outgoing):
            return value
        if self._to is None:
            raise ResultError(
                f"handler {self._name} returned {_type_of(value)} among its messages; make it a penstock.Outgoing, or "
                "name the topic with to="
            )
        return Outgoing(self._to, value, key)

    def _result(self, outgoing: Outgoing) -> Result:
        topic, partition, key = outgoing.topic, outgoing.partition, outgoing.key
        try:
            require_place(topic, partition)
            if key is not None and not isinstance(key, bytes):
                key = encoded("key", key)
            written: HeaderList = [*as_headers(outgoing.headers)] if outgoing.headers else []
        except ConfigurationError as error:
            raise ResultError(f"handler {self._name} returned a message that cannot be sent: {error}") from error
        if self.trace is not None:
            written = self.trace(topic, written)
        return Result(
            topic, self._encoded(topic, outgoing.value, written), key, written, -1 if partition is None else partition
        )

    def _encoded(self, topic: str, value: object, headers: HeaderList) -> bytes | None:
        if value is None or isinstance(value, bytes):
            return value
        encoder = self._encoder
        if encoder is not None:
            try:
                value = encoder.encode(topic, value, headers) if isinstance(encoder, RecordEncoder) else encoder(value)
            except (RegistryConnectionError, HandlerTimeLimitError):
                raise  # the value is not at fault: the message is tried again
            except:  # noqa: E722 - see `raised`; an error of the user's code, whose text may quote the value
                error = raised()
                raise ResultError(
                    f"a value of handler {self._name} for {topic} cannot be encoded: {describe(error)}; correct "
                    "the handler or the encoder"
                ) from error
        if isinstance(value, bytearray | memoryview):
            return bytes(value)
        try:
            return encoded("value", value)
        except ConfigurationError as error:
            more = "" if encoder is not None else ", or give the handler an encoder, such as encoder='json'"
            raise ResultError(
                f"handler {self._name} returned a message for {topic} that cannot be sent: {error}{more}"
            ) from error


def _is_pending(returned: object) -> bool:
    """Return whether a value stands for unfinished work that no code would wait for."""
    return inspect.isawaitable(returned) or inspect.isasyncgen(returned) or isinstance(returned, Future)


def _are_outgoing(returned: object) -> TypeGuard[Sequence[object]]:
    """Return whether a value is a list or tuple with an `Outgoing` in it."""
    return isinstance(returned, list | tuple) and any(isinstance(value, Outgoing) for value in returned)


def _type_of(returned: object) -> str:
    """Return the type of a value in words. Its content is payload, which errors never show."""
    name = "generator" if isinstance(returned, Yielded) else type(returned).__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def with_results(invoke: Callable[..., object], maker: ResultMaker, *, is_async: bool) -> Callable[..., object]:
    """Return a function that calls another and makes results of its return value, so that a span covers both."""

    def made(returned: object, work: Any) -> object:
        return returned if returned is None or isinstance(returned, DeferredCompletion) else maker.make(returned, work)

    async def await_and_make(work: Any) -> object:
        return made(await cast("Awaitable[object]", invoke(work)), work)

    def call_and_make(work: Any) -> object:
        return made(invoke(work), work)

    return await_and_make if is_async else call_and_make
