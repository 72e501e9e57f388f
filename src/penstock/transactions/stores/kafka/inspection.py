"""Reads the pending transactions of a store in Kafka, without a coordinator and without changes.

It reads like a coordinator at a recovery (positions, done log, half log, op log) into the same state machine. But it
does not wait for open Kafka transactions: a transaction that is settled meanwhile may still show as pending. It keeps
the payloads of one requested transaction only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from penstock.clients.kafka_errors import is_missing_right
from penstock.clients.reading import Place
from penstock.clients.rights import MissingRightError
from penstock.clients.topics import ask_topic_ids
from penstock.clients.transactional.missing_rights import is_group_forbidden
from penstock.errors import BrokerConnectionError, MessageFormatError
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.recovered_state import without_payloads
from penstock.transactions.core.state import PartitionState
from penstock.transactions.model import PendingTransaction
from penstock.transactions.operator.administration import shown
from penstock.transactions.operator.inspection import Inspection
from penstock.transactions.stores.kafka.coordinator.log_feed import read_half, read_ops
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
from penstock.transactions.wire.done_records import Done, decode_done
from penstock.transactions.wire.ops import Verdict
from penstock.transactions.wire.topics import StoreTopics

#: The number of last status records to read: more than dozens of coordinators write while a status is valid.
_STATUS_RECORDS = 5_000


class Found(NamedTuple):
    """A pending transaction, its half partition, and its view for operators."""

    half_partition: int
    pending: Pending
    shown: PendingTransaction


@dataclass(slots=True)
class ReadPartition:
    """The state of one half partition; only the transaction `kept` has its payload."""

    state: PartitionState
    topics: StoreTopics
    number: int
    kept: str | None

    def take_half(self, message: Message) -> None:
        """Process a record of the half log."""
        offset, state = message.offset() or 0, self.state
        if offset < state.half_position:
            return
        try:
            half = read_half(message, self.topics.may_publish_to)
        except MessageFormatError:
            state.skip_half(offset)
            return
        pending = state.add_half(offset, half, message.timestamp()[1])
        if isinstance(pending, Pending) and half.transaction_id != self.kept:
            pending.drop()

    def take_op(self, message: Message) -> None:
        """Process a record of the op log."""
        offset, state = message.offset() or 0, self.state
        if offset < state.op_position:
            return
        with contextlib.suppress(MessageFormatError):
            for index, op in enumerate(read_ops(message, self.number)):
                if op.verdict is not Verdict.TICK:
                    state.add_op(offset, op, message.timestamp()[1], index)
        state.skip_op(offset)


def read_partitions(reads: Inspection, kept: str | None = None) -> dict[int, ReadPartition]:
    """Read the logs of all half partitions; log replaced and truncated logs. Keep only the payload of `kept`."""
    logs = names_of(reads.topics)
    numbers = range(reads.topics.partitions)
    places = [(topic, number) for number in numbers for topic in logs.values()]
    committed = reads.ask(lambda limit_s: _committed(reads, places, limit_s))
    # Bounds after positions: an end that was read earlier may lie below a position.
    found_ids = reads.ask(lambda limit_s: ask_topic_ids(reads.admin, logs.values(), limit_s)).ids
    ids = {log: found_ids[topic] for log, topic in logs.items() if topic in found_ids}
    bounds = reads.bounds(places)
    positions = {
        number: {log: committed_at(committed[topic, number], *bounds[topic, number]) for log, topic in logs.items()}
        for number in numbers
    }
    done: dict[int, list[tuple[int, Done]]] = {number: [] for number in numbers}
    for message in reads.read({(logs[DONE], number): positions[number][DONE].low for number in numbers}, bounds):
        with contextlib.suppress(MessageFormatError):
            record = _without_payloads(decode_done(message.value()), kept)
            done[message.partition() or 0].append((message.offset() or 0, record))
    read: dict[int, ReadPartition] = {}
    halves, ops = dict[Place, int](), dict[Place, int]()
    for number, found in positions.items():
        end = bounds[logs[DONE], number][1]
        start = recovered_partition(reads.topics, number, found, ids, DoneRead(end, done[number]))
        read[number] = ReadPartition(start.state, reads.topics, number, kept)
        halves[logs[HALF], number], ops[logs[OP], number] = start.starts[HALF], start.starts[OP]
    for message in reads.read(halves, bounds):
        read[message.partition() or 0].take_half(message)
    for message in reads.read(ops, bounds):
        read[message.partition() or 0].take_op(message)
    return read


def read_statuses(reads: Inspection) -> tuple[list[Status], str]:
    """Return the valid status of each coordinator, and the reason if the status topic cannot be read."""
    latest: dict[str, Status] = {}
    try:
        for message in reads.read_all(reads.topics.status, _STATUS_RECORDS):
            with contextlib.suppress(MessageFormatError):
                status = decode_status(message.value())
                # Ages use the broker's time.
                latest[status.coordinator] = replace(status, at_ms=message.timestamp()[1])
    except (MissingRightError, BrokerConnectionError) as error:
        return [], str(error)
    oldest_ms = (time.time() - STALE_S) * 1000
    return [latest[name] for name in sorted(latest) if latest[name].at_ms >= oldest_ms], ""


def found_in(read: Mapping[int, ReadPartition], statuses: Sequence[Status]) -> list[Found]:
    """Return the pending transactions, oldest first, with what they wait for. Ages use this machine's clock."""
    found, now_ms = list[Found](), time.time() * 1000
    for number, partition in read.items():
        for pending in partition.state.pending.values():
            before = partition.state.queue.held_by(pending)
            held_by = None if before is None else before.transaction_id
            obstacle = waits_for(pending, number, statuses)
            found.append(Found(number, pending, shown(pending, now_ms, held_by, obstacle)))
    return sorted(found, key=lambda entry: entry.pending.birth_ms)


def end_of(reads: Inspection, transaction_id: str, half_partition: int, done_from: int = 0) -> Verdict | None:
    """Return the end of a transaction in the done log at or above an offset, or None."""
    place = (reads.topics.done, half_partition)
    for message in reads.read({place: done_from}, reads.bounds([place])):
        try:
            notes = decode_done(message.value()).notes
        except MessageFormatError:
            continue
        for note in notes:
            if note.transaction_id == transaction_id and note.verdict is not Verdict.UNKNOWN:
                return note.verdict
    return None


def _committed(reads: Inspection, places: list[Place], limit_s: float) -> dict[Place, TopicPartition]:
    """Return the committed positions. A read_uncommitted reader does not wait for transactions that write them."""
    consumer = reads.reader("read_uncommitted", limit_s).consumer
    try:
        found = consumer.committed([TopicPartition(*place) for place in places], limit_s)
    except KafkaException:
        if is_group_forbidden(consumer):
            raise KafkaException(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)) from None
        raise
    for place in found:
        if place.error is not None and is_missing_right(place.error):
            raise KafkaException(place.error)
    return {(place.topic, place.partition): place for place in found}


def _without_payloads(record: Done, kept: str | None) -> Done:
    """Return a record of the done log, without payloads unless it has the transaction `kept`."""
    is_kept = any(snapshot.note.transaction_id == kept for snapshot in record.snapshots)
    return record if is_kept else without_payloads(record)
