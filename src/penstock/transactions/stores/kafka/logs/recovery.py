"""Recovery of half partitions: from which offsets to read, and what is settled above them.

The order matters:

1. The topic ids. If a log was deleted and created again, or truncated, reading begins at the start of the logs. The
   consequence is logged and counted.
2. The committed positions, read as a read_committed client. The broker answers only after each predecessor's
   transaction on them has ended. It refuses later ones: their group generation is old.
3. The done log, up to the end that it had *before* reading. The last stable offset is not enough: transaction markers
   may reach `done` after they reached the positions. The records above the half checkpoint name all that was ever
   settled there.

A predecessor's transaction may not end by itself, in 2 or in 3. Then recovery ends it instead of waiting for its
time-out: it initialises a producer with the predecessor's transactional id, which is committed with the position. This
fences the former producer. If that one was alive, it loses one Kafka transaction, reads its result in the done log, and
continues.

Other partitions do not wait for a predecessor's transaction: each attempt has a disposable thread and clients of its
own. An attempt that makes no step for long is abandoned and replaced; a failed one is repeated after a moment. A result
is valid only while its assignment lasts: a partition that was revoked and came back has another attempt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from penstock import clients
from penstock.clients.bounded_calls import BackgroundCall, Call, Disposable, NotAnsweredError
from penstock.clients.kafka_errors import ErrorKind, is_missing_right, reason
from penstock.clients.reading import PartitionReader, Place
from penstock.clients.rights import Operation, group_right, topic_right
from penstock.clients.topics import ask_topic_ids
from penstock.clients.transactional.missing_rights import is_group_forbidden
from penstock.clients.transactional.settings import initialise
from penstock.clients.transactional.writer import TRANSACTION_S
from penstock.errors import MessageFormatError, StoppedError
from penstock.transactions.core.recovered_state import without_payloads
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.logs.recovered_partition import (
    Committed,
    DoneRead,
    RecoveredPartition,
    committed_at,
    decode_claim,
    names_of,
    recovered_partition,
)
from penstock.transactions.wire.done_records import decode_done

_log = logging.getLogger("penstock.transactions")

_ANSWER_S = 10.0
_COORDINATOR_S = 2.0
_POLL_S = 0.1
#: Seconds in which a live predecessor may end its transaction by itself.
_PREDECESSOR_GRACE_S = 1.0
#: Seconds after which the broker must have aborted a transaction that holds positions: its time limit plus the broker's
#: own check interval. After that, a warning is logged.
_OPEN_TRANSACTION_WARNING_AFTER_S = 25.0
_HELD = (
    "positions of %s in half partitions %s cannot be read: no broker returns them, or a Kafka transaction that should "
    "have timed out holds them back; decided transactions wait there. If the brokers are well, one of them has lost a "
    "transaction's end: `kafka-transactions.sh find-hanging --broker-id N` names it, and `kafka-transactions.sh abort` "
    "ends it (KAFKA-20734 is one cause)"
)
#: Seconds for the call that ends a transaction, and for all steps around it.
_INIT_TIMEOUT_S = 6.0
_FENCING_BUDGET_S = 8.0
#: Seconds without a step after which an attempt is abandoned: more than twice the limit of any single call.
_ABANDON_AFTER_S = 30.0
#: Seconds between a failed attempt and the next one, and if a permission is missing.
_RETRY_DELAY_S = 0.2
_PERMISSION_RETRY_DELAY_S = 1.0

#: Called with the name of each step before the step. It raises `StoppedError` when the coordinator stops.
Step = Callable[[str], object]


class RecoveryReader:
    """Reads positions and done logs with short-lived consumers. Thread-safe: calls share nothing.

    `own_ids` returns the transactional ids of this coordinator's producers: it does not fence them.
    """

    def __init__(self, context: CoordinatorContext, own_ids: Callable[[], Sequence[str]]) -> None:
        self._context, self._topics = context, context.topics
        self._names = names_of(context.topics)
        self._admin = clients.admin(context.bootstrap_servers, context.config)
        self._own_ids = own_ids
        self._reader = partial(
            PartitionReader, context.bootstrap_servers, context.config, self._topics.coordinators, self._not_read
        )
        self._unreadable = f"the positions and the done log of {self._topics.prefix} cannot be read"

    def recover(self, partitions: Iterable[int], step: Step) -> dict[int, RecoveredPartition]:
        """Return the start state of half partitions; waits until a predecessor's transactions have ended.

        Raises `KafkaException` if a broker does not answer: try again.
        """
        wanted = list(partitions)
        step("asking for topic ids")
        found = ask_topic_ids(self._admin, self._names.values(), _ANSWER_S).ids
        ids = {log: found[name] for log, name in self._names.items() if name in found}
        # Transactional ids whose open transactions were ended.
        ended: set[str] = set()
        committed = self._committed(wanted, step, ended)
        done = self.done(wanted, {}, step, ended=ended)
        self._context.rights.granted(
            group_right(self._topics.coordinators), *(topic_right(Operation.READ, log) for log in self._names.values())
        )
        return {
            p: recovered_partition(
                self._topics, p, {log: committed[name, p] for log, name in self._names.items()}, ids, done[p]
            )
            for p in wanted
        }

    def await_coordinator(self) -> None:
        """Return once the broker that coordinates the group answers; raise `KafkaException` if it does not."""
        with self._reader(isolation="read_uncommitted") as reader:
            try:
                answer = reader.consumer.committed([TopicPartition(self._topics.half, 0)], _COORDINATOR_S)[0]
            except KafkaException:
                self._note_group_right(reader.consumer)
                raise
        if answer.error is not None:
            raise KafkaException(answer.error)

    def _committed(self, partitions: list[int], step: Step, ended: set[str]) -> dict[Place, Committed]:
        """Return the position and the bounds of each log."""
        logs = [(topic, p) for p in partitions for topic in self._names.values()]
        # This shows an open trial, which the broker may have accepted before the group's generation changed, and which
        # may still write to the done log.
        trials = {self._topics.trial_place(p) for p in partitions}
        places = [TopicPartition(*place) for place in (*logs, *trials)]
        begun = time.monotonic()
        wait_until = begun + _PREDECESSOR_GRACE_S
        with self._reader() as reader:
            while True:
                step(f"asking for positions of {self._topics.coordinators}, which a Kafka transaction may hold back")
                answers = self._ask_committed(reader.consumer, places)
                if answers and all(place.error is None for place in answers):
                    break
                time.sleep(_POLL_S)
                if time.monotonic() >= wait_until:
                    self._end_predecessors(partitions, ended)
                    wait_until = time.monotonic() + _PREDECESSOR_GRACE_S
                    if wait_until - begun >= _OPEN_TRANSACTION_WARNING_AFTER_S:
                        self._context.ration.warn("held", _HELD, self._topics.coordinators, sorted(partitions))
            # Bounds after positions: an end that was read earlier may lie below a position.
            return {
                (place.topic, place.partition): committed_at(
                    place, *reader.consumer.get_watermark_offsets(place, _ANSWER_S)
                )
                for place in answers
                if place.topic != self._topics.discarded
            }

    def _end_predecessors(self, partitions: Iterable[int], ended: set[str]) -> None:
        """End the transactions that hold back positions or the done log."""
        group = self._topics.coordinators
        try:
            # The ids are committed with half positions. A transaction holds back its half and op positions together.
            halves = [TopicPartition(self._topics.half, number) for number in partitions]
            with self._reader(isolation="read_uncommitted") as reader:
                answers = reader.consumer.committed(halves, _ANSWER_S)
            ids = {name for answer in answers for name in decode_claim(self._topics, answer.metadata)}
            ended |= end_transactions(self._context, ids - set(self._own_ids()) - ended)
        except KafkaException as error:
            _log.info("the owners of transactions that hold back positions of %s are unknown: %s", group, reason(error))

    def _ask_committed(self, consumer: Consumer, places: list[TopicPartition]) -> list[TopicPartition]:
        """Return positions, which may carry errors; nothing if they are not stable yet."""
        context, group = self._context, self._topics.coordinators
        try:
            answers = consumer.committed(places, _PREDECESSOR_GRACE_S)
        except KafkaException as error:
            if context.note_unreadable(error, self._unreadable, self._topics.half):
                raise
            self._note_group_right(consumer)
            # UNSTABLE_OFFSET_COMMIT passes by itself, at the latest after the predecessor's transaction time-out.
            _log.info("positions of %s are not stable yet: %s", group, reason(error))
            return []
        for answer in answers:
            if answer.error is not None and context.note_unreadable(answer.error, self._unreadable, answer.topic):
                raise KafkaException(answer.error)
        return answers

    def _note_group_right(self, consumer: Consumer) -> None:
        if is_group_forbidden(consumer):
            self._context.rights.refused(self._unreadable, group_right(self._topics.coordinators))

    def done(
        self, partitions: Iterable[int], starts: Mapping[int, int], step: Step, *, ended: set[str] | None = None
    ) -> dict[int, DoneRead]:
        """Read done logs from `starts`, or else from their beginnings, to their ends; waits for open transactions.

        With `ended`, it ends transactions of former owners after a grace period, except those of these ids, and adds
        their ids. A coordinator that owned the partitions before must not pass it: another one may own them now. For
        `step` and errors see `recover`.
        """
        log = self._topics.done
        step(f"asking where {log} ends")
        with self._reader(isolation="read_uncommitted") as reader:
            bounds = reader.bounds(log, partitions, _ANSWER_S)
        found = {p: DoneRead(end, []) for p, (_, end) in bounds.items()}
        # A log that ends below its start was created again: it is read from its beginning.
        begins = {
            (log, p): low if starts.get(p, 0) > end else max(starts.get(p, 0), low) for p, (low, end) in bounds.items()
        }
        ended_at = time.monotonic()

        def on_step(behind: set[Place], idle_s: float) -> None:
            nonlocal ended_at
            step(f"reading {log}, in which a Kafka transaction may be open")
            if ended is not None and min(idle_s, time.monotonic() - ended_at) >= _PREDECESSOR_GRACE_S:
                # A predecessor died between the records of its transaction and its positions: only `done` shows it.
                self._end_predecessors((partition for _, partition in behind), ended)
                ended_at = time.monotonic()

        ends = {(log, p): end for p, (_, end) in bounds.items()}
        with self._reader() as reader:
            for message in chain.from_iterable(reader.read(begins, ends, step=on_step)):
                partition, offset = message.partition() or 0, message.offset() or 0
                try:
                    found[partition].records.append((offset, without_payloads(decode_done(message.value()))))
                except MessageFormatError as bad:
                    found[partition].unreadable.append(offset)
                    self._context.ration.warn("done", "%s:%d@%d: %s", log, partition, offset, bad)
        return found

    def _not_read(self, _kind: ErrorKind, error: KafkaError, _place: Place) -> None:
        """Raise an error of reading the done log; note a missing permission."""
        self._context.note_unreadable(error, self._unreadable, self._topics.done)
        raise KafkaException(error)


def end_transactions(context: CoordinatorContext, ids: Iterable[str]) -> set[str]:
    """End the open transactions of transactional ids, within a time limit; return the ids for which that worked.

    A live producer can open new transactions, but the group's generation refuses them. They are not ended again: that
    would disturb its work on the partitions that it still owns.
    """
    calls = {
        name: BackgroundCall(f"fencing {name}", partial(_end, context, name), _FENCING_BUDGET_S, context.left)
        for name in sorted(ids)
    }
    ended = set()
    for name, call in calls.items():
        try:
            call.wait()
        except (KafkaException, NotAnsweredError) as error:
            _log.warning("the Kafka transaction of %s cannot be ended: %s; its time limit will", name, reason(error))
        else:
            ended.add(name)
            _log.info("the Kafka transaction that %s left open was ended", name)
    return ended


def _end(context: CoordinatorContext, name: str) -> None:
    settings = {"transaction.timeout.ms": int(TRANSACTION_S * 1000), "transactional.id": name}
    producer = clients.producer(context.bootstrap_servers, {**context.config, **settings})
    try:
        initialise(producer, context.topics.done, _INIT_TIMEOUT_S)
    finally:
        producer.close()


@dataclass(slots=True, eq=False)
class _Attempt:
    """An attempt. Its thread writes `doing` and `stepped_at` (atomic assignments), the coordinator's thread reads."""

    partitions: list[int]
    thread: Disposable
    doing: str = "recovering partitions"
    begun: float = field(default_factory=time.monotonic)
    stepped_at: float = field(default_factory=time.monotonic)
    #: After a failure: the monotonic second of the next attempt.
    retry_at: float | None = None
    call: Call[dict[int, RecoveredPartition]] = field(init=False)


