"""The transaction runner: Kafka transactions on a producer that can be abandoned. Each client call has a bound.

The library ignores the time-out of `send_offsets_to_transaction` while the group's coordinator is away
(librdkafka#5456). So each call is made on a `Disposable`. A call that does not answer in time is abandoned with its
producer, and the next producer fences it by their transactional id. A broker cannot end a transaction if a partition
does not take its marker, and meanwhile no producer gets its id. Then the next producer takes a new id.

The owner never waits for a call. Each call is a generator (`Steps`), which yields until the call has returned.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from penstock.clients.bounded_calls import Disposable, LeftBehind, NotAnsweredError
from penstock.clients.cluster import Cluster
from penstock.clients.transactional.end_watch import UnknownEndError
from penstock.clients.transactional.faults import GivenUpError, NotOpenedError, is_forbidden
from penstock.clients.transactional.writer import TransactionalWriter
from penstock.consumer.assignments import Assignment
from penstock.consumer.outbox.transaction import Transaction
from penstock.errors import PenstockError
from penstock.offsets import CommitPoint

T = TypeVar("T")
#: Yields while a call is under way, and returns its result.
Steps = Generator[None, None, T]

_log = logging.getLogger(__name__)

#: Seconds until brokers must have stored some of a transaction. Less for a trial of a topic that did not answer
#: before, because all other topics wait for it.
_DELIVERY_S = 5.0
_TRIAL_DELIVERY_S = 1.0
#: Seconds until a transaction is abandoned. Its calls have limits of their own, but the library may ignore them.
_ABANDON_AFTER_S = 12.0
#: Seconds for one try to initialise a producer, and for all tries.
_OPEN_TRY_S = 10.0
#: The writer's steps until all is stored.
_DELIVERING = frozenset({"produce", "delivery"})


class TooSlowError(PenstockError):
    """Brokers stored only a part of a transaction in its time: it is too large for them."""


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults that brokers found in a failed transaction."""

    #: Topics that take no message, each with the broker's error.
    topics: Mapping[str, KafkaError] = field(default_factory=dict)
    #: The topic that refused one of its messages, and the error; or None. It is unknown which message that was.
    message: tuple[str, KafkaError] | None = None
    #: Topics that did not answer.
    silent: Collection[str] = ()

    def __bool__(self) -> bool:
        return bool(self.topics or self.message or self.silent)


def transactional_ids(group: str) -> str:
    """Return the prefix of the transactional ids of a group's members."""
    return f"penstock.{group}."


