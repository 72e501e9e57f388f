"""How a task reads its range of one partition into Arrow record batches.

The end is found by position: a record at or past the range's end, or the partition's end at or past it.
Never by counting rows, because transaction markers, aborted records and compaction leave offsets without one.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc
import tenacity
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from penstock import clients
from penstock.clients.gc_pause import collection_put_off
from penstock.clients.kafka_errors import concerns_a_group, is_transient, reason
from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right
from penstock.errors import PenstockError, SourceError
from penstock.message import UNREADABLE_HEADERS, Record, headers_of
from penstock.spark_sink.errors import DataLossError
from penstock.spark_sink.source.options.options import SourceOptions
from penstock.spark_sink.source.planning.offset_reader import consumer_config
from penstock.spark_sink.source.planning.planning import OffsetRange

#: A record batch is handed over when it holds this many rows or this many bytes of keys, values and headers.
BATCH_ROWS = 20_000
BATCH_BYTES = 8 * 1024 * 1024

#: Most bytes of messages a task holds at a time, however large they are, unless `kafka.queued.max.messages.kbytes` or
#: the size of a broker's answer is raised: 16 MB fetched ahead; as many in the record batch, where large records came
#: after small ones, beside its 8 MB; the same once more in Arrow, and in the record batch before; and one answer. As a
#: rule it is a third of that. Keys and headers fetched ahead come on top, for the client library counts values only:
#: where they are large, `kafka.queued.min.messages` bounds the number of messages.
TASK_BYTES = 128 * 1024 * 1024

#: Most records taken from the client library in one call; less where records are large.
_TAKE = 4_000

#: Records taken first, before their size is known. Each take is at most so many times the one before.
_FIRST_TAKE = 16
_GROWTH = 4

#: Seconds one wait for the first record lasts; only then is the deadline looked at.
_WAIT_S = 0.5

#: Seconds an answer about a log's first offset may take.
_WATERMARK_TIMEOUT_S = 10.0

_log = logging.getLogger("penstock.spark_sink")


def read_range(options: SourceOptions, schema: pa.Schema, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
    """Read one range over a connection of its own, which is closed on every way out.

    Memory: at most `TASK_BYTES` of messages, beside what the process and its libraries take. Where the range cannot be
    read, a `SourceError` names partition and offsets; where the topic may not be, a `MissingRightError` does.
    """
    consumer = clients.consumer(options.bootstrap_servers, consumer_config(options))
    try:
        consumer.assign([TopicPartition(wanted.topic, wanted.partition, wanted.start)])
        yield from _batches(consumer, options, schema, wanted)
    finally:
        consumer.close()


def _batches(
    consumer: Consumer, options: SourceOptions, schema: pa.Schema, wanted: OffsetRange
) -> Iterator[pa.RecordBatch]:
    position, pace = wanted.start, _Pace()
    while position < wanted.end:
        rows = _Rows(options.include_headers, pace)
        with collection_put_off():
            position = _fill(rows, consumer, options, wanted, position)
        if rows.offsets:
            yield rows.to_arrow(schema, wanted)


def _fill(rows: _Rows, consumer: Consumer, options: SourceOptions, wanted: OffsetRange, position: int) -> int:
    """Read until the columns are full or the range is at its end, and return the position reached."""
    last_progress = time.monotonic()
    hindrance: KafkaError | None = None
    while position < wanted.end and not rows.is_full:
        # The first call waits for one record, the second takes what is there: asked for many at once, the
        # library waits until it has them all or the time is up.
        fetched = consumer.consume(1, _WAIT_S)
        if fetched:
            fetched += consumer.consume(min(rows.room(fetched[0]), wanted.end - position), 0)
        before = position
        records, position, error = _settle(consumer, options, wanted, fetched, position)
        rows.take(records)
        if position > before:
            last_progress, hindrance = time.monotonic(), error
            continue
        hindrance = error or hindrance
        if time.monotonic() - last_progress > options.poll_timeout_s:
            why = "" if hindrance is None else f" ({reason(hindrance)})"
            raise SourceError(
                f"{_name(wanted)}: nothing came at offset {position} for {options.poll_timeout_s:g} s{why}; check that "
                "the partition's leader is up, or raise kafkaConsumer.pollTimeoutMs"
            )
    return position


def _settle(
    consumer: Consumer, options: SourceOptions, wanted: OffsetRange, fetched: list[Message], position: int
) -> tuple[list[Message], int, KafkaError | None]:
    """Return the records that belong to the range, the position reached, and what hinders the client for a moment."""
    hindrance = None
    if not any(map(Message.error, fetched)):
        records = fetched
    else:
        records = []
        for message in fetched:
            error = message.error()
            if error is None:
                records.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the library's name for the constant
                position = max(position, message.offset() or 0)
            elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):  # noqa: SLF001 - as above
                position = max(position, _after_gap(consumer, options, wanted, position))
            elif is_transient(error):
                hindrance = error
            elif not concerns_a_group(error):
                raise _failure(error, options, wanted, position)
    if records:
        position = max(position, (records[-1].offset() or 0) + 1)
        if position > wanted.end:
            records = [record for record in records if (record.offset() or 0) < wanted.end]
    return records, position, hindrance


def _failure(error: KafkaError, options: SourceOptions, wanted: OffsetRange, position: int) -> PenstockError:
    """Return what is told of an error that does not pass."""
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        right = topic_right(Operation.READ, wanted.topic)
        return MissingRightError(f"{_name(wanted)} cannot be read", [right], principal_of(options.client))
    return SourceError(
        f"{_name(wanted)}: reading at offset {position} failed: {reason(error)}; "
        "Spark tries the task again, and the broker's log says more"
    )


def _after_gap(consumer: Consumer, options: SourceOptions, wanted: OffsetRange, position: int) -> int:
    """Go on at the log's first offset after offsets vanished under the reader, if that is allowed."""
    first = _first_offset(consumer, options, wanted, position)
    gap = f"{wanted.topic}[{wanted.partition}]: offsets from {position} are not in the log, which begins at {first}"
    if options.fail_on_data_loss:
        raise DataLossError(f"{gap}; set failOnDataLoss to false to go on without them")
    _log.warning("%s; going on without them, as failOnDataLoss=false says", gap)
    resumed = min(max(first, position), wanted.end) if first > position else wanted.end
    consumer.assign([TopicPartition(wanted.topic, wanted.partition, resumed)])
    return resumed


