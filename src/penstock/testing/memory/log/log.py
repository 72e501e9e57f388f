"""The log of one partition: records, transaction markers, holes, and what a reader gets of them.

Records are the client library's own `Message` objects, made once when they are appended and handed to every reader.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter

from confluent_kafka import Message

Headers = Sequence[tuple[str, str | bytes | None]]
#: Topic and partition.
Place = tuple[str, int]

#: Types of a timestamp (librdkafka `rd_kafka_timestamp_type_t`).
CREATE_TIME = 1
LOG_APPEND_TIME = 2


class Outcome(Enum):
    """What became of a transaction."""

    OPEN = auto()
    COMMITTED = auto()
    ABORTED = auto()


@dataclass(slots=True, eq=False)
class LoggedTransaction:
    """A transaction as the logs know it: one object for all its partitions, so that it ends in all at once."""

    outcome: Outcome = Outcome.OPEN
    #: Where it has records, in their order.
    logs: dict[PartitionLog, None] = field(default_factory=dict)

    def end(self, outcome: Outcome) -> None:
        """Write its markers."""
        self.outcome = outcome
        for log in self.logs:
            log.append_marker(self)


@dataclass(slots=True, eq=False)
class _Entry:
    """What is at one offset: a record, or None for a marker; and its transaction, where it has one."""

    offset: int
    record: Message | None
    owner: LoggedTransaction | None

    @property
    def is_aborted(self) -> bool:
        return self.owner is not None and self.owner.outcome is Outcome.ABORTED


class PartitionLog:
    """The log of one partition. The broker's lock guards it."""

    def __init__(self, topic: str, partition: int, timestamp_type: int = CREATE_TIME) -> None:
        self.topic = topic
        self.partition = partition
        self.type = timestamp_type
        #: The first offset that can be read, and the one that is given next.
        self.start = 0
        self.end = 0
        # By their offsets; there are holes between them.
        self._entries: list[_Entry] = []
        # The first offset of each transaction that is open.
        self._open: dict[LoggedTransaction, int] = {}

    @property
    def last_stable(self) -> int:
        """The offset at which a read_committed reader stops: the first of an open transaction, or the end."""
        return min(self._open.values()) if self._open else self.end

    def append(
        self,
        value: bytes | None,
        key: bytes | None,
        headers: Headers | None,
        timestamp_ms: int,
        owner: LoggedTransaction | None = None,
    ) -> Message:
        """Append a record and return it."""
        pairs: list[tuple[str, str | bytes | None]] | None
        pairs = [(name, text.encode() if isinstance(text, str) else text) for name, text in headers or ()] or None
        message = Message(self.topic, self.partition, self.end, key, value, pairs, None, (self.type, timestamp_ms))
        if owner is not None:
            self._open.setdefault(owner, self.end)
            owner.logs[self] = None
        self._put(message, owner)
        return message

    def append_marker(self, owner: LoggedTransaction) -> None:
        """End a transaction here: its marker takes an offset that nobody gets."""
        self._open.pop(owner, None)
        self._put(None, owner)

    def _put(self, record: Message | None, owner: LoggedTransaction | None) -> None:
        self._entries.append(_Entry(self.end, record, owner))
        self.end += 1

    def _index(self, offset: int) -> int:
        return bisect_left(self._entries, offset, key=attrgetter("offset"))

    def read(self, position: int, limit: int, *, committed_only: bool) -> tuple[list[Message], int]:
        """Return up to `limit` records from `position`, and the position after them.

        That position lies past markers and aborted ranges that follow the last record returned.
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

    def records(self, *, committed_only: bool) -> list[Message]:
        """Return all records that a reader gets from the start."""
        return self.read(self.start, len(self._entries), committed_only=committed_only)[0]

    def delete_before(self, offset: int) -> None:
        """Let the log begin at `offset`, as retention does."""
        self.start = max(self.start, min(offset, self.end))
        del self._entries[: self._index(self.start)]

    def truncate(self, end: int) -> None:
        """Let the log end before `end`, as after the loss of a leader: offsets are given again."""
        del self._entries[self._index(end) :]
        self.end = max(0, min(end, self.end))
        self.start = min(self.start, self.end)
        self._open = {owner: first for owner, first in self._open.items() if first < self.end}

    def compact(self, keep: Callable[[Message], bool] | None) -> None:
        """Remove records below the last stable offset; their offsets become holes.

        `keep` tells whether a record stays; without it the newest of each key and all without a key stay.
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
            return keep(record) if keep is not None else record.key() is None or newest[record.key()] == entry.offset

        self._entries[:last] = filter(stays, self._entries[:last])
