"""Reads payloads that were dropped from memory: from the half log, or from a snapshot in the done log.

Each read has a thread of its own, so that no loop waits for it; a hung read is abandoned with its client. A payload
that no longer exists is not found; `log_upkeep` detects the changed log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import NamedTuple, TypeVar

from confluent_kafka import KafkaError, KafkaException, Message

from penstock.clients.bounded_calls import BackgroundCall, TooManyLeftBehindError
from penstock.clients.kafka_errors import ErrorKind, reason
from penstock.clients.reading import PartitionReader, Place
from penstock.errors import MessageFormatError, PenstockError
from penstock.transactions.acked_producer import wire_headers
from penstock.transactions.core.payloads import PAYLOAD_BYTES
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.state import PartitionState
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.coordinator.half_partition import HalfPartition
from penstock.transactions.wire.done_records import Snapshot, decode_done
from penstock.transactions.wire.half import Half, decode_half

#: Seconds after which reading a log ends with its result so far; and after which a hung read is abandoned.
_READ_BUDGET_S = 2.0
_ABANDON_AFTER_S = 30.0
_POLL_S = 0.1
_MESSAGES = 500
#: A gap of fewer records is read instead of skipped: a seek costs a fetch.
_NEAR = 1_000
#: Seconds after a read that failed or found nothing.
_RETRY_DELAY_S = 0.2

#: A transaction's id and lowest half offset: a discarded and resumed transaction has snapshots of both its lives.
_Life = tuple[str, int]
KeyT = TypeVar("KeyT", int, _Life)
ValueT = TypeVar("ValueT")


class _Read(NamedTuple):
    """The result of a read: halves by offset, snapshots with their offsets, and the next offset of the done log."""

    halves: Mapping[int, Half]
    snapshots: Mapping[_Life, tuple[int, Snapshot]]
    done_to: int


class PayloadReader:
    """Reads for the half partitions of one coordinator, one read at a time. Used by the coordinator's thread."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._topics, self._left, self._ration = context.topics, context.left, context.ration
        # Only scattered single records are read.
        settings = {"fetch.message.max.bytes": 1 << 20, "queued.max.messages.kbytes": 4_096, **context.config}
        self._new_reader = partial(
            PartitionReader, context.bootstrap_servers, settings, context.topics.coordinators, _not_read
        )
        # The client of the last read, for the next one. A read takes it out of the list while it uses it.
        self._kept: list[PartitionReader] = []
        # The running read: its partition, which may be lost meanwhile, and its transactions with the offsets from which
        # their snapshots are searched.
        self._reading: tuple[HalfPartition, dict[str, int | None], BackgroundCall[_Read]] | None = None
        self._last = -1
        self._not_before = 0.0

    def poll(self, owned: Mapping[int, HalfPartition], now: float) -> None:
        """Process the result of a read, or start to read for the next half partition; does not wait.

        Raises `TooManyLeftBehindError` if too many reads hang.
        """
        for partition in owned.values():
            # The partitions share the memory budget.
            partition.state.payloads.limit = PAYLOAD_BYTES // len(owned)
        if self._reading is not None:
            self._take(*self._reading, now)
        elif now >= self._not_before:
            for number in sorted(owned, key=lambda number: (number <= self._last, number)):
                if wanted := owned[number].state.payloads.next_read(owned[number].state.now_ms):
                    self._last = number
                    self._begin(owned[number], wanted)
                    break

    def _begin(self, partition: HalfPartition, wanted: Sequence[Pending]) -> None:
        sought = {p.transaction_id: p.snapshot_at for p in wanted}
        snapshots = {(p.transaction_id, p.offset): p.snapshot_at for p in wanted if p.snapshot_at is not None}
        halves = {offset: offset for p in wanted if p.snapshot_at is None for offset in p.offsets}
        read = partial(self._read, partition.number, halves, snapshots, self._kept)
        label = f"reading payloads of half partition {partition.number}"
        self._reading = partition, sought, BackgroundCall(label, read, _ABANDON_AFTER_S, self._left)

    def _take(
        self, partition: HalfPartition, sought: Mapping[str, int | None], call: BackgroundCall[_Read], now: float
    ) -> None:
        try:
            read = call.answer()
        except (KafkaException, PenstockError) as error:
            read, self._kept = _Read({}, {}, 0), []
            self._ration.warn(
                "payloads", "payloads of %s cannot be read: %s; trying again", self._topics.prefix, reason(error)
            )
        if read is None:
            return
        self._reading = None
        # If the partition was lost meanwhile, this changes an object that is no longer used.
        loaded = [name for name, at in sought.items() if _load(partition.state, name, at, read)]
        for transaction_id in loaded:
            partition.plan.loaded(transaction_id)
        if not loaded:
            self._not_before = now + _RETRY_DELAY_S

    def _read(
        self, number: int, halves: Mapping[int, int], snapshots: Mapping[_Life, int], kept: list[PartitionReader]
    ) -> _Read:
        """Read the wanted payloads within the time limit; runs on a thread of its own."""
        reader = kept.pop() if kept else self._new_reader()
        try:
            found, _ = _read_log(reader, (self._topics.half, number), halves, _half)
            written, done_to = _read_log(reader, (self._topics.done, number), snapshots, _snapshots)
            reader.start({})
        except KafkaException:
            reader.close()
            raise
        kept.append(reader)
        return _Read(found, written, done_to)

    def close(self) -> None:
        """Close the kept client in the background."""
        for reader in self._kept:
            with suppress(TooManyLeftBehindError):
                BackgroundCall("closing a reader of payloads", reader.close, _ABANDON_AFTER_S, self._left)


