"""A slot: one transactional id at a time, with a producer on a thread that can be abandoned.

Each producer is made, used and closed on its own disposable thread. If a transaction fails, or a call does not return
in time, both are abandoned, and a successor is made on a new thread. Under the same id the broker ends the transaction
that was left open. If the broker cannot, the outcome is decided all the same, and the next producer has a new id. So
the engine waits for no call of the client library. The outcome of a transaction is known once the successor is open
and the done log was read.

The engine's thread calls all methods. Only `begin` waits, for a moment.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from confluent_kafka import KafkaException

from penstock.clients.bounded_calls import CLOSE_S, Call, Disposable
from penstock.clients.kafka_errors import reason
from penstock.clients.transactional.end_watch import SURE_S
from penstock.clients.transactional.faults import IdLostError, NotOpenedError
from penstock.errors import StoppedError
from penstock.transactions.publishing.group_commit import GroupCommit
from penstock.transactions.publishing.publisher import (
    AbortedError,
    InDoubtError,
    NotPublishedError,
    Proof,
    Publisher,
    PublishingClients,
    Visibility,
)
from penstock.transactions.rationed_log import RationedLog

_log = logging.getLogger("penstock.transactions")

#: Seconds without progress, while brokers are well, after which a Kafka transaction's thread is abandoned.
PUBLISH_LIMIT_S = 6.0
#: Seconds for opening a producer and reading the done log; and for the producer's initialisation alone.
OPEN_LIMIT_S = 25.0
_INIT_TIMEOUT_S = 15.0
#: Seconds of trying to open an id that the broker cannot free: for the first one, and at most. Each lost id doubles
#: them, because a slow broker only needs longer.
_FREE_ID_BUDGET_S = 1.0
_MAX_FREE_ID_BUDGET_S = 8.0
#: Seconds after which a call is reported in the log and to operators.
SLOW_S = 2.0
#: Seconds until opening is tried again: after a failure, and if a right is missing.
_RETRY_DELAY_S = 0.3
_PERMISSION_RETRY_DELAY_S = 1.5
#: Seconds to wait until the client library has all records.
_PRODUCE_BUDGET_S = 1.0

#: Reads done logs to their ends, given partitions and start offsets. Called by the publisher's thread.
ReadDone = Callable[[Mapping[int, int]], Mapping[int, Any]]


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The outcome of a Kafka transaction, and the seconds from its beginning until its end was answered.

    The error is None if it was certainly committed; otherwise it is the error of `Publisher.publish`. `is_replaced`:
    its end may be repeated, so its producer is replaced. `done_ends` is the result of `Publisher.publish`.
    """

    commit: GroupCommit
    error: NotPublishedError | None
    took_s: float
    is_replaced: bool = False
    done_ends: Mapping[int, int] = field(default_factory=dict)


class SlotState(Enum):
    """The state of a slot."""

    #: There is no producer; one is made at its time.
    CLOSED = "closed"
    #: A producer is being made, and the done log is read if something is in doubt.
    OPENING = "opening"
    #: A Kafka transaction can begin.
    READY = "ready"
    #: A Kafka transaction is under way.
    IN_FLIGHT = "in flight"


