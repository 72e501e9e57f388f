"""Runs Kafka transactions on a producer that can be abandoned: nothing of the client library is without a bound.

The library ignores the time-out of `send_offsets_to_transaction` while the group's coordinator is away
(librdkafka#5456). So each call is made on a `Disposable`; one that does not answer in time is abandoned with its
producer, and the next producer fences it by their transactional id. A broker cannot end a transaction whose marker a
partition does not take, and gives its id to nobody: then the next producer has another one.

The owner waits for none of these calls: what makes one is a generator (`Steps`), which yields until it has returned.
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
#: Yields while a call has not returned, and returns what came of it.
Steps = Generator[None, None, T]

_log = logging.getLogger(__name__)

#: Seconds in which something of a transaction must be stored; and of one to a topic that did not answer before, which
#: all others wait for.
_DELIVERY_S = 5.0
_TRIAL_DELIVERY_S = 1.0
#: Seconds after which a transaction is abandoned: its calls have limits of their own, that the library may ignore.
_ABANDON_AFTER_S = 12.0
#: Seconds of one try to initialise a producer, and of all of them.
_OPEN_TRY_S = 10.0
#: What the writer does until all is stored.
_DELIVERING = frozenset({"produce", "delivery"})


class TooSlowError(PenstockError):
    """Brokers stored some of a transaction, and not all of it in its time: it is too large for them."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What brokers found fault with in a transaction that failed."""

    #: Topics that take nothing, each with the broker's error.
    topics: Mapping[str, KafkaError] = field(default_factory=dict)
    #: The topic that refused one of the messages, nobody knows which, and why; or None.
    message: tuple[str, KafkaError] | None = None
    #: Topics that did not answer.
    silent: Collection[str] = ()

    def __bool__(self) -> bool:
        return bool(self.topics or self.message or self.silent)


def transactional_ids(group: str) -> str:
    """Return how the transactional ids of a group's members begin."""
    return f"penstock.{group}."


class TransactionRunner:
    """For one thread. What is raised says that a transaction failed; then `discard` is to be called.

    Args:
        name: of the threads that make the calls.
    """

    def __init__(self, name: str, group: str, cluster: Cluster, config: Mapping[str, Any]) -> None:
        self._name = name
        self._group = group
        self._cluster = cluster
        self._config = config
        self._left = LeftBehind(name)
        self._calls: Disposable | None = None
        self._writer: TransactionalWriter | None = None
        # No other process has the id, so nobody fences this one but its own successor. None: a new one is to be taken.
        self._transactional_id: str | None = None
        #: Whether a call is under way.
        self.is_calling = False

    def require_open(self) -> Steps[None]:
        """Open a producer where none is. What a predecessor left open under its id has ended when this returns."""
        if self._writer is None:
            self._writer = yield from self._call("opening a transactional producer", self._open)

    def _open(self) -> TransactionalWriter:
        self._transactional_id = self._transactional_id or f"{transactional_ids(self._group)}{uuid.uuid4()}"
        writer = self._cluster.transactional_writer(self._transactional_id, self._config)
        writer.open(_OPEN_TRY_S, _OPEN_TRY_S)
        return writer

    def committed(self, assignments: Sequence[Assignment]) -> Steps[dict[Assignment, CommitPoint]]:
        """Return the group's committed offsets with their metadata."""
        asked = {(assignment.topic, assignment.partition): assignment for assignment in assignments}
        partitions = [TopicPartition(*place) for place in asked]
        ask = partial(self._cluster.stable_offsets, self._group, partitions)
        found = {}
        for at in (yield from self._call("asking for the group's offsets", ask)):
            if at.error is not None:
                # A partition without an answer is not known: it may have been committed.
                raise KafkaException(at.error)
            found[asked[at.topic, at.partition]] = CommitPoint(at.offset, at.metadata or "")
        return found

    def run(self, transaction: Transaction, group_metadata: Any, *, is_trial: bool = False) -> Steps[None]:
        """Write, add the positions as of the group's generation, commit; where it `is_trial`, do not wait for long.

        `TooSlowError`, `GivenUpError`: it did not get as far as its end in time, and never will. `NotAnsweredError`:
        nobody knows.
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
            (to.topic, None if to.partition < 0 else to.partition, to.key, to.value, to.headers)
            for submission in transaction.inside
            for to in submission.messages
        )
        begun = self._cluster.clock.monotonic()
        try:
            writer.produce("", written, room_s=_DELIVERY_S)
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
        """Return what brokers found fault with in the transaction that failed."""
        writer = self._writer
        if writer is None:
            return Faults()
        blame = writer.blame
        topics = {topic: _not_let_in(why) for topic, why in writer.not_let_in().items()}
        topics |= {topic: blame.errors[topic] for topic in blame.topics}
        refused = blame.messages.get("")
        return Faults(topics, None if refused is None else (refused[0], blame.errors[""]), frozenset(blame.silent))

    def discard(self, *, abort: bool | None, is_lost: bool = False) -> None:
        """Give the producer up after a failure, with an abort where the end of its transaction is not in doubt.

        With None there is an abort where the call under way, if any, comes back and has not begun an end.

        With `is_lost` its id too, for the broker may not be able to end what is open under it.
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
        """Give the producer up, and the thread that makes the calls, once the one under way has returned."""
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


def _not_let_in(why: str) -> KafkaError:
    """Return the error of a topic that was not let into a transaction, which only the client's log tells."""
    if is_forbidden(why):
        return KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    return KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, why)


def _end(writer: TransactionalWriter | None, *, abort: bool | None) -> None:
    """Abort what a writer has open, so that it holds no readers back, and discard it. On its own thread."""
    if writer is None:
        return
    try:
        if writer.give_up() if abort is None else abort:
            writer.abort()
    except UnknownEndError as error:
        _log.info("%s; its successor ends it", error)
    finally:
        writer.close()