def _load(state: PartitionState, transaction_id: str, snapshot_at: int | None, read: _Read) -> bool:
    """Give a transaction its payload; return whether it was found."""
    pending = state.pending.get(transaction_id)
    if pending is None or pending.dropped is None:
        return False
    if (life := (transaction_id, pending.offset)) in read.snapshots:
        place, snapshot = read.snapshots[life]
        return state.load(transaction_id, [(half.offset, half.half) for half in snapshot.halves], place) is not None
    if snapshot_at is None:
        halves = [(at, read.halves[at]) for at in pending.offsets if at in read.halves]
        return state.load(transaction_id, halves) is not None
    if pending.snapshot_at is not None:
        # The next search continues at the end of this read: a new snapshot may not be visible yet.
        pending.snapshot_at = max(pending.snapshot_at, read.done_to)
    return False


def _read_log(
    reader: PartitionReader,
    place: Place,
    begins: Mapping[KeyT, int],
    found_in: Callable[[Message], Iterable[tuple[KeyT, ValueT]]],
) -> tuple[dict[KeyT, ValueT], int]:
    """Return a log's values for keys, each searched from its offset in `begins`, and the next offset."""
    left = dict(sorted(begins.items(), key=itemgetter(1)))
    found: dict[KeyT, ValueT] = {}
    position, deadline = -_NEAR, time.monotonic() + _READ_BUDGET_S
    while left and time.monotonic() < deadline:
        first = next(iter(left.values()))
        if first - position >= _NEAR:
            position = first
            reader.start({place: position})
        for message in reader.poll(_POLL_S, _MESSAGES):
            offset = message.offset() or 0
            if offset < position:  # of a former assignment
                continue
            position = offset + 1
            # An unreadable record: the log was replaced, or the recovery has logged it.
            with suppress(MessageFormatError):
                for key, value in found_in(message):
                    if left.get(key, position) < position:
                        del left[key]
                        found[key] = value
        if place in reader.exhausted:
            # Transaction markers are no records, so only the reader's position at the end counts them.
            position = max(position, reader.positions[place])
            break
    return found, position


def _half(message: Message) -> Iterable[tuple[int, Half]]:
    return [(message.offset() or 0, decode_half(message.key(), message.value(), wire_headers(message)))]


def _snapshots(message: Message) -> Iterable[tuple[_Life, tuple[int, Snapshot]]]:
    return [
        (
            (snapshot.note.transaction_id, min(half.offset for half in snapshot.halves)),
            (message.offset() or 0, snapshot),
        )
        for snapshot in decode_done(message.value()).snapshots
    ]


def _not_read(kind: ErrorKind, error: KafkaError, _place: Place) -> None:
    """Raise errors from which the client does not recover by itself."""
    if kind not in {ErrorKind.PASSING, ErrorKind.GROUP}:
        raise KafkaException(error)
