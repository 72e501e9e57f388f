"""What lies in a store in Kafka, read without a coordinator and without changing anything.

It reads as a coordinator does that takes the partitions over: positions, the done log, the half log, the op log, into
the same state machine. But it waits for nobody's transaction: what is settled while it reads may still show as pending.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self, TypeVar

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from penstock import clients
from penstock.clients.kafka_errors import ErrorKind, concerns_a_group, is_missing_right, reason
from penstock.clients.reading import NotReadInTimeError, PartitionReader, Place
from penstock.clients.requests.answers import asked_until_ready
from penstock.clients.requests.log_ends import log_bounds
from penstock.clients.rights import MissingRightError, Operation, group_right, principal_of, topic_right
from penstock.clients.transactional.missing_rights import is_group_forbidden
from penstock.errors import BrokerConnectionError, MessageFormatError
from penstock.options import ClientConfig
from penstock.transactions.coordinator.logs.log_bounds import topic_ids
from penstock.transactions.coordinator.logs.log_identity import DONE, HALF, OP
from penstock.transactions.coordinator.recovery.recovered_partition import (
    DoneRead,
    RecoveredPartition,
    committed_at,
    recovered_partition,
    report_log,
)
from penstock.transactions.coordinator.state.pending.pending import Pending
from penstock.transactions.coordinator.state.state_machine import PartitionState
from penstock.transactions.coordinator.status import STALE_S, Status, decode_status
from penstock.transactions.model import PendingTransaction
from penstock.transactions.operator.description import described
from penstock.transactions.operator.obstacles import Obstacle, obstacles
from penstock.transactions.wire.discarded import decode_discarded
from penstock.transactions.wire.done_records import Done, Note, decode_done
from penstock.transactions.wire.half import Half, decode_half
from penstock.transactions.wire.ops import Op, Verdict, decode_ops
from penstock.transactions.wire.topics import StoreTopics
from penstock.transactions.writing.acked_producer import wire_headers

T = TypeVar("T")

#: Seconds that all questions together wait for brokers which do not answer at once, so that an operator soon hears that
#: a partition has no leader. An answer within `_QUICK_S` costs nothing of them, nor does what is read steadily.
_WAIT_S = 2.0
_QUICK_S = 1.0
#: Seconds for which closing a client may take: it has nothing left to say.
_CLOSE_S = 1.0
_READ_S = 60.0
#: The last records of the status topic: more than dozens of coordinators write in the time for which they count.
_STATUS_RECORDS = 5_000


@dataclass(frozen=True, slots=True)
class Found:
    """A pending transaction and where it is."""

    half_partition: int
    pending: Pending
    #: Id of the transaction of its group and key that it waits for.
    held_by: str | None
    #: The one that stands, and has not taken effect yet.
    decision: Op | None
    #: What stands in its way, from the status of a coordinator.
    obstacle: Obstacle | None = None

    @property
    def transaction_id(self) -> str:
        """Its id."""
        return self.pending.half.transaction_id

    def described(self, now_ms: float, missing: Iterable[str] = ()) -> PendingTransaction:
        """Return it as an operator sees it, given the topics that do not exist."""
        pending, why = self.pending, "" if self.obstacle is None else self.obstacle.text
        return described(
            self.transaction_id,
            pending.half.group,
            [half.topic for half in pending.halves],
            birth_ms=pending.birth_ms,
            now_ms=now_ms,
            check_count=pending.check_count,
            verdict=pending.verdict,
            deliver_at_ms=pending.half.deliver_at_ms,
            held_by=self.held_by,
            is_complete=pending.is_complete,
            missing=frozenset(missing),
            obstacle=why,
            unasked=why,
        )


@dataclass(frozen=True, slots=True)
class Discarded:
    """A record of the discarded topic."""

    partition: int
    offset: int
    half: Half
    reason: str
    check_count: int
    #: When it came there, in milliseconds since the epoch.
    at_ms: int
    #: Who brought it back since; empty: it waits here.
    resumed_by: str = ""


@dataclass(slots=True)
class _Partition:
    """What was read of one half partition."""

    state: PartitionState
    decisions: dict[tuple[int, int], Op] = field(default_factory=dict)


class Inspection:
    """Reads a store whose topics have their real counts. Used by one thread.

    As a context manager it keeps its clients from one question to the next, else each question makes new ones.

    What reads raises `BrokerConnectionError` where a broker does not answer, or not in time, and `MissingRightError`
    where this client may not read.
    """

    def __init__(self, bootstrap_servers: str, config: ClientConfig, topics: StoreTopics) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._topics = topics
        self._principal = principal_of(config)
        self._reader = partial(PartitionReader, bootstrap_servers, config, topics.coordinators)
        self._admin = clients.admin(bootstrap_servers, config)
        # The seconds that are left to wait.
        self._left_s = _WAIT_S
        # The clients that are kept, by isolation; None: each question makes its own.
        self._kept: dict[str, PartitionReader] | None = None

    def __enter__(self) -> Self:
        self._kept = {}
        return self

    def __exit__(self, *_raised: object) -> None:
        kept, self._kept = self._kept or {}, None
        for reader in kept.values():
            reader.close(_CLOSE_S)

    def pending(self) -> list[Found]:
        """Return what is not settled, oldest first."""
        numbers = range(self._topics.partitions)
        recovered, bounds = self._recovered(numbers)
        read: dict[int, _Partition] = {}
        for number, start in recovered.items():
            read[number] = _Partition(PartitionState(start.half_position, start.op_position))
            read[number].state.remember(start.notes, start.snapshots)
        half_positions = {number: start.half_position for number, start in recovered.items()}
        for message in self.read(self._topics.half, half_positions, bounds):
            _take_half(read[message.partition() or 0].state, message)
        # Ops that were stored while the halves were read belong to them.
        for message in self.read(self._topics.op, {number: start.op_position for number, start in recovered.items()}):
            _take_op(read[message.partition() or 0], message)
        statuses, now_ms = self.seen_statuses(), time.time() * 1000
        found = [one for number, partition in read.items() for one in _found(number, partition, statuses, now_ms)]
        return sorted(found, key=lambda one: one.pending.birth_ms)

    def find(self, transaction_id: str) -> Found | None:
        """Return one that is not settled, or None."""
        return next((one for one in self.pending() if one.transaction_id == transaction_id), None)

    def discarded(self) -> list[Discarded]:
        """Return what lies in the discarded topic, oldest first."""
        numbers = dict.fromkeys(range(self.partitions_of(self._topics.discarded)), 0)
        found = [_discarded(message) for message in self.read(self._topics.discarded, numbers)]
        return sorted((one for one in found if one is not None), key=lambda one: one.at_ms)

    def seen_statuses(self) -> list[Status]:
        """Return what `statuses` does, or nothing where it may not be read."""
        try:
            return self.statuses()
        except MissingRightError:
            return []

    def statuses(self) -> list[Status]:
        """Return the last status of each coordinator, unless that was long ago."""
        topic = self._topics.status
        if not self.partitions_of(topic):
            return []
        latest: dict[str, Status] = {}
        begin = max(0, self.end(topic, 0) - _STATUS_RECORDS)
        for message in self.read(topic, {0: begin}):
            try:
                status = decode_status(message.value())
            except MessageFormatError:
                continue
            # The broker's time: ages go by it everywhere.
            latest[status.coordinator] = replace(status, at_ms=message.timestamp()[1])
        oldest_ms = (time.time() - STALE_S) * 1000
        return [latest[name] for name in sorted(latest) if latest[name].at_ms >= oldest_ms]

    def ends_of(self, transaction_id: str, half_partition: int, done_from: int) -> Note | None:
        """Return how a transaction was settled, as the done log says at or above an offset, or None."""
        for message in self.read(self._topics.done, {half_partition: done_from}):
            try:
                notes = decode_done(message.value()).notes
            except MessageFormatError:
                continue
            for note in notes:
                if note.transaction_id == transaction_id and note.verdict is not Verdict.UNKNOWN:
                    return note
        return None

    def end(self, topic: str, number: int) -> int:
        """Return where a partition ends for a reader of committed records."""
        return self._bounds(topic, [number])[topic, number][1]

    def partitions_of(self, topic: str) -> int:
        """Return how many partitions a topic has; 0 where there is none."""

        def count() -> int:
            found = self._admin.list_topics(topic, timeout=self._limit_s).topics[topic]
            if found.error is not None and is_missing_right(found.error):
                raise KafkaException(found.error)
            return len(found.partitions)

        return self._ask(count, topic)

    def _recovered(self, numbers: Sequence[int]) -> tuple[dict[int, RecoveredPartition], dict[Place, tuple[int, int]]]:
        """Return what a coordinator would start from, and the bounds of the logs; report logs that were replaced."""
        names = {HALF: self._topics.half, OP: self._topics.op, DONE: self._topics.done}
        places = [(topic, number) for number in numbers for topic in names.values()]
        ids = self._ask(lambda: topic_ids(self._admin, self._topics, self._limit_s))
        bounds = self._ask(lambda: log_bounds(self._admin, places, self._limit_s))
        committed = self._ask(lambda: self._committed([TopicPartition(*place) for place in places]))
        done: dict[int, list[tuple[int, Done]]] = {number: [] for number in numbers}
        for message in self.read(self._topics.done, dict.fromkeys(numbers, 0), bounds):
            with contextlib.suppress(MessageFormatError):
                done[message.partition() or 0].append((message.offset() or 0, decode_done(message.value())))
        found = {}
        for number in numbers:
            logs = {log: committed_at(committed[name, number], *bounds[name, number]) for log, name in names.items()}
            read = DoneRead(bounds[names[DONE], number][1], done[number])
            found[number] = recovered_partition(logs, ids, read, partial(report_log, names, number))
        return found, bounds

    def _committed(self, places: list[TopicPartition]) -> dict[Place, TopicPartition]:
        # A reader of uncommitted records is told positions at once, others wait for the transactions that write them.
        with self._client("read_uncommitted") as reader:
            try:
                found = reader.consumer.committed(places, self._limit_s)
            except KafkaException:
                if is_group_forbidden(reader.consumer):
                    raise KafkaException(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)) from None
                raise
        for place in found:
            if place.error is not None and is_missing_right(place.error):
                raise KafkaException(place.error)
        return {(place.topic, place.partition): place for place in found}

    @contextmanager
    def _client(self, isolation: str) -> Iterator[PartitionReader]:
        """Yield a client of an isolation: the one that is kept, or one for this question alone."""
        kept = self._kept
        if kept is not None and isolation in kept:
            yield kept[isolation]
            return
        reader = self._reader(self._fail, isolation=isolation)
        if kept is not None:
            kept[isolation] = reader
        try:
            yield reader
        finally:
            if kept is None:
                reader.close(_CLOSE_S)

    def _fail(self, kind: ErrorKind, error: KafkaError, place: Place) -> None:
        """Raise what ends reading; the client recovers from all else by itself, or the time limit ends it."""
        if kind in {ErrorKind.MISSING_RIGHT, ErrorKind.GROUP}:
            raise self._lacking(error, place[0])

    @property
    def _limit_s(self) -> float:
        """Seconds that one question may take."""
        return max(_QUICK_S, self._left_s)

    def _bounds(self, topic: str, numbers: Iterable[int]) -> dict[Place, tuple[int, int]]:
        places = [(topic, number) for number in numbers]
        return self._ask(lambda: log_bounds(self._admin, places, self._limit_s), topic) if places else {}

    def _ask(self, question: Callable[[], T], *topics: str) -> T:
        """Ask brokers, and again where they are not ready: a topic that is new has no leader for a moment.

        Where it is about no topics, it is about the three logs.
        """
        begun = time.monotonic()
        try:
            return asked_until_ready(question, self._left_s)
        except KafkaException as error:
            if is_missing_right(error):
                raise self._lacking(error.args[0], *topics) from error
            raise self._gone(error) from error
        finally:
            self._left_s = max(0.0, self._left_s - max(0.0, time.monotonic() - begun - _QUICK_S))

    def read(
        self, topic: str, starts: Mapping[int, int], bounds: Mapping[Place, tuple[int, int]] | None = None
    ) -> Iterator[Message]:
        """Yield the committed records of partitions, each from its start to its end: that of `bounds`, or as it is now.

        A partition ends for a reader of committed records where its oldest open transaction begins.
        """
        found = self._bounds(topic, starts) if bounds is None else bounds
        begins = {(topic, number): max(start, found[topic, number][0]) for number, start in starts.items()}
        ends = {place: found[place][1] for place in begins}
        if all(begins[place] >= end for place, end in ends.items()):
            return
        with self._client("read_committed") as reader:
            try:
                for records in reader.read(begins, ends, limit_s=_READ_S, silence_s=self._limit_s):
                    yield from records
            except NotReadInTimeError as error:
                raise BrokerConnectionError(
                    f"{topic} at {self._bootstrap_servers} was not read to its end: {error}; check that all brokers "
                    "run, and try again"
                ) from error

    def _lacking(self, error: KafkaError, *topics: str) -> MissingRightError:
        """Return the error of a client that may not ask, or not read."""
        if concerns_a_group(error):
            rights = [group_right(self._topics.coordinators, Operation.DESCRIBE)]
        else:
            names = [name for name in topics if name] or [self._topics.half, self._topics.op, self._topics.done]
            rights = [topic_right(Operation.READ, name) for name in names]
        return MissingRightError(f"the store {self._topics.prefix} cannot be read", rights, self._principal)

    def _gone(self, error: KafkaException) -> BrokerConnectionError:
        return BrokerConnectionError(
            f"the store {self._topics.prefix} at {self._bootstrap_servers} cannot be read: {reason(error)}; "
            "check that all brokers run"
        )


def _take_half(state: PartitionState, message: Message) -> None:
    offset = message.offset() or 0
    if offset < state.half_position:
        return
    try:
        half = decode_half(message.key(), message.value(), wire_headers(message))
    except MessageFormatError:
        state.skip_half(offset)
        return
    state.add_half(offset, half, message.timestamp()[1])


def _take_op(partition: _Partition, message: Message) -> None:
    offset, state = message.offset() or 0, partition.state
    if offset < state.op_position:
        return
    try:
        ops = decode_ops(message.value())
    except MessageFormatError:
        ops = []
    for index, op in enumerate(ops):
        if op.verdict is not Verdict.TICK:
            state.add_op(offset, op, message.timestamp()[1], index)
            partition.decisions[offset, index] = op
    state.skip_op(offset)


def _found(number: int, partition: _Partition, statuses: Sequence[Status], now_ms: float) -> Iterator[Found]:
    keys = partition.state.queue.keys
    in_the_way = obstacles(number, partition.state.pending.values(), statuses, now_ms)
    for pending in partition.state.pending.values():
        line = pending.half.line
        head = None if line is None else keys.head(line)
        held_by = None if head is None or head is pending else head.half.transaction_id
        decision = partition.decisions.get((pending.decided_at, pending.decided_index))
        yield Found(number, pending, held_by, decision, in_the_way.get(pending.half.transaction_id))


def _discarded(message: Message) -> Discarded | None:
    """Read a record of the discarded topic; None where it is none."""
    try:
        found = decode_discarded(message.key(), message.value(), wire_headers(message))
    except MessageFormatError:
        return None
    return Discarded(message.partition() or 0, message.offset() or 0, *found, message.timestamp()[1])
