"""`Message`: one Kafka record as a handler receives it, read-only.

It is a thin view of the client library's record. Each field is read on access, so an empty handler pays for none.
`Message.of` makes one by hand, for tests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: Names and contents of headers, in order; names may repeat.
Headers = tuple[tuple[str, bytes | None], ...]

#: `timestamp()` types of the client library, in the order of its constants (librdkafka `rd_kafka_timestamp_type_t`).
_NO_TIMESTAMP = 0


class HandlerThread(threading.local):
    """Thread-local data for code that handlers call: the consumer group; None outside of handlers."""

    group: str | None = None


#: The data of the present thread. The thread writes it before it calls a handler.
handler_thread = HandlerThread()


@contextmanager
def calling_handlers_of(group: str) -> Iterator[None]:
    """Set the consumer group of the present thread within the block."""
    before, handler_thread.group = handler_thread.group, group
    try:
        yield
    finally:
        handler_thread.group = before


class Record(Protocol):
    """The interface of a fetched record: the reading half of `confluent_kafka.Message`."""

    def topic(self) -> str:
        """Name of the topic."""

    def partition(self) -> int:
        """Number of the partition."""

    def offset(self) -> int:
        """Offset of the record in its partition."""

    def key(self) -> bytes | None:
        """Key, or None."""

    def value(self) -> bytes | None:
        """Value, or None for a tombstone."""

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        """Headers in wire order, or None when there are none."""

    def __len__(self) -> int:
        """Bytes of the value."""

    def timestamp(self) -> tuple[int, int]:
        """Timestamp type (0 none, 1 create time, 2 log-append time) and milliseconds since the epoch."""


#: Calls `headers` of a record: see `headers_of`.
_read_headers: Callable[[Record], list[tuple[str, bytes | None]] | None] = methodcaller("headers")
#: The header of records whose own headers the client could not transfer.
HEADERS_LOST = "penstock-headers-lost"
#: Replaces the headers of a record that cannot be read; compared by identity.
UNREADABLE_HEADERS: list[tuple[str, bytes | None]] = [(HEADERS_LOST, b"a header name is not UTF-8")]


def column(records: Sequence[Record], method: str) -> list[Any]:
    """Call a method of each record and return the results, in C. All records have the same type."""
    return list(map(getattr(type(records[0]), method), records)) if records else []


def position_of(record: Record) -> str:
    """Return the topic, partition and offset of a record, as errors and logs name them."""
    return f"{record.topic()}:{record.partition()}@{record.offset()}"


def headers_of(record: Record) -> list[tuple[str, bytes | None]] | None:
    """Return a record's headers. All code must read headers by this function.

    On the wire, a header name may be any bytes. confluent-kafka 2.16 cannot return a name that is not UTF-8: its first
    call raises an error, and the second returns a list with holes, which ends the process when it is used. So after the
    first error, the record gets a replacement list, which makes later calls raise the same error. The first call may
    return a result and set an error at once. Python notices that in a call from C, as here, but not in a specialised
    call of its own.

    Raises:
        UnicodeDecodeError: a header name is not UTF-8; none of the headers can be read.
    """
    try:
        found = _read_headers(record)
    except (SystemError, UnicodeDecodeError) as error:
        replace = getattr(record, "set_headers", None)
        if replace is not None:
            replace(UNREADABLE_HEADERS)
        raise UnicodeDecodeError("utf-8", b"?", 0, 1, "the name of a header is not text") from error
    if found is UNREADABLE_HEADERS:
        raise UnicodeDecodeError("utf-8", b"?", 0, 1, "the name of a header is not text")
    return found


def readable_headers(record: Record) -> list[tuple[str, bytes | None]]:
    """Return a record's headers, or `UNREADABLE_HEADERS` if they cannot be read."""
    try:
        return headers_of(record) or []
    except UnicodeDecodeError:
        return list(UNREADABLE_HEADERS)


def timestamp_of(record: Record) -> int | None:
    """Return a record's milliseconds since the epoch, or None if it has no time."""
    kind, milliseconds = record.timestamp()
    # A producer may write -1 for "no time"; the type is then that of create time.
    return None if kind == _NO_TIMESTAMP or milliseconds < 0 else milliseconds


