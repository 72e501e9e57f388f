"""The flight of one transaction: from its halves to the end that its owner waits for. No thread has to wait meanwhile.

A flight is started, calls back when its halves are stored, is ended with a state, and calls back when what its owner
wants to wait for has come. The context manager, `send`, `submit`, the listeners and the async variants are thin layers
on it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING, NoReturn

from penstock.errors import (
    DecisionNotStoredError,
    HalfNotStoredError,
    PenstockError,
    PublicationNotSeenError,
    StoppedError,
    TransactionError,
    TransactionRefusedError,
)
from penstock.transactions.model import TransactionResult, TransactionState, Wait
from penstock.transactions.producer.futures import ResultFuture
from penstock.transactions.producer.in_flight import Core
from penstock.transactions.store import Prepared
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Verdict

if TYPE_CHECKING:
    from penstock.telemetry.sending import SendSpans

_log = logging.getLogger("penstock.transactions")

FlightCallback = Callable[["Flight"], None]


class Phase(Enum):
    """How far a transaction is."""

    #: Its halves are on their way into the store, or it was not started.
    STORING = "storing"
    #: Its halves are stored: the local transaction may run, and its owner decides.
    PREPARED = "prepared"
    #: Its decision is on its way into the store.
    DECIDING = "deciding"
    #: Its decision is stored, and its owner waits until the message is visible.
    PUBLISHING = "publishing"
    #: The store's answer was waited for too long: its owner was called back with an error, the answer may still come.
    GIVEN_UP = "given up"
    #: Its owner was called back for the last time.
    ENDED = "ended"


# Members of enumerations are expensive to look up and to hash, and every message passes here.
_STORING, _PREPARED, _DECIDING = Phase.STORING, Phase.PREPARED, Phase.DECIDING
_PUBLISHING, _GIVEN_UP, _ENDED = Phase.PUBLISHING, Phase.GIVEN_UP, Phase.ENDED
_COMMIT, _UNKNOWN = TransactionState.COMMIT, TransactionState.UNKNOWN
_TO_COMMIT, _TO_ROLL_BACK = Verdict.COMMIT, Verdict.ROLLBACK


class Flight(ResultFuture[TransactionResult]):
    """One transaction on its way. Driven by its owner, completed by the store's threads.

    The owner, the store's threads and the thread of the deadlines meet in `_phase`, which changes under the lock alone:
    whoever changes it calls the owner back, without the lock. `error` says why its halves, or its decision, are not
    known to be stored, or why it was refused; `state` is what it was ended with.
    """

    __slots__ = (
        "_callback",
        "_commits",
        "_core",
        "_lock",
        "_ordering_key",
        "_phase",
        "_prepared",
        "_settled",
        "_size",
        "halves",
        "state",
        "wait",
    )

    def __init__(self, core: Core, halves: Sequence[Half], ordering_key: bytes | None, wait: Wait) -> None:
        # What `super().__init__()` does.
        self._set, self._callbacks, self.error = False, None, None
        self.halves = halves if core.spans is None else _traced(halves, core.spans)
        self.state = _UNKNOWN
        self.wait: Wait = wait
        self._core = core
        self._ordering_key = ordering_key
        self._size = _size(halves[0]) if len(halves) == 1 else sum(map(_size, halves))
        self._commits = False
        # Guards the fields below.
        self._lock = threading.Lock()
        self._phase = _STORING
        self._callback: FlightCallback = _nobody
        self._prepared: Prepared | None = None
        # How the store settled it, if that came before its decision was known to be stored.
        self._settled: Verdict | None = None

    def start(self, callback: FlightCallback, *, may_wait: bool = True, commits: bool = False) -> None:
        """Store the halves; `callback` comes once, from any thread, when they are stored, or with an error.

        `may_wait` says whether this may wait for room, `commits` whether the callback ends the flight at once. Raises
        `BufferFullError` where too many are in flight, `StoppedError` where the producer is being stopped, and another
        `PenstockError` where a target does not exist, or the store cannot be asked.
        """
        core = self._core
        for half in self.halves:
            core.store.require_target(half.topic, half.partition)
        core.in_flight.reserve(self._size, may_wait=may_wait)
        self._callback, self._commits = callback, commits
        core.deadlines.await_answer(self)
        try:
            if core.deadlines.stopping:
                _refuse(self.halves[0])
            if self.wait == "published":
                # Before the halves are stored: nothing that settles it can be missed.
                core.store.watch(self.halves[0].transaction_id, self._on_settled)
            core.store.prepare(self.halves, self._halves_answered, self._ordering_key)
        except BaseException:
            core.deadlines.awaiting_answer.pop(self, None)
            core.in_flight.release(self._size)
            self._forget_watch()
            raise

    def end(self, state: TransactionState, callback: FlightCallback) -> None:
        """Store the decision; `callback` comes once what the owner waits for has come, or with an error."""
        self.state = state
        core = self._core
        if state is not _COMMIT:
            self._forget_watch()
        if state is _UNKNOWN:
            self._phase = _ENDED
            core.in_flight.release(self._size, state)
            callback(self)
            return
        prepared = self._prepared
        assert prepared is not None  # noqa: S101 - its owner was called back
        at_once = self.wait == "sent"
        # Its owner alone changes it in this phase; the callback comes first, for whoever sees the new phase takes it.
        self._callback = _nobody if at_once else callback
        self._phase = _DECIDING
        answered: Callable[[TransactionError | None], None] = self._decision_answered
        if core.spans is not None:
            half = self.halves[0]
            answered = core.spans.settling(half.topic, half.headers, state.name, answered)
        if not self._commits or core.deadlines.has_limit:
            core.deadlines.await_answer(self)
        core.store.decide(prepared, _TO_COMMIT if state is _COMMIT else _TO_ROLL_BACK, answered)
        if at_once:
            callback(self)

    @property
    def is_prepared(self) -> bool:
        """Whether its halves are stored."""
        return self._prepared is not None

    def abandon(self) -> None:
        """Roll it back, now or once its halves are stored: nobody waits for it, and its local transaction never ran."""
        with self._lock:
            is_prepared = self._phase is _PREPARED
            self._callback = Flight._roll_back
        if is_prepared:
            self._roll_back()

    def _roll_back(self) -> None:
        if self._phase is _PREPARED:
            self.end(TransactionState.ROLLBACK, _nobody)

    def give_up(self, cause: str) -> None:
        """Wait no longer for the store's answer; the transaction keeps its room until that has come."""
        with self._lock:
            was, callback = self._phase, self._callback
            if was is not _STORING and was is not _DECIDING:
                # It was answered meanwhile.
                return
            self._phase, self._callback = _GIVEN_UP, _nobody
        half = self.halves[0]
        if was is _STORING:
            self._core.in_flight.count_failure()
            self.error = HalfNotStoredError(
                f"transaction {half.transaction_id} for {half.topic}: its half is not known to be stored: {cause}; the "
                "local transaction did not run, send it again"
            )
            self._forget_watch()
        else:
            what = f"transaction {half.transaction_id}: its {self.state.name} is not known to be stored"
            self._lose(DecisionNotStoredError(f"{what}: {cause}"))
        callback(self)
        self._core.deadlines.awaiting_answer.pop(self, None)

    def give_up_publication(self, cause: str) -> None:
        """Wait no longer until the message is visible."""
        with self._lock:
            callback = self._callback
            if self._phase is not _PUBLISHING:
                # It was seen meanwhile.
                return
            self._phase, self._callback = _ENDED, _nobody
        self._core.deadlines.awaiting_publication.pop(self, None)
        self._forget_watch()
        half = self.halves[0]
        due_s = (half.deliver_at_ms or 0) / 1000
        if due_s > time.time():
            due = datetime.fromtimestamp(due_s, UTC).isoformat(timespec="milliseconds")
            hint = f"it will be published when it is due, at {due}"
        else:
            hint = self._hint()
        self.error = PublicationNotSeenError(
            f"transaction {half.transaction_id} for {half.topic} is committed, but {cause}; {hint}"
        )
        callback(self)

    def _hint(self) -> str:
        """Say what the message waits for, where that can be known, and how to look."""
        transaction_id = self.halves[0].transaction_id
        look = f"look with `penstock tx show {transaction_id}`"
        why = ""
        if not self._core.deadlines.stopping:
            why = self._core.store.waits_for(transaction_id, [half.topic for half in self.halves])
        if why:
            return f"it waits for {why}; it is published then: {look}"
        return f"it will be published: {look} what it waits for"

    def _forget_watch(self) -> None:
        """Wait no longer for the message to become visible, if that was waited for."""
        if self.wait == "published":
            self._core.store.forget(self.halves[0].transaction_id)

    def _halves_answered(self, answer: Prepared | HalfNotStoredError) -> None:
        core = self._core
        with self._lock:
            is_late = self._phase is _GIVEN_UP
            if isinstance(answer, HalfNotStoredError):
                self._phase = _ENDED
            elif not is_late:
                self._phase, self._prepared = _PREPARED, answer
            # The callback mostly holds this object: without it neither needs the garbage collector.
            callback, self._callback = self._callback, _nobody
        if is_late:
            self._halves_came_late(answer)
            return
        if isinstance(answer, HalfNotStoredError):
            self.error = answer
            core.in_flight.release(self._size)
            core.in_flight.count_failure()
            self._forget_watch()
            callback(self)
            core.deadlines.awaiting_answer.pop(self, None)
            return
        if not self._commits:
            # Before its callback: its owner may end it from then on.
            core.deadlines.awaiting_answer.pop(self, None)
        callback(self)

    def _halves_came_late(self, answer: Prepared | HalfNotStoredError) -> None:
        """Take in what became of halves that were given up: their local transaction never ran."""
        if isinstance(answer, HalfNotStoredError):
            self._core.in_flight.release(self._size)
        else:
            self._core.store.decide(answer, _TO_ROLL_BACK, self._rolled_back)

    def _rolled_back(self, error: TransactionError | None) -> None:
        self._core.in_flight.release(self._size)
        if error is not None:
            _log.warning("%s", error)

    def _decision_answered(self, error: TransactionError | None) -> None:
        core = self._core
        waits = error is None and self.wait == "published" and self.state is _COMMIT
        if waits:
            # Before the phase says so: whoever ends it takes it out again.
            core.deadlines.await_publication(self)
        with self._lock:
            is_late, settled, callback = self._phase is _GIVEN_UP, self._settled, self._callback
            if not is_late:
                goes_on = waits and settled is None
                self._phase = _PUBLISHING if goes_on else _ENDED
                if not goes_on:
                    self._callback = _nobody
            # Before anybody can call back: who was called back finds it counted.
            core.in_flight.release(self._size, None if is_late or error is not None else self.state)
        if is_late:
            core.deadlines.awaiting_publication.pop(self, None)
            return
        if error is None:
            if not waits:
                callback(self)
            elif settled is not None:
                self._end_published(settled, callback)
        else:
            if isinstance(error, TransactionRefusedError):
                # Another decision stands.
                self.error = error
                core.in_flight.count_failure()
                self._forget_watch()
            else:
                self._lose(error)
            callback(self)
        # After the callback: whoever waits until no answer is awaited waits until all were called back.
        core.deadlines.awaiting_answer.pop(self, None)

    def _lose(self, error: TransactionError) -> None:
        """Take in that the decision is not known to be stored, and say who settles it: the store does not know."""
        lost = DecisionNotStoredError(f"{error}; {self._core.who_settles()}")
        lost.__cause__ = error
        self._core.in_flight.count_failure(lost=self.wait == "sent")
        if self.wait == "sent":
            # Its future says that it was sent, and does not wait any more.
            _log.warning("%s", lost)
        else:
            self.error = lost
        self._forget_watch()

    def _on_settled(self, verdict: Verdict) -> None:
        with self._lock:
            self._settled, callback = verdict, self._callback
            if self._phase is not _PUBLISHING:
                # That its decision is stored is not known yet, or it was given up.
                return
            self._phase, self._callback = _ENDED, _nobody
        self._end_published(verdict, callback)

    def _end_published(self, verdict: Verdict, callback: FlightCallback) -> None:
        """Call back: the decision is stored and the transaction settled."""
        self._core.deadlines.awaiting_publication.pop(self, None)
        if verdict is not Verdict.COMMIT:
            self.error = TransactionRefusedError(
                f"transaction {self.halves[0].transaction_id}: its COMMIT does not stand, it is settled as "
                f"{verdict.name} by a check, an operator or a cancellation; the message is not published"
            )
        callback(self)


