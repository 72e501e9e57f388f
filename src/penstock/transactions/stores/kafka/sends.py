"""Sends halves into the half topic and decisions into the op topic, many decisions in one record.

All halves of a transaction are stored, or the transaction is rolled back. Decisions are batched by Nagle's rule: the
first one is sent at once; decisions that come meanwhile collect in order and are sent together after the next delivery
report. So a single caller never waits, and thousands of callers share a record. Each producer group and half partition
has a queue, which keeps its decisions in the order in which they were made.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Message

from penstock.errors import DecisionNotStoredError, HalfNotStoredError, StoppedError, TransactionError
from penstock.transactions.acked_producer import AckedProducer
from penstock.transactions.store import DecidedCallback, PreparedCallback
from penstock.transactions.stores.kafka.done_watch import PublicationPace
from penstock.transactions.wire.half import Half, encode_half
from penstock.transactions.wire.ops import Author, Op, Verdict, encode_ops
from penstock.transactions.wire.topics import StoreTopics

_log = logging.getLogger("penstock.transactions")

#: Decisions in one record at most: some 100 kB.
_MAX_DECISIONS = 2_000
#: Unacknowledged records of one queue at most.
_MAX_IN_FLIGHT = 2

Waiting = tuple[Op, DecidedCallback]


@dataclass(slots=True, eq=False)
class _DecisionQueue:
    """The decisions of one group for one half partition. The lock guards the fields, unless they say otherwise."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    waiting: list[Waiting] = field(default_factory=list)
    in_flight: list[list[Waiting]] = field(default_factory=list)
    #: Whether it is in `_to_flush` for decisions of the delivery thread. Used by that thread only, without the lock.
    is_marked: bool = False


class RecordSends:
    """Sends the halves and decisions of one producer. Thread-safe.

    `pace` controls when decisions are answered.
    """

    def __init__(self, sends: AckedProducer, topics: StoreTopics, pace: PublicationPace) -> None:
        self._sends = sends
        self._topics = topics
        self._half_topic, self._op_topic = topics.half, topics.op
        self._pace = pace
        #: Guards the state of transactions with several halves.
        self.parts_lock = threading.Lock()
        # Only grows; setdefault is atomic under the interpreter lock.
        self._queues: dict[tuple[str, int], _DecisionQueue] = {}
        # Queues to flush after the present delivery reports. Any thread adds, the delivery thread takes.
        self._to_flush: deque[_DecisionQueue] = deque()

    def prepare(self, halves: Sequence[Half], callback: PreparedCallback, ordering_key: bytes | None = None) -> None:
        """Store halves in one half partition and call back once they are durable.

        If a half is not known to be durable, the callback gets `HalfNotStoredError`, and a ROLLBACK is sent: it settles
        halves that were stored after all, without a check.
        """
        first = halves[0]
        key = first.key if ordering_key is None else ordering_key
        partition = self._topics.half_partition(first.transaction_id.encode() if key is None else key)
        stored = StoredHalves(halves, partition, callback, self)
        for number, half in enumerate(halves):
            try:
                self._sends.post(
                    self._half_topic, partition, half.key, half.value, headers=encode_half(half), report=stored.report
                )
            except (KafkaException, StoppedError) as error:
                stored.settle(len(halves) - number, 0, self.why_not(error), is_posted=number > 0)
                return

    def why_not(self, error: KafkaError | KafkaException | StoppedError) -> str:
        """Return the reason why a half is not stored."""
        if isinstance(error, StoppedError):
            return str(error)
        return self._sends.why(self._half_topic, error.args[0] if isinstance(error, KafkaException) else error)

    def not_stored(self, stored: StoredHalves, cause: str, *, is_posted: bool) -> HalfNotStoredError:
        """Roll back halves that may be stored after all; return the error for the callback."""
        half, partition = stored.halves[0], stored.partition
        if is_posted:
            op = Op(half.transaction_id, Verdict.ROLLBACK, Author.PRODUCER, half.group, partition, (), 0)
            self.decide(op, _log_lost)
        return HalfNotStoredError(
            f"transaction {half.transaction_id} for {half.topic}: its half is not known to be stored in "
            f"{self._half_topic}:{partition}: {cause}; the local transaction did not run, send it again"
        )

    def decide(self, op: Op, callback: DecidedCallback) -> None:
        """Send a decision; call back once it is durable, or with the error if that is not known."""
        place = (op.group, op.half_partition)
        queue = self._queues.get(place)
        if queue is None:
            queue = self._queues.setdefault(place, _DecisionQueue())
        if threading.get_ident() == self._sends.delivering:
            # Delivery reports come in groups, so their decisions are sent together. append() is atomic under the
            # interpreter lock; _flush takes from the front, under the queue's lock.
            queue.waiting.append((op, callback))
            if not queue.is_marked:
                queue.is_marked = True
                self._to_flush.append(queue)
            return
        with queue.lock:
            try:
                queue.waiting.append((op, callback))
                if queue.in_flight:
                    return
                refused = self._flush(queue)
            except BaseException:
                self._to_flush.append(queue)
                raise
        self._refuse(*refused)

    @property
    def unanswered(self) -> int:
        """The number of queues with unanswered decisions."""
        return sum(1 for queue in list(self._queues.values()) if queue.waiting or queue.in_flight)

    def after_reports(self) -> None:
        """Flush the queues that collected decisions during delivery reports. Called by the delivery thread."""
        for _ in range(len(self._to_flush)):
            queue = self._to_flush.popleft()
            queue.is_marked = False
            with queue.lock:
                refused = self._flush(queue)
            self._refuse(*refused)
        self._pace.release()

    def _flush(self, queue: _DecisionQueue) -> tuple[list[Waiting], str]:
        """Send waiting decisions up to the limit of records; return those that the client library refused, and why.

        The sending thread may be interrupted at each call. So a batch stays in `waiting` until it is sent, and no call
        comes between its removal there and its entry in `in_flight`.
        """
        while queue.waiting and len(queue.in_flight) < _MAX_IN_FLIGHT:
            batch = queue.waiting[:_MAX_DECISIONS]
            count, refusal = len(batch), ""
            try:
                report = partial(self._report, queue, batch)
                ops = [op for op, _ in batch]
                taken = self._sends.try_post(
                    self._op_topic, ops[0].half_partition, None, encode_ops(ops), report=report
                )
            except StoppedError as error:
                batch, refusal = queue.waiting[:], str(error)
                count = len(batch)
            except KafkaException as error:
                refusal = self._sends.why(self._op_topic, error.args[0])
            except BaseException:
                # It may be sent all the same. The delivery thread sends it again, which harms nothing; only the second
                # record is answered.
                batch.clear()
                raise
            if not refusal and not taken:
                # The delivery thread tries again after its next reports, or after 0.1 s.
                self._to_flush.append(queue)
                break
            del queue.waiting[:count]
            if refusal:
                # Later decisions are tried after the next reports.
                self._to_flush.append(queue)
                return batch, refusal
            queue.in_flight += [batch]
        return [], ""

    def _report(self, queue: _DecisionQueue, batch: list[Waiting], error: KafkaError | None, message: Message) -> None:
        with queue.lock:
            queue.in_flight = [sent for sent in queue.in_flight if sent is not batch]
        self._to_flush.append(queue)
        if error is not None:
            self._refuse(batch, self._sends.why(self._op_topic, error))
            return
        place = message.partition() or 0, message.offset() or 0
        self._pace.stored(*place, len(batch), partial(self._complete, batch))

    @staticmethod
    def _complete(batch: list[Waiting]) -> None:
        for _, callback in batch:
            try:
                callback(None)
            except Exception:  # noqa: BLE001 - the other decisions of the record must be completed
                _log.exception("a callback of a decision raised")

    def _refuse(self, batch: list[Waiting], cause: str) -> None:
        for op, callback in batch:
            callback(
                DecisionNotStoredError(
                    f"transaction {op.transaction_id}: its {op.verdict.name} is not known to be stored in "
                    f"{self._op_topic}:{op.half_partition}: {cause}"
                )
            )


