"""Reads payloads that were dropped from memory again: halves by their offsets, snapshots where the done log holds them.

It has a thread and a client of its own, so that nobody's loop waits for it. A read that does not return in time is left
behind with its client, and the next one has another. What is not there any more stays away: that its log is not as it
was is found out by `log_upkeep`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakSet, ref

from confluent_kafka import KafkaError, KafkaException, Message

from penstock.clients.bounded_calls import Call, Disposable, LeftBehind
from penstock.clients.kafka_errors import ErrorKind, reason
from penstock.clients.reading import PartitionReader, Place
from penstock.errors import MessageFormatError, PenstockError
from penstock.options import ClientConfig
from penstock.transactions.core.payloads import PAYLOAD_BYTES
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.state import PartitionState
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.wire.done_records import Snapshot, decode_done
from penstock.transactions.wire.half import Half, decode_half
from penstock.transactions.wire.topics import StoreTopics
from penstock.transactions.writing.acked_producer import wire_headers

_log = logging.getLogger("penstock.transactions")

#: Seconds after which a read ends with what it has, and after which it is left behind.
_READ_S = 2.0
_LIMIT_S = 30.0
_POLL_S = 0.1
_MESSAGES = 500
#: Records that are read through rather than jumped over, which costs a fetch.
_NEAR = 1_000
#: Seconds after a read that failed, or found nothing.
_BACK_OFF_S = 0.2


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be read of one half partition.

    Attributes:
        ids: of the transactions that it is for.
        halves: offsets in the half log.
        snapshots: by transaction id, an offset of the done log at or above which it is snapshotted.
    """

    partition: int
    ids: Sequence[str]
    halves: frozenset[int]
    snapshots: Mapping[str, int]

    @classmethod
    def of(cls, partition: int, some: Sequence[Pending]) -> Wanted:
        """Return what is to be read for transactions."""
        snapshots = {it.half.transaction_id: it.snapshot_at for it in some if it.snapshot_at is not None}
        halves = frozenset(offset for it in some if it.snapshot_at is None for offset in it.offsets)
        return cls(partition, [it.half.transaction_id for it in some], halves, snapshots)


@dataclass(slots=True)
class Read:
    """What was read.

    Attributes:
        halves: by offset.
        snapshots: by transaction id, each with the offset of its record.
        absent: by transaction id, an offset of the done log below which it is not.
    """

    halves: dict[int, Half] = field(default_factory=dict)
    snapshots: dict[str, tuple[int, Snapshot]] = field(default_factory=dict)
    absent: dict[str, int] = field(default_factory=dict)

    def take_in(self, state: PartitionState, transaction_id: str) -> Pending | None:
        """Give a transaction its payload, if it was found; return the transaction then."""
        pending = state.pending.get(transaction_id)
        if pending is None or pending.dropped is None:
            return None
        if transaction_id in self.snapshots:
            place, snapshot = self.snapshots[transaction_id]
            return state.load(transaction_id, [(half.offset, half.half) for half in snapshot.halves], place)
        if pending.snapshot_at is None:
            found = [(offset, self.halves[offset]) for offset in pending.offsets if offset in self.halves]
            return state.load(transaction_id, found)
        # It goes on where reading came to: what was written a moment ago may not be visible yet.
        pending.snapshot_at = max(pending.snapshot_at, self.absent.get(transaction_id, 0))
        return None


class PayloadReader:
    """Reads for all half partitions of one coordinator, one after another. Used by the coordinator's thread."""

    def __init__(self, bootstrap_servers: str, config: ClientConfig, topics: StoreTopics, left: LeftBehind) -> None:
        self._topics = topics
        # Single records are read, here and there.
        settings = {"fetch.message.max.bytes": 1 << 20, "queued.max.messages.kbytes": 4_096, **config}
        new_reader = partial(PartitionReader, bootstrap_servers, settings, topics.coordinators, _not_read)
        self._new_client = partial(_Client, new_reader)
        self._left = left
        self._ration = RationedLog()
        self._thread: Disposable | None = None
        self._client = self._new_client()
        # For whom something is read, and what. Partitions may be lost meanwhile.
        self._reading: tuple[ref[PartitionState], Wanted, Call[Read]] | None = None
        self._not_before = 0.0
        # All who read share the budget.
        self._owners: WeakSet[PartitionState] = WeakSet()

    def poll(self, number: int, state: PartitionState, now: float) -> list[Pending]:
        """Take in what was read for a half partition, or have read what it needs; does not wait.

        Returns the transactions whose payloads are in memory again. Raises `TooManyLeftBehindError` where too many
        reads hang.
        """
        self._owners.add(state)
        state.payloads.limit = PAYLOAD_BYTES // len(self._owners)
        if self._reading is not None and self._reading[0]() is state and self._reading[2].done():
            # Who got something begins nothing in the same round: the others have their turn.
            return self._take(state, now)
        if not self._is_busy(now) and (wanted := state.payloads.next_read(state.now_ms)):
            self._begin(state, Wanted.of(number, wanted))
        return []

    def _begin(self, state: PartitionState, wanted: Wanted) -> None:
        if self._thread is None:
            self._left.require_few()
            self._thread = Disposable(f"penstock-payloads-{self._topics.prefix}", self._left)
            self._client = self._new_client()
        client = self._client
        label = f"reading payloads of half partition {wanted.partition}"
        call = self._thread.start(label, lambda: _read(client.reader, self._topics, wanted))
        self._reading = ref(state), wanted, call

    def _take(self, state: PartitionState, now: float) -> list[Pending]:
        assert self._reading is not None  # noqa: S101 - the caller looked
        (_, wanted, call), self._reading = self._reading, None
        try:
            read = call.result()
        except (KafkaException, PenstockError) as error:
            read = Read()
            text = reason(error) if isinstance(error, KafkaException) else str(error)
            self._ration.warn("read", "payloads of %s cannot be read: %s; trying again", self._topics.prefix, text)
        loaded = [pending for name in wanted.ids if (pending := read.take_in(state, name)) is not None]
        if not loaded:
            self._not_before = now + _BACK_OFF_S
        return loaded

    def _is_busy(self, now: float) -> bool:
        """Tell whether something is being read; what hangs is left behind."""
        if self._reading is None or self._thread is None:
            return now < self._not_before
        owner, _, call = self._reading
        if call.done():
            # Nobody takes what a partition asked for that was lost since.
            return owner() is not None
        if call.age_s <= _LIMIT_S:
            return True
        _log.warning("%s did not return in %g s: it is left behind", call.label, _LIMIT_S)
        self._thread.leave(self._client.close)
        self._thread, self._reading = None, None
        return False

    def close(self) -> None:
        """Read nothing more; does not wait."""
        if self._thread is not None:
            self._thread.start("closing the payload reader", self._client.close)
            self._thread.close()
            self._thread = None


