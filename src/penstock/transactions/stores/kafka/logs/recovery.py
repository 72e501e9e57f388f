"""Recovery of half partitions: where to read on, and what was settled above that point.

Whether the logs are still those that were read is asked first of all: where one was deleted and made again, or cut,
reading begins at the start of the logs, and what that means is logged and counted.

The order matters. First the committed positions, read as a read_committed client: the broker answers only once a
predecessor's transaction that touched them has ended, and any that comes later is refused, for its group generation is
past. A transaction that does not end by itself, here or in the done log, is ended under its owner's name, which is
committed with the position, rather than waited for until it times out: initialising a producer of that id ends what is
open and fences the former one. Where that one was alive after all, it loses one Kafka transaction, learns from the done
log what became of it, and goes on. Then the done log to its end, and that is where the log ended *before* reading, not
where readers of committed records may read to now: markers of a transaction may reach `done` after they reached the
positions. What is found above the half checkpoint is all that was ever settled there.

Since a predecessor's transaction may be waited for, and the other partitions shall not wait for it, each attempt has a
disposable thread and clients of its own. One that makes no step for long is abandoned and another begins; one that
failed begins again after a moment. What an attempt found counts as long as its partitions were not revoked since, also
if they came back: then there is another attempt for them.
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
#: Seconds for which a predecessor that may be alive is left to end its transaction by itself.
_PREDECESSOR_GRACE_S = 1.0
#: Seconds after which a transaction that holds positions has to have ended by its time limit, with room for the
#: broker's own round of looks; it is said then that it does not.
_OPEN_TRANSACTION_WARNING_AFTER_S = 25.0
#: Seconds for the call that ends a transaction, and for all that it takes.
_INIT_TIMEOUT_S = 6.0
_FENCING_BUDGET_S = 8.0

#: Called at each step with what is done next; it raises `StoppedError` once nobody wants to know any more.
Step = Callable[[str], object]


class RecoveryReader:
    """Reads positions and done logs, with short-lived consumers of its own. Thread-safe: calls share nothing.

    `own_ids` returns the transactional ids of this coordinator's own producers: they are not shut out.
    """

    def __init__(self, context: CoordinatorContext, own_ids: Callable[[], Sequence[str]]) -> None:
        self._context, self._topics = context, context.topics
        self._names = names_of(context.topics)
        self._admin = clients.admin(context.bootstrap_servers, context.config)
        self._own_ids = own_ids
        self._reader = partial(
            PartitionReader, context.bootstrap_servers, context.config, self._topics.coordinators, self._not_read
        )
        self._unreadable = f"it cannot be read how far the transactions of {self._topics.prefix} are settled"

    def recover(self, partitions: Iterable[int], step: Step) -> dict[int, RecoveredPartition]:
        """Return what the new owner of half partitions starts from; waits for a predecessor's transaction to end.

        `step` is called at each step. Raises `KafkaException` where a broker does not answer: try again.
        """
        wanted = list(partitions)
        step("asking for topic ids")
        found = ask_topic_ids(self._admin, self._names.values(), _ANSWER_S).ids
        ids = {log: found[name] for log, name in self._names.items() if name in found}
        # Transactional ids under which all was ended that they had left open.
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
        """Return once the coordinator of the group answers, or raise `KafkaException`: it does not; try again."""
        with self._reader(isolation="read_uncommitted") as reader:
            try:
                answer = reader.consumer.committed([TopicPartition(self._topics.half, 0)], _COORDINATOR_S)[0]
            except KafkaException:
                self._look_for_right(reader.consumer)
                raise
        if answer.error is not None:
            raise KafkaException(answer.error)

    def _committed(self, partitions: list[int], step: Step, ended: set[str]) -> dict[Place, Committed]:
        """Return how far each log was read, and where it begins and ends."""
        # What is tried apart moves no position but one of `discarded`, which tells that it is under way: it may have
        # been let through before the group changed hands, and write to the done log still.
        topics = [*self._names.values(), self._topics.discarded]
        places = [TopicPartition(topic, p) for p in partitions for topic in topics]
        begun = time.monotonic()
        wait_until = begun + _PREDECESSOR_GRACE_S
        with self._reader() as reader:
            while True:
                step(f"asking for positions of {self._topics.coordinators}, which a Kafka transaction may hold back")
                answers = self._ask_committed(reader.consumer, places)
                held = {place.partition for place in answers or places if place.error is not None or not answers}
                if not held:
                    break
                time.sleep(_POLL_S)
                if time.monotonic() >= wait_until:
                    self._end_predecessors(held, ended)
                    wait_until = time.monotonic() + _PREDECESSOR_GRACE_S
                    if wait_until - begun >= _OPEN_TRANSACTION_WARNING_AFTER_S:
                        self._report_held(held)
            # After the positions: an end that was asked for before may lie below one.
            return {
                (place.topic, place.partition): committed_at(
                    place, *reader.consumer.get_watermark_offsets(place, _ANSWER_S)
                )
                for place in answers
                if place.topic != self._topics.discarded
            }

    def _report_held(self, partitions: Iterable[int]) -> None:
        """Say that positions are held for longer than any transaction of ours lasts."""
        self._context.ration.warn(
            "held",
            "positions of %s in half partitions %s are not to be had: no broker tells them, or a Kafka transaction "
            "that should have timed out holds them back; what is decided there waits. If the brokers are well, one of "
            "them has lost a transaction's end: `kafka-transactions.sh find-hanging --broker-id N` names it, and "
            "`kafka-transactions.sh abort` ends it (KAFKA-20734 is a way into this)",
            self._topics.coordinators,
            sorted(partitions),
        )

    def _end_predecessors(self, partitions: Iterable[int], ended: set[str]) -> None:
        """End the transactions that hold back positions or the done log."""
        try:
            # The names are committed with half positions; a transaction holds back those of its half and its op alike.
            halves = [TopicPartition(self._topics.half, number) for number in partitions]
            with self._reader(isolation="read_uncommitted") as reader:
                answers = reader.consumer.committed(halves, _ANSWER_S)
            ids = {name for answer in answers for name in decode_claim(self._topics, answer.metadata)}
            ended |= end_transactions(self._context, ids - set(self._own_ids()) - ended)
        except KafkaException as error:
            _log.info("it is not known who holds back positions of %s: %s", self._topics.coordinators, reason(error))

    def _ask_committed(self, consumer: Consumer, places: list[TopicPartition]) -> list[TopicPartition]:
        """Return positions, some with an error perhaps; nothing where they are not stable yet."""
        context, group = self._context, self._topics.coordinators
        try:
            answers = consumer.committed(places, _PREDECESSOR_GRACE_S)
        except KafkaException as error:
            if context.may_not_read(error, self._unreadable, self._topics.half):
                raise
            self._look_for_right(consumer)
            # UNSTABLE_OFFSET_COMMIT ends by itself, at the latest by the predecessor's transaction timeout.
            _log.info("positions of %s are not stable yet: %s", group, reason(error))
            return []
        for answer in answers:
            if answer.error is not None and context.may_not_read(answer.error, self._unreadable, answer.topic):
                raise KafkaException(answer.error)
        return answers

    def _look_for_right(self, consumer: Consumer) -> None:
        if is_group_forbidden(consumer):
            self._context.rights.refused(self._unreadable, group_right(self._topics.coordinators))

    def done(
        self, partitions: Iterable[int], starts: Mapping[int, int], step: Step, *, ended: set[str] | None = None
    ) -> dict[int, DoneRead]:
        """Read done logs to their ends, each from its start or its beginning, waiting for open transactions to end.

        With `ended`, transactions of former owners are ended that are waited for too long, save under these ids, to
        which theirs are added. Who was an owner before, and may not know that another one is, must not do so. `step`
        and errors as in `recover`.
        """
        log = self._topics.done
        step(f"asking where {log} ends")
        with self._reader(isolation="read_uncommitted") as reader:
            bounds = reader.bounds(log, partitions, _ANSWER_S)
        found = {p: DoneRead(end, []) for p, (_, end) in bounds.items()}
        # A log that ends below was made again: all that it says is read.
        begins = {
            (log, p): low if starts.get(p, 0) > end else max(starts.get(p, 0), low) for p, (low, end) in bounds.items()
        }
        ended_at = time.monotonic()

        def go_on(behind: set[Place], idle_s: float) -> None:
            nonlocal ended_at
            step(f"reading {log}, in which a Kafka transaction may be open")
            if ended is not None and min(idle_s, time.monotonic() - ended_at) >= _PREDECESSOR_GRACE_S:
                # One died between the records of its transaction and their positions, which hold nobody back.
                self._end_predecessors((partition for _, partition in behind), ended)
                ended_at = time.monotonic()

        ends = {(log, p): end for p, (_, end) in bounds.items()}
        with self._reader() as reader:
            for message in chain.from_iterable(reader.read(begins, ends, step=go_on)):
                partition, offset = message.partition() or 0, message.offset() or 0
                try:
                    found[partition].records.append((offset, without_payloads(decode_done(message.value()))))
                except MessageFormatError as bad:
                    found[partition].unreadable.append(offset)
                    self._context.ration.warn("done", "%s:%d@%d: %s", log, partition, offset, bad)
        return found

    def _not_read(self, _kind: ErrorKind, error: KafkaError, _place: Place) -> None:
        """Raise an error of reading the done log; note it where a right is missing."""
        self._context.may_not_read(error, self._unreadable, self._topics.done)
        raise KafkaException(error)


def end_transactions(context: CoordinatorContext, ids: Iterable[str]) -> set[str]:
    """End what was left open under transactional ids; return those under which that is done.

    Waits for no producer longer than a limit. One that is alive after all opens new transactions, but none that the
    group lets through: to end those as well would hold up what it does for the partitions that it still has.
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