def _first_offset(consumer: Consumer, options: SourceOptions, wanted: OffsetRange, position: int) -> int:
    """Return where the log begins, asked again as often as the options say while brokers cannot tell."""
    part = TopicPartition(wanted.topic, wanted.partition)

    def ask() -> int:
        return consumer.get_watermark_offsets(part, timeout=_WATERMARK_TIMEOUT_S)[0]

    def is_passing(error: BaseException) -> bool:
        return isinstance(error, KafkaException) and is_transient(error)

    try:
        return options.retrying(tenacity.retry_if_exception(is_passing))(ask)
    except KafkaException as error:
        raise SourceError(
            f"{_name(wanted)}: offset {position} is out of range, and where the log begins could not be read: "
            f"{reason(error)}; Spark tries the task again"
        ) from error


def _name(wanted: OffsetRange) -> str:
    return f"{wanted.topic}[{wanted.partition}] offsets {wanted.start} to {wanted.end - 1}"


@dataclass(slots=True)
class _Pace:
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
        self.largest_bytes = max(1.0, self.largest_bytes / 2, largest_bytes)
        self.taken = max(count, _FIRST_TAKE // _GROWTH)


@dataclass(slots=True)
class _Rows:
    """Columns gathered for one record batch, with their size.

    Fields are taken out of the library's records at once, so that thousands of record objects do not live on
    for the garbage collector to walk. Numbers go into arrays that Arrow takes as they are.
    """

    with_headers: bool
    pace: _Pace
    keys: list[bytes | None] = field(default_factory=list, repr=False)
    values: list[bytes | None] = field(default_factory=list, repr=False)
    offsets: array[int] = field(default_factory=lambda: array("q"))
    #: Type and milliseconds of each timestamp, in turns.
    times: array[int] = field(default_factory=lambda: array("q"))
    headers: list[list[tuple[str, bytes | None]] | None] = field(default_factory=list, repr=False)
    size_bytes: int = 0

    def room(self, example: Message) -> int:
        """Most records to take next, so that one call does not overshoot the limit by much."""
        return self.pace.room(example, BATCH_BYTES - self.size_bytes)

    def take(self, records: list[Message]) -> None:
        if not records:
            return
        keys = list(map(Message.key, records))
        self.keys += keys
        self.values += map(Message.value, records)
        self.offsets.extend(map(Message.offset, records))  # type: ignore[arg-type] # a fetched record has an offset
        self.times.extend(chain.from_iterable(map(Message.timestamp, records)))
        # In C, for it is done for every record: what a record takes at most, as if the largest parts met in one.
        parts = [list(map(len, records)), list(map(len, filter(None, keys)))]
        if self.with_headers:
            headers = [_headers(record) for record in records]
            self.headers += headers
            parts.append([sum(len(name) + len(value or b"") for name, value in some) for some in headers if some])
        self.size_bytes += sum(map(sum, parts))
        self.pace.took(len(records), sum(max(part, default=0) for part in parts))

    @property
    def is_full(self) -> bool:
        return len(self.offsets) >= BATCH_ROWS or self.size_bytes >= BATCH_BYTES

    def to_arrow(self, schema: pa.Schema, wanted: OffsetRange) -> pa.RecordBatch:
        count = len(self.offsets)
        columns = [
            _bytes_column(self.keys),
            _bytes_column(self.values),
            pa.repeat(pa.scalar(wanted.topic), count),
            pa.repeat(pa.scalar(wanted.partition, pa.int32()), count),
            _column(self.offsets),
            pc.multiply(_column(self.times[1::2]), pa.scalar(1_000, pa.int64())).view(pa.timestamp("us", "UTC")),
            # The client library counts the types from "none" = 0, Spark from "none" = -1.
            pc.subtract(_column(self.times[::2]), pa.scalar(1, pa.int64())).cast(pa.int32()),
        ]
        if self.with_headers:
            columns.append(_headers_column(self.headers, schema.field("headers").type))
        return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(numbers: array[int], kind: pa.DataType = pa.int64()) -> pa.Array:  # noqa: B008 - types are immutable
    """Return whole numbers as a column over the same memory."""
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])


