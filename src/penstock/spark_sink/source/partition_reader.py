"""How a task reads its ranges, of one partition each, into Arrow record batches.

The end of one is found by position: a record at or past the range's end, or the partition's end at or past it.
Never by counting rows, because transaction markers, aborted records and compaction leave offsets without one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import tenacity
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from penstock.clients.gc_pause import collection_put_off
from penstock.clients.kafka_errors import ErrorKind, is_transient, kind_of, reason
from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right
from penstock.errors import PenstockError, SourceError
from penstock.spark_sink.errors import DataLossError
from penstock.spark_sink.source.consumer_pool import ConsumerPool, LentConsumer
from penstock.spark_sink.source.offsets.planning import OffsetRange
from penstock.spark_sink.source.offsets.planning import TopicPartition as TopicAndPartition
from penstock.spark_sink.source.options.options import SourceOptions
from penstock.spark_sink.source.planning.offset_reader import consumer_config
from penstock.spark_sink.source.record_columns import Rows, TakeSize

#: Most bytes of messages a task holds at a time, however large they are, unless `kafka.queued.max.messages.kbytes` or
#: the size of a broker's answer is raised: 16 MB fetched ahead; as many in the record batch, where large records came
#: after small ones, beside its 8 MB; the same once more in Arrow, and in the record batch before; and one answer. As a
#: rule it is a third of that. Keys and headers fetched ahead come on top, for the client library counts values only:
#: where they are large, `kafka.queued.min.messages` bounds the number of messages.
TASK_BYTES = 128 * 1024 * 1024

#: Seconds one wait for the first record lasts; only then is the deadline looked at.
_WAIT_S = 0.5

#: Seconds an answer about a log's first offset may take.
_WATERMARK_TIMEOUT_S = 10.0

_log = logging.getLogger("penstock.spark_sink")


def read_ranges(
    options: SourceOptions, schema: pa.Schema, wanted: Sequence[OffsetRange], consumers: ConsumerPool | None = None
) -> Iterator[pa.RecordBatch]:
    """Read the ranges of a task, of a partition each, by a consumer that is its own meanwhile.

    It is lent by `consumers`, to which it goes back where the task was read to its end without an error. On every other
    way out, and where none are given, it is closed. Rows of a partition come in the order of their offsets. Memory: at
    most `TASK_BYTES` of messages, beside what the process and its libraries take. Where a range cannot be read, a
    `SourceError` names partition and offsets; where the topic may not be, a `MissingRightError` does.
    """
    pool = ConsumerPool(most=0) if consumers is None else consumers
    with pool.lend(options.bootstrap_servers, consumer_config(options)) as lent:
        task = _Task(lent, options, {(one.topic, one.partition): _Progress(one, one.start) for one in wanted})
        task.assign()
        take_size = TakeSize()
        while task.open:
            rows = Rows(options.include_headers, take_size, options.null_times)
            with collection_put_off():
                task.fill(rows)
                batch = rows.to_arrow(schema) if rows.offsets else None
                del rows
            if batch is not None:
                yield batch


@dataclass(slots=True)
class _Progress:
    """How far a range is read: `position` is the next offset."""

    wanted: OffsetRange
    position: int

    @property
    def left(self) -> int:
        return self.wanted.end - self.position


@dataclass(slots=True)
class _Task:
    """The ranges of a task, read side by side by one consumer, which fetches of all of them at once.

    `open` are those that are not at their end. A range that is stays assigned, paused: what was fetched of it comes all
    the same, and is left out.
    """

    lent: LentConsumer
    options: SourceOptions
    open: dict[TopicAndPartition, _Progress]
    is_single: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_single = len(self.open) == 1

    def assign(self) -> None:
        """Let the consumer go on, of all that is open, where it is read to."""
        self.lent.begin([TopicPartition(*part, one.position) for part, one in self.open.items()])

    def fill(self, rows: Rows) -> None:
        """Read until the columns are full or all ranges are at their ends."""
        last_progress = time.monotonic()
        hindrance: KafkaError | None = None
        while self.open and not rows.is_full:
            # The first call waits for one record, the second takes what is there: asked for many at once, the
            # library waits until it has them all or the time is up.
            consumer = self.lent.consumer
            fetched = consumer.consume(1, _WAIT_S)
            if fetched and fetched[0].error() is None:
                left = sum(one.left for one in self.open.values())
                fetched += consumer.consume(min(rows.room(fetched[0]), left), 0)
            has_failed = _has_fault(fetched)
            if self.lent.is_kept and (not fetched or has_failed):
                # It may know another topic of that name, leaders that were, or a connection that leads nowhere.
                self.lent.replace()
                self.assign()
                continue
            self.lent.has_failed |= has_failed
            progressed, error = self._take(rows, fetched)
            if progressed:
                last_progress, hindrance = time.monotonic(), error
                continue
            hindrance = error or hindrance
            if time.monotonic() - last_progress > self.options.poll_timeout_s:
                why = "" if hindrance is None else f" ({reason(hindrance)})"
                stuck = next(iter(self.open.values()))
                raise SourceError(
                    f"{_name(stuck.wanted)}: nothing came at offset {stuck.position} for "
                    f"{self.options.poll_timeout_s:g} s{why}; check that the partition's leader is up, or raise "
                    "kafkaConsumer.pollTimeoutMs"
                )

    def _take(self, rows: Rows, fetched: list[Message]) -> tuple[bool, KafkaError | None]:
        """Put what was fetched into the columns; tell whether a range got further, and what hinders the client."""
        progressed, is_resumed, hindrance = False, False, None
        for part, some in self._by_range(fetched):
            one = self.open[part]
            before = one.position
            records, error, resumed = _settle(self.lent.consumer, self.options, one, some)
            rows.take(records, part)
            progressed |= one.position > before
            hindrance, is_resumed = error or hindrance, is_resumed or resumed
            if one.left <= 0:
                del self.open[part]
                if self.open:
                    self.lent.pause(TopicPartition(*part))
        if is_resumed and self.open:
            # When all that was fetched is taken: it is fetched anew from here on.
            self.assign()
        return progressed, hindrance

    def _by_range(self, fetched: list[Message]) -> Iterable[tuple[TopicAndPartition, list[Message]]]:
        """Return what was fetched of each open range, in its order; errors of no partition are given to the first."""
        first = next(iter(self.open))
        if self.is_single:
            return [(first, fetched)] if fetched else []
        found: dict[TopicAndPartition, list[Message]] = {}
        for message in fetched:
            part = (message.topic() or "", message.partition() or 0)
            if part not in self.open and message.error() is not None and message.topic() is None:
                part = first
            if part in self.open:
                found.setdefault(part, []).append(message)
        return found.items()


def _has_fault(fetched: Sequence[Message]) -> bool:
    """Tell whether there is an error of the consumer's, beside records and ends of partitions."""
    # In C for the records, which nearly all are: a call for each would take a tenth of the task.
    errors = filter(None, map(Message.error, fetched))
    return any(kind_of(error) not in {ErrorKind.END, ErrorKind.GROUP} for error in errors)


