"""How a batch is published to Kafka by Spark's tasks, for `KafkaSink` and `HandlerSink`: rows in, reports out.

Rows are columns of `PUBLISHED`, whoever makes them. Between that and the tasks that publish stands a shuffle, in which
they are written down: a task that publishes and is tried again publishes the same, and nothing is made once more.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import Row as SparkRow
from pyspark.sql import functions as F  # noqa: N812 - the name under which everybody knows it
from pyspark.sql.types import StructType

from penstock.clients.gc_pause import imports_set_aside
from penstock.errors import SinkError
from penstock.spark_sink.ledger.rules import Batch, OffsetStatistics, warn_left_out
from penstock.spark_sink.sinks.frames import PICKLED, as_row, from_row, run_job
from penstock.spark_sink.sinks.kafka_ledger import SLOTS, Target, ledger_options, read_ledger
from penstock.spark_sink.sinks.kafka_publisher import Row, SinkPublisher, change_ledger, publishing
from penstock.spark_sink.sinks.planned_offsets import micro_batch
from penstock.spark_sink.sinks.position import POSITION, require_position, steps
from penstock.spark_sink.sinks.sink import Changes, Entries, LedgerSink, origin_of, stored_batches
from penstock.spark_sink.source.plan import TopicPartition
from penstock.spark_sink.source.pool import WorkerPool

#: A transaction takes rows of one source partition up to so many, or so many bytes of keys and values.
PIECE_ROWS = 10_000
PIECE_BYTES = 8 * 1024 * 1024

#: Columns by which rows are sorted: of one message, they stand by their place among what it publishes.
ORDER = (*POSITION, "place")
#: The place of a row that publishes nothing, and says how far a batch, or what a task has handled, goes in a source
#: partition. Without a topic it is a report of the task that made the rows, in `value`.
MARK = -1
#: The columns. A target partition of -1 is left to the partitioner.
PUBLISHED = pa.schema(
    {
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "place": pa.int32(),
        "target_topic": pa.string(),
        "target_partition": pa.int32(),
        "key": pa.binary(),
        "value": pa.binary(),
        "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    }
)


def published(rows: DataFrame, target: Target, batch: Batch, parallelism: int) -> DataFrame:
    """Return the frame whose job publishes a batch, of columns `PUBLISHED`; its rows are for `conclude`.

    Those of a slot go to one task, those of a `whole` batch to one. With a row for each partition where Spark has
    planned the batch to end: the ledger moves there, whatever a filter has dropped.
    """
    ends = [(*part, end - 1) for part, (start, end) in sorted(batch.planned.items()) if start != end]
    if ends:
        values = ", ".join(f"(?, {partition}, {offset}L, {MARK})" for _, partition, offset in ends)
        query = f"SELECT * FROM VALUES {values} AS ends ({', '.join(ORDER)})"  # noqa: S608 - of numbers and our names
        marks = rows.sparkSession.sql(query, args=[topic for topic, *_ in ends])
        rows = rows.unionByName(marks.coalesce(1), allowMissingColumns=True)
    lanes = rows.repartitionById(1 if target.whole else parallelism, slot_column()).sortWithinPartitions(*ORDER)
    return lanes.mapInArrow(PublishTask(target, batch), PICKLED)


def slot_column() -> Column:
    """Return the slot of a row's source partition, as `kafka_ledger.slot_of`; some slot where it has none."""
    place = F.concat_ws("/", F.col("topic"), F.col("partition").cast("string"))
    return F.pmod(F.crc32(place.cast("binary")), F.lit(SLOTS)).cast("int")


