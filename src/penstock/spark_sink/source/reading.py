"""How a task reads its ranges, of one partition each, into Arrow record batches.

The end of a range is found by position: a record at or past the range's end, or the partition's end at or past it.
Never by counting rows, because transaction markers, aborted records and compaction leave offsets without a record.
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


class KeptConsumer:
    """A consumer that a worker keeps, as Spark's JVM source does: another one would have to connect and log in again.

    Only one that has met no error is kept: what it knows of topics and leaders is then no older than its last task.

    Attributes:
        consumer: the client.
        is_kept: whether an earlier task has had it.
        has_failed: whether it has met an error, so that no other task gets it.
    """

    def __init__(self, make: Callable[[], Consumer]) -> None:
        self._make = make
        self.consumer = make()
        self.is_kept = self.has_failed = False

    def replace(self) -> None:
        """Go on with a new consumer, which has no partitions yet."""
        old, self.consumer = self.consumer, self._make()
        old.close()
        self.is_kept = self.has_failed = False

    def release(self) -> bool:
        """Let go of the task's partitions and of what was fetched of them; tell whether another task may begin."""
        if self.has_failed:
            return False
        try:
            # A paused partition would stay paused in the next task.
            self.consumer.resume(self.consumer.assignment())
            self.consumer.unassign()
            # What was fetched ahead is thrown away where it is looked at: here, and not with the next task.
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
    """Read the ranges of a task, one for each partition, by a consumer that no other task has meanwhile.

    The consumer is lent by `pool`, to which it returns after a task without an error; else it is closed. Rows of a
    partition come in the order of their offsets. Memory: at most `TASK_BYTES` of messages, beside what the process and
    its libraries take. Where a range cannot be read, a `SourceError` names partition and offsets; where the topic may
    not be, a `MissingRightError` does.
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
    """The ranges of a task, read side by side by one consumer, which fetches of all of them at once.

    `open` are those that are not at their end. A range that is stays assigned, paused: what was fetched of it comes all
    the same, and is left out.
    """

    def __init__(self, lent: KeptConsumer, options: SourceOptions, wanted: Iterable[OffsetRange]) -> None:
        self._lent = lent
        self._options = options
        self.open = {offsets.part: offsets for offsets in wanted}
        #: The next offset of each.
        self._positions = {part: offsets.start for part, offsets in self.open.items()}
        self._is_single = len(self.open) == 1
        #: What hinders the client, or None.
        self._trouble: KafkaError | None = None
        self._assign()

    def _assign(self) -> None:
        """Let the consumer read on where each open range was read to, and nothing else."""
        # Nothing that an earlier task has fetched is handed over after this: before `assign` and `unassign` return, the
        # client library has raised the version of each partition that they stop or start
        # (`rd_kafka_cgrp_handle_assign_op` serves the assignment, then answers), and `consume` throws away records and
        # ends of partitions that were fetched under a lower one (`rd_kafka_op_version_outdated`).
        self._lent.consumer.assign([KafkaPartition(*part, self._positions[part]) for part in self.open])

    def fill(self, rows: Rows) -> None:
        """Read until the columns are full or all ranges are at their ends."""
        last_progress = time.monotonic()
        while self.open and not rows.is_full:
            records = self._fetch(rows)
            # In C for the records, which nearly all are: a call for each would take a tenth of the task.
            errors = list(filter(Message.error, records))
            is_faulty = any(map(_is_fault, errors))
            if self._lent.is_kept and (not records or is_faulty):
                # It may know another topic of that name, leaders that were, or a connection that leads nowhere.
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
        # The first call waits for one record, the second takes what is there: asked for many at once, the library
        # waits until it has them all or the time is up.
        consumer = self._lent.consumer
        fetched = consumer.consume(1, _WAIT_S)
        if fetched and fetched[0].error() is None:
            left = sum(wanted.end - self._positions[part] for part, wanted in self.open.items())
            fetched += consumer.consume(min(rows.room(fetched[0]), left), 0)
        return fetched

    def _take(self, rows: Rows, records: list[Message]) -> None:
        """Put records into the columns, those of each open range in their order."""
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
        """Go on after an error, or raise if it is permanent. Errors of no partition are given to the first range."""
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
        """Return the log's first offset, to go on there after offsets vanished under the reader, if that is allowed."""
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
    """Tell whether it is an error of the consumer's, and no record or end of a partition."""
    error = fetched.error()
    return error is not None and kind_of(error) not in {ErrorKind.END, ErrorKind.GROUP}


def _name(wanted: OffsetRange) -> str:
    return f"{place(wanted.part)} offsets {wanted.start} to {wanted.end - 1}"