#: Seconds without a step after which an attempt is abandoned: twice what any single call is given.
_ABANDON_AFTER_S = 30.0
#: Seconds until another attempt begins after one that failed, and where a right is missing.
_RETRY_DELAY_S = 0.2
_PERMISSION_RETRY_DELAY_S = 1.0


@dataclass(slots=True, eq=False)
class _Attempt:
    """One attempt. Its thread writes `doing` and `stepped_at`, single values that the coordinator's thread reads."""

    partitions: list[int]
    thread: Disposable
    doing: str = "recovering partitions"
    begun: float = field(default_factory=time.monotonic)
    stepped_at: float = field(default_factory=time.monotonic)
    #: Once it failed: when another one begins.
    again_at: float | None = None
    call: Call[dict[int, RecoveredPartition]] = field(init=False)


class Recoveries:
    """The recoveries under way. Used by the coordinator's thread; waits for nothing.

    `recover` is `RecoveryReader.recover`, and `stopping` tells whether the coordinator stops.
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
        # The attempt that counts for each partition.
        self._wanted: dict[int, _Attempt] = {}

    @property
    def partitions(self) -> list[int]:
        """The partitions on their way."""
        return list(self._wanted)

    def begin(self, partitions: Iterable[int]) -> None:
        """Begin to take partitions over."""
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
        """Raise `StoppedError` where the coordinator stops. Any thread."""
        if self._stopping():
            raise StoppedError(f"the coordinator of {self._name} stops while it reads its logs")

    def forget(self, partition: int) -> None:
        """A partition was taken away: what is found out about it counts no more."""
        self._wanted.pop(partition, None)

    def found(self, now: float) -> list[tuple[int, RecoveredPartition]]:
        """Return what was found out about partitions that are still wanted, once; begin again what failed."""
        found: list[tuple[int, RecoveredPartition]] = []
        for attempt in dict.fromkeys(self._wanted.values()):
            numbers = [number for number in attempt.partitions if self._wanted.get(number) is attempt]
            if attempt.again_at is not None:
                if now >= attempt.again_at:
                    self.begin(numbers)
            elif attempt.call.done():
                found += self._take_in(attempt, numbers, now)
            elif now - attempt.stepped_at >= _ABANDON_AFTER_S:
                _log.warning("%s has not returned for %.0f s: it is abandoned", attempt.doing, _ABANDON_AFTER_S)
                # The call that hangs closes by itself.
                attempt.thread.abandon(lambda: None)
                self.begin(numbers)
        return found

    def _take_in(self, attempt: _Attempt, numbers: list[int], now: float) -> list[tuple[int, RecoveredPartition]]:
        attempt.thread.close()
        try:
            recovered = attempt.call.result()
        except KafkaException as error:
            self._ration.warn("later", "partitions %s cannot be recovered yet: %s", numbers, reason(error))
            attempt.again_at = now + (_PERMISSION_RETRY_DELAY_S if is_missing_right(error) else _RETRY_DELAY_S)
            return []
        except StoppedError:
            attempt.again_at = float("inf")
            return []
        for number in numbers:
            del self._wanted[number]
        return [(number, recovered[number]) for number in numbers]

    def slow_call(self, now: float) -> tuple[str, float]:
        """Return what the oldest attempt does, and its age in seconds; an empty name where there is none."""
        oldest = min(self._wanted.values(), key=lambda recovery: recovery.begun, default=None)
        return ("", 0.0) if oldest is None else (oldest.doing, now - oldest.begun)