class Submission(Flight):
    """A message that commits as soon as its half is stored; the result is there when what it waits for has come."""

    __slots__ = ()

    @property
    def transaction_id(self) -> str:
        """The id of the transaction."""
        return self.halves[0].transaction_id

    def submit(self) -> None:
        """Send it off; raises as `Flight.start` does."""
        self.start(Submission._commit, commits=True)

    def try_submit(self) -> None:
        """Send it off, or end with the error that `submit` would raise."""
        try:
            self.submit()
        except PenstockError as error:
            self.fail(error)

    def _outcome(self) -> TransactionResult:
        half = self.halves[0]
        return TransactionResult(half.transaction_id, _COMMIT, half.topic)

    # Functions of a flight, as its callbacks are: without a bound method it holds nothing that holds it.

    @staticmethod
    def _commit(flight: Flight) -> None:
        if flight.error is not None:
            flight._end()  # noqa: SLF001 - it is a submission
        else:
            flight.end(_COMMIT, Flight._end)  # noqa: SLF001 - the same


def _refuse(half: Half) -> NoReturn:
    raise StoppedError(
        f"transaction {half.transaction_id} for {half.topic}: the producer was stopped, and nothing of it was sent; "
        "make a new producer"
    )


def _traced(halves: Sequence[Half], spans: SendSpans) -> Sequence[Half]:
    """Return halves with the context of their spans in the headers."""
    return [half._replace(headers=tuple(spans.sending(half.topic, half.headers))) for half in halves]


def _size(half: Half) -> int:
    key, value = half.key, half.value
    return (len(key) if key else 0) + (len(value) if value else 0)


def _nobody(_: Flight) -> None:
    """Nobody waits."""