def _bytes_column(values: list[bytes | None]) -> pa.Array:
    """Return bytes as a column that takes their own size: Arrow's builder, which grows, took five times as much."""
    valid = None
    if None in values:
        valid = pa.array([value is not None for value in values]).buffers()[1]
        values = [value or b"" for value in values]
    present = cast("list[bytes]", values)
    ends = array("i", accumulate(map(len, present), initial=0))
    return pa.Array.from_buffers(pa.binary(), len(values), [valid, pa.py_buffer(ends), pa.py_buffer(b"".join(present))])


def _headers_column(headers: list[list[tuple[str, bytes | None]] | None], kind: pa.ListType) -> pa.Array:
    pairs = list(chain.from_iterable(filter(None, headers)))
    names = pa.array([name for name, _ in pairs], pa.string())
    structs = pa.StructArray.from_arrays([names, _bytes_column([value for _, value in pairs])], type=kind.value_type)
    ends = array("i", accumulate((len(some or ()) for some in headers), initial=0))
    missing = pa.array([some is None for some in headers])
    return pa.ListArray.from_arrays(_column(ends, pa.int32()), structs, type=kind, mask=missing)


def _headers(record: Message) -> list[tuple[str, bytes | None]] | None:
    try:
        return headers_of(cast("Record", record)) or None
    except UnicodeDecodeError:
        # One record of many millions must not end the query, and nothing but its headers is lost.
        return list(UNREADABLE_HEADERS)
