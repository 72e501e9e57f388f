"""The core of the transactional producer: transactions as they fly, none of which a thread has to wait for.

`Flight` is one transaction. It is started, tells when its halves are stored, is ended with a state, and tells when
what the caller wanted to wait for has come. The context manager, `send`, `submit`, the listeners and the async
variants are thin layers on it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from penstock.errors import (
    DecisionNotStoredError,
    HalfNotStoredError,
    PublicationNotSeenError,
    StoppedError,
    TransactionError,
    TransactionRefusedError,
)
from penstock.transactions.model import ProducerStatistics, TransactionState, Wait
from penstock.transactions.producer.deadlines import RequestDeadlines
from penstock.transactions.producer.in_flight import InFlightLimit
from penstock.transactions.store import Prepared, Store
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Verdict

if TYPE_CHECKING:
    from penstock.telemetry import SendSpans

_log = logging.getLogger("penstock.transactions")

# Members of enumerations are dear to look up and to hash, and this is the way of every message.
_COMMIT, _UNKNOWN = TransactionState.COMMIT, TransactionState.UNKNOWN
_TO_COMMIT, _TO_ROLL_BACK = Verdict.COMMIT, Verdict.ROLLBACK

Told = Callable[["Flight"], None]


class Core:
    """What all transactions of one producer share. Thread-safe.

    Args:
        store: where halves and decisions go.
        in_flight: the bounds.
        deadlines: how long answers and publications are waited for.
        has_check: whether its producer answers checks.
        spans: tells of each message that is sent, where telemetry is on.
    """

    def __init__(
        self,
        store: Store,
        in_flight: InFlightLimit,
        deadlines: RequestDeadlines,
        *,
        has_check: bool,
        spans: SendSpans | None = None,
    ) -> None:
        self.store = store
        self._has_check = has_check
        self._spans = spans
        self.in_flight = in_flight
        self.deadlines = deadlines
        # Guards the counts below: transactions of many threads add to them.
        self._lock = threading.Lock()
        self._committed = self._rolled_back = self._unknown = 0
        self._failed = 0
        self._lost = 0

    def flight(self, halves: Sequence[Half], ordering_key: bytes | None, wait: Wait) -> Flight:
        """Return a transaction that has not been started."""
        if self._spans is not None:
            sending = self._spans.sending
            halves = [half._replace(headers=tuple(sending(half.topic, half.headers))) for half in halves]
        return Flight(self, halves, ordering_key, wait)

    def require_running(self, half: Half) -> None:
        """Raise `StoppedError` once the producer is being stopped."""
        if self.deadlines.stopping:
            raise StoppedError(
                f"transaction {half.transaction_id} for {half.topic}: the producer was stopped, and nothing of it was "
                "sent; make a new producer"
            )

    def who_settles(self, group: str) -> str:
        """Say what becomes of a transaction whose decision is lost."""
        if self._has_check:
            return f"a check of group {group} will settle it"
        return (
            f"this producer has no check: it stays pending until a producer of group {group} that has one answers, or "
            "until `penstock tx commit` or `rollback` decides"
        )

    def count_end(self, state: TransactionState) -> None:
        """Count a transaction that ended as it should."""
        with self._lock:
            if state is _COMMIT:
                self._committed += 1
            elif state is _UNKNOWN:
                self._unknown += 1
            else:
                self._rolled_back += 1

    def count_failure(self, *, lost: bool = False) -> None:
        """Count a half or a decision that is not known to be stored."""
        with self._lock:
            self._failed += 1
            self._lost += lost

    def statistics(self) -> ProducerStatistics:
        """Return the counts; those of checks are 0."""
        with self._lock:
            return ProducerStatistics(
                in_flight=self.in_flight.count,
                committed=self._committed,
                rolled_back=self._rolled_back,
                unknown=self._unknown,
                failed=self._failed,
                checks=0,
                failed_checks=0,
                skipped_checks=0,
                lost_decisions=self._lost,
            )


class Flight:
    """One transaction on its way. Driven by its owner, told by the store's threads; the two never at once.

    What the store answers may have been given up before: the answer and who gives it up take one token, and whoever has
    it tells the owner.

    Attributes:
        halves: its messages.
        error: why its halves, or its decision, are not known to be stored, or why it was refused.
        state: what it was ended with.
        wait: what its owner waits for at the end.
    """

    __slots__ = (
        "_abandoned",
        "_awaited",
        "_commits",
        "_core",
        "_ordering_key",
        "_prepared",
        "_settled",
        "_size",
        "_stored",
        "_told",
        "error",
        "halves",
        "state",
        "wait",
    )

    def __init__(self, core: Core, halves: Sequence[Half], ordering_key: bytes | None, wait: Wait) -> None:
        self.halves = halves
        self.error: Exception | None = None
        self.state = _UNKNOWN
        self._core = core
        self._ordering_key = ordering_key
        self.wait: Wait = wait
        self._size = _size(halves[0]) if len(halves) == 1 else sum(map(_size, halves))
        self._prepared: Prepared | None = None
        self._told: Told = _nobody
        # The token of an answer to come. Lists, here and below, for taking the last item of one is a single step.
        self._awaited: list[None] = []
        self._commits = False
        self._abandoned: list[None] = []
        # With wait="published": two tellers, one for each; whoever is the second tells on.
        self._stored: list[None] = []
        self._settled: Verdict | None = None

    def start(self, told: Told, *, may_wait: bool = True, commits: bool = False) -> None:
        """Store the halves; `told` is called once they are stored, or with an error.

        Args:
            told: called once, by any thread.
            may_wait: whether it may wait for room.
            commits: whether `told` ends it at once.

        Raises:
            BufferFullError: too many are in flight.
            StoppedError: the producer is being stopped.
            PenstockError: a target does not exist, or the store cannot be asked.
        """
        core = self._core
        for half in self.halves:
            core.store.require_target(half.topic, half.partition)
        core.in_flight.enter(self._size, may_wait=may_wait)
        self._told = told
        self._awaited, self._commits = [None], commits
        core.deadlines.await_answer(self)
        try:
            core.require_running(self.halves[0])
            if self.wait == "published":
                # Before the halves are stored: what is told of later cannot have been missed.
                self._stored = [None]
                core.store.watch(self.halves[0].transaction_id, self._is_settled)
            core.store.prepare(self.halves, self._is_prepared, self._ordering_key)
        except BaseException:
            core.deadlines.awaiting_answer.pop(self, None)
            core.in_flight.leave(self._size)
            if self.wait == "published":
                self.give_up_watch()
            raise

    def end(self, state: TransactionState, told: Told) -> None:
        """Store the decision; `told` is called once what the caller waits for has come, or with an error."""
        self.state = state
        self._told = told
        core = self._core
        if state is not _COMMIT and self.wait == "published":
            self.give_up_watch()
        if state is _UNKNOWN:
            core.in_flight.leave(self._size)
            core.count_end(state)
            told(self)
            return
        assert self._prepared is not None  # noqa: S101 - it was told of
        self._awaited = [None]
        core.deadlines.await_answer(self)
        verdict = _TO_COMMIT if state is _COMMIT else _TO_ROLL_BACK
        if self.wait == "sent":
            self._told = _nobody
            core.store.decide(self._prepared, verdict, self._is_decided)
            told(self)
        else:
            core.store.decide(self._prepared, verdict, self._is_decided)

    @property
    def is_prepared(self) -> bool:
        """Whether its halves are stored."""
        return self._prepared is not None

    def abandon(self) -> None:
        """Roll it back, now or once its halves are stored: nobody waits for it, and its local transaction never ran."""
        self._abandoned = [None]
        self._told = Flight._roll_back
        if self._prepared is not None:
            self._roll_back()

    def _roll_back(self) -> None:
        try:
            self._abandoned.pop()
        except IndexError:
            # The other of two threads did it.
            return
        if self.error is None:
            self.end(TransactionState.ROLLBACK, _nobody)

    def give_up(self, cause: str) -> None:
        """Wait no longer for the store's answer, and tell so; it keeps its room until that has come."""
        try:
            self._awaited.pop()
        except IndexError:
            # It was answered meanwhile.
            return
        half = self.halves[0]
        if self._prepared is None:
            self._core.count_failure()
            self.error = HalfNotStoredError(
                f"transaction {half.transaction_id} for {half.topic}: its half is not known to be stored: {cause}; the "
                "local transaction did not run, send it again"
            )
            if self.wait == "published":
                self.give_up_watch()
        else:
            what = f"transaction {half.transaction_id}: its {self.state.name} is not known to be stored"
            self._lose(DecisionNotStoredError(f"{what}: {cause}"))
        self._tell()
        self._core.deadlines.awaiting_answer.pop(self, None)

    def give_up_publication(self, cause: str) -> None:
        """Wait no longer until the message is visible, and tell so."""
        if self._core.deadlines.awaiting_publication.pop(self, None) is None:
            # It was seen meanwhile.
            return
        self.give_up_watch()
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
        self._tell()

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

    def give_up_watch(self) -> None:
        """Wait no longer for the message to become visible."""
        self._core.store.forget(self.halves[0].transaction_id)

    def _is_prepared(self, answer: Prepared | HalfNotStoredError) -> None:
        core = self._core
        try:
            self._awaited.pop()
        except IndexError:
            self._is_late(answer)
            return
        if isinstance(answer, HalfNotStoredError):
            self.error = answer
            core.in_flight.leave(self._size)
            core.count_failure()
            if self.wait == "published":
                self.give_up_watch()
            self._tell()
            core.deadlines.awaiting_answer.pop(self, None)
            return
        self._prepared = answer
        if not self._commits:
            # Before it is told: its owner may end it from then on.
            core.deadlines.awaiting_answer.pop(self, None)
        self._tell()

    def _is_late(self, answer: Prepared | HalfNotStoredError) -> None:
        """Take in what became of halves that were given up: their local transaction never ran."""
        if isinstance(answer, HalfNotStoredError):
            self._core.in_flight.leave(self._size)
        else:
            self._core.store.decide(answer, _TO_ROLL_BACK, self._is_rolled_back)

    def _is_rolled_back(self, error: TransactionError | None) -> None:
        self._core.in_flight.leave(self._size)
        if error is not None:
            _log.warning("%s", error)

    def _tell(self) -> None:
        """Tell on, once. The teller mostly holds this object: let go of, neither needs the garbage collector."""
        told, self._told = self._told, _nobody
        told(self)

    def _is_decided(self, error: TransactionError | None) -> None:
        core = self._core
        core.in_flight.leave(self._size)
        try:
            self._awaited.pop()
        except IndexError:
            return
        if isinstance(error, TransactionRefusedError):
            self._is_refused(error)
            self._tell()
        elif error is not None:
            self._lose(error)
            self._tell()
        else:
            core.count_end(self.state)
            if self.wait == "published" and self.state is _COMMIT:
                core.deadlines.await_publication(self)
                self._one_of_two()
            else:
                self._tell()
        # After it is told: whoever waits until nothing is owed waits until all are told.
        core.deadlines.awaiting_answer.pop(self, None)

    def _is_refused(self, error: TransactionRefusedError) -> None:
        """Take in that another decision stands."""
        self.error = error
        self._core.count_failure()
        if self.wait == "published":
            self.give_up_watch()

    def _lose(self, error: TransactionError) -> None:
        """Take in that the decision is not known to be stored, and say who settles it: the store does not know."""
        self.error = DecisionNotStoredError(f"{error}; {self._core.who_settles(self.halves[0].group)}")
        self.error.__cause__ = error
        self._core.count_failure(lost=self.wait == "sent")
        if self.wait == "sent":
            _log.warning("%s", self.error)
        elif self.wait == "published":
            self.give_up_watch()

    def _is_settled(self, verdict: Verdict) -> None:
        self._settled = verdict
        self._one_of_two()

    def _one_of_two(self) -> None:
        """Tell, once the decision is stored and the transaction settled."""
        try:
            self._stored.pop()
        except IndexError:
            if self._core.deadlines.awaiting_publication.pop(self, None) is None:
                # It was given up meanwhile.
                return
            if self._settled is not Verdict.COMMIT and self._settled is not None:
                self.error = TransactionRefusedError(
                    f"transaction {self.halves[0].transaction_id}: its COMMIT does not stand, it is settled as "
                    f"{self._settled.name} by a check, an operator or a cancellation; the message is not published"
                )
            self._tell()


def _size(half: Half) -> int:
    return len(half.key or b"") + len(half.value or b"")


def _nobody(_: Flight) -> None:
    """Nobody waits."""


__all__ = ["Core", "Flight", "Told"]
