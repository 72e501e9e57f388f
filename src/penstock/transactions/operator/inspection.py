"""What lies in a store in Kafka, read without a coordinator and without changing anything.

It reads as a coordinator does that takes the partitions over: positions, the done log, the half log, the op log, into
the same state machine. But it waits for nobody's transaction: what is settled while it reads may still show as pending.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from confluent_kafka import Message, TopicPartition

from penstock.clients.reading import Place
from penstock.clients.rights import MissingRightError
from penstock.errors import MessageFormatError
from penstock.options import ClientConfig
from penstock.transactions.coordinator.logs.log_identity import DONE, HALF, OP, Fate, starts_of
from penstock.transactions.coordinator.recovery.recovered_partition import (
    DoneRead,
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
from penstock.transactions.operator.store_reader import WAIT_S, StoreReader
from penstock.transactions.wire.discarded import decode_discarded
from penstock.transactions.wire.done_records import Done, Note, decode_done
from penstock.transactions.wire.half import Half, decode_half
from penstock.transactions.wire.ops import Op, Verdict, decode_ops
from penstock.transactions.wire.topics import StoreTopics
from penstock.transactions.writing.acked_producer import wire_headers

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


class Inspection(StoreReader):
    """Says what lies in a store. Used by one thread; raises as `StoreReader`."""

    def __init__(
        self, bootstrap_servers: str, config: ClientConfig, topics: StoreTopics, wait_s: float = WAIT_S
    ) -> None:
        super().__init__(bootstrap_servers, config, topics, wait_s)
        #: What `seen_statuses` read last; None: nothing was, or may be.
        self.last_statuses: list[Status] | None = None

    def pending(self) -> list[Found]:
        """Return what is not settled, oldest first."""
        read = self._partitions()
        statuses, now_ms = self.seen_statuses(), time.time() * 1000
        pending = [it for number, partition in read.items() for it in _found(number, partition, statuses, now_ms)]
        return sorted(pending, key=lambda it: it.pending.birth_ms)

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
            self.last_statuses = self.statuses()
        except MissingRightError:
            return []
        return self.last_statuses

    def statuses(self) -> list[Status]:
        """Return the last status of each coordinator, unless that was long ago."""
        topic = self._topics.status
        if not self.partitions_of(topic):
            return []
        latest: dict[str, Status] = {}
        bounds = self._bounds(topic, [0])
        begin = max(0, bounds[topic, 0][1] - _STATUS_RECORDS)
        for message in self.read_places({(topic, 0): begin}, bounds):
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

    def _partitions(self) -> dict[int, _Partition]:
        """Read the logs of all half partitions as a coordinator does; report logs that were replaced or cut."""
        logs = {HALF: self._topics.half, OP: self._topics.op, DONE: self._topics.done}
        numbers = range(self._topics.partitions)
        places = [(topic, number) for number in numbers for topic in logs.values()]
        ids, bounds = self.ask(lambda: self.ids_and_bounds(logs, places))
        committed = self.ask(lambda: self.committed([TopicPartition(*place) for place in places]))
        positions = {
            number: {log: committed_at(committed[topic, number], *bounds[topic, number]) for log, topic in logs.items()}
            for number in numbers
        }
        begins = {}
        for number, found in positions.items():
            starts = starts_of(found, ids)
            is_intact = all(start.fate is Fate.INTACT for start in starts.values())
            for log, begin in starts.items():
                begins[logs[log], number] = begin.offset if is_intact and log != DONE else found[log].low
        records: dict[Place, list[Message]] = {place: [] for place in places}
        for message in self.read_places(begins, bounds):
            records[message.topic() or "", message.partition() or 0].append(message)
        read = {}
        for number in numbers:
            done = DoneRead(bounds[logs[DONE], number][1], list(_done_records(records[logs[DONE], number])))
            start = recovered_partition(positions[number], ids, done, partial(report_log, logs, number))
            partition = read[number] = _Partition(PartitionState(start.half_position, start.op_position))
            partition.state.remember(start.notes, start.snapshots)
            for message in records[logs[HALF], number]:
                _take_half(partition.state, message)
            for message in records[logs[OP], number]:
                _take_op(partition, message)
        return read


def _done_records(messages: Iterable[Message]) -> Iterator[tuple[int, Done]]:
    for message in messages:
        with contextlib.suppress(MessageFormatError):
            yield message.offset() or 0, decode_done(message.value())


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
