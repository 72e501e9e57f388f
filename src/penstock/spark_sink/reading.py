"""How a task reads its range of one partition into Arrow record batches.

The end is found by position: a record at or past the range's end, or the partition's end at or past it.
Never by counting rows, because transaction markers, aborted records and compaction leave offsets without one.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from penstock import kafka
from penstock.errors import SourceError
from penstock.message import UNREADABLE_HEADERS, Record, headers_of
from penstock.spark_sink.log_view import consumer_config
from penstock.spark_sink.options import SourceOptions
from penstock.spark_sink.planning import OffsetRange

#: A record batch is handed over when it holds this many rows or this many bytes of keys and values.
BATCH_ROWS = 20_000
BATCH_BYTES = 8 * 1024 * 1024

#: Most records taken from the client library in one call; less where records are large.
_TAKE = 4_000

#: Records taken first, before their size is known.
_FIRST_TAKE = 64

#: Seconds one wait for the first record lasts; only then is the deadline looked at.
_WAIT_S = 0.5

#: Seconds an answer about a log's first offset may take.
_WATERMARK_TIMEOUT_S = 10.0

_log = logging.getLogger("penstock.spark_sink")


def read_range(options: SourceOptions, schema: pa.Schema, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
    """Read one range over a connection of its own, which is closed on every way out.

    Memory: what the client library fetches ahead (32 MB and one answer unless `kafka.queued.max.messages.kbytes` says
    otherwise), one record batch of `BATCH_BYTES`, and its copy in Arrow. Where large records follow small ones a batch
    may grow to what had been fetched ahead.

    Raises:
        SourceError: the range cannot be read; the message names partition and offsets.
    """
    consumer = Consumer(consumer_config(options))
    try:
        consumer.assign([TopicPartition(wanted.topic, wanted.partition, wanted.start)])
        yield from _batches(consumer, options, schema, wanted)
    finally:
        consumer.close()


def _batches(
    consumer: Consumer, options: SourceOptions, schema: pa.Schema, wanted: OffsetRange
) -> Iterator[pa.RecordBatch]:
    position = wanted.start
    average_bytes = 0.0
    while position < wanted.end:
        rows = _Rows(options.include_headers, average_bytes)
        with _collector_paused():
            position = _fill(rows, consumer, options, wanted, position)
        if rows.offsets:
            yield rows.to_arrow(schema, wanted)
        average_bytes = rows.average_bytes


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python's cycle collector still while records are turned into columns.

    It would run every 700 records, to find nothing: records make no cycles. That took half of the reading
    time (0.57 million rows/s with it, 1.08 without). It runs again between two record batches. The setting is
    the process's, and a Python worker of Spark runs one task at a time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _fill(rows: _Rows, consumer: Consumer, options: SourceOptions, wanted: OffsetRange, position: int) -> int:
    """Read until the columns are full or the range is at its end, and return the position reached."""
    last_progress = time.monotonic()
    while position < wanted.end and not rows.is_full:
        # The first call waits for one record, the second takes what is there: asked for many at once, the
        # library waits until it has them all or the time is up.
        fetched = consumer.consume(1, _WAIT_S)
        if fetched:
            fetched += consumer.consume(min(rows.room(fetched[0]), wanted.end - position), 0)
            last_progress = time.monotonic()
        elif time.monotonic() - last_progress > options.poll_timeout_s:
            raise SourceError(
                f"{_name(wanted)}: nothing came at offset {position} for {options.poll_timeout_s:g} s; check that "
                "the partition's leader is up, or raise kafkaConsumer.pollTimeoutMs"
            )
        records, position = _settle(consumer, options, wanted, fetched, position)
        rows.take(records)
    return position


def _settle(
    consumer: Consumer, options: SourceOptions, wanted: OffsetRange, fetched: list[Message], position: int
) -> tuple[list[Message], int]:
    """Return the records that belong to the range, and the position reached."""
    errors = [message.error() for message in fetched]
    if not any(errors):
        records = fetched
    else:
        records = []
        for message, error in zip(fetched, errors, strict=True):
            if error is None:
                records.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the library's name for the constant
                position = max(position, message.offset() or 0)
            elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):  # noqa: SLF001 - as above
                position = max(position, _after_gap(consumer, options, wanted, position))
            elif not error.retriable() and error.code() != KafkaError._ALL_BROKERS_DOWN:  # noqa: SLF001 - as above
                raise SourceError(
                    f"{_name(wanted)}: reading at offset {position} failed: {kafka.reason(error)}; "
                    "Spark tries the task again, and the broker's log says more"
                )
    if records:
        position = max(position, (records[-1].offset() or 0) + 1)
        if position > wanted.end:
            records = [record for record in records if (record.offset() or 0) < wanted.end]
    return records, position


def _after_gap(consumer: Consumer, options: SourceOptions, wanted: OffsetRange, position: int) -> int:
    """Go on at the log's first offset after offsets vanished under the reader, if that is allowed."""
    part = TopicPartition(wanted.topic, wanted.partition)
    try:
        first, _ = consumer.get_watermark_offsets(part, timeout=_WATERMARK_TIMEOUT_S)
    except KafkaException as error:
        raise SourceError(
            f"{_name(wanted)}: offset {position} is out of range, and where the log begins could not be read: "
            f"{kafka.reason(error)}; Spark tries the task again"
        ) from error
    gap = f"{wanted.topic}[{wanted.partition}]: offsets from {position} are not in the log, which begins at {first}"
    if options.fail_on_data_loss:
        raise SourceError(f"{gap}; set failOnDataLoss to false to go on without them")
    _log.warning("%s; going on without them, as failOnDataLoss=false says", gap)
    resumed = min(max(first, position), wanted.end) if first > position else wanted.end
    consumer.assign([TopicPartition(wanted.topic, wanted.partition, resumed)])
    return resumed