class PublisherSlot:
    """A place for one Kafka transaction at a time, from its beginning until its outcome is known.

    Args:
        clients: the settings of its producers.
        name: its first transactional id. After a loss a number is appended.
        read_done: reads done logs if something is in doubt.
        is_trial: whether it is for trials only.
        may_open: tells whether a producer may be made now.
        visibility: returns the `visibility` of one `Publisher`.
    """

    def __init__(
        self,
        clients: PublishingClients,
        name: str,
        read_done: ReadDone,
        *,
        is_trial: bool,
        may_open: Callable[[], bool] = lambda: True,
        visibility: Callable[[], Visibility | None] = lambda: None,
    ) -> None:
        self._clients = clients
        self.name = name
        self._read_done = read_done
        self.is_trial = is_trial
        self._may_open = may_open
        self._visibility = visibility
        self._ration = RationedLog()
        #: Transactional ids that the broker could not free.
        self.lost_ids = 0
        #: The commit that is under way or in doubt.
        self.commit: GroupCommit | None = None
        self._thread: Disposable | None = None
        # Made and used on the thread. The slot only reads its state.
        self._publisher: Publisher | None = None
        self._state = SlotState.CLOSED
        # The thread's call, while it opens or publishes.
        self._call: Call[Any] | None = None
        self._not_before = 0.0
        # From where to read the done logs once the next producer is open; empty: nothing is in doubt.
        self._doubt: dict[int, int] = {}
        self._sure_s = SURE_S
        self._answer: Mapping[int, Any] | None = None
        # Threads that are closing failed producers.
        self._closing: list[tuple[Disposable, Publisher, Call[None]]] = []

    @property
    def transactional_id(self) -> str:
        """The id of the current producer, or of the next one."""
        return f"{self.name}.{self.lost_ids}" if self.lost_ids else self.name

    @property
    def is_used(self) -> bool:
        """Whether it has a producer, one that is closing, or a doubt to settle."""
        return self._state is not SlotState.CLOSED or bool(self._closing) or bool(self._doubt)

    @property
    def is_ready(self) -> bool:
        """Whether a Kafka transaction can begin."""
        return self._state is SlotState.READY

    @property
    def is_in_flight(self) -> bool:
        """Whether a Kafka transaction is under way."""
        return self._state is SlotState.IN_FLIGHT

    def slow_call(self) -> tuple[str, float]:
        """Return the call that hangs, and its age in seconds; an empty name if none hangs."""
        call = self._call
        if call is None or call.done() or call.age_s < SLOW_S:
            return "", 0.0
        publisher = self._publisher
        return (publisher.writer.doing if publisher is not None else "") or call.label, call.age_s

    def begin(self, commit: GroupCommit, proof: Proof | None) -> None:
        """Begin to publish a commit in one Kafka transaction. `result` returns its outcome.

        Its transactions must not change until then. Returns when the client library has all records: otherwise the
        owner and the thread that hands them over would compete for the interpreter lock, and the group ends no sooner.
        """
        thread, publisher = self._thread, self._publisher
        assert thread is not None  # noqa: S101 - it is ready
        assert publisher is not None  # noqa: S101 - the same
        batches = {number: batch for number, (_, batch) in commit.batches.items()}
        produced = threading.Event()

        def publish() -> Mapping[int, int]:
            try:
                return publisher.publish(batches, proof, produced.set)
            finally:
                produced.set()

        self.commit, self._state = commit, SlotState.IN_FLIGHT
        self._call = thread.start("a Kafka transaction", publish, self._clients.wake)
        produced.wait(_PRODUCE_BUDGET_S)

    def result(self, timeout_s: float = 0.0) -> CommitResult | None:
        """Return the outcome of the Kafka transaction under way, once, or None while it is unknown.

        If it is in doubt, the done logs are read from their ends as it began; see `learned`.
        """
        call, publisher = self._call, self._publisher
        if call is None or publisher is None or self._state is not SlotState.IN_FLIGHT:
            return None
        if call.done(timeout_s):
            self._call, self._state = None, SlotState.READY
            try:
                done_ends = call.result()
            except NotPublishedError as error:
                self._replace()
                return self._ended(error, call.age_s)
            if is_spent := publisher.writer.is_spent:
                self._replace()
            return self._ended(None, call.age_s, is_replaced=is_spent, done_ends=done_ends)
        self._warn_if_slow(call)
        pace = self._clients.pace
        stands_s = time.monotonic() - max(call.since, publisher.writer.doing_since)
        if stands_s < pace.limit(PUBLISH_LIMIT_S) and not publisher.writer.is_stuck:
            return None
        pace.note(call.age_s)
        text = (
            f"{publisher.writer.doing or call.label} of {self.transactional_id} has not returned for {stands_s:.1f} s: "
            "it is abandoned, with its producer"
        )
        given_up: NotPublishedError = AbortedError(text) if publisher.writer.give_up() else InDoubtError(text)
        self._replace(abandon=True)
        return self._ended(given_up, call.age_s)

    def _ended(self, error: NotPublishedError | None, took_s: float, **more: Any) -> CommitResult:
        commit = self.commit
        assert commit is not None  # noqa: S101 - it was under way
        if isinstance(error, InDoubtError):
            _log.warning("%s; its producer is replaced and the done log asked", error)
            self.ask(commit.done_from)
        else:
            self.commit = None
        return CommitResult(commit, error, took_s, **more)

    def learned(self) -> tuple[GroupCommit, Mapping[int, Any]] | None:
        """Return a commit that was in doubt, and what the done logs say, once. None until they are read."""
        commit = self.commit
        found = None if commit is None else self.answer()
        if commit is None or found is None:
            return None
        self.commit = None
        return commit, found

    def ask(self, doubt: Mapping[int, int], sure_s: float = SURE_S) -> None:
        """Read the done logs once the next producer is open. `answer` returns what they say.

        `doubt` has the start offsets by partition. Reading begins `sure_s` seconds after the opening.
        """
        self._doubt, self._sure_s = dict(doubt), sure_s

    def answer(self) -> Mapping[int, Any] | None:
        """Return what the done logs say, once. None until they are read."""
        answer, self._answer = self._answer, None
        return answer

    def poll(self, now: float) -> None:
        """Open a producer at its time, and abandon calls that hang.

        Raises `ConfigurationError` if the client library refuses the settings.
        """
        self._poll_closing()
        if self._state is SlotState.CLOSED and now >= self._not_before:
            if self._may_open():
                self._open()
            return
        if self._call is not None and self._state is SlotState.OPENING:
            self._poll_opening(self._call, now)

    def _poll_opening(self, opening: Call[Any], now: float) -> None:
        if not opening.done():
            self._warn_if_slow(opening)
            if opening.age_s >= OPEN_LIMIT_S + self._clients.pace.limit(0.0):
                _log.warning("opening %s has not returned for %.0f s: it is abandoned", self.name, opening.age_s)
                self._replace(abandon=True)
            return
        try:
            found = opening.result()
        except IdLostError as error:
            _log.error("%s; another transactional id takes its place", error)
            self.lost_ids += 1
            self._replace()
        except (NotOpenedError, InDoubtError, KafkaException, StoppedError) as error:
            text = reason(error) if isinstance(error, KafkaException) else error
            is_lacking = isinstance(error, NotOpenedError | InDoubtError) and error.rights
            if not is_lacking:
                self._ration.warn("later", "%s cannot publish yet: %s; trying again", self.name, text)
            self._replace()
            self._not_before = now + (_PERMISSION_RETRY_DELAY_S if is_lacking else _RETRY_DELAY_S)
        else:
            self._call, self._state = None, SlotState.READY
            if self._doubt:
                self._doubt, self._answer = {}, found

    def renew(self) -> None:
        """Replace an idle producer."""
        if self.is_ready:
            self._replace()

    def close(self) -> None:
        """Close the producer on its thread, without waiting."""
        self._replace(abandon=self._state is SlotState.IN_FLIGHT)

    def _open(self) -> None:
        clients, doubt, sure_s = self._clients, dict(self._doubt), self._sure_s
        clients.left.require_few()
        self._thread = Disposable(f"penstock-publisher-{self.name}", clients.left)
        publisher = Publisher(clients, self.transactional_id, is_trial=self.is_trial, visibility=self._visibility())
        free_s = min(_MAX_FREE_ID_BUDGET_S, _FREE_ID_BUDGET_S * 2.0 ** min(self.lost_ids, 9))
        self._publisher = publisher

        def open_it() -> Mapping[int, Any]:
            # The broker ends the transaction that a former producer of this id left open.
            publisher.writer.open(_INIT_TIMEOUT_S, free_s)
            if not doubt:
                return {}
            publisher.writer.step("reading the done log")
            # A broker that was frozen answers with old data until it hears of the new leader.
            time.sleep(sure_s)
            return self._read_done(doubt)

        self._call = self._thread.start("opening a Kafka producer", open_it, clients.wake)
        self._state = SlotState.OPENING

    def _replace(self, *, abandon: bool = False) -> None:
        """Close the producer on its thread, or abandon both. `poll` opens a successor at its time."""
        thread, publisher = self._thread, self._publisher
        self._thread, self._publisher, self._call, self._state = None, None, None, SlotState.CLOSED
        if thread is None or publisher is None:
            return
        if abandon:
            thread.abandon(publisher.writer.close)
        else:
            self._closing.append((thread, publisher, thread.start("closing a Kafka producer", publisher.writer.close)))
            thread.close()

    def _poll_closing(self) -> None:
        for closing in list(self._closing):
            thread, publisher, call = closing
            if not call.done():
                if call.age_s < CLOSE_S:
                    continue
                thread.abandon(publisher.writer.close)
            self._closing.remove(closing)

    def _warn_if_slow(self, call: Call[Any]) -> None:
        if call.age_s >= SLOW_S and self._ration.is_due("slow"):
            name, age_s = self.slow_call()
            _log.warning("%s of %s has not returned for %.1f s", name, self.transactional_id, age_s)
