"""Reads payloads that were dropped from memory again: halves by their offsets, snapshots where the done log holds them.

It has a thread and clients of its own, so that nobody's loop waits for it. A read that does not return in time is left
behind with its clients, and the next one has others. Before each read the brokers tell which topics the logs are, and
where they begin and end: nothing is read of a topic that was made again, and what is not there any more is reported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet, ref

from confluent_kafka import KafkaError, KafkaException, Message
from confluent_kafka.admin import AdminClient

from penstock import clients
from penstock.clients.bounded_calls import Call, Disposable, LeftBehind
from penstock.clients.kafka_errors import ErrorKind, reason
from penstock.clients.reading import PartitionReader, Place
from penstock.errors import MessageFormatError, PenstockError
from penstock.options import ClientConfig
from penstock.transactions.core.payloads import PAYLOAD_BYTES
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.stores.kafka.logs.log_bounds import Bounds, LogBounds, Look
from penstock.transactions.stores.kafka.logs.log_identity import DONE, HALF
from penstock.transactions.wire.done_records import Snapshot, UnloadedSnapshot, decode_done
from penstock.transactions.wire.half import Half, decode_half
from penstock.transactions.wire.topics import StoreTopics
from penstock.transactions.writing.acked_producer import wire_headers

_log = logging.getLogger("penstock.transactions")

#: Seconds after which a read ends with what it has, and after which it is left behind.
_READ_S = 2.0
_LIMIT_S = 30.0
_POLL_S = 0.1
_MESSAGES = 500
#: Records that are read through in place of a jump over them, which costs a fetch.
_NEAR = 1_000
#: Seconds after which who asked for a turn and asks no more has none.
_TURN_S = 1.0
#: Seconds after a read that failed.
_BACK_OFF_S = 0.5


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be read of one half partition.

    Attributes:
        halves: offsets in the half log.
        snapshots: by transaction id, an offset of the done log at or above which it is snapshotted.
        ids: topic ids of the logs, as far as they are known.
    """

    partition: int
    halves: frozenset[int]
    snapshots: Mapping[str, int]
    ids: Mapping[str, str]


@dataclass(slots=True)
class Read:
    """What was read.

    Attributes:
        halves: by offset.
        gone: offsets of halves that the log does not have any more.
        snapshots: by transaction id, each with the offset of its record.
        absent: by transaction id, an offset of the done log below which it is not.
        gone_snapshots: ids of those that the done log does not have any more.
    """

    halves: dict[int, Half] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    snapshots: dict[str, tuple[int, Snapshot | UnloadedSnapshot]] = field(default_factory=dict)
    absent: dict[str, int] = field(default_factory=dict)
    gone_snapshots: set[str] = field(default_factory=set)


class PayloadsNotReadError(PenstockError):
    """Payloads could not be read now; it is tried again."""


class PayloadReader:
    """Reads for all half partitions of one coordinator, one after another. Used by the coordinator's thread."""

    def __init__(self, bootstrap_servers: str, config: ClientConfig, topics: StoreTopics, left: LeftBehind) -> None:
        self._topics = topics
        # Single records are read, here and there.
        settings = {"fetch.message.max.bytes": 1 << 20, "queued.max.messages.kbytes": 4_096, **config}
        new_reader = partial(PartitionReader, bootstrap_servers, settings, topics.coordinators, _not_read)
        self._new_clients = partial(_Clients, new_reader, partial(clients.admin, bootstrap_servers, config), topics)
        self._left = left
        self._ration = RationedLog()
        self._thread: Disposable | None = None
        self._clients = self._new_clients()
        # Who reads now, and what. Partitions may be lost meanwhile.
        self._reading: tuple[ref[Any], Call[Read]] | None = None
        # By half partition, of those that wait for their turn: since when, and when they last asked.
        self._waiting: dict[int, tuple[float, float]] = {}
        self._not_before = 0.0
        self._owners: WeakSet[Any] = WeakSet()

    def budget_bytes(self, owner: object) -> int:
        """Return how many bytes of payloads may be in memory for a half partition: its share of the budget."""
        self._owners.add(owner)
        return PAYLOAD_BYTES // len(self._owners)

    def read(self, owner: object, wanted: Wanted) -> bool:
        """Begin to read, and tell whether it was begun: not while something else is read, or others waited longer.

        Raises `TooManyLeftBehindError` where too many reads hang.
        """
        now = time.monotonic()
        since, _ = self._waiting.get(wanted.partition, (now, now))
        self._waiting[wanted.partition] = since, now
        if self._is_busy(now) or since > min(since for since, asked in self._waiting.values() if asked > now - _TURN_S):
            return False
        self._waiting = {one: times for one, times in self._waiting.items() if times[1] > now - _TURN_S}
        del self._waiting[wanted.partition]
        if self._thread is None:
            self._left.require_few()
            self._thread = Disposable(f"penstock-payloads-{self._topics.prefix}", self._left)
            self._clients = self._new_clients()
        clients = self._clients
        label = f"reading payloads of half partition {wanted.partition}"
        self._reading = ref(owner), self._thread.start(label, lambda: _read(clients, self._topics, wanted))
        return True

    def take(self, owner: object) -> Read | None:
        """Return what was read for an owner, once it is there; nothing of it where reading failed."""
        if self._reading is None or self._reading[0]() is not owner:
            return Read()
        call = self._reading[1]
        if not call.done():
            return None if self._is_busy(time.monotonic()) else Read()
        self._reading = None
        try:
            return call.result()
        except (KafkaException, PenstockError) as error:
            self._not_before = time.monotonic() + _BACK_OFF_S
            text = reason(error) if isinstance(error, KafkaException) else str(error)
            self._ration.warn("read", "payloads of %s cannot be read: %s; trying again", self._topics.prefix, text)
            return Read()

    def _is_busy(self, now: float) -> bool:
        """Tell whether something is being read; what hangs is left behind."""
        if self._reading is None or self._thread is None:
            return now < self._not_before
        owner, call = self._reading
        if call.done():
            # Nobody takes what a partition asked for that was lost since.
            return owner() is not None
        if call.age_s <= _LIMIT_S:
            return True
        _log.warning("%s did not return in %g s: it is left behind", call.label, _LIMIT_S)
        self._thread.leave(self._clients.close)
        self._thread, self._reading = None, None
        return False

    def close(self) -> None:
        """Read nothing more; does not wait."""
        if self._thread is not None:
            self._thread.start("closing the payload reader", self._clients.close)
            self._thread.close()
            self._thread = None


