"""The store in Kafka topics, as producers see it: halves and decisions in, checks out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message

from penstock import clients
from penstock.clients.rights import Operation, principal_of
from penstock.errors import HalfNotStoredError, StoppedError, TransactionError
from penstock.options import ClientConfig
from penstock.transactions.coordinator.logs.topic_settings import mend_settings
from penstock.transactions.operator.cancelling_in_kafka import cancel
from penstock.transactions.operator.inspection import Inspection
from penstock.transactions.store import DecidedCallback, Prepared, PreparedCallback, SettledCallback
from penstock.transactions.stores.kafka.check_source import KafkaCheckSource
from penstock.transactions.stores.kafka.op_batches import OpBatches
from penstock.transactions.stores.kafka.publication_diagnosis import PublicationDiagnosis, observer_of
from penstock.transactions.stores.kafka.publication_watch import DoneWatch
from penstock.transactions.stores.target_topics import TargetTopics
from penstock.transactions.wire.check_request import CheckRequest
from penstock.transactions.wire.half import Half, encode_half
from penstock.transactions.wire.ops import Author, Op, Verdict
from penstock.transactions.wire.topics import StoreTopics, open_topics, require_prefix
from penstock.transactions.writing.acked_producer import AckedProducer
from penstock.transactions.writing.receipt import Report

_log = logging.getLogger("penstock.transactions")

_STOP_POLL_S = 0.005

#: What every producer does with the topics of the store. Who waits for publications, or answers checks, needs READ on
#: one more, and is told so when it does.
_NEEDS = {
    "half": (Operation.WRITE,),
    "op": (Operation.WRITE,),
    "done": (Operation.DESCRIBE,),
    "check": (Operation.DESCRIBE,),
    "discarded": (Operation.DESCRIBE,),
}


class StoredHalves(NamedTuple):
    """The halves of one transaction and their places in the half topic. A named tuple, for it is quick to make."""

    halves: Sequence[Half]
    partition: int
    offsets: tuple[int, ...]


def _log_lost(error: TransactionError | None) -> None:
    if error is not None:
        _log.warning("%s", error)


class _Storing:
    """Halves on their way into the log. Reports come from the delivery thread, refusals from the sending one."""

    __slots__ = (
        "_callback",
        "_describe",
        "_left",
        "_lock",
        "_offsets",
        "_why",
        "error",
        "halves",
        "partition",
        "posted",
    )

    def __init__(
        self,
        halves: Sequence[Half],
        partition: int,
        callback: PreparedCallback,
        describe: Callable[[_Storing], HalfNotStoredError],
        why: Callable[[KafkaError], str],
    ) -> None:
        self.halves = halves
        self.partition = partition
        #: How many were handed to the client library.
        self.posted = len(halves)
        self.error: str | None = None
        self._callback = callback
        self._describe = describe
        self._why = why
        self._offsets = [0] * len(halves)
        # Guards what is left to be reported and the error.
        self._lock = threading.Lock()
        self._left = len(halves)

    def report(self, error: KafkaError | None, message: Message) -> None:
        """Take the delivery report of the first half."""
        if len(self.halves) > 1:
            self.report_part(0, error, message)
        elif error is None:
            self._callback(StoredHalves(self.halves, self.partition, (message.offset() or 0,)))
        else:
            self._settle(1, self._why(error))

    def report_part(self, number: int, error: KafkaError | None, message: Message) -> None:
        """Take the delivery report of one half of several."""
        self._offsets[number] = message.offset() or 0
        self._settle(1, None if error is None else self._why(error))

    def fail(self, count: int, cause: str) -> None:
        """Take in that the last so many were not taken by the client library."""
        self.posted -= count
        self._settle(count, cause)

    def _settle(self, count: int, cause: str | None) -> None:
        with self._lock:
            self._left -= count
            self.error = self.error or cause
            if self._left:
                return
        if self.error is None:
            self._callback(StoredHalves(self.halves, self.partition, tuple(self._offsets)))
        else:
            self._callback(self._describe(self))


class KafkaStore:
    """Halves in `<prefix>.half`, decisions in `<prefix>.op`. Thread-safe; `start` and `stop` are called once each.

    A half or decision that is not acknowledged within `send_timeout_s` counts as not stored.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        prefix: str,
        partitions: int,
        config: ClientConfig,
        send_timeout_s: float,
        name: str,
    ) -> None:
        require_prefix(prefix)
        self._bootstrap_servers = bootstrap_servers
        self._prefix = prefix
        self._partitions = partitions
        self._config = config
        self._send_timeout_s = send_timeout_s
        self._admin = clients.admin(bootstrap_servers, config)
        self._name = name
        self._sends = AckedProducer(bootstrap_servers, config, send_timeout_s, name)
        # These three are set by start() before any other call; decisions go to the op topic of these topics.
        self._topics = StoreTopics(prefix, partitions)
        self._ops = OpBatches(self._sends, self._topics.op)
        self._why: PublicationDiagnosis
        # Made at the first watch, under its lock.
        self._watch: DoneWatch | None = None
        self._watch_lock = threading.Lock()
        self._targets = TargetTopics(self._admin, bootstrap_servers, config, self._topics.may_publish_to)

    def start(self) -> None:
        """Create the store's topics where they are absent and start sending. Raises as `open_topics`."""
        principal = principal_of(self._config)
        self._topics = open_topics(
            self._admin, self._bootstrap_servers, self._prefix, self._partitions, needs=_NEEDS, principal=principal
        )
        mend_settings(self._admin, self._bootstrap_servers, self._topics, refuses=False, principal=principal)
        self._ops = OpBatches(self._sends, self._topics.op)
        inspection = Inspection(self._bootstrap_servers, self._config, self._topics)
        read = observer_of(self._admin, self._bootstrap_servers, inspection, self._topics)
        self._why = PublicationDiagnosis(read, self._prefix)
        self._sends.after_reports = self._ops.after_reports
        self._sends.start()

    def stop(self, timeout_s: float) -> None:
        """Wait for what is being sent, at most `timeout_s` seconds."""
        if self._sends.is_inherited:
            # What is open there is the parent's.
            return
        deadline = time.monotonic() + timeout_s
        while self._ops.open and time.monotonic() < deadline:
            time.sleep(_STOP_POLL_S)
        left = self._sends.stop(max(0.0, deadline - time.monotonic()))
        # What waited behind those is refused.
        self._ops.after_reports()
        if left:
            _log.warning("%d records of store %s were not acknowledged; checks will settle them", left, self._prefix)
        with self._watch_lock:
            if self._watch is not None:
                self._watch.stop()

    def require_target(self, topic: str, partition: int | None) -> None:
        """Raise as `TargetTopics.require`; or `StoppedError` in a process that was forked from the store's."""
        self._sends.require_own()
        if partition is not None or topic not in self._targets.counts:
            self._targets.require(topic, partition)

    def prepare(self, halves: Sequence[Half], callback: PreparedCallback, ordering_key: bytes | None = None) -> None:
        """Store halves in one half partition and call back once they are durable.

        Where one is not known to be durable, the callback gets `HalfNotStoredError`, and a ROLLBACK is written after
        them, so that they are settled without a check should they turn up after all.
        """
        first = halves[0]
        key = first.key if ordering_key is None else ordering_key
        partition = self._topics.half_partition(first.transaction_id.encode() if key is None else key)
        why = partial(self._sends.why, self._topics.half)
        storing = _Storing(halves, partition, callback, self._not_stored, why)
        report: Report = storing.report
        for number, half in enumerate(halves):
            if number:
                report = partial(storing.report_part, number)
            try:
                self._sends.post(
                    self._topics.half, partition, half.key, half.value, headers=encode_half(half), report=report
                )
            except (KafkaException, StoppedError) as error:
                cause = why(error.args[0]) if isinstance(error, KafkaException) else str(error)
                storing.fail(len(halves) - number, cause)
                return

    def _not_stored(self, storing: _Storing) -> HalfNotStoredError:
        half, partition = storing.halves[0], storing.partition
        if storing.posted:
            op = Op(half.transaction_id, Verdict.ROLLBACK, Author.PRODUCER, half.group, partition, (), 0)
            self._ops.add(op, _log_lost)
        return HalfNotStoredError(
            f"transaction {half.transaction_id} for {half.topic}: its half is not known to be stored in "
            f"{self._topics.half}[{partition}]: {storing.error}; the local transaction did not run, send it again"
        )

    def decide(self, prepared: Prepared, verdict: Verdict, callback: DecidedCallback) -> None:
        """Store the producer's decision; call back once it is durable, or why that is not known."""
        assert isinstance(prepared, StoredHalves)  # noqa: S101 - a store gets back what it gave out
        half = prepared.halves[0]
        place = (prepared.partition, prepared.offsets)
        self._ops.add(Op(half.transaction_id, verdict, Author.PRODUCER, half.group, *place, 0), callback)

    def answer(self, request: CheckRequest, verdict: Verdict, author: Author) -> None:
        """Store the answer to a check and return once it is durable, or raise `DecisionNotStoredError`."""
        half = request.half
        place = (request.half_partition, (request.half_offset,))
        self._await_stored(Op(half.transaction_id, verdict, author, half.group, *place, request.check_number))

    def _await_stored(self, op: Op) -> None:
        """Store a decision and return once it is durable, or raise `DecisionNotStoredError`."""
        answers: SimpleQueue[TransactionError | None] = SimpleQueue()
        self._ops.add(op, answers.put)
        error = answers.get()
        if error is not None:
            raise error

    def cancel(self, transaction_id: str, group: str, wait_s: float) -> None:
        """Take a committed message back that is not due yet, and return once it is rolled back; see `Store.cancel`.

        It reads what is pending, for no index of ids is kept.
        """
        inspection = Inspection(self._bootstrap_servers, self._config, self._topics)
        cancel(inspection, self._topics, self._await_stored, transaction_id=transaction_id, group=group, wait_s=wait_s)

    def watch(self, transaction_id: str, callback: SettledCallback) -> None:
        """Call back once a transaction is settled, as soon as a committed reader of the done log sees it."""
        with self._watch_lock:
            if self._watch is None:
                self._watch = DoneWatch(self._bootstrap_servers, self._config, self._topics, self._name)
            self._watch.add(transaction_id, callback)

    def forget(self, transaction_id: str) -> None:
        """Give a watch up."""
        if self._watch is not None:
            self._watch.remove(transaction_id)

    def waits_for(self, transaction_id: str, topics: Sequence[str]) -> str:
        """Say what a committed transaction waits for, as far as that is known within seconds; see `Store.waits_for`."""
        lacking = "" if self._watch is None else self._watch.lacking
        return f"a right to be seen: {lacking}" if lacking else self._why.cause(transaction_id, topics)

    def checks(self, group: str) -> KafkaCheckSource:
        """Return the checks of a producer group: its share of `<prefix>.check`."""
        return KafkaCheckSource(self._bootstrap_servers, self._config, self._topics, group)
