"""Halves and decisions on their way into the half and op topics.

All halves of one transaction are stored, or it is rolled back. Of decisions many go in one record, by Nagle's rule: one
goes at once where none is under way; those that come meanwhile gather, in their order, and go together when the answer
is there. So one caller waits for nothing, and of thousands each pays a small part of a record. Lanes, one for each
producer group and half partition, keep decisions in the order in which they were made.
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
from penstock.transactions.stores.kafka.publication import PublicationPace
from penstock.transactions.wire.half import Half, encode_half
from penstock.transactions.wire.ops import Author, Op, Verdict, encode_ops
from penstock.transactions.wire.topics import StoreTopics

_log = logging.getLogger("penstock.transactions")

#: Most decisions in one record: some 100 kB.
_MOST = 2_000
#: Records of one lane that may be under way.
_UNDER_WAY = 2

Waiting = tuple[Op, DecidedCallback]


@dataclass(slots=True, eq=False)
class _Lane:
    """Decisions of one group for one half partition. All fields are guarded by the lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    waiting: deque[Waiting] = field(default_factory=deque)
    under_way: int = 0
    #: Whether it is to be looked at after the reports under way. The delivery thread's alone, and under no lock.
    is_gathering: bool = False


class RecordSends:
    """Writes the records of one producer: halves into the half topic, decisions into the op topic. Thread-safe.

    `pace` says when answers to decisions are given.
    """

    def __init__(self, sends: AckedProducer, topics: StoreTopics, pace: PublicationPace) -> None:
        self._sends = sends
        self._topics = topics
        self._half_topic, self._op_topic = topics.half, topics.op
        self._pace = pace
        #: Guards what is known of the halves of transactions with several.
        self.parts_lock = threading.Lock()
        # Only grows; setdefault is one step under the interpreter lock.
        self._lanes: dict[tuple[str, int], _Lane] = {}
        # Lanes to look at after the reports under way. Any thread adds, the delivery thread takes.
        self._dirty: deque[_Lane] = deque()

    def prepare(self, halves: Sequence[Half], callback: PreparedCallback, ordering_key: bytes | None = None) -> None:
        """Store halves in one half partition and call back once they are durable.

        Where one is not known to be durable, the callback gets `HalfNotStoredError`, and a ROLLBACK is written after
        them, so that they are settled without a check should they turn up after all.
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
        """Say why a half is not stored."""
        if isinstance(error, StoppedError):
            return str(error)
        return self._sends.why(self._half_topic, error.args[0] if isinstance(error, KafkaException) else error)

    def not_stored(self, stored: StoredHalves, cause: str, *, is_posted: bool) -> HalfNotStoredError:
        """Have halves rolled back that may turn up after all; return the error that tells of them."""
        half, partition = stored.halves[0], stored.partition
        if is_posted:
            op = Op(half.transaction_id, Verdict.ROLLBACK, Author.PRODUCER, half.group, partition, (), 0)
            self.decide(op, _log_lost)
        return HalfNotStoredError(
            f"transaction {half.transaction_id} for {half.topic}: its half is not known to be stored in "
            f"{self._half_topic}:{partition}: {cause}; the local transaction did not run, send it again"
        )

    def decide(self, op: Op, callback: DecidedCallback) -> None:
        """Have a decision written; call back once it is durable, or that is not known."""
        place = (op.group, op.half_partition)
        lane = self._lanes.get(place)
        if lane is None:
            lane = self._lanes.setdefault(place, _Lane())
        if self._sends.in_delivery_thread:
            # Reports come in crowds: what they lead to goes together. To append is one step under the interpreter lock;
            # whoever sends what waits takes it from the other end, under the lane's lock.
            lane.waiting.append((op, callback))
            if not lane.is_gathering:
                lane.is_gathering = True
                self._dirty.append(lane)
            return
        with lane.lock:
            lane.waiting.append((op, callback))
            if lane.under_way:
                return
            refused = self._flush(lane)
        self._refuse(*refused)

    @property
    def open(self) -> int:
        """Lanes with decisions that are not answered for."""
        return sum(1 for lane in list(self._lanes.values()) if lane.waiting or lane.under_way)

    def after_reports(self) -> None:
        """Send what gathered while reports came in. Called by the delivery thread."""
        for _ in range(len(self._dirty)):
            lane = self._dirty.popleft()
            lane.is_gathering = False
            with lane.lock:
                refused = self._flush(lane)
            self._refuse(*refused)
        self._pace.look()

    def _flush(self, lane: _Lane) -> tuple[list[Waiting], str]:
        """Send what waits, as far as may be under way; return what the client library refused, and why."""
        while lane.waiting and lane.under_way < _UNDER_WAY:
            batch = [lane.waiting.popleft() for _ in range(min(_MOST, len(lane.waiting)))]
            ops = [op for op, _ in batch]
            try:
                report = partial(self._report, lane, batch)
                taken = self._sends.try_post(
                    self._op_topic, ops[0].half_partition, None, encode_ops(ops), report=report
                )
            except StoppedError as error:
                # One by one: the delivery thread may add meanwhile.
                while lane.waiting:
                    batch.append(lane.waiting.popleft())
                return batch, str(error)
            except KafkaException as error:
                # Those behind it are tried with the next reports.
                self._dirty.append(lane)
                return batch, self._sends.why(self._op_topic, error.args[0])
            if not taken:
                lane.waiting.extendleft(reversed(batch))
                # The delivery thread tries again after its next reports, or after a tenth of a second.
                self._dirty.append(lane)
                break
            lane.under_way += 1
        return [], ""

    def _report(self, lane: _Lane, batch: list[Waiting], error: KafkaError | None, message: Message) -> None:
        with lane.lock:
            lane.under_way -= 1
        self._dirty.append(lane)
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
            except Exception:  # noqa: BLE001 - the others of the record must be completed
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
    """The halves of one transaction on their way into the half topic, and then their places there.

    One object for both: the delivery report of a single half completes it. Reports come from the delivery thread,
    refusals from the sending one: of several halves they meet under the lock of the sends.
    """

    __slots__ = ("_callback", "_error", "_left", "_sends", "halves", "offsets", "partition")

    def __init__(self, halves: Sequence[Half], partition: int, callback: PreparedCallback, sends: RecordSends) -> None:
        self.halves = halves
        self.partition = partition
        #: Their places, in the order of the halves, once all are stored.
        self.offsets: tuple[int, ...] = ()
        self._callback: PreparedCallback | None = callback
        self._sends = sends
        # Halves that nothing is known of yet, and the first error.
        self._left = len(halves)
        self._error: str | None = None

    def report(self, error: KafkaError | None, message: Message) -> None:
        """Take the delivery report of one half."""
        offset = message.offset() or 0
        if error is None and len(self.halves) == 1:
            self.offsets = (offset,)
            self._answer(self)
        else:
            self.settle(1, offset, None if error is None else self._sends.why_not(error), is_posted=True)

    def settle(self, count: int, offset: int, cause: str | None, *, is_posted: bool) -> None:
        """Take in that one half is stored at a place, or so many are not, for a cause; the last one completes them.

        `is_posted`: some were handed to the client library.
        """
        with self._sends.parts_lock:
            self._left -= count
            self._error = self._error or cause
            self.offsets += (offset,)
            if self._left:
                return
        if self._error is None:
            # They were sent in their order into one partition.
            self.offsets = tuple(sorted(self.offsets))
            self._answer(self)
        else:
            self._answer(self._sends.not_stored(self, self._error, is_posted=is_posted))

    def _answer(self, answer: StoredHalves | HalfNotStoredError) -> None:
        # Its owner mostly holds this object: without the callback neither needs the garbage collector.
        callback, self._callback = self._callback, None
        if callback is not None:
            callback(answer)


def _log_lost(error: TransactionError | None) -> None:
    if error is not None:
        _log.warning("%s", error)
