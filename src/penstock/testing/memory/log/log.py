"""The log of one partition: records, transaction markers, holes, and what a reader gets of them.

Records are the client library's own `Message` objects, made once when they are appended and handed to every reader.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

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


class PartitionLog:
    """The log of one partition. The broker's lock guards it."""

    __slots__ = ("_entries", "_offsets", "_open", "_owners", "_plain", "end", "partition", "start", "topic", "type")

    def __init__(self, topic: str, partition: int, timestamp_type: int = CREATE_TIME) -> None:
        self.topic = topic
        self.partition = partition
        self.type = timestamp_type
        #: The first offset that can be read, and the one that is given next.
        self.start = 0
        self.end = 0
        # Offsets that exist, rising, and what is there: a record, or None for a marker.
        self._offsets: list[int] = []
        self._entries: list[Message | None] = []
        # The transaction of each record that has one, and the first offset of each that is open.
        self._owners: dict[int, LoggedTransaction] = {}
        self._open: dict[LoggedTransaction, int] = {}
        # Whether every entry is a record that anybody may see: then a read is a slice.
        self._plain = True

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
            self._plain = False
            self._owners[self.end] = owner
            self._open.setdefault(owner, self.end)
        self._put(message)
        return message

    def append_marker(self, owner: LoggedTransaction) -> None:
        """End a transaction here: its marker takes an offset that nobody gets."""
        self._plain = False
        self._open.pop(owner, None)
        self._put(None)

    def _put(self, entry: Message | None) -> None:
        self._offsets.append(self.end)
        self._entries.append(entry)
        self.end += 1

    def read(self, position: int, limit: int, *, committed_only: bool) -> tuple[list[Message], int]:
        """Return up to `limit` records from `position`, and the position after them.

        That position lies past markers and aborted ranges that follow the last record returned.
        """
        stop = self.last_stable if committed_only else self.end
        if position >= stop:
            return [], position
        index, last = bisect_left(self._offsets, position), bisect_left(self._offsets, stop)
        if self._plain:
            found: list[Message] = self._entries[index : min(last, index + limit)]  # type: ignore[assignment] # no markers
            index += len(found)
        else:
            found = []
            while index < last:
                entry = self._entries[index]
                if entry is not None and not (committed_only and self._aborted(self._offsets[index])):
                    if len(found) == limit:
                        break
                    found.append(entry)
                index += 1
        return found, self._offsets[index] if index < last else stop

    def _aborted(self, offset: int) -> bool:
        owner = self._owners.get(offset)
        return owner is not None and owner.outcome is Outcome.ABORTED

    def records(self, *, committed_only: bool) -> list[Message]:
        """Return all records that a reader gets from the start."""
        return self.read(self.start, len(self._offsets), committed_only=committed_only)[0]

    def delete_before(self, offset: int) -> None:
        """Let the log begin at `offset`, as retention does."""
        self.start = max(self.start, min(offset, self.end))
        self._drop(0, bisect_left(self._offsets, self.start))

    def truncate(self, end: int) -> None:
        """Let the log end before `end`, as after the loss of a leader: offsets are given again."""
        self._drop(bisect_left(self._offsets, end), len(self._offsets))
        self.end = max(0, min(end, self.end))
        self.start = min(self.start, self.end)
        self._open = {owner: first for owner, first in self._open.items() if first < self.end}

    def _drop(self, begin: int, end: int) -> None:
        for offset in self._offsets[begin:end]:
            self._owners.pop(offset, None)
        del self._offsets[begin:end]
        del self._entries[begin:end]

    def compact(self, keep: Callable[[Message], bool] | None) -> None:
        """Remove records below the last stable offset; their offsets become holes.

        `keep` tells whether a record stays; without it the newest of each key and all without a key stay.
        """
        last = bisect_left(self._offsets, self.last_stable)
        newest: dict[bytes, int] = {}
        for entry in self._entries[:last]:
            if entry is not None and entry.key() is not None and not self._aborted(entry.offset() or 0):
                newest[_key(entry)] = entry.offset() or 0

        def stays(entry: Message | None, offset: int) -> bool:
            if entry is None:
                return True
            if self._aborted(offset):
                return False
            return keep(entry) if keep is not None else entry.key() is None or newest[_key(entry)] == offset

        staying = [index for index in range(last) if stays(self._entries[index], self._offsets[index])]
        staying.extend(range(last, len(self._offsets)))
        self._offsets = [self._offsets[index] for index in staying]
        self._entries = [self._entries[index] for index in staying]


def _key(message: Message) -> bytes:
    key = message.key()
    return key if isinstance(key, bytes) else str(key).encode()
