"""What a handler returns: results, as the messages that are to be written, or the promise of a completion."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from penstock.consumer.handlers.serialization import RecordEncoder, describe
from penstock.dead_letters.headers import HeaderList
from penstock.errors import ConfigurationError, MessageFormatError, PenstockError, RegistryConnectionError, raised
from penstock.options import positive
from penstock.outgoing import Outgoing, as_headers, encoded, require_place

if TYPE_CHECKING:
    from penstock.consumer.handlers.handler import Handler
    from penstock.message import Message

_log = logging.getLogger(__name__)

#: Called with the error of a completion that failed, or None.
OnDecided = Callable[[BaseException | None], None]


class DeferredCompletion:
    """Returned by a handler whose work goes on elsewhere: in another thread pool, in a callback of some client.

    The message is done when `complete` is called, and failed (so: retried by its policy) when `fail` is. Until then its
    key waits, and nothing at or above its offset is committed. Thread-safe; the first call decides, later ones change
    nothing. It belongs to one message: one that is returned a second time is a failure of the message it came with.

    Args:
        timeout: seconds from its return after which it counts as failed; None (default) for never.

    Raises:
        ConfigurationError: `timeout` is no number above zero.
    """

    __slots__ = ("_bound", "_lock", "_on_decided", "_outcome", "timeout")

    def __init__(self, timeout: float | None = None) -> None:
        if timeout is not None:
            positive("timeout", timeout)
        self.timeout = timeout
        self._lock = threading.Lock()
        self._bound = False
        self._outcome: tuple[BaseException | None] | None = None
        self._on_decided: OnDecided | None = None

    def complete(self) -> bool:
        """Say that the message is done. Returns whether this call decided it."""
        return self._decide(None)

    def fail(self, error: BaseException) -> bool:
        """Say that the message failed. Returns whether this call decided it.

        Args:
            error: why. What is no exception, such as an error object of some client, counts as a failure all the same.
        """
        given: object = error
        if isinstance(given, BaseException):
            return self._decide(given)
        return self._decide(
            PenstockError(f"the completion was failed with a {type(given).__name__}, which is no exception")
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
            # Released: a completion that its user keeps must not keep the message.
            on_decided, self._on_decided = self._on_decided, None
        if on_decided is not None:
            on_decided(error)
        return True

    def _take(self) -> bool:
        """Bind it to a message; return False where it is bound already. Called by the engine, first."""
        with self._lock:
            bound, self._bound = self._bound, True
        return not bound

    def _attach(self, on_decided: OnDecided) -> None:
        """Set the callback, or call it at once where the outcome is known. By the engine."""
        with self._lock:
            outcome = self._outcome
            if outcome is None:
                self._on_decided = on_decided
        if outcome is not None:
            on_decided(outcome[0])


class ResultError(MessageFormatError):
    """What a handler returned cannot be published, now or at another try."""


@dataclass(slots=True)
class Result:
    """A message as it is written; -1 leaves its partition to the partitioner."""

    topic: str
    value: bytes | None = field(repr=False)
    key: bytes | None = field(repr=False)
    headers: HeaderList = field(repr=False)
    partition: int


@dataclass(slots=True)
class Results:
    """What a handler returned, as messages. Never changed; frozen it would cost three times as much to make.

    Attributes:
        messages: for the message that it was given, or for a batch as a whole.
        each: or for each message of a batch, in their order.
    """

    messages: Sequence[Result] = field(default=(), repr=False)
    each: Sequence[Sequence[Result]] | None = field(default=None, repr=False)


#: What a value is as it stands: neither a message, nor several, nor something that was to be awaited.
_PLAIN = (bytes, str, dict)

#: Adds a trace to the headers of a message for a topic.
Trace = Callable[[str, HeaderList], HeaderList]


class ResultMaker:
    """Makes results of what one handler returns. Thread-safe."""

    def __init__(self, handler: Handler) -> None:
        self._name = handler.name
        # The topic of plain values, or None where only `Outgoing` is published.
        self._to = handler.to
        self._encoder = handler.encoder
        #: Set before the start, where telemetry is on.
        self.trace: Trace | None = None
        self._has_warned = False

    def make(self, returned: object, work: Message | list[Message]) -> Results | None:
        """Return what is to be written; None for nothing. What was made before stays as it is.

        Raises:
            ResultError: something of it cannot be a message.
            RegistryConnectionError: the encoder's registry was not reached.
            Exception: what a generator raised.
        """
        # First, for speed: what most handlers return. The topic was checked when the handler was made.
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
        is_outgoing = _are_outgoing(returned)
        if isinstance(returned, list) and len(returned) == len(work) and not is_outgoing:
            each = [
                () if value is None else self._several(value, message.key)
                for value, message in zip(returned, work, strict=True)
            ]
            return Results(each=each) if any(each) else None
        if self._to is not None and not is_outgoing:
            raise ResultError(
                f"handler {self._name} returned {_what(returned)} for {len(work)} messages; return a list with a "
                "value for each of them, None for those without, or penstock.Outgoing"
            )
        found = self._several(returned, None)
        return Results(found) if found else None

    def _several(self, returned: object, key: bytes | None) -> list[Result]:
        """Return the messages of what was returned for one message, or for a batch as a whole."""
        if isinstance(returned, Outgoing):
            return [self._result(returned)]
        if isinstance(returned, Iterator) or _are_outgoing(returned):
            values = cast("Iterable[object]", returned)
            return [self._result(self._addressed(value, key)) for value in values if value is not None]
        parts = returned if self._to is None and isinstance(returned, list | tuple) else (returned,)
        for value in parts:
            if _is_pending(value):
                if inspect.iscoroutine(value):
                    value.close()
                raise ResultError(
                    f"handler {self._name} returned {_what(value)}, and nobody waits for its work: make the handler "
                    "itself an `async def` that awaits it, wait for it in the handler, or return a DeferredCompletion"
                )
        if self._to is not None:
            return [self._result(Outgoing(self._to, returned, key))]
        if returned is not None and parts and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "handler %s returned %s, which is not published: return penstock.Outgoing, name the topic with to=, or "
                "return None; this is said once",
                self._name,
                _what(returned),
            )
        return []

    def _addressed(self, value: object, key: bytes | None) -> Outgoing:
        if isinstance(value, Outgoing):
            return value
        if self._to is None:
            raise ResultError(
                f"handler {self._name} returned {_what(value)} among its messages; make it a penstock.Outgoing, or "
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
            topic,
            self._encoded(topic, outgoing.value, written),
            key,
            written,
            -1 if partition is None else partition,
        )

    def _encoded(self, topic: str, value: object, headers: HeaderList) -> bytes | None:
        if value is None or isinstance(value, bytes):
            return value
        encoder = self._encoder
        if encoder is not None:
            try:
                value = encoder.encode(topic, value, headers) if isinstance(encoder, RecordEncoder) else encoder(value)
            except RegistryConnectionError:
                raise  # no fault of the value: the message is tried again
            except:  # noqa: E722 - see `raised`; the user's code, whose text may quote the value
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
    """Tell whether the work that this stands for is not done, and would be lost sight of."""
    return inspect.isawaitable(returned) or inspect.isasyncgen(returned) or isinstance(returned, Future)


def _are_outgoing(returned: object) -> bool:
    """Tell whether it is a list or tuple of messages."""
    return isinstance(returned, list | tuple) and any(isinstance(value, Outgoing) for value in returned)


def _what(found: object) -> str:
    """Name what was returned by its type: its content is payload."""
    name = type(found).__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def with_results(invoke: Callable[..., object], maker: ResultMaker, *, is_async: bool) -> Callable[..., object]:
    """Return a function that makes results of what another returns, within what is put around it."""

    def made(returned: object, work: Any) -> object:
        return returned if returned is None or isinstance(returned, DeferredCompletion) else maker.make(returned, work)

    async def await_and_make(work: Any) -> object:
        return made(await cast("Awaitable[object]", invoke(work)), work)

    def call_and_make(work: Any) -> object:
        return made(invoke(work), work)

    return await_and_make if is_async else call_and_make
