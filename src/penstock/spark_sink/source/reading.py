"""Reads the offset ranges of a task, one for each partition, into Arrow record batches.

The end of a range is found by position: a record at or past the range's end, or the partition's end at or past it.
Counting rows would be wrong: transaction markers, aborted records and compaction leave offsets without a record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import filterfalse

import pyarrow as pa
import tenacity
from confluent_kafka import Consumer, KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as KafkaPartition

from penstock import clients
from penstock.clients.gc_pause import collection_put_off
from penstock.clients.kafka_errors import ErrorKind, is_transient, kind_of, reason
from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right
from penstock.errors import SourceError
from penstock.spark_sink.source.columns import Rows
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.plan import OffsetRange, TopicPartition, place
from penstock.spark_sink.source.pool import WorkerPool

#: Most bytes of messages that a task holds, whatever their sizes, unless `kafka.queued.max.messages.kbytes` or the size
#: of a broker's answer is raised: 16 MB fetched ahead; 8 MB in the record batch, and 16 MB more if large records follow
#: small ones; the same again in Arrow, and in the previous record batch; and one answer. Usually it is a third of that.
#: Keys and headers fetched ahead are not included, because the client library counts values only. If they are large,
#: set `kafka.queued.min.messages`, which bounds the number of messages.
TASK_BYTES = 128 * 1024 * 1024

#: Seconds of one wait for the first record. The deadline is checked only afterwards.
_WAIT_S = 0.5

#: Seconds for an answer about a log's first offset.
_WATERMARK_TIMEOUT_S = 10.0


class KeptConsumer:
    """A consumer that a worker keeps, as Spark's JVM source does: a new one would have to connect and log in again.

    Only a consumer without errors is kept: its metadata is then no older than its last task.

    Attributes:
        consumer: the client.
        is_kept: whether an earlier task has used it.
        has_failed: whether it had an error, so that no other task gets it.
    """

    def __init__(self, make: Callable[[], Consumer]) -> None:
        self._make = make
        self.consumer = make()
        self.is_kept = self.has_failed = False

    def replace(self) -> None:
        """Replace the consumer by a new one, without partitions."""
        old, self.consumer = self.consumer, self._make()
        old.close()
        self.is_kept = self.has_failed = False

    def release(self) -> bool:
        """Release the task's partitions and their fetched records; return whether another task may use it."""
        if self.has_failed:
            return False
        try:
            # A paused partition would stay paused in the next task.
            self.consumer.resume(self.consumer.assignment())
            self.consumer.unassign()
            # The library drops records fetched ahead when they are consumed: do that here, not in the next task.
            self.is_kept = not self.consumer.consume(1, 0)
        except (KafkaException, RuntimeError):
            return False
        return self.is_kept

    def close(self) -> None:
        """Close the client."""
        self.consumer.close()


def read_ranges(
    options: SourceOptions, wanted: Iterable[OffsetRange], pool: WorkerPool[KeptConsumer]
) -> Iterator[pa.RecordBatch]:
    """Read the ranges of a task, one for each partition, with a consumer that no other task uses meanwhile.

    The consumer comes from `pool`. It returns there after a task without an error; otherwise it is closed. Rows of a
    partition are in the order of their offsets. Memory: at most `TASK_BYTES` of messages, in addition to the process
    and its libraries. A range that cannot be read raises `SourceError` with partition and offsets, or
    `MissingRightError` if the permission is missing.
    """
    servers, config = options.bootstrap_servers, options.consumer_config
    key = servers, frozenset(config.items())
    with pool.lend(key, lambda: KeptConsumer(lambda: clients.consumer(servers, config))) as lent:
        task = _Task(lent, options, wanted)
        largest_bytes = 1.0
        while task.open:
            rows = Rows(options.include_headers, options.null_times, largest_bytes)
            with collection_put_off():
                task.fill(rows)
                batch, largest_bytes = rows.to_arrow() if rows.offsets else None, rows.largest_bytes
                del rows
            if batch is not None:
                yield batch


