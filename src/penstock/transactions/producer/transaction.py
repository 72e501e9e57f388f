"""The transaction of a user: a context manager for `with` and `async with`, or a listener as in RocketMQ.

A listener is a thin layer on `TransactionalProducer.send`, with RocketMQ's rule: if it raises or returns None, the
transaction is UNKNOWN and left to a check. An `execute` function commits if it returns None, and rolls back if it
raises.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from penstock.errors import BufferFullError, PublicationNotSeenError, TransactionError
from penstock.transactions.messages import as_seen
from penstock.transactions.model import HalfMessage, TransactionResult, TransactionState, Wait
from penstock.transactions.producer.flight import Flight, Phase
from penstock.transactions.producer.in_flight import Core
from penstock.transactions.producer.submission import awaited
from penstock.transactions.wire.half import Half

_log = logging.getLogger("penstock.transactions")

#: Seconds between two looks for room when an event loop waits for it.
_ROOM_POLL_S = 0.005

_BEFORE_THE_BLOCK = frozenset({Phase.NEW, Phase.STORING})


class Transaction(Flight):
    """One transaction: a context manager that a `TransactionalProducer` makes, to be entered once.

    Entering stores the halves, leaving stores the decision. For one thread with `with`, or one task with `async with`.

    Attributes:
        transaction_id: a UUID of version 7; write it with your own data, so that a check can find it.
    """

    __slots__ = ("_errors_roll_back",)

    def __init__(self, core: Core, halves: Sequence[Half], ordering_key: bytes | None, wait: Wait) -> None:
        super().__init__(core, halves, ordering_key, wait)
        # Whether an exception in the block means that the local transaction did not commit.
        self._errors_roll_back = True

    def unknown(self) -> None:
        """Leave the decision to a check, however the block ends.

        Raises:
            TransactionError: the block was left already.
        """
        self._require_open()
        self._state = TransactionState.UNKNOWN

    def rollback(self) -> None:
        """Roll the message back when the block ends, also if it ends with an exception behind a barrier.

        Raises:
            TransactionError: the block was left already.
        """
        self._require_open()
        self._state = TransactionState.ROLLBACK
        self._errors_roll_back = True

    def leave_errors_to_check(self) -> None:
        """Leave the decision to a check if the block raises; without this call an exception means ROLLBACK.

        For a local transaction whose commit may succeed and raise all the same, because the database's answer is lost.
        Its check must know the outcome. `barrier` calls this.
        """
        self._errors_roll_back = False

    @property
    def result(self) -> TransactionResult:
        """The result, after the block was left.

        Raises:
            TransactionError: the block was not left yet. Or the error of entering or leaving, if halves or decision
                are not known to be stored, or the decision was refused.
        """
        if self.error is not None and not isinstance(self.error, PublicationNotSeenError):
            raise self.error
        if self._prepared is None or self._phase is Phase.PREPARED or self._callbacks is not None:
            raise TransactionError(
                f"transaction {self.transaction_id} has no result: it was not entered, or not left yet, or its end was "
                "interrupted; ask for it after the block"
            )
        return TransactionResult(self.transaction_id, self._state, self.halves[0].topic)

    @property
    def message(self) -> HalfMessage:
        """The message, the first of several, as a check would see it."""
        return as_seen(self.halves[0], 0)

    def __enter__(self) -> Self:
        self._require_new()
        gate = self._gate()
        try:
            self._take_off()
            gate.acquire()
            self._raise(None)
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            state, gate = self._ending(error), self._gate()
            self._decide(state)
            gate.acquire()
        except BaseException:
            if self._phase is Phase.PREPARED:
                self._prepared = None
                self._end_early()
            raise
        self._raise(error)

    async def __aenter__(self) -> Self:
        self._require_new()
        future, wake = awaited()
        self._callbacks = [wake]
        places = {(half.topic, half.partition) for half in self.halves}
        if not places <= self._core.known_targets:
            await asyncio.to_thread(self._core.require, places)
        try:
            await self._take_off_async()
            await future
        except BaseException:
            self._abandon()
            raise
        self._raise(None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        state, (future, wake) = self._ending(error), awaited()
        self._callbacks = [wake]
        self._decide(state)
        await future
        self._raise(error)

    def _gate(self) -> threading.Lock:
        """Return a lock that the next callback releases: the cheapest event there is.

        Acquiring it needs no time limit, because the deadline of the flight ends the wait.
        """
        gate = threading.Lock()
        gate.acquire()
        self._callbacks = [gate.release]
        return gate

    async def _take_off_async(self) -> None:
        """Take off from an event loop when there is room."""
        deadline = time.monotonic() + self._core.room_timeout_s
        while True:
            try:
                if self._wait != "published":
                    return self._take_off(may_wait=False)
                # `watch` may ask brokers first. A task that is cancelled meanwhile abandons the flight.
                return await asyncio.to_thread(self._take_off, may_wait=False)
            except BufferFullError:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(_ROOM_POLL_S)

    def _abandon(self) -> None:
        """Roll back, now or when the halves are stored: the owner is gone, and the local transaction never ran."""
        with self._core.lock:
            is_prepared = self._phase is Phase.PREPARED
            if not is_prepared:
                self._callbacks = [self._roll_back]
        if is_prepared:
            self._roll_back()

    def _roll_back(self) -> None:
        if self._phase is Phase.PREPARED:
            self._decide(TransactionState.ROLLBACK)

    def _require_new(self) -> None:
        # Entering sets a callback first, and that stays if the flight does not take off.
        if self._phase is not Phase.NEW or self._callbacks is not None:
            raise TransactionError(
                f"transaction {self.transaction_id} was entered before; call producer.transaction() for a new one"
            )

    def _require_open(self) -> None:
        if self._phase is not Phase.PREPARED and self._phase not in _BEFORE_THE_BLOCK:
            raise TransactionError(f"transaction {self.transaction_id} was left: its decision can no longer be changed")

    def _ending(self, error: BaseException | None) -> TransactionState:
        """Return the decision, from the end of the block."""
        self._require_open()
        if self._phase is not Phase.PREPARED:
            raise TransactionError(
                f"transaction {self.transaction_id} cannot be left: its half is not stored; enter it with `with` or "
                "`async with` first"
            )
        if isinstance(error, Exception):
            is_known = self._errors_roll_back and self._state is not TransactionState.UNKNOWN
            return TransactionState.ROLLBACK if is_known else TransactionState.UNKNOWN
        # KeyboardInterrupt or a cancelled task may come after the local commit: they say nothing about it.
        return self._state if error is None else TransactionState.UNKNOWN

    def _raise(self, error: BaseException | None) -> None:
        """Raise the error of halves or decision; only log it if the block itself raised `error`."""
        if self.error is not None and error is None:
            raise self.error
        if self.error is not None:
            # A check will find that the local transaction did not commit.
            _log.warning("%s", self.error)


class TransactionListener(Protocol):
    """A local transaction and its check in one object, as in RocketMQ since 4.3. Many threads call it at once."""

    def execute_local_transaction(self, message: HalfMessage, argument: object) -> TransactionState | None:
        """Run the local transaction of a message whose half is stored, in the sending thread.

        Args:
            message: the message, with its transaction id; write the id with your own data.
            argument: the argument of `send_in_transaction`.

        Returns:
            The decision. None, or an exception, is UNKNOWN, unlike with `send(execute=)`.
        """

    def check_local_transaction(self, half: HalfMessage) -> TransactionState:
        """Return the outcome of an undecided local transaction; an exception is UNKNOWN."""


#: A local transaction as a function of the message and the argument.
Run = Callable[[HalfMessage, object], TransactionState | None]


def run_local_transaction(run: Run, tx: Transaction, argument: object) -> TransactionState:
    """Run a local transaction by RocketMQ's rule: an exception, or anything but a `TransactionState`, is UNKNOWN."""
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