def _settle(
    consumer: Consumer, options: SourceOptions, one: _Progress, fetched: list[Message]
) -> tuple[list[Message], KafkaError | None, bool]:
    """Return the records that belong to a range, which is read so far then.

    Beside them, what hinders the client for a moment, and whether the range goes on behind a gap, where the consumer is
    to be assigned.
    """
    wanted, position = one.wanted, one.position
    hindrance, is_resumed = None, False
    if not any(map(Message.error, fetched)):
        records = fetched
    else:
        records = []
        for message in fetched:
            error = message.error()
            if error is None:
                records.append(message)
                continue
            kind = kind_of(error)
            if kind is ErrorKind.END:
                position = max(position, message.offset() or 0)
            elif kind is ErrorKind.OUT_OF_RANGE:
                position, is_resumed = max(position, _after_gap(consumer, options, wanted, position)), True
            elif kind in {ErrorKind.PASSING, ErrorKind.GONE}:  # Spark looks for topics that are gone for good
                hindrance = error
            elif kind is not ErrorKind.GROUP:
                raise _failure(error, kind, options, wanted, position)
    if records:
        position = max(position, (records[-1].offset() or 0) + 1)
        if position > wanted.end:
            records = [record for record in records if (record.offset() or 0) < wanted.end]
    one.position = position
    return records, hindrance, is_resumed


def _failure(
    error: KafkaError, kind: ErrorKind, options: SourceOptions, wanted: OffsetRange, position: int
) -> PenstockError:
    """Return the text of an error that does not pass."""
    if kind is ErrorKind.MISSING_RIGHT:
        right = topic_right(Operation.READ, wanted.topic)
        return MissingRightError(f"{_name(wanted)} cannot be read", [right], principal_of(options.client))
    return SourceError(
        f"{_name(wanted)}: reading at offset {position} failed: {reason(error)}; "
        "Spark tries the task again, and the broker's log says more"
    )


def _after_gap(consumer: Consumer, options: SourceOptions, wanted: OffsetRange, position: int) -> int:
    """Return the log's first offset, to go on there after offsets vanished under the reader, if that is allowed."""
    first = _first_offset(consumer, options, wanted, position)
    gap = f"{wanted.topic}[{wanted.partition}]: offsets from {position} are not in the log, which begins at {first}"
    if options.fail_on_data_loss:
        raise DataLossError(f"{gap}; set failOnDataLoss to false to go on without them")
    _log.warning("%s; going on without them, as failOnDataLoss=false says", gap)
    return min(first, wanted.end) if first > position else wanted.end


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
