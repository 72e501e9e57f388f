"""Halves on their way into the half topic: all of one transaction are stored, or it is rolled back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Message

from penstock.errors import HalfNotStoredError, StoppedError, TransactionError
from penstock.transactions.store import PreparedCallback
from penstock.transactions.stores.kafka.op_batches import OpBatches
from penstock.transactions.wire.half import Half, encode_half
from penstock.transactions.wire.ops import Author, Op, Verdict
from penstock.transactions.wire.topics import StoreTopics
from penstock.transactions.writing.acked_producer import AckedProducer, Report

_log = logging.getLogger("penstock.transactions")


class StoredHalves:
    """The halves of one transaction on their way into the half topic, and then their places there.

    One object for both: the delivery report of a single half completes it. Reports come from the delivery thread,
    refusals from the sending one.
    """

    __slots__ = ("_callback", "_error", "_left", "_lock", "_places", "_sends", "halves", "offsets", "partition")

    def __init__(
        self, halves: Sequence[Half], partition: int, callback: PreparedCallback | None, sends: HalfSends
    ) -> None:
        self.halves = halves
        self.partition = partition
        #: Their places; none as long as they are not stored.
        self.offsets: tuple[int, ...] = ()
        self._callback = callback
        self._sends = sends
        if len(halves) > 1:
            # Guards the fields below, which one half has no need of: places so far, reports to come, the first error.
            self._lock = threading.Lock()
            self._places = [0] * len(halves)
            self._left = len(halves)
            self._error: str | None = None

    def report(self, error: KafkaError | None, message: Message) -> None:
        """Take the delivery report of the only half."""
        if error is None:
            self._stored((message.offset() or 0,))
        else:
            self.failed(self._sends.why_not(error), is_posted=True)

    def report_part(self, number: int, error: KafkaError | None, message: Message) -> None:
        """Take the delivery report of one half of several."""
        self._places[number] = message.offset() or 0
        self.settle(1, None if error is None else self._sends.why_not(error), is_posted=True)

    def settle(self, count: int, cause: str | None, *, is_posted: bool) -> None:
        """Take in that so many halves of several are stored, or not, for a cause; the last one completes them."""
        with self._lock:
            self._left -= count
            self._error = self._error or cause
            if self._left:
                return
        if self._error is None:
            self._stored(tuple(self._places))
        else:
            self.failed(self._error, is_posted=is_posted)

    def _stored(self, offsets: tuple[int, ...]) -> None:
        """Take in that all are stored."""
        self.offsets = offsets
        # Its owner mostly holds this object: without the callback neither needs the garbage collector.
        callback, self._callback = self._callback, None
        if callback is not None:
            callback(self)

    def failed(self, cause: str, *, is_posted: bool) -> None:
        """Take in that not all are stored; `is_posted`: some were handed to the client library."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback(self._sends.not_stored(self, cause, is_posted=is_posted))


def _log_lost(error: TransactionError | None) -> None:
    if error is not None:
        _log.warning("%s", error)


class HalfSends:
    """Stores halves. Thread-safe; decisions to roll back go to `ops`."""

    def __init__(self, sends: AckedProducer, topics: StoreTopics, ops: OpBatches) -> None:
        self._sends = sends
        self._topics = topics
        self._half_topic = topics.half
        self._ops = ops

    def prepare(self, halves: Sequence[Half], callback: PreparedCallback, ordering_key: bytes | None = None) -> None:
        """Store halves in one half partition and call back once they are durable.

        Where one is not known to be durable, the callback gets `HalfNotStoredError`, and a ROLLBACK is written after
        them, so that they are settled without a check should they turn up after all.
        """
        first = halves[0]
        key = first.key if ordering_key is None else ordering_key
        partition = self._topics.half_partition(first.transaction_id.encode() if key is None else key)
        stored = StoredHalves(halves, partition, callback, self)
        if len(halves) > 1:
            self._prepare_several(stored)
            return
        try:
            self._sends.post(
                self._half_topic, partition, first.key, first.value, headers=encode_half(first), report=stored.report
            )
        except (KafkaException, StoppedError) as error:
            stored.failed(self.why_not(error), is_posted=False)

    def _prepare_several(self, stored: StoredHalves) -> None:
        for number, half in enumerate(stored.halves):
            report: Report = partial(stored.report_part, number)
            try:
                self._sends.post(
                    self._half_topic, stored.partition, half.key, half.value, headers=encode_half(half), report=report
                )
            except (KafkaException, StoppedError) as error:
                stored.settle(len(stored.halves) - number, self.why_not(error), is_posted=number > 0)
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
            self._ops.add(op, _log_lost)
        return HalfNotStoredError(
            f"transaction {half.transaction_id} for {half.topic}: its half is not known to be stored in "
            f"{self._half_topic}[{partition}]: {cause}; the local transaction did not run, send it again"
        )