class _Task:
    """The ranges of a task, read in parallel by one consumer.

    `open` has the ranges that are not at their ends. A finished range stays assigned, but paused. Its records that were
    fetched already still arrive and are left out.
    """

    def __init__(self, lent: KeptConsumer, options: SourceOptions, wanted: Iterable[OffsetRange]) -> None:
        self._lent = lent
        self._options = options
        self.open = {offsets.part: offsets for offsets in wanted}
        #: The next offset of each range.
        self._positions = {part: offsets.start for part, offsets in self.open.items()}
        self._is_single = len(self.open) == 1
        #: The client's present obstacle, or None.
        self._trouble: KafkaError | None = None
        self._assign()

    def _assign(self) -> None:
        """Assign the open ranges at their positions, and nothing else."""
        # No record that an earlier task fetched is returned after this. Before `assign` and `unassign` return, the
        # client library raises the version of each partition that they stop or start (`rd_kafka_cgrp_handle_assign_op`
        # serves the assignment, then answers). `consume` drops records and ends of partitions of a lower version
        # (`rd_kafka_op_version_outdated`).
        self._lent.consumer.assign([KafkaPartition(*part, self._positions[part]) for part in self.open])

    def fill(self, rows: Rows) -> None:
        """Read until the columns are full or all ranges are at their ends."""
        last_progress = time.monotonic()
        while self.open and not rows.is_full:
            records = self._fetch(rows)
            # In C, because nearly all are records: a call for each would take a tenth of the task.
            errors = list(filter(Message.error, records))
            is_faulty = any(map(_is_fault, errors))
            if self._lent.is_kept and (not records or is_faulty):
                # It may know an old topic of that name, former leaders, or have a dead connection.
                self._lent.replace()
                self._assign()
                continue
            self._lent.has_failed |= is_faulty
            before, trouble, self._trouble = dict(self._positions), self._trouble, None
            self._take(rows, list(filterfalse(Message.error, records)) if errors else records)
            for error in errors:
                self._take_error(error)
            self._end_ranges()
            if self._positions != before:
                last_progress = time.monotonic()
                continue
            self._trouble = self._trouble or trouble
            if time.monotonic() - last_progress > self._options.poll_timeout_s:
                part, wanted = next(iter(self.open.items()))
                why = "" if self._trouble is None else f" ({reason(self._trouble)})"
                raise SourceError(
                    f"{_name(wanted)}: nothing came at offset {self._positions[part]} for "
                    f"{self._options.poll_timeout_s:g} s{why}; check that the partition's leader is up, or raise "
                    "kafkaConsumer.pollTimeoutMs"
                )

    def _fetch(self, rows: Rows) -> list[Message]:
        # The first call waits for one record, the second takes the available ones. Asked for many at once, the library
        # waits until it has them all or the time is over.
        consumer = self._lent.consumer
        fetched = consumer.consume(1, _WAIT_S)
        if fetched and fetched[0].error() is None:
            left = sum(wanted.end - self._positions[part] for part, wanted in self.open.items())
            fetched += consumer.consume(min(rows.room(fetched[0]), left), 0)
        return fetched

    def _take(self, rows: Rows, records: list[Message]) -> None:
        """Append the records of open ranges to the columns, in order."""
        by_range: dict[TopicPartition, list[Message]] = {}
        if self._is_single:
            by_range = dict.fromkeys(self.open, records)
        else:
            for record in records:
                by_range.setdefault((record.topic() or "", record.partition() or 0), []).append(record)
        for part, found in by_range.items():
            wanted = self.open.get(part)
            if wanted is not None and found:
                self._positions[part] = max(self._positions[part], (found[-1].offset() or 0) + 1)
                taken = found
                if self._positions[part] > wanted.end:
                    taken = [record for record in found if (record.offset() or 0) < wanted.end]
                rows.take(taken, part)

    def _take_error(self, message: Message) -> None:
        """Go on after a transient error, raise a permanent one. Without a partition it counts for the first range."""
        error, part = message.error(), (message.topic() or "", message.partition() or 0)
        if self._is_single or message.topic() is None:
            part = next(iter(self.open))
        wanted = self.open.get(part)
        if error is None or wanted is None:
            return
        kind, position = kind_of(error), self._positions[part]
        if kind is ErrorKind.END:
            self._positions[part] = max(position, message.offset() or 0)
        elif kind is ErrorKind.OUT_OF_RANGE:
            self._positions[part] = self._after_gap(wanted, position)
            self._assign()
        elif kind in {ErrorKind.PASSING, ErrorKind.GONE}:  # Spark looks for topics that are gone for good
            self._trouble = error
        elif kind is ErrorKind.MISSING_RIGHT:
            right = topic_right(Operation.READ, wanted.topic)
            raise MissingRightError(f"{_name(wanted)} cannot be read", [right], principal_of(self._options.client))
        elif kind is not ErrorKind.GROUP:
            raise SourceError(
                f"{_name(wanted)}: reading at offset {position} failed: {reason(error)}; "
                "Spark tries the task again, and the broker's log says more"
            )

    def _end_ranges(self) -> None:
        for part in [part for part, wanted in self.open.items() if self._positions[part] >= wanted.end]:
            del self.open[part]
            if self.open:
                self._lent.consumer.pause([KafkaPartition(*part)])

    def _after_gap(self, wanted: OffsetRange, position: int) -> int:
        """Return the log's first offset, where reading goes on if offsets vanished and the options allow it."""
        ask = self._options.retrying(tenacity.retry_if_exception(_may_pass))
        try:
            first: int = ask(
                lambda: self._lent.consumer.get_watermark_offsets(
                    KafkaPartition(*wanted.part), timeout=_WATERMARK_TIMEOUT_S
                )[0]
            )
        except KafkaException as error:
            raise SourceError(
                f"{_name(wanted)}: offset {position} is out of range, and where the log begins could not be read: "
                f"{reason(error)}; Spark tries the task again"
            ) from error
        self._options.report_loss(
            f"{place(wanted.part)}: offsets from {position} are not in the log, which begins at {first}"
        )
        return min(first, wanted.end) if first > position else wanted.end


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, KafkaException) and is_transient(error)


def _is_fault(fetched: Message) -> bool:
    """Tell whether it is an error of the consumer, not a record or the end of a partition."""
    error = fetched.error()
    return error is not None and kind_of(error) not in {ErrorKind.END, ErrorKind.GROUP}


def _name(wanted: OffsetRange) -> str:
    return f"{place(wanted.part)} offsets {wanted.start} to {wanted.end - 1}"