class Recoveries:
    """Runs recovery attempts in the background. Used by the coordinator's thread; never waits.

    `recover` is `RecoveryReader.recover`; `stopping` returns whether the coordinator stops.
    """

    def __init__(
        self,
        context: CoordinatorContext,
        recover: Callable[[Iterable[int], Step], dict[int, RecoveredPartition]],
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._recover = recover
        self._stopping = stopping
        self._name, self._left, self._ration = context.topics.prefix, context.left, context.ration
        # The valid attempt of each partition.
        self._wanted: dict[int, _Attempt] = {}

    @property
    def partitions(self) -> list[int]:
        """The partitions that are being recovered."""
        return list(self._wanted)

    def begin(self, partitions: Iterable[int]) -> None:
        """Start to recover partitions."""
        numbers = list(partitions)
        if not numbers:
            return
        self._left.require_few()
        attempt = _Attempt(numbers, Disposable(f"penstock-takeover-{self._name}", self._left))

        def step(doing: str) -> None:
            self.require_running()
            attempt.doing, attempt.stepped_at = doing, time.monotonic()

        attempt.call = attempt.thread.start(attempt.doing, lambda: self._recover(numbers, step))
        self._wanted.update(dict.fromkeys(numbers, attempt))

    def require_running(self, _doing: str = "") -> None:
        """Raise `StoppedError` if the coordinator stops. Any thread."""
        if self._stopping():
            raise StoppedError(f"the coordinator of {self._name} stops while it reads its logs")

    def forget(self, partition: int) -> None:
        """Drop the attempt of a revoked partition."""
        self._wanted.pop(partition, None)

    def found(self, now: float) -> list[tuple[int, RecoveredPartition]]:
        """Return new results for partitions that are still assigned; restart failed or hung attempts."""
        found: list[tuple[int, RecoveredPartition]] = []
        for attempt in dict.fromkeys(self._wanted.values()):
            numbers = [number for number in attempt.partitions if self._wanted.get(number) is attempt]
            if attempt.retry_at is not None:
                if now >= attempt.retry_at:
                    self.begin(numbers)
            elif attempt.call.done():
                found += self._take_in(attempt, numbers, now)
            elif now - attempt.stepped_at >= _ABANDON_AFTER_S:
                _log.warning("%s has not returned for %.0f s: it is abandoned", attempt.doing, _ABANDON_AFTER_S)
                # The hung call closes its clients itself when it returns.
                attempt.thread.abandon(lambda: None)
                self.begin(numbers)
        return found

    def _take_in(self, attempt: _Attempt, numbers: list[int], now: float) -> list[tuple[int, RecoveredPartition]]:
        attempt.thread.close()
        try:
            recovered = attempt.call.result()
        except KafkaException as error:
            self._ration.warn("later", "partitions %s cannot be recovered yet: %s", numbers, reason(error))
            attempt.retry_at = now + (_PERMISSION_RETRY_DELAY_S if is_missing_right(error) else _RETRY_DELAY_S)
            return []
        except StoppedError:
            attempt.retry_at = float("inf")
            return []
        for number in numbers:
            del self._wanted[number]
        return [(number, recovered[number]) for number in numbers]

    def slow_call(self, now: float) -> tuple[str, float]:
        """Return the current step of the oldest attempt and the attempt's age in seconds; an empty name if none."""
        oldest = min(self._wanted.values(), key=lambda recovery: recovery.begun, default=None)
        return ("", 0.0) if oldest is None else (oldest.doing, now - oldest.begun)
