"""What is pending in a store in Kafka, read without a coordinator and without changing anything.

It reads as a coordinator does that takes the partitions over: positions, the done log, the half log, the op log, into
the same state machine. But it waits for nobody's transaction: what is settled while it reads may still show as pending.
No more payloads are in memory than those of the one transaction that is asked for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from confluent_kafka import Message, TopicPartition

from penstock.clients.bounded_calls import ask_again
from penstock.clients.reading import Place
from penstock.clients.rights import MissingRightError
from penstock.errors import BrokerConnectionError, MessageFormatError
from penstock.options import ClientConfig
from penstock.transactions.acked_producer import wire_headers
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.recovered_state import without_payloads
from penstock.transactions.core.state import PartitionState
from penstock.transactions.model import PendingTransaction
from penstock.transactions.operator.administration import described
from penstock.transactions.operator.inspection import Inspection, Patience
from penstock.transactions.stores.kafka.logs.recovered_partition import (
    DONE,
    HALF,
    OP,
    DoneRead,
    committed_at,
    names_of,
    recovered_partition,
)
from penstock.transactions.stores.kafka.status import STALE_S, Status, decode_status, waits_for
from penstock.transactions.wire.done_records import Done, Note, decode_done
from penstock.transactions.wire.half import decode_half
from penstock.transactions.wire.ops import Verdict, decode_ops
from penstock.transactions.wire.topics import StoreTopics

#: The last records of the status topic: more than dozens of coordinators write in the time for which they count.
_STATUS_RECORDS = 5_000
#: Seconds between two looks whether a transaction is settled.
_SETTLED_POLL_S = 0.3


@dataclass(frozen=True, slots=True)
class Found:
    """A pending transaction and where it is."""

    half_partition: int
    pending: Pending
    #: Id of the transaction of its group and key that it waits for.
    held_by: str | None
    #: What it waits for, from the status of a coordinator; empty: that is not known.
    obstacle: str = ""

    @property
    def transaction_id(self) -> str:
        """Its id."""
        return self.pending.half.transaction_id

    def described(self, now_ms: float, missing: Iterable[str] = ()) -> PendingTransaction:
        """Return it as an operator sees it, given the topics that do not exist."""
        pending = self.pending
        return described(
            pending.transaction_id,
            pending.group,
            [half.topic for half in pending.halves],
            birth_ms=pending.birth_ms,
            now_ms=now_ms,
            check_count=pending.check_count,
            verdict=pending.verdict,
            deliver_at_ms=pending.half.deliver_at_ms,
            held_by=self.held_by,
            is_complete=pending.is_complete,
            missing=frozenset(missing),
            obstacle=self.obstacle,
            unasked=self.obstacle,
        )


@dataclass(slots=True)
class _Partition:
    """What was read of one half partition; payloads are kept of the transaction of one id."""

    state: PartitionState
    kept: str | None

    def take_half(self, message: Message) -> None:
        """Take a record of the half log in."""
        offset, state = message.offset() or 0, self.state
        if offset < state.half_position:
            return
        try:
            half = decode_half(message.key(), message.value(), wire_headers(message))
        except MessageFormatError:
            state.skip_half(offset)
            return
        pending = state.add_half(offset, half, message.timestamp()[1])
        if isinstance(pending, Pending) and half.transaction_id != self.kept:
            pending.drop()

    def take_op(self, message: Message) -> None:
        """Take a record of the op log in."""
        offset, state = message.offset() or 0, self.state
        if offset < state.op_position:
            return
        with contextlib.suppress(MessageFormatError):
            for index, op in enumerate(decode_ops(message.value())):
                if op.verdict is not Verdict.TICK:
                    state.add_op(offset, op, message.timestamp()[1], index)
        state.skip_op(offset)


class KafkaInspection(Inspection):
    """Says what lies in a store in Kafka. Used by one thread; raises as `Inspection`."""

    def __init__(
        self, bootstrap_servers: str, config: ClientConfig, topics: StoreTopics, patience: Patience | None = None
    ) -> None:
        super().__init__(bootstrap_servers, config, topics, patience)
        #: What `pending` read of the coordinators last; None: nothing yet. And why `seen_statuses` saw nothing.
        self.statuses: list[Status] | None = None
        self.unseen = ""

    def pending(self, kept: str | None = None) -> list[Found]:
        """Return what is not settled, oldest first; with its payloads only the transaction `kept`."""
        read = self._partitions(kept)
        self.statuses = self.seen_statuses()
        pending = [it for number, partition in read.items() for it in _found(number, partition, self.statuses)]
        return sorted(pending, key=lambda it: it.pending.birth_ms)

    def find(self, transaction_id: str) -> Found | None:
        """Return one that is not settled, with its messages, or None."""
        return next((found for found in self.pending(transaction_id) if found.transaction_id == transaction_id), None)

    def seen_statuses(self) -> list[Status]:
        """Return what `read_statuses` does, or nothing where it may not be read, or a broker of its topic is away."""
        self.unseen = ""
        try:
            return self.read_statuses()
        except (MissingRightError, BrokerConnectionError) as error:
            self.unseen = str(error)
            return []

    def read_statuses(self) -> list[Status]:
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

    def await_end(self, found: Found, done_from: int, timeout_s: float) -> Note | None:
        """Return how a transaction is settled, as soon as the done log says so at or above an offset, or None."""
        return ask_again(
            lambda: self.ends_of(found.transaction_id, found.half_partition, done_from), timeout_s, _SETTLED_POLL_S
        )

    def _partitions(self, kept: str | None) -> dict[int, _Partition]:
        """Read the logs of all half partitions as a coordinator does; report logs that were replaced or cut."""
        logs = names_of(self._topics)
        numbers = range(self._topics.partitions)
        places = [(topic, number) for number in numbers for topic in logs.values()]
        committed = self.ask(lambda: self.committed([TopicPartition(*place) for place in places]))
        # After the positions: an end that was asked for before may lie below one.
        ids, bounds = self.ask(lambda: self.ids_and_bounds(logs, places))
        positions = {
            number: {log: committed_at(committed[topic, number], *bounds[topic, number]) for log, topic in logs.items()}
            for number in numbers
        }
        done: dict[int, list[tuple[int, Done]]] = {number: [] for number in numbers}
        for message in self._read_log(logs[DONE], {number: positions[number][DONE].low for number in numbers}, bounds):
            with contextlib.suppress(MessageFormatError):
                record = _without_payloads(decode_done(message.value()), kept)
                done[message.partition() or 0].append((message.offset() or 0, record))
        read: dict[int, _Partition] = {}
        begins: dict[str, dict[int, int]] = {HALF: {}, OP: {}}
        for number, found in positions.items():
            end = bounds[logs[DONE], number][1]
            start = recovered_partition(self._topics, number, found, ids, DoneRead(end, done[number]))
            read[number] = _Partition(start.state, kept)
            begins[HALF][number], begins[OP][number] = start.starts[HALF], start.starts[OP]
        for message in self._read_log(logs[HALF], begins[HALF], bounds):
            read[message.partition() or 0].take_half(message)
        for message in self._read_log(logs[OP], begins[OP], bounds):
            read[message.partition() or 0].take_op(message)
        return read

    def _read_log(self, topic: str, begins: dict[int, int], bounds: dict[Place, tuple[int, int]]) -> Iterator[Message]:
        return self.read_places({(topic, number): begin for number, begin in begins.items()}, bounds)


def _without_payloads(record: Done, kept: str | None) -> Done:
    """Return a record of the done log with the payloads of one transaction alone."""
    is_kept = any(snapshot.note.transaction_id == kept for snapshot in record.snapshots)
    return record if is_kept else without_payloads(record)


def _found(number: int, partition: _Partition, statuses: list[Status]) -> Iterator[Found]:
    keys = partition.state.queue.keys
    for pending in partition.state.pending.values():
        line = pending.half.line
        head = None if line is None else keys.head(line)
        held_by = None if head is None or head is pending else head.half.transaction_id
        yield Found(number, pending, held_by, waits_for(pending, number, statuses))