def _name(wanted: OffsetRange) -> str:
    return f"{wanted.topic}[{wanted.partition}] offsets {wanted.start} to {wanted.end - 1}"


@dataclass(slots=True)
class _Rows:
    """Columns gathered for one record batch, with their size.

    Fields are taken out of the library's records at once, so that thousands of record objects do not live on
    for the garbage collector to walk.
    """

    with_headers: bool
    average_bytes: float = 0.0
    keys: list[bytes | None] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)
    offsets: list[int | None] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    time_types: list[int] = field(default_factory=list)
    headers: list[list[tuple[str, bytes | None]] | None] = field(default_factory=list)
    size_bytes: int = 0

    def room(self, example: Message) -> int:
        """Most records to take next, so that one call does not overshoot the limit by much."""
        most = _TAKE if self.average_bytes else _FIRST_TAKE
        each = max(self.average_bytes, len(example) + len(example.key() or b""), 1)
        return max(1, min(most, int((BATCH_BYTES - self.size_bytes) / each)))

    def take(self, records: list[Message]) -> None:
        if not records:
            return
        self.keys += [record.key() for record in records]
        self.values += [record.value() for record in records]
        self.offsets += [record.offset() for record in records]
        kinds, times = zip(*[record.timestamp() for record in records], strict=True)
        self.times += times
        self.time_types += kinds
        if self.with_headers:
            headers = [_headers(record) for record in records]
            self.headers += headers
            self.size_bytes += sum(len(one[0]) + len(one[1] or b"") for some in headers if some for one in some)
        self.size_bytes += sum(map(len, records)) + sum(map(len, filter(None, self.keys[-len(records) :])))
        self.average_bytes = max(1.0, self.size_bytes / len(self.offsets))

    @property
    def is_full(self) -> bool:
        return len(self.offsets) >= BATCH_ROWS or self.size_bytes >= BATCH_BYTES

    def to_arrow(self, schema: pa.Schema, wanted: OffsetRange) -> pa.RecordBatch:
        count = len(self.offsets)
        columns = [
            pa.array(self.keys, pa.binary()),
            pa.array(self.values, pa.binary()),
            pa.repeat(pa.scalar(wanted.topic), count),
            pa.repeat(pa.scalar(wanted.partition, pa.int32()), count),
            pa.array(self.offsets, pa.int64()),
            pa.array(self.times, pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC")),
            # The client library counts the types from "none" = 0, Spark from "none" = -1.
            pc.subtract(pa.array(self.time_types, pa.int32()), pa.scalar(1, pa.int32())),
        ]
        if self.with_headers:
            structs = [
                None if some is None else [{"key": name, "value": value} for name, value in some]
                for some in self.headers
            ]
            columns.append(pa.array(structs, schema.field("headers").type))
        return pa.RecordBatch.from_arrays(columns, schema=schema)


def _headers(record: Message) -> list[tuple[str, bytes | None]] | None:
    try:
        return headers_of(cast("Record", record)) or None
    except UnicodeDecodeError:
        # One record of many millions must not end the query, and nothing but its headers is lost.
        return list(UNREADABLE_HEADERS)


__all__ = ["BATCH_BYTES", "BATCH_ROWS", "read_range"]