class TransactionRunner:
    """Runs transactions for one thread. Any exception means a failed transaction; the owner then calls `discard`.

    Args:
        name: name of the threads that make the calls.
    """

    def __init__(self, name: str, group: str, cluster: Cluster, config: Mapping[str, Any]) -> None:
        self._name = name
        self._group = group
        self._cluster = cluster
        self._config = config
        self._left = LeftBehind(name)
        self._calls: Disposable | None = None
        self._writer: TransactionalWriter | None = None
        # No other process has this id, so only its own successor fences it. None: the next producer takes a new id.
        self._transactional_id: str | None = None
        #: Whether a call is under way.
        self.is_calling = False

    def require_open(self) -> Steps[None]:
        """Open a producer if there is none. Then any open transaction of its predecessor with the same id has ended."""
        if self._writer is None:
            self._writer = yield from self._call("opening a transactional producer", self._open)

    def _open(self) -> TransactionalWriter:
        self._transactional_id = self._transactional_id or f"{transactional_ids(self._group)}{uuid.uuid4()}"
        writer = self._cluster.transactional_writer(self._transactional_id, self._config)
        writer.open(_OPEN_TRY_S, _OPEN_TRY_S)
        return writer

    def committed(self, assignments: Sequence[Assignment]) -> Steps[dict[Assignment, CommitPoint]]:
        """Return the group's committed offsets with their metadata."""
        by_place = {(assignment.topic, assignment.partition): assignment for assignment in assignments}
        request = partial(self._cluster.stable_offsets, self._group, [TopicPartition(*place) for place in by_place])
        found = {}
        for answer in (yield from self._call("asking for the group's offsets", request)):
            if answer.error is not None:
                # A partition without an answer may have been committed.
                raise KafkaException(answer.error)
            found[by_place[answer.topic, answer.partition]] = CommitPoint(answer.offset, answer.metadata or "")
        return found

    def run(self, transaction: Transaction, group_metadata: Any, *, is_trial: bool = False) -> Steps[None]:
        """Write the messages, add the positions with the group's generation, and commit.

        With `is_trial` it waits less for the delivery. `TooSlowError` and `GivenUpError`: it did not reach its end in
        time, and will not be committed. `NotAnsweredError`: its outcome is unknown.
        """
        if (writer := self._writer) is None:
            raise NotOpenedError("the producer was given up")
        try:
            yield from self._call("a transaction", partial(self._run, transaction, writer, group_metadata, is_trial))
        except NotAnsweredError as error:
            if not writer.give_up():
                raise
            kind = TooSlowError if writer.doing in _DELIVERING else GivenUpError
            raise kind(f"{error} in {writer.doing}") from error
        except UnknownEndError as error:
            if not error.is_committed:
                raise
            _log.info("%s: its producer is replaced", error)
            self.discard(abort=False)

    def _run(self, transaction: Transaction, writer: TransactionalWriter, metadata: Any, is_trial: bool) -> None:
        writer.begin()
        written = (
            (result.topic, None if result.partition < 0 else result.partition, result.key, result.value, result.headers)
            for submission in transaction.submissions
            for result in submission.messages
        )
        begun = self._cluster.clock.monotonic()
        try:
            writer.produce([("", written)], room_s=_DELIVERY_S)
        except BufferError as error:
            raise TooSlowError(str(error)) from error
        if not writer.deliver(_TRIAL_DELIVERY_S if is_trial else _DELIVERY_S):
            took_s = self._cluster.clock.monotonic() - begun
            is_slow = took_s > _DELIVERY_S and not self.faults()
            raise (TooSlowError if is_slow else BufferError)(writer.blame.cause)
        positions = [
            TopicPartition(assignment.topic, assignment.partition, point.offset, metadata=point.metadata)
            for assignment, point in transaction.positions.items()
        ]
        writer.send_positions(positions, metadata)
        writer.commit()

    def faults(self) -> Faults:
        """Return the faults that brokers found in the failed transaction."""
        writer = self._writer
        if writer is None:
            return Faults()
        blame = writer.blame
        topics = {topic: _error_of(text) for topic, text in writer.not_let_in().items()}
        topics |= {topic: blame.errors[topic] for topic in blame.topics}
        refused = blame.messages.get("")
        return Faults(topics, None if refused is None else (refused[0], blame.errors[""]), frozenset(blame.silent))

    def discard(self, *, abort: bool | None, is_lost: bool = False) -> None:
        """Give up the producer after a failure.

        `abort`: whether to abort its transaction, which must not be in doubt. With None it aborts unless an end has
        begun, after the call under way has returned. `is_lost`: give up its id too, because the broker may be unable
        to end the open transaction.
        """
        writer, self._writer = self._writer, None
        calls = self._calls
        if is_lost:
            self._transactional_id = self._calls = None
        if calls is None:
            return
        end = partial(_end, writer, abort=abort)
        if is_lost:
            calls.abandon(end)
        else:
            calls.start("closing", end)

    def close(self) -> None:
        """Give up the producer and its calling thread, after the call under way has returned."""
        self.discard(abort=None)
        if self._calls is not None:
            self._calls.close()

    def _call(self, label: str, function: Callable[[], T]) -> Steps[T]:
        if self._calls is None:
            self._left.require_few()
            self._calls = self._cluster.disposable(self._name, self._left)
        calls, writer = self._calls, self._writer
        call, self.is_calling = calls.start(label, function), True
        try:
            while not calls.has_returned(
                call,
                _ABANDON_AFTER_S,
                lambda: None if writer is None else writer.close(),
                lambda: writer is not None and writer.is_stuck,
            ):
                yield
        except NotAnsweredError:
            self._calls = self._writer = None
            raise
        finally:
            self.is_calling = False
        return call.result()


def _error_of(log_text: str) -> KafkaError:
    """Return the error of a topic that the broker kept out of a transaction. Only the client's log has its text."""
    if is_forbidden(log_text):
        return KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    return KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, log_text)


def _end(writer: TransactionalWriter | None, *, abort: bool | None) -> None:
    """Abort a writer's open transaction, so that it holds back no readers, and close the writer. On its own thread."""
    if writer is None:
        return
    try:
        if writer.give_up() if abort is None else abort:
            writer.abort()
    except UnknownEndError as error:
        _log.info("%s; its successor ends it", error)
    finally:
        writer.close()
