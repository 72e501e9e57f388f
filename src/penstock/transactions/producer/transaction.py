"""One transaction as the user meets it: a context manager for `with` and for `async with`, or RocketMQ's listener.

A listener is a thin layer on `TransactionalProducer.send`. One rule differs from a plain `execute` function, and is
RocketMQ's: what raises, or returns None, is UNKNOWN and left to a check; an `execute` function that returns None
commits, and one that raises rolls back.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Protocol, Self

from penstock.errors import BufferFullError, PublicationNotSeenError, TransactionError
from penstock.transactions.model import HalfMessage, TransactionResult, TransactionState, Wait
from penstock.transactions.producer.flight import Flight, FlightCallback
from penstock.transactions.producer.futures import ResultFuture
from penstock.transactions.producer.in_flight import Core
from penstock.transactions.wire.half import Half

_log = logging.getLogger("penstock.transactions")

#: Seconds between two looks for room, where an event loop waits for it.
_ROOM_POLL_S = 0.005


class Transaction:
    """One transaction: a context manager, made by a `TransactionalProducer` and entered once.

    Entering stores its halves, leaving stores the decision. Used by one thread with `with`, or by one task with
    `async with`.

    Attributes:
        transaction_id: a UUID of version 7; write it with your own data, so that a check can find it.
    """

    __slots__ = (
        "_core",
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
        core: Core,
        halves: Sequence[Half],
        ordering_key: bytes | None,
        wait: Wait,
    ) -> None:
        self.transaction_id = halves[0].transaction_id
        self._core = core
        self._halves = halves
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
        """Roll the message back when the block is left, by an exception too, also behind a barrier.

        Raises:
            TransactionError: it was left already.
        """
        self._require_open()
        self._state = TransactionState.ROLLBACK
        self._errors_roll_back = True

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
                f"transaction {self.transaction_id} has no result: it was not entered, or not left yet; "
                "ask for it after the block"
            )
        if flight.error is not None and flight.wait != "sent" and not isinstance(flight.error, PublicationNotSeenError):
            raise flight.error
        return TransactionResult(self.transaction_id, flight.state, self._halves[0].topic)

    @property
    def message(self) -> HalfMessage:
        """Its message, the first of several, as a check would see it."""
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
        self._flight = Flight(self._core, self._halves, self._ordering_key, self._wait)
        return self._flight

    def _store_halves(self) -> None:
        flight = self._take_off()
        self._core.open()
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
        places = {(half.topic, half.partition) for half in self._halves}
        if not places <= self._core.known:
            await asyncio.to_thread(self._core.require, places)
            self._core.known.update(places)
        ended: ResultFuture[Flight] = ResultFuture()
        await self._start(flight, ended.succeed)
        try:
            await ended
        except BaseException:
            flight.abandon()
            raise
        if flight.error is not None:
            raise flight.error

    async def _start(self, flight: Flight, callback: FlightCallback) -> None:
        """Start a flight from an event loop, once there is room."""
        deadline = time.monotonic() + self._core.in_flight.timeout_s
        while True:
            try:
                if flight.wait != "published":
                    return flight.start(callback, may_wait=False)
                return await _start_in_thread(flight, callback)
            except BufferFullError:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(_ROOM_POLL_S)

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


async def _start_in_thread(flight: Flight, callback: FlightCallback) -> None:
    """Start a flight that may wait for brokers. Where this is cancelled meanwhile, the flight is rolled back."""
    started: Future[None] = Future()
    # Whoever waits cannot cancel it: it comes to an end in any case.
    started.set_running_or_notify_cancel()

    def start() -> None:
        try:
            flight.start(callback, may_wait=False)
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            started.set_exception(error)
        else:
            started.set_result(None)

    asyncio.get_running_loop().run_in_executor(None, start)
    try:
        await asyncio.wrap_future(started)
    except asyncio.CancelledError:
        started.add_done_callback(lambda ended: flight.abandon() if ended.exception() is None else None)
        raise


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


class TransactionListener(Protocol):
    """A local transaction and its check in one object, as in RocketMQ since 4.3. Called by many threads at once."""

    def execute_local_transaction(self, message: HalfMessage, argument: object) -> TransactionState | None:
        """Run the local transaction of a message whose half is stored, in the thread that sends.

        Args:
            message: the message, with its transaction id; write it with your own data.
            argument: what was given to `send_in_transaction`.

        Returns:
            What became of it. None, or an exception, is UNKNOWN, unlike with `send(execute=)`.
        """

    def check_local_transaction(self, half: HalfMessage) -> TransactionState:
        """Say what became of an undecided local transaction; what raises is UNKNOWN."""


#: A local transaction as a function, given with a call.
Run = Callable[[HalfMessage, object], TransactionState | None]


def executing(run: Run, argument: object) -> Callable[[Transaction], TransactionState]:
    """Return an `execute` function that keeps RocketMQ's rule: whatever is no answer is UNKNOWN."""

    def execute(tx: Transaction) -> TransactionState:
        try:
            state: object = run(tx.message, argument)
        except Exception:  # noqa: BLE001 - the user's object may raise anything
            _log.exception("the local transaction of %s raised; it is left to a check", tx.transaction_id)
            return TransactionState.UNKNOWN
        if isinstance(state, TransactionState):
            return state
        if state is not None:
            _log.error(
                "the local transaction of %s returned a %s instead of a TransactionState; it is left to a check",
                tx.transaction_id,
                type(state).__name__,
            )
        return TransactionState.UNKNOWN

    return execute
