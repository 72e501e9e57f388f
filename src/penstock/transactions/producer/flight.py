"""The life of one transaction in the producer: a state machine that callbacks drive, so that no thread has to wait.

A flight stores its halves, takes the decision, stores it and ends. It calls its owner back when the halves are stored,
and when the result that the owner waits for is there. It has two public faces: a `Submission`, which commits as soon as
its half is stored, and a `Transaction`, whose owner decides in a block. All ways to send are thin layers on these.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING

from penstock.errors import (
    DecisionNotStoredError,
    HalfNotStoredError,
    PenstockError,
    PublicationNotSeenError,
    TransactionError,
    TransactionRefusedError,
)
from penstock.transactions.model import TransactionState, Wait
from penstock.transactions.producer.in_flight import Core
from penstock.transactions.store import Prepared
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Verdict

if TYPE_CHECKING:
    from penstock.telemetry.sending import SendSpans

_log = logging.getLogger("penstock.transactions")


class Phase(Enum):
    """The phase of a transaction."""

    #: Nothing was sent.
    NEW = "new"
    #: The store is storing the halves.
    STORING = "storing"
    #: The halves are stored: the local transaction may run, and the owner decides.
    PREPARED = "prepared"
    #: The store is storing the decision.
    DECIDING = "deciding"
    #: The decision is stored, and the owner waits until the message is visible.
    PUBLISHING = "publishing"
    #: The store did not answer in time. The owner was called back with an error; the answer may still come.
    GIVEN_UP = "given up"
    #: The owner was called back for the last time.
    ENDED = "ended"


# Members of enumerations are slow to look up and to hash, and every message passes here.
_NEW, _STORING, _PREPARED, _DECIDING = Phase.NEW, Phase.STORING, Phase.PREPARED, Phase.DECIDING
_PUBLISHING, _GIVEN_UP, _ENDED = Phase.PUBLISHING, Phase.GIVEN_UP, Phase.ENDED
_COMMIT, _UNKNOWN = TransactionState.COMMIT, TransactionState.UNKNOWN
_TO_COMMIT, _TO_ROLL_BACK = Verdict.COMMIT, Verdict.ROLLBACK


class Flight:
    """One transaction in flight. The owner drives it, the store's threads complete it.

    The owner, the store's threads and the deadline thread share `_phase` and `error`. They change both under the lock
    of the core, and call back after that, without the lock. Only the owner leaves NEW and PREPARED.
    """

    __slots__ = (
        "_callbacks",
        "_core",
        "_deadline",
        "_ordering_key",
        "_phase",
        "_prepared",
        "_settled",
        "_size",
        "_state",
        "_wait",
        "error",
        "halves",
        "transaction_id",
    )

    #: Whether the owner decides after a block. If not, the flight commits as soon as its halves are stored.
    _has_block = True

    def __init__(self, core: Core, halves: Sequence[Half], ordering_key: bytes | None, wait: Wait) -> None:
        self._core = core
        self.halves = halves
        self._ordering_key = ordering_key
        self._wait: Wait = wait
        #: A UUID of version 7; write it with your own data, so that a check can find it.
        self.transaction_id = halves[0].transaction_id
        # Bytes of the keys and values.
        self._size = _bytes_of(halves[0]) if len(halves) == 1 else sum(map(_bytes_of, halves))
        # The monotonic second at which the core gives it up.
        self._deadline = math.inf
        # The decision that is stored, or will be.
        self._state = _COMMIT
        # Called once and then dropped: when the halves are stored, if the owner decides then, and at the end.
        self._callbacks: list[Callable[[], object]] | None = None
        self._phase = _NEW
        #: The reason why halves or decision are not known to be stored, were refused, or the message was not seen.
        self.error: PenstockError | None = None
        self._prepared: Prepared | None = None
        # How the store settled the transaction, if that came before the answer about the decision.
        self._settled: Verdict | None = None

    @property
    def _is_owed(self) -> bool:
        """Whether an answer of the store is outstanding; False while the block runs."""
        return self._phase in {_STORING, _DECIDING}

    def _take_off(self, *, may_wait: bool = True) -> None:
        """Connect at the first use, and store the halves.

        The store calls back once, from any thread. `may_wait` says whether this may wait for room. Raises
        `BufferFullError` if too many are in flight, `StoppedError` if the producer was stopped, and another
        `PenstockError` if a target does not exist or the store cannot be reached.
        """
        core = self._core
        core.start()
        for half in self.halves:
            core.store.require_target(half.topic, half.partition)
        try:
            with core.lock:
                core.add(self, may_wait=may_wait)
                self._deadline = time.monotonic() + core.answer_timeout_s
                self._phase = _STORING
            if core.spans is not None:
                self.halves = _traced(self.halves, core.spans)
            if self._wait == "published":
                # Before the halves are stored: the settlement cannot be missed.
                core.store.watch(self.transaction_id, self._on_settled)
            core.store.prepare(self.halves, self._halves_answered, self._ordering_key)
        except BaseException:
            self._end_early()
            raise

    def _end_early(self) -> None:
        """End after the owner was refused or interrupted. What the store answers later no longer counts."""
        with self._core.lock:
            self._core.remove(self)
            self._core.unseen.discard(self)
            self._phase = _ENDED
        self._forget_watch()

    def _decide(self, state: TransactionState) -> None:
        """Store the decision. The owner is called back with the result it waits for, or with an error."""
        core = self._core
        self._state = state
        try:
            if state is not _COMMIT:
                self._forget_watch()
            if state is _UNKNOWN:
                with core.lock:
                    core.remove(self, state)
                    self._phase = _ENDED
                self._call_back()
                return
            with core.lock:
                self._deadline = time.monotonic() + core.answer_timeout_s
                self._phase = _DECIDING
            self._store_decision()
        except BaseException:
            self._end_early()
            raise

    def _store_decision(self) -> None:
        core, prepared, state = self._core, self._prepared, self._state
        assert prepared is not None  # noqa: S101 - its halves are stored
        answered: Callable[[TransactionError | None], None] = self._decision_answered
        if core.spans is not None:
            half = self.halves[0]
            answered = core.spans.settling(half.topic, half.headers, state.name, answered)
        core.store.decide(prepared, _TO_COMMIT if state is _COMMIT else _TO_ROLL_BACK, answered)
        if self._wait == "sent":
            self._call_back()

    def _call_back(self) -> None:
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback()

    def _halves_answered(self, answer: Prepared | HalfNotStoredError) -> None:
        core = self._core
        with core.lock:
            phase = self._phase
            if phase is _ENDED:
                # An interrupt in `_take_off` ended the flight: a check settles the transaction.
                return
            if isinstance(answer, HalfNotStoredError):
                self._phase = _ENDED
                core.remove(self)
                if phase is _STORING:
                    self._fail(answer)
            elif phase is _STORING:
                self._prepared = answer
                if self._has_block:
                    self._phase = _PREPARED
                else:
                    self._deadline = time.monotonic() + core.answer_timeout_s
                    self._phase = _DECIDING
        if isinstance(answer, HalfNotStoredError):
            if phase is _STORING:
                self._halves_failed()
        elif phase is not _STORING:
            # The halves came after the flight was given up, and the local transaction never ran.
            core.store.decide(answer, _TO_ROLL_BACK, self._rolled_back)
        elif self._has_block:
            self._call_back()
        else:
            self._store_decision()

    def _halves_failed(self) -> None:
        self._forget_watch()
        self._call_back()

    def _rolled_back(self, error: TransactionError | None) -> None:
        with self._core.lock:
            self._core.remove(self)
        if error is not None:
            _log.warning("%s", error)

    def _decision_answered(self, error: TransactionError | None) -> None:
        core, waits = self._core, error is None and self._wait == "published" and self._state is _COMMIT
        if error is not None and not isinstance(error, TransactionRefusedError):
            error = self._lost(error)
        with core.lock:
            is_late = self._phase is not _DECIDING
            # Before the callbacks: the owner finds the transaction counted.
            core.remove(self, None if is_late or error is not None else self._state)
            if is_late:
                return
            if waits and self._settled is None:
                self._deadline = time.monotonic() + core.publish_timeout_s
                self._phase = _PUBLISHING
                core.unseen.add(self)
                return
            self._phase = _ENDED
            if error is not None:
                self._fail(error)
            elif waits:
                self._check_settled()
        self._end(error)

    def _on_settled(self, verdict: Verdict) -> None:
        with self._core.lock:
            self._settled = verdict
            if self._phase is not _PUBLISHING:
                # The answer about the decision is still to come, or the flight was given up.
                return
            self._phase = _ENDED
            self._core.unseen.discard(self)
            self._check_settled()
        self._end(None)

    def _check_settled(self) -> None:
        """Set the error if the transaction was not settled as COMMIT; called under the lock."""
        if self._settled is not Verdict.COMMIT and self._settled is not None:
            self.error = TransactionRefusedError(
                f"transaction {self.transaction_id}: its COMMIT does not stand, it is settled as "
                f"{self._settled.name} by a check, an operator or a cancellation; the message is not published"
            )

    def _give_up(self, now: float) -> None:
        """Stop waiting if the deadline has passed at `now`. `now` is infinite if the producer was stopped.

        The flight keeps its room until an outstanding answer of the store has come.
        """
        core = self._core
        with core.lock:
            phase = self._phase
            if self._deadline > now or phase not in {_STORING, _DECIDING, _PUBLISHING}:
                # It was answered meanwhile, or its block runs.
                return
            cause = "the producer was stopped before the store had answered"
            if now < math.inf:
                cause = f"the store did not answer within {core.answer_timeout_s:g} s"
            error: TransactionError
            if phase is _STORING:
                error = HalfNotStoredError(
                    f"transaction {self.transaction_id} for {self.halves[0].topic}: its half is not known to be "
                    f"stored: {cause}; the local transaction did not run, send it again"
                )
            elif phase is _DECIDING:
                decision = f"transaction {self.transaction_id}: its {self._state.name} is not known to be stored"
                error = self._lost(f"{decision}: {cause}")
            else:
                error = self.error = self._not_seen(is_stopped=now == math.inf)
            if phase is _PUBLISHING:
                self._phase = _ENDED
                core.unseen.discard(self)
            else:
                self._phase = _GIVEN_UP
                self._fail(error)
        if phase is _STORING:
            self._halves_failed()
        else:
            self._end(error)

    def _end(self, error: TransactionError | None) -> None:
        """Call back for the last time, unless the owner did not wait for the decision."""
        if error is not None:
            self._forget_watch()
        if self._wait != "sent":
            self._call_back()
        elif error is not None:
            _log.warning("%s", error)

    def _fail(self, error: TransactionError) -> None:
        """Count and keep the error of halves or a decision; called under the lock."""
        is_lost = self._wait == "sent" and isinstance(error, DecisionNotStoredError)
        self._core.failed += 1
        self._core.lost += is_lost
        if self._wait != "sent" or isinstance(error, HalfNotStoredError):
            self.error = error

    def _forget_watch(self) -> None:
        if self._wait == "published":
            self._core.store.forget(self.transaction_id)

    def _lost(self, cause: TransactionError | str) -> DecisionNotStoredError:
        """Return the error of a decision that is not known to be stored. It says who will settle the transaction."""
        lost = DecisionNotStoredError(f"{cause}; {self._core.who_settles()}")
        lost.__cause__ = None if isinstance(cause, str) else cause
        return lost

    def _not_seen(self, *, is_stopped: bool) -> PublicationNotSeenError:
        half, cause = self.halves[0], "the producer was stopped before it was seen to be visible"
        if not is_stopped:
            cause = f"was not seen to be visible within {self._core.publish_timeout_s:g} s"
        due_s = (half.deliver_at_ms or 0) / 1000
        if due_s > time.time():
            due = datetime.fromtimestamp(due_s, UTC).isoformat(timespec="milliseconds")
            hint = f"it will be published when it is due, at {due}"
        else:
            hint = (
                "it will be published: check that a coordinator runs; `penstock tx show "
                f"{self.transaction_id}` shows what it waits for"
            )
        return PublicationNotSeenError(
            f"transaction {self.transaction_id} for {half.topic} is committed, but {cause}; {hint}"
        )


def _traced(halves: Sequence[Half], spans: SendSpans) -> Sequence[Half]:
    """Return the halves with the trace contexts of their spans in the headers."""
    return [half._replace(headers=tuple(spans.sending(half.topic, half.headers))) for half in halves]


def _bytes_of(half: Half) -> int:
    key, value = half.key, half.value
    return (len(key) if key else 0) + (len(value) if value else 0)