class _Clients:
    """Clients that are made when they are needed first. Used by the reader's thread."""

    def __init__(
        self, new_reader: Callable[[], PartitionReader], new_admin: Callable[[], AdminClient], topics: StoreTopics
    ) -> None:
        self._new_reader = new_reader
        self._new_admin = new_admin
        self._topics = topics
        self._reader: PartitionReader | None = None
        self._bounds: LogBounds | None = None

    @property
    def reader(self) -> PartitionReader:
        if self._reader is None:
            self._reader = self._new_reader()
        return self._reader

    @property
    def bounds(self) -> LogBounds:
        if self._bounds is None:
            self._bounds = LogBounds(self._new_admin(), self._topics)
        return self._bounds

    def close(self) -> None:
        reader, self._reader, self._bounds = self._reader, None, None
        if reader is not None:
            reader.close()


def _read(clients: _Clients, topics: StoreTopics, wanted: Wanted) -> Read:
    """Read what is wanted, as far as time allows; runs in the reader's thread."""
    look, reader, read = clients.bounds.look(wanted.partition), clients.reader, Read()
    deadline = time.monotonic() + _READ_S
    try:
        if wanted.halves:
            _read_halves(reader, topics.half, wanted, read, _bounds(look, HALF, wanted), deadline)
        if wanted.snapshots:
            # Some of it, even if the halves took all the time.
            deadline = max(deadline, time.monotonic() + _READ_S / 2)
            _read_snapshots(reader, topics.done, wanted, read, _bounds(look, DONE, wanted), deadline)
    finally:
        reader.start({})
    return read


def _bounds(look: Look, log: str, wanted: Wanted) -> Bounds:
    """Return where a log begins and ends, once it is certain that it is the one that was read."""
    bounds, topic_id = look.bounds.get((log, wanted.partition)), look.ids.get(log)
    if look.failures or bounds is None:
        why = ", ".join(look.failures.values())
        raise PayloadsNotReadError(f"it is not known where the {log} log begins and ends: {why}")
    if topic_id is not None and wanted.ids.get(log, topic_id) != topic_id:
        raise PayloadsNotReadError(
            f"the {log} topic was made again since; what follows from it is logged in some seconds"
        )
    return bounds


def _read_halves(  # noqa: PLR0917 - what one read is made of
    reader: PartitionReader, topic: str, wanted: Wanted, read: Read, bounds: Bounds, deadline: float
) -> None:
    read.gone.update(offset for offset in wanted.halves if not bounds.low <= offset < bounds.end)
    offsets = sorted(wanted.halves - read.gone, reverse=True)
    position = -_NEAR
    while offsets and time.monotonic() < deadline:
        if offsets[-1] - position >= _NEAR:
            position = offsets[-1]
            reader.start({(topic, wanted.partition): position})
        for message in reader.poll(_POLL_S, min(_MESSAGES, offsets[0] + 1 - position)):
            offset = message.offset() or 0
            if offset < position:  # of a former assignment
                continue
            while offsets and offsets[-1] < offset:
                read.gone.add(offsets.pop())
            position = offset + 1
            if offsets and offsets[-1] == offset:
                offsets.pop()
                try:
                    read.halves[offset] = decode_half(message.key(), message.value(), wire_headers(message))
                except MessageFormatError:
                    read.gone.add(offset)


def _read_snapshots(  # noqa: PLR0917 - as for halves
    reader: PartitionReader, topic: str, wanted: Wanted, read: Read, bounds: Bounds, deadline: float
) -> None:
    place = topic, wanted.partition
    begins = dict(sorted(wanted.snapshots.items(), key=lambda one: one[1]))
    position = -_NEAR
    while begins and time.monotonic() < deadline:
        first = max(bounds.low, next(iter(begins.values())))
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
    # What was snapshotted when the end was asked for lay below it, and no open transaction hides it.
    read.gone_snapshots.update(read.absent if position >= bounds.end else ())


def _snapshots(message: Message) -> Sequence[Snapshot | UnloadedSnapshot]:
    try:
        return decode_done(message.value()).snapshots
    except MessageFormatError:
        # It was logged when the partition was recovered.
        return []


def _not_read(kind: ErrorKind, error: KafkaError, _place: Place) -> None:
    """Raise what the client does not mend by itself."""
    if kind not in {ErrorKind.PASSING, ErrorKind.GROUP}:
        raise KafkaException(error)
