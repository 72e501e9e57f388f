"""The columns of a record batch of the source, gathered from the client library's records."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Message

from penstock.errors import MessageFormatError
from penstock.message import UNREADABLE_HEADERS, Record, headers_of
from penstock.spark_sink.source.offsets.planning import TopicPartition

#: A record batch is handed over when it holds this many rows or this many bytes of keys, values and headers. More rows
#: took more time for each (20,000: a seventh), for their memory was no more in the processor's cache.
BATCH_ROWS = 5_000
BATCH_BYTES = 8 * 1024 * 1024

#: Most records taken from the client library in one call; less where records are large.
_TAKE = 4_000

#: Milliseconds before and after 1970 whose microseconds, which Spark's times are, fit into 64 bits.
_FURTHEST_MS = (2**63 - 1) // 1_000

#: Records taken first, before their size is known. Each take is at most so many times the one before.
_FIRST_TAKE = 16
_GROWTH = 4


@dataclass(slots=True)
class TakeSize:
    """How many records to take at once, from the size of those before: their bytes are known only once they are taken.

    One large record among small ones makes the next takes small, and those after them large again.
    """

    largest_bytes: float = 1.0
    taken: int = _FIRST_TAKE // _GROWTH

    def room(self, example: Message, left_bytes: int) -> int:
        """Return most records to take next, given one of them and the bytes that there is room for."""
        each = max(self.largest_bytes, len(example) + len(example.key() or b""))
        return max(1, min(_TAKE, self.taken * _GROWTH, int(left_bytes / each)))

    def took(self, count: int, largest_bytes: int) -> None:
        """Note how many records were taken, and the bytes of the largest."""
        self.largest_bytes = max(1.0, self.largest_bytes / 2, largest_bytes)
        self.taken = max(count, _FIRST_TAKE // _GROWTH)


@dataclass(slots=True)
class BytesColumn:
    """A column of bytes, with the length of each."""

    values: list[bytes | None] = field(default_factory=list, repr=False)
    lengths: list[int] = field(default_factory=lambda: [0], repr=False)

    def take(self, values: list[bytes | None]) -> list[int]:
        """Add values and return their lengths."""
        try:
            lengths = list(map(len, values))  # type: ignore[arg-type] # None raises
        except TypeError:
            lengths = [len(value or b"") for value in values]
        self.values += values
        self.lengths += lengths
        return lengths

    def to_arrow(self) -> pa.Array:
        """Return a column that takes the bytes' own size: Arrow's builder, which grows, took five times as much."""
        values, valid = self.values, None
        if None in values:
            valid = pa.array([value is not None for value in values]).buffers()[1]
            values = [value or b"" for value in values]
        ends = pc.cumulative_sum(pa.array(self.lengths, pa.int32())).buffers()[1]
        body = pa.py_buffer(b"".join(cast("list[bytes]", values)))
        return pa.Array.from_buffers(pa.binary(), len(values), [valid, ends, body])


@dataclass(slots=True)
class Rows:
    """Columns gathered for one record batch, with their size.

    Fields are taken out of the library's records at once, so that thousands of record objects do not live on
    for the garbage collector to walk. With `null_times` a timestamp that Spark cannot hold is NULL.
    """

    with_headers: bool
    take_size: TakeSize
    null_times: bool = False
    keys: BytesColumn = field(default_factory=BytesColumn)
    values: BytesColumn = field(default_factory=BytesColumn)
    offsets: list[int] = field(default_factory=list)
    #: Type and milliseconds of each.
    times: list[tuple[int, int]] = field(default_factory=list)
    #: Of which partition rows are, and how many, one after the other.
    places: list[tuple[TopicPartition, int]] = field(default_factory=list)
    headers: list[list[tuple[str, bytes | None]] | None] = field(default_factory=list, repr=False)
    size_bytes: int = 0

    def room(self, example: Message) -> int:
        """Most records to take next, so that one call does not overshoot the limit by much."""
        return self.take_size.room(example, BATCH_BYTES - self.size_bytes)

    def take(self, records: list[Message], part: TopicPartition) -> None:
        """Take records of one partition."""
        if not records:
            return
        self.places.append((part, len(records)))
        self.offsets += map(Message.offset, records)  # type: ignore[arg-type] # a fetched record has an offset
        self.times += map(Message.timestamp, records)
        # In C, for it is done for every record: what a record takes at most, as if the largest parts met in one.
        parts = [self.keys.take(list(map(Message.key, records))), self.values.take(list(map(Message.value, records)))]
        if self.with_headers:
            headers = [_headers(record) for record in records]
            self.headers += headers
            parts.append([sum(len(name) + len(value or b"") for name, value in some) for some in headers if some])
        self.size_bytes += sum(map(sum, parts))
        self.take_size.took(len(records), sum(max(part, default=0) for part in parts))

    @property
    def is_full(self) -> bool:
        """Whether the record batch is to be handed over."""
        return len(self.offsets) >= BATCH_ROWS or self.size_bytes >= BATCH_BYTES

    def to_arrow(self, schema: pa.Schema) -> pa.RecordBatch:
        """Return the record batch; there is at least one row."""
        kinds, milliseconds = (pa.array(numbers, pa.int64()) for numbers in zip(*self.times, strict=True))
        topics = [pa.repeat(pa.scalar(topic), count) for (topic, _), count in self.places]
        partitions = [pa.repeat(pa.scalar(number, pa.int32()), count) for (_, number), count in self.places]
        columns = [
            self.keys.to_arrow(),
            self.values.to_arrow(),
            pa.concat_arrays(topics),
            pa.concat_arrays(partitions),
            pa.array(self.offsets, pa.int64()),
            self._microseconds(milliseconds).view(pa.timestamp("us", "UTC")),
            # The client library counts the types from "none" = 0, Spark from "none" = -1.
            pc.subtract(kinds, pa.scalar(1, pa.int64())).cast(pa.int32()),
        ]
        if self.with_headers:
            columns.append(_headers_column(self.headers, schema.field("headers").type))
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _microseconds(self, milliseconds: pa.Array) -> pa.Array:
        """Return times as Spark counts them; one that is too far away for that is NULL, or a `MessageFormatError`."""
        thousand = pa.scalar(1_000, pa.int64())
        try:
            return pc.multiply_checked(milliseconds, thousand)
        except pa.ArrowInvalid:
            fits = pc.and_(pc.less_equal(milliseconds, _FURTHEST_MS), pc.greater_equal(milliseconds, -_FURTHEST_MS))
        if self.null_times:
            return pc.multiply(pc.if_else(fits, milliseconds, None), thousand)
        row = pc.index(fits, False).as_py()
        topic, partition = next(
            part for (part, _), end in zip(self.places, accumulate(n for _, n in self.places), strict=True) if row < end
        )
        raise MessageFormatError(
            f"{topic}[{partition}] offset {self.offsets[row]} has the timestamp {milliseconds[row]}, which is no time "
            "in milliseconds that Spark can hold; correct its producer, and set the source's option "
            "timestampOutOfRange=null to read such timestamps as NULL"
        )


def _headers_column(headers: list[list[tuple[str, bytes | None]] | None], kind: pa.ListType) -> pa.Array:
    pairs = list(chain.from_iterable(filter(None, headers)))
    names = pa.array([name for name, _ in pairs], pa.string())
    values = BytesColumn()
    values.take([value for _, value in pairs])
    structs = pa.StructArray.from_arrays([names, values.to_arrow()], type=kind.value_type)
    ends = pa.array(accumulate((len(some or ()) for some in headers), initial=0), pa.int32())
    missing = pa.array([some is None for some in headers])
    return pa.ListArray.from_arrays(ends, structs, type=kind, mask=missing)


def _headers(record: Message) -> list[tuple[str, bytes | None]] | None:
    try:
        return headers_of(cast("Record", record)) or None
    except UnicodeDecodeError:
        # One record of many millions must not end the query, and nothing but its headers is lost.
        return list(UNREADABLE_HEADERS)