@dataclass(frozen=True, slots=True)
class PublishTask:
    """Publishes the rows of one Spark task, sorted by `ORDER`. Can be pickled."""

    target: Target
    batch: Batch

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield what was published, and the reports that came with the rows."""
        reports: list[bytes] = []
        found = publish_rows(self.target, self.batch, rows_of(batches, self.target.name, reports))
        yield as_row((found, reports))
        imports_set_aside("publishing")


def rows_of(batches: Iterable[pa.RecordBatch], name: str, reports: list[bytes]) -> Iterator[Row]:
    """Return rows as the sink of that name publishes them; reports are put into `reports`, as they come."""
    for batch in batches:
        if any(batch[column].null_count for column in POSITION):
            require_position(batch.filter(pc.not_equal(batch["place"], MARK)), f"sink {name}")
        for part in steps(batch):
            cells = zip(*(column.to_pylist() for column in part.columns), strict=True)
            for topic, partition, offset, place, target, target_partition, key, value, headers in cells:
                if topic is None:
                    reports.append(value)
                    continue
                pairs = [(header["key"], header["value"]) for header in headers if header] if headers else ()
                if place != MARK and (target is None or (pairs and any(header is None for header, _ in pairs))):
                    raise SinkError(
                        f"{'target_topic' if target is None else 'headers.key'} is NULL in a row from "
                        f"{topic}[{partition}] offset {offset} for sink {name}; give it a value in the query, or "
                        "filter such rows out"
                    )
                yield Row((topic, partition), offset, target, key, value, pairs, target_partition)


def pieces(rows: Iterable[Row], *, whole: bool = False) -> Iterator[Sequence[Row]]:
    """Cut sorted rows into what one transaction takes: of one source partition, and never between rows of one offset.

    A `whole` batch is one piece.
    """
    piece: list[Row] = []
    size = 0
    for row in rows:
        is_full = len(piece) >= PIECE_ROWS or size >= PIECE_BYTES
        last = piece[-1] if piece and not whole else row
        if row.source != last.source or (is_full and row.offset != last.offset):
            yield piece
            piece, size = [], 0
        piece.append(row)
        size += len(row.key or b"") + len(row.value or b"")
    if piece:
        yield piece


#: What this process's tasks publish by.
_publishers = WorkerPool[SinkPublisher]()


def publish_rows(
    target: Target, batch: Batch, rows: Iterable[Row], publishers: WorkerPool[SinkPublisher] = _publishers
) -> OffsetStatistics:
    """Publish rows of a batch, sorted by source partition and offset; return how many, and how many were before.

    By a publisher of `publishers`, or of what this process keeps. No two tasks at a time have rows of one slot. Raises
    `SinkError` or `MissingRightError` for the first transaction that fails.
    """
    found = OffsetStatistics()
    with publishers.lend(target, lambda: SinkPublisher(target)) as publisher:
        for piece in pieces(rows, whole=target.whole):
            found.count(piece[0].source, publishing(piece), publisher.publish(batch, piece))
    return found


def conclude(batch: Batch, tasks: Iterable[SparkRow]) -> list[bytes]:
    """Warn of rows that were left out, and return the reports that came with the rows."""
    published, reports = OffsetStatistics(), list[bytes]()
    for task in tasks:
        found, others = from_row(task)
        published.add(found)
        reports += others
    warn_left_out(batch.batch_id, batch.target, published)
    return reports


class PublishingSink(LedgerSink):
    """What sinks that publish to Kafka share: their ledger is a topic, by the sinks' own names."""

    __slots__ = ()

    bootstrap_servers: str | None
    ledger_topic: str
    parallelism: int

    @abstractmethod
    def check(self, schema: StructType) -> None:
        """Check that frames of this schema can be published; make the ledger's topic."""

    @abstractmethod
    def _target(self) -> Target | None:
        """Return where it publishes; None where it publishes nothing, and has no ledger."""

    @property
    def has_ledger(self) -> bool:
        """Whether it remembers what it has published."""
        return self._target() is not None

    def ledger(self) -> dict[str, Entries]:
        """Return what the ledger's topic has of each sink, by their names."""
        target = self._target()
        return {} if target is None else read_ledger(target)

    def _change_ledger(
        self, query: str, parts: Collection[TopicPartition], change: Callable[[Entries], Changes]
    ) -> None:
        if (target := self._target()) is not None:
            change_ledger(replace(target, name=query), parts, change)

    def write_ledger(self, query: str, entries: Changes) -> None:
        """Have the ledger of a sink hold these entries, None for none; `SinkError` where it cannot.

        What a query of that name publishes at the moment is refused and tried again, by the new entries.
        """
        if (target := self._target()) is not None:
            for whole in (True, False):  # a sink goes by either kind of transactional ids
                change_ledger(replace(target, name=query, whole=whole), entries, lambda _held: entries)

    @property
    def ledger_key(self) -> Hashable:
        """What tells its ledger from those of others in this process."""
        return self.bootstrap_servers, self.name, self.ledger_topic

    def _publish(
        self,
        batch: DataFrame,
        batch_id: int,
        made: Callable[[DataFrame], DataFrame],
        run: Callable[[DataFrame, str], list[SparkRow]] = run_job,
    ) -> list[bytes]:
        """Publish the rows that are made of a batch, of columns `PUBLISHED`; return the reports that came with them."""
        target = self._target()
        if target is None:
            raise AssertionError("only a sink with a name publishes")
        origin = origin_of(batch, target.name)
        # A run of a query that has published a batch was found to be able to.
        if not stored_batches.has_any_of(self.ledger_key, origin):
            self.check(batch.schema)
        what = micro_batch(batch, batch_id, origin, f"sink {target.name}", ledger_options(target.ledger))
        with stored_batches.one_call(self.ledger_key, origin, what):
            return conclude(what, run(published(made(batch), target, what, self.parallelism), f"batch {batch_id}: "))