class StoredHalves:
    """The halves of one transaction while they are sent, and their offsets once they are stored.

    The delivery report of a single half completes it without a lock. Several halves are counted under `parts_lock`:
    reports come from the delivery thread, refusals from the sending thread.
    """

    __slots__ = ("_callback", "_error", "_left", "_sends", "halves", "offsets", "partition")

    def __init__(self, halves: Sequence[Half], partition: int, callback: PreparedCallback, sends: RecordSends) -> None:
        self.halves = halves
        self.partition = partition
        #: The offsets of the halves, in order, once all are stored.
        self.offsets: tuple[int, ...] = ()
        self._callback: PreparedCallback | None = callback
        self._sends = sends
        # The number of halves without a report, and the first error.
        self._left = len(halves)
        self._error: str | None = None

    def report(self, error: KafkaError | None, message: Message) -> None:
        """Process the delivery report of one half."""
        offset = message.offset() or 0
        if error is None and len(self.halves) == 1:
            self.offsets = (offset,)
            self._answer(self)
        else:
            self.settle(1, offset, None if error is None else self._sends.why_not(error), is_posted=True)

    def settle(self, count: int, offset: int, cause: str | None, *, is_posted: bool) -> None:
        """Count one half stored at `offset`, or `count` halves that failed with `cause`; answer after the last one.

        `is_posted`: some halves were handed to the client library.
        """
        with self._sends.parts_lock:
            self._left -= count
            self._error = self._error or cause
            self.offsets += (offset,)
            if self._left:
                return
        if self._error is None:
            # They were sent in order into one partition.
            self.offsets = tuple(sorted(self.offsets))
            self._answer(self)
        else:
            self._answer(self._sends.not_stored(self, self._error, is_posted=is_posted))

    def _answer(self, answer: StoredHalves | HalfNotStoredError) -> None:
        # The callback's owner mostly refers to this object: dropping the callback avoids a reference cycle.
        callback, self._callback = self._callback, None
        if callback is not None:
            callback(answer)


def _log_lost(error: TransactionError | None) -> None:
    if error is not None:
        _log.warning("%s", error)