class _Client:
    """A reader that is made when it is needed first. Used by the reader's thread."""

    def __init__(self, new_reader: Callable[[], PartitionReader]) -> None:
        self._new_reader = new_reader
        self._reader: PartitionReader | None = None

    @property
    def reader(self) -> PartitionReader:
        if self._reader is None:
            self._reader = self._new_reader()
        return self._reader

    def close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


def _read(reader: PartitionReader, topics: StoreTopics, wanted: Wanted) -> Read:
    """Read what is wanted, as far as time allows; runs in the reader's thread."""
    read, deadline = Read(), time.monotonic() + _READ_S
    try:
        if wanted.halves:
            _read_halves(reader, (topics.half, wanted.partition), wanted, read, deadline)
        if wanted.snapshots:
            # Some of it, even if the halves took all the time.
            deadline = max(deadline, time.monotonic() + _READ_S / 2)
            _read_snapshots(reader, (topics.done, wanted.partition), wanted, read, deadline)
    finally:
        reader.start({})
    return read


def _read_halves(reader: PartitionReader, place: Place, wanted: Wanted, read: Read, deadline: float) -> None:
    offsets = sorted(wanted.halves, reverse=True)
    position = -_NEAR
    while offsets and time.monotonic() < deadline:
        if offsets[-1] - position >= _NEAR:
            position = offsets[-1]
            reader.start({place: position})
        for message in reader.poll(_POLL_S, min(_MESSAGES, offsets[0] + 1 - position)):
            offset = message.offset() or 0
            if offset < position:  # of a former assignment
                continue
            position = offset + 1
            while offsets and offsets[-1] < offset:
                offsets.pop()
            if offsets and offsets[-1] == offset:
                offsets.pop()
                try:
                    read.halves[offset] = decode_half(message.key(), message.value(), wire_headers(message))
                except MessageFormatError:
                    # Another record than the one that was there: the log is another one.
                    continue


def _read_snapshots(reader: PartitionReader, place: Place, wanted: Wanted, read: Read, deadline: float) -> None:
    begins = dict(sorted(wanted.snapshots.items(), key=lambda item: item[1]))
    position = -_NEAR
    while begins and time.monotonic() < deadline:
        first = next(iter(begins.values()))
        if first - position >= _NEAR:
            position = first
            reader.start({place: position})
        for message in reader.poll(_POLL_S, _MESSAGES):
            offset = message.offset() or 0
            if offset < position:
                continue
            position = offset + 1
            for snapshot in _snapshots(message):
                transaction_id = snapshot.note.transaction_id
                if begins.get(transaction_id, position) < position:
                    del begins[transaction_id]
                    read.snapshots[transaction_id] = offset, snapshot
        if place in reader.exhausted:
            # Markers are no records: the end of what may be read now tells how far it came.
            position = max(position, reader.positions[place])
            break
    read.absent = {transaction_id: position for transaction_id, begin in begins.items() if begin <= position}


def _snapshots(message: Message) -> Sequence[Snapshot]:
    try:
        return decode_done(message.value()).snapshots
    except MessageFormatError:
        # It was logged when the partition was recovered.
        return []


def _not_read(kind: ErrorKind, error: KafkaError, _place: Place) -> None:
    """Raise what the client does not recover from by itself."""
    if kind not in {ErrorKind.PASSING, ErrorKind.GROUP}:
        raise KafkaException(error)