class Message:
    """One Kafka record as a handler receives it. Read-only, and safe to share between threads.

    Keys and values are bytes. Only a decoder that the handler names decodes them.
    """

    __slots__ = ("_record",)

    def __init__(self, record: Record) -> None:
        self._record = record

    @classmethod
    def of(
        cls,
        value: bytes | None,
        *,
        topic: str = "topic",
        partition: int = 0,
        offset: int = 0,
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        timestamp: int | None = None,
        attempt: int = 1,
    ) -> Message:
        """Make a message by hand, to call a handler in a test.

        Args:
            value: the value, or None for a tombstone.
            topic: name of the topic.
            partition: number of the partition.
            offset: offset in that partition.
            key: the key, or None.
            headers: pairs of name and bytes.
            timestamp: create time in milliseconds since the epoch, or None.
            attempt: number of the try, 1 for the first.

        Raises:
            ConfigurationError: `attempt` is below 1.
        """
        if attempt < 1:
            raise ConfigurationError(f"attempt counts from 1, which is the first try, but is {attempt!r}")
        record = FixedRecord(topic, partition, offset, key, value, tuple(headers), timestamp)
        return RetriedMessage(record, attempt - 1) if attempt > 1 else cls(record)

    @property
    def topic(self) -> str:
        """Name of the topic."""
        return self._record.topic()

    @property
    def partition(self) -> int:
        """Number of the partition."""
        return self._record.partition()

    @property
    def offset(self) -> int:
        """Offset of the record in its partition."""
        return self._record.offset()

    @property
    def key(self) -> bytes | None:
        """Key, or None."""
        return self._record.key()

    @property
    def value(self) -> bytes | None:
        """Value, or None for a tombstone."""
        return self._record.value()

    @property
    def body(self) -> object:
        """The decoded value; the value itself if the handler names no decoder."""
        return self._record.value()

    @property
    def headers(self) -> Headers:
        """Headers in wire order; names may repeat."""
        return tuple(headers_of(self._record) or ())

    @property
    def timestamp(self) -> int | None:
        """Milliseconds since the epoch, or None when the record carries none."""
        return timestamp_of(self._record)

    @property
    def attempt(self) -> int:
        """Number of this try: 1 for the first. Tries before a retry topic count.

        A new process does not know the tries of an earlier one. It begins at 1 again, or at the count that the message
        had when it came to its retry topic.
        """
        return 1

    def header(self, name: str) -> bytes | None:
        """Return the last header of that name, as Kafka's `lastHeader`, or None."""
        return dict(headers_of(self._record) or ()).get(name)

    def __repr__(self) -> str:
        """Name the place, never the key or the value."""
        return f"<Message {self.topic}:{self.partition}@{self.offset}>"


class FetchedMessage(Message):
    """A message that is made in two steps: `FetchedMessage()`, then its `_record`.

    That avoids a call of an `__init__` in Python, half of the cost of making a message.
    """

    __slots__ = ()

    __init__ = object.__init__


class RetriedMessage(Message):
    """A message that was tried before. It has its own class, so that first tries, nearly all, pay nothing for it."""

    __slots__ = ("_tries",)

    def __init__(self, record: Record, tries: int) -> None:
        super().__init__(record)
        #: Number of earlier tries.
        self._tries = tries

    @property
    def attempt(self) -> int:
        """Number of this try."""
        return self._tries + 1


class DecodedMessage(RetriedMessage):
    """A message with a decoded body."""

    __slots__ = ("_body",)

    def __init__(self, record: Record, body: object, tries: int = 0) -> None:
        # Inlined from its base classes: a call of each costs as much as decoding a short body.
        self._record, self._tries, self._body = record, tries, body

    @property
    def body(self) -> object:
        """The decoded value; None for a tombstone."""
        return self._body


@dataclass(frozen=True, slots=True)
class FixedRecord:
    """A `Record` made from values."""

    topic_name: str
    partition_number: int
    record_offset: int
    record_key: bytes | None = field(repr=False)
    record_value: bytes | None = field(repr=False)
    record_headers: Headers = field(repr=False)
    timestamp_ms: int | None

    def topic(self) -> str:
        """Name of the topic."""
        return self.topic_name

    def partition(self) -> int:
        """Number of the partition."""
        return self.partition_number

    def offset(self) -> int:
        """Offset of the record."""
        return self.record_offset

    def key(self) -> bytes | None:
        """Key, or None."""
        return self.record_key

    def value(self) -> bytes | None:
        """Value, or None."""
        return self.record_value

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        """Headers, or None when there are none."""
        return list(self.record_headers) or None

    def __len__(self) -> int:
        """Bytes of the value."""
        return len(self.record_value or b"")

    def timestamp(self) -> tuple[int, int]:
        """Type 1 (create time) and the milliseconds, or 0 and -1."""
        return (_NO_TIMESTAMP, -1) if self.timestamp_ms is None else (1, self.timestamp_ms)


__all__ = ["DecodedMessage", "FixedRecord", "Headers", "Message", "Record", "RetriedMessage", "column", "headers_of"]
