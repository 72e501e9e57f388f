"""Gathers the columns of the source's record batches from the client library's records."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Message
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ArrayType, BinaryType, IntegerType, LongType, StringType, StructType, TimestampType

from penstock.errors import MessageFormatError
from penstock.message import Record, readable_headers
from penstock.spark_sink.source.plan import TopicPartition, place

#: A record batch is complete with this many rows, or this many bytes of keys, values and headers. More rows took more
#: time each (20,000 rows: a seventh more), because they no longer fit into the processor's cache.
BATCH_ROWS = 5_000
BATCH_BYTES = 8 * 1024 * 1024

#: Most records taken from the client library in one call; fewer if records are large.
_TAKE = 4_000

#: Most milliseconds before and after 1970: Spark counts microseconds in 64 bits.
_FURTHEST_MS = (2**63 - 1) // 1_000


def source_schema(*, include_headers: bool) -> StructType:
    """Return the columns of Spark's own Kafka source."""
    schema = StructType().add("key", BinaryType()).add("value", BinaryType())
    schema.add("topic", StringType()).add("partition", IntegerType()).add("offset", LongType())
    schema.add("timestamp", TimestampType()).add("timestampType", IntegerType())
    if include_headers:
        schema.add("headers", ArrayType(StructType().add("key", StringType()).add("value", BinaryType())))
    return schema


@cache
def _arrow_schema(*, include_headers: bool) -> pa.Schema:
    return to_arrow_schema(source_schema(include_headers=include_headers), timezone="UTC")


@dataclass(slots=True)
class Rows:
    """Columns gathered for one record batch, with their size.

    Fields are read from the library's records at once, so that the garbage collector does not have to walk thousands of
    record objects. With `null_times`, a timestamp that Spark cannot hold becomes NULL.
    """

    with_headers: bool
    null_times: bool = False
    #: Estimated bytes of the next record, from earlier ones, also of earlier batches.
    largest_bytes: float = 1.0
    keys: list[bytes | None] = field(default_factory=list, repr=False)
    values: list[bytes | None] = field(default_factory=list, repr=False)
    offsets: list[int] = field(default_factory=list)
    #: Type and milliseconds of each record.
    times: list[tuple[int, int]] = field(default_factory=list)
    #: Partition and number of consecutive rows.
    places: list[tuple[TopicPartition, int]] = field(default_factory=list)
    headers: list[list[tuple[str, bytes | None]] | None] = field(default_factory=list, repr=False)
    size_bytes: int = 0

    def room(self, example: Message) -> int:
        """Return how many records to take next, given one of them. Their sizes are known only after taking them.

        A large record among small ones makes the next takes small; later takes grow again.
        """
        each = max(self.largest_bytes, len(example) + len(example.key() or b""))
        return max(1, min(_TAKE, int((BATCH_BYTES - self.size_bytes) / each)))

    def take(self, records: list[Message], part: TopicPartition) -> None:
        """Take records of one partition."""
        if not records:
            return
        self.places.append((part, len(records)))
        self.offsets += map(Message.offset, records)  # type: ignore[arg-type] # a fetched record has an offset
        self.times += map(Message.timestamp, records)
        keys, values = list(map(Message.key, records)), list(map(Message.value, records))
        self.keys += keys
        self.values += values
        # In C, because it runs for every record. The largest record is estimated as the sum of the largest parts.
        sizes = [list(map(len, filter(None, column))) for column in (keys, values)]
        if self.with_headers:
            # One record among millions must not end the query: only its headers are lost.
            headers = [readable_headers(cast("Record", record)) or None for record in records]
            self.headers += headers
            sizes.append([sum(len(name) + len(value or b"") for name, value in some) for some in headers if some])
        self.size_bytes += sum(map(sum, sizes))
        self.largest_bytes = max(1.0, self.largest_bytes / 2, sum(max(column, default=0) for column in sizes))

    @property
    def is_full(self) -> bool:
        """Whether the record batch is complete."""
        return len(self.offsets) >= BATCH_ROWS or self.size_bytes >= BATCH_BYTES

    def to_arrow(self) -> pa.RecordBatch:
        """Return the record batch; there is at least one row."""
        schema = _arrow_schema(include_headers=self.with_headers)
        kinds, milliseconds = (pa.array(numbers, pa.int64()) for numbers in zip(*self.times, strict=True))
        topics = [pa.repeat(pa.scalar(topic), count) for (topic, _), count in self.places]
        partitions = [pa.repeat(pa.scalar(number, pa.int32()), count) for (_, number), count in self.places]
        columns = [
            _bytes_column(self.keys),
            _bytes_column(self.values),
            pa.concat_arrays(topics),
            pa.concat_arrays(partitions),
            pa.array(self.offsets, pa.int64()),
            self._microseconds(milliseconds).view(pa.timestamp("us", "UTC")),
            # The client library counts the types from "none" = 0, Spark from "none" = -1.
            pc.subtract(kinds, pa.scalar(1, pa.int64())).cast(pa.int32()),
        ]
        if self.with_headers:
            columns.append(pa.array(self.headers, schema.field("headers").type))
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _microseconds(self, milliseconds: pa.Array) -> pa.Array:
        """Return times in microseconds. A time outside Spark's range becomes NULL or raises `MessageFormatError`."""
        thousand = pa.scalar(1_000, pa.int64())
        try:
            return pc.multiply_checked(milliseconds, thousand)
        except pa.ArrowInvalid:
            fits = pc.and_(pc.less_equal(milliseconds, _FURTHEST_MS), pc.greater_equal(milliseconds, -_FURTHEST_MS))
        if self.null_times:
            return pc.multiply(pc.if_else(fits, milliseconds, None), thousand)
        row = pc.index(fits, False).as_py()
        ends = accumulate(count for _, count in self.places)
        part = next(part for (part, _), end in zip(self.places, ends, strict=True) if row < end)
        raise MessageFormatError(
            f"{place(part)}@{self.offsets[row]} has the timestamp {milliseconds[row]}, which is no time "
            "in milliseconds that Spark can hold; correct its producer, and set the source's option "
            "timestampOutOfRange=null to read such timestamps as NULL"
        )


def _bytes_column(values: list[bytes | None]) -> pa.Array:
    """Return a column with an exact buffer. Arrow's growing builder takes twice the time for large values."""
    valid = None
    if None in values:
        valid = pa.array([value is not None for value in values]).buffers()[1]
        values = [value or b"" for value in values]
    known = cast("list[bytes]", values)
    ends = pc.cumulative_sum(pa.array([0, *map(len, known)], pa.int32())).buffers()[1]
    return pa.Array.from_buffers(pa.binary(), len(known), [valid, ends, pa.py_buffer(b"".join(known))])
