"""The log of one partition: records, transaction markers and offset gaps, and reading from it.

Records are `Message` objects of the client library. They are made once, at the append, and shared by all readers.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from operator import attrgetter
from typing import Self

from confluent_kafka import Message

from penstock.errors import StoppedError

Headers = Sequence[tuple[str, str | bytes | None]]
#: Topic and partition.
Place = tuple[str, int]

#: The type of all timestamps here (librdkafka `rd_kafka_timestamp_type_t`).
_CREATE_TIME = 1


class Outcome(Enum):
    """The states of a transaction."""

    OPEN = auto()
    COMMITTED = auto()
    ABORTED = auto()


class TestTransaction:
    """A Kafka transaction, made by `TestBroker.transaction`. It ends in all its logs at once.

    As a context manager it commits, or aborts if an exception passes through. Otherwise it stays open until `commit` or
    `abort`. Until then, readers of committed messages stop before its first record.
    """

    __test__ = False  # pytest would take the name for a test case

    def __init__(self, append: Callable[..., Message], lock: threading.RLock) -> None:
        self._append = append
        self._lock = lock
        self.outcome = Outcome.OPEN
        #: The logs that hold its records, in order.
        self.logs: dict[PartitionLog, None] = {}

    def produce(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers | None = (),
        partition: int | None = None,
    ) -> Message:
        """Append a record and return it; `StoppedError` if the transaction has ended."""
        with self._lock:
            self._require_open()
            return self._append(topic, value, key, headers, partition=partition, owner=self)

    def commit(self) -> None:
        """End the transaction and make its records visible."""
        self.end(Outcome.COMMITTED)

    def abort(self) -> None:
        """End the transaction. Readers of committed messages never get its records."""
        self.end(Outcome.ABORTED)

    def end(self, outcome: Outcome) -> None:
        """End the transaction and write its markers."""
        with self._lock:
            self._require_open()
            self.outcome = outcome
            for log in self.logs:
                log.append_marker(self)

    def _require_open(self) -> None:
        if self.outcome is not Outcome.OPEN:
            raise StoppedError(f"this transaction has ended: {self.outcome.name}; begin another")

    def __enter__(self) -> Self:
        """Return the open transaction."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit, or abort if an exception passes through. If the transaction has already ended, do nothing."""
        if self.outcome is Outcome.OPEN:
            self.end(Outcome.COMMITTED if kind is None else Outcome.ABORTED)


@dataclass(slots=True, eq=False)
class _Entry:
    """The entry of one offset: a record, or None for a marker; and its transaction, if any."""

    offset: int
    record: Message | None
    owner: TestTransaction | None

    @property
    def is_aborted(self) -> bool:
        return self.owner is not None and self.owner.outcome is Outcome.ABORTED


class PartitionLog:
    """The log of one partition. The broker's lock guards it."""

    def __init__(self, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        #: The first readable offset, and the offset of the next record.
        self.start = 0
        self.end = 0
        # In order of offsets, with gaps.
        self._entries: list[_Entry] = []
        # The first offset of each open transaction.
        self._open: dict[TestTransaction, int] = {}

    @property
    def last_stable(self) -> int:
        """The end for a read_committed reader: the first offset of an open transaction, or the end of the log."""
        return min(self._open.values()) if self._open else self.end

    def append(
        self,
        value: bytes | None,
        key: bytes | None,
        headers: Headers | None,
        timestamp_ms: int,
        owner: TestTransaction | None = None,
    ) -> Message:
        """Append a record and return it."""
        pairs: list[tuple[str, str | bytes | None]] | None
        pairs = [(name, text.encode() if isinstance(text, str) else text) for name, text in headers or ()] or None
        message = Message(self.topic, self.partition, self.end, key, value, pairs, None, (_CREATE_TIME, timestamp_ms))
        if owner is not None:
            self._open.setdefault(owner, self.end)
            owner.logs[self] = None
        self._put(message, owner)
        return message

    def append_marker(self, owner: TestTransaction) -> None:
        """End a transaction in this log. Its marker takes an offset that no reader gets."""
        self._open.pop(owner, None)
        self._put(None, owner)

    def _put(self, record: Message | None, owner: TestTransaction | None) -> None:
        self._entries.append(_Entry(self.end, record, owner))
        self.end += 1

    def _index(self, offset: int) -> int:
        return bisect_left(self._entries, offset, key=attrgetter("offset"))

    def read(self, position: int, limit: int, *, committed_only: bool) -> tuple[list[Message], int]:
        """Return up to `limit` records from `position`, and the position after them.

        That position is past the markers and aborted ranges after the last returned record.
        """
        stop = self.last_stable if committed_only else self.end
        if position >= stop:
            return [], position
        found: list[Message] = []
        for index in range(self._index(position), self._index(stop)):
            entry = self._entries[index]
            if entry.record is None or (committed_only and entry.is_aborted):
                continue
            if len(found) == limit:
                return found, entry.offset
            found.append(entry.record)
        return found, stop

    def records(self) -> list[Message]:
        """Return all records for a reader of committed messages, from the start."""
        return self.read(self.start, len(self._entries), committed_only=True)[0]

    def delete_before(self, offset: int) -> None:
        """Delete the records before `offset`, as retention does."""
        self.start = max(self.start, min(offset, self.end))
        del self._entries[: self._index(self.start)]

    def truncate(self, end: int) -> None:
        """Delete the records from `end`, as after the loss of a leader. Their offsets will be used again."""
        del self._entries[self._index(end) :]
        self.end = max(0, min(end, self.end))
        self.start = min(self.start, self.end)
        self._open = {owner: first for owner, first in self._open.items() if first < self.end}

    def compact(self) -> None:
        """Keep the newest record of each key, and all records without a key, below the last stable offset.

        Markers are kept, aborted records are removed. Removed records leave gaps in the offsets.
        """
        last = self._index(self.last_stable)
        newest: dict[object, int] = {
            entry.record.key(): entry.offset
            for entry in self._entries[:last]
            if entry.record is not None and not entry.is_aborted
        }

        def stays(entry: _Entry) -> bool:
            record = entry.record
            if record is None or entry.is_aborted:
                return record is None
            return record.key() is None or newest[record.key()] == entry.offset

        self._entries[:last] = filter(stays, self._entries[:last])
