"""One transaction as the user meets it: a context manager for `with` and for `async with`."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from penstock.errors import BufferFullError, PublicationNotSeenError, TransactionError
from penstock.outgoing import Outgoing, UserHeaders
from penstock.transactions.messages import Terms, halves
from penstock.transactions.model import HalfMessage, TransactionResult, TransactionState, Wait
from penstock.transactions.producer.flight.core import Core
from penstock.transactions.producer.flight.flight import Flight, FlightCallback
from penstock.transactions.producer.flight.futures import ResultFuture
from penstock.transactions.wire.half import Half

_log = logging.getLogger("penstock.transactions")

#: Seconds between two looks for room, where an event loop waits for it.
_ROOM_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class ProducerContext:
    """What all transactions of a producer have in common.

    `open` connects at the first use. Where too many are in flight, they wait `room_timeout_s` seconds; 0: they raise at
    once.
    """

    core: Core
    group: str
    open: Callable[[], object]
    room_timeout_s: float
    #: Targets that event loops asked for before. A set's steps are single ones.
    known: set[tuple[str, int | None]] = field(default_factory=set)

    async def ready(self, wanted: Sequence[Half]) -> None:
        """Connect and look for the targets, in a thread of their own, where that was not done before."""
        places = {(half.topic, half.partition) for half in wanted}
        if not places <= self.known:
            await asyncio.to_thread(self.require, places)
            self.known.update(places)

    def require(self, places: set[tuple[str, int | None]]) -> None:
        """Connect, and raise unless all targets exist."""
        self.open()
        for place in places:
            self.core.store.require_target(*place)

    async def start(self, flight: Flight, callback: FlightCallback) -> None:
        """Start a flight from an event loop, which waits for nothing else than for this."""
        deadline = time.monotonic() + self.room_timeout_s
        while True:
            try:
                if flight.wait == "published":
                    await _ThreadedStart(flight, callback).wait()
                else:
                    flight.start(callback, may_wait=False)
            except BufferFullError:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(_ROOM_POLL_S)
            else:
                return


class _ThreadedStart:
    """The start of a flight on another thread. Where it is cancelled meanwhile, the flight is rolled back."""

    def __init__(self, flight: Flight, callback: FlightCallback) -> None:
        self._flight = flight
        self._callback = callback
        # Guards both: whoever is the second to set one abandons the flight.
        self._lock = threading.Lock()
        self._has_started = self._is_cancelled = False

    async def wait(self) -> None:
        """Return once it has started, or raise why it has not."""
        try:
            await asyncio.to_thread(self._start)
        except asyncio.CancelledError:
            with self._lock:
                self._is_cancelled = True
                abandons = self._has_started
            if abandons:
                self._flight.abandon()
            raise

    def _start(self) -> None:
        self._flight.start(self._callback, may_wait=False)
        with self._lock:
            self._has_started = True
            abandons = self._is_cancelled
        if abandons:
            self._flight.abandon()


class Transaction:
    """One transaction: a context manager, made by `TransactionalProducer.transaction` and entered once.

    Entering stores the half; leaving stores the decision. Used by one thread with `with`, or by one task with
    `async with`.

    Attributes:
        transaction_id: a UUID of version 7; write it beside your own data, so that a check can find it.
    """

    __slots__ = (
        "_context",
        "_errors_roll_back",
        "_flight",
        "_halves",
        "_left",
        "_ordering_key",
        "_state",
        "_wait",
        "transaction_id",
    )

    def __init__(
        self,
        context: ProducerContext,
        transaction_id: str,
        made: Sequence[Half],
        ordering_key: bytes | None,
        wait: Wait,
    ) -> None:
        self.transaction_id = transaction_id
        self._context = context
        self._halves = made
        self._ordering_key = ordering_key
        self._wait: Wait = wait
        self._flight: Flight | None = None
        self._state = TransactionState.COMMIT
        # Whether the block was left: nothing changes the decision from then on.
        self._left = False
        # Whether an exception means that the local transaction did not commit.
        self._errors_roll_back = True

    def unknown(self) -> None:
        """Leave the decision to a check, however the block is left.

        Raises:
            TransactionError: it was left already.
        """
        self._require_open()
        self._state = TransactionState.UNKNOWN

    def rollback(self) -> None:
        """Roll the message back when the block is left, without an exception.

        Raises:
            TransactionError: it was left already.
        """
        self._require_open()
        self._state = TransactionState.ROLLBACK

    def leave_errors_to_check(self) -> None:
        """Leave the decision to a check where the block is left with an exception; without this it is ROLLBACK.

        For a local transaction whose commit may raise though it took hold, as when the database's answer is lost, and
        whose check knows: `barrier` calls it.
        """
        self._errors_roll_back = False

    @property
    def result(self) -> TransactionResult:
        """What became of it, once it was left.

        Raises:
            TransactionError: it was not left yet, or nothing of it is stored; or what leaving raised, where its
                decision is not known to be stored or was refused.
        """
        flight = self._flight
        if flight is None or not self._left:
            raise TransactionError(
                f"transaction {self.transaction_id} has no result: it was not entered, not prepared, or not left yet; "
                "ask for it after the block"
            )
        if flight.error is not None and flight.wait != "sent" and not isinstance(flight.error, PublicationNotSeenError):
            raise flight.error
        return TransactionResult(self.transaction_id, flight.state, self._halves[0].topic)

    @property
    def message(self) -> HalfMessage:
        """Its message, the first of several, as a check would see it.

        Raises:
            TransactionError: it has none yet.
        """
        if not self._halves:
            raise TransactionError(
                f"transaction {self.transaction_id} has no message yet: add one, and call prepare() first"
            )
        half = self._halves[0]
        return HalfMessage(half.topic, half.key, half.value, half.headers, self.transaction_id, 0)

    def __enter__(self) -> Self:
        self._store_halves()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        flight = self._leave(error)
        gate = _Gate()
        flight.end(self._state, gate.open)
        gate.wait()
        _raise(flight, error)

    async def __aenter__(self) -> Self:
        await self._store_halves_async()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        flight = self._leave(error)
        ended: ResultFuture[Flight] = ResultFuture()
        flight.end(self._state, ended.succeed)
        await ended
        _raise(flight, error)

    def _take_off(self) -> Flight:
        if self._flight is not None:
            raise TransactionError(
                f"transaction {self.transaction_id} was entered before; call producer.transaction() for a new one"
            )
        self._flight = Flight(self._context.core, self._halves, self._ordering_key, self._wait)
        return self._flight

    def _store_halves(self) -> None:
        flight = self._take_off()
        self._context.open()
        gate = _Gate()
        flight.start(gate.open)
        try:
            gate.wait()
        except BaseException:
            flight.abandon()
            raise
        if flight.error is not None:
            raise flight.error

    async def _store_halves_async(self) -> None:
        flight = self._take_off()
        await self._context.ready(self._halves)
        ended: ResultFuture[Flight] = ResultFuture()
        await self._context.start(flight, ended.succeed)
        try:
            await ended
        except BaseException:
            flight.abandon()
            raise
        if flight.error is not None:
            raise flight.error

    def _require_open(self) -> None:
        if self._left:
            raise TransactionError(
                f"transaction {self.transaction_id} was left: its decision cannot be changed any more"
            )

    def _leave(self, error: BaseException | None) -> Flight:
        """Settle how it ends, by how the block was left."""
        self._require_open()
        flight = self._flight
        if flight is None or not flight.is_prepared:
            raise TransactionError(
                f"transaction {self.transaction_id} cannot be left: its half is not stored; enter it with `with` or "
                "`async with` first"
            )
        self._left = True
        if isinstance(error, Exception):
            if not self._errors_roll_back:
                self._state = TransactionState.UNKNOWN
            elif self._state is not TransactionState.UNKNOWN:
                self._state = TransactionState.ROLLBACK
        elif error is not None:
            # KeyboardInterrupt, a cancelled task and their like may strike after the local commit: they say nothing
            # about it.
            self._state = TransactionState.UNKNOWN
        return flight


class TransactionOfSeveral(Transaction):
    """A transaction whose messages are given beforehand, or added inside the block and stored by `prepare`.

    All or none of them become visible, in one Kafka transaction.
    """

    __slots__ = ("_given", "_messages", "_terms")

    def __init__(self, context: ProducerContext, transaction_id: str, terms: Terms, wait: Wait) -> None:
        super().__init__(context, transaction_id, (), terms.ordering_key, wait)
        self._terms = terms
        self._messages: list[Outgoing] = []
        # Whether the messages were given beforehand: then entering stores them.
        self._given = False

    def give(self, messages: Sequence[Outgoing]) -> None:
        """Take all messages, before the block; what is wrong with one raises `ConfigurationError`."""
        self._messages = list(messages)
        self._make()
        self._given = True

    def _make(self) -> None:
        self._halves = halves(self.transaction_id, self._context.group, self._messages, self._terms)

    def add(
        self,
        topic: str,
        *,
        key: bytes | str | None = None,
        value: bytes | str | None,
        headers: UserHeaders = (),
        partition: int | None = None,
    ) -> None:
        """Add a message; nothing is stored before `prepare`.

        Raises:
            TransactionError: it was prepared already.
        """
        if self._flight is not None or self._given:
            raise TransactionError(f"transaction {self.transaction_id} is prepared: no message can be added to it")
        self._messages.append(Outgoing(topic, value, key, headers, partition))

    def prepare(self) -> None:
        """Store all halves; once it returns they are durable and the local transaction may run.

        Raises:
            ConfigurationError: an argument of a message is wrong, or there is no message.
            HalfNotStoredError: one is not known to be durable; all are rolled back.
        """
        self._make()
        self._store_halves()

    async def prepare_async(self) -> None:
        """Do what `prepare` does, from an event loop."""
        self._make()
        await self._store_halves_async()

    def __enter__(self) -> Self:
        if self._given:
            self._store_halves()
        return self

    async def __aenter__(self) -> Self:
        if self._given:
            await self._store_halves_async()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_prepared(error):
            super().__exit__(kind, error, traceback)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_prepared(error):
            await super().__aexit__(kind, error, traceback)

    def _is_prepared(self, error: BaseException | None) -> bool:
        """Tell whether there is anything to decide; a block that was left normally must have prepared it."""
        flight = self._flight
        if flight is not None and flight.is_prepared:
            return True
        if error is None:
            failed = "was never prepared" if flight is None else "was left though its prepare() had failed"
            raise TransactionError(
                f"transaction {self.transaction_id} {failed}, so its messages are not stored; call prepare() in the "
                "block, before the local transaction, and let its error leave the block"
            ) from (None if flight is None else flight.error)
        return False


class _Gate:
    """One wait of one thread. A held lock is the cheapest event there is."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self, _: Flight) -> None:
        self._lock.release()

    def wait(self) -> None:
        # There is no time limit: the deadlines of the request end it.
        self._lock.acquire()


def _raise(flight: Flight, error: BaseException | None) -> None:
    """Raise what became of the decision, unless the user's own exception says more."""
    if flight.error is None or flight.wait == "sent":
        return
    if error is None:
        raise flight.error
    # A check finds out that the local transaction did not commit.
    _log.warning("%s", flight.error)
