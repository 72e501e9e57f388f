"""`KafkaSink`: a foreachBatch function that publishes rows to Kafka exactly once.

Spark tasks publish one source partition at a time: rows in, reports out. A Kafka transaction keeps rows and ledger
together (`kafka_ledger`). `HandlerSink` publishes with the same tasks. All rows have the columns `PUBLISHED`. A shuffle
before the publishing tasks stores the rows: a repeated task publishes the same rows, and they are not computed again.
"""

from __future__ import annotations

import shlex
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import Row as SparkRow
from pyspark.sql import functions as F  # noqa: N812 - the name under which everybody knows it
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import BinaryType, StringType, StructType

from penstock.clients.gc_pause import imports_set_aside
from penstock.clients.rights import Right
from penstock.errors import ConfigurationError, SinkError
from penstock.options import ClientConfig, not_empty, positive_int
from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.ledger.rules import Batch, OffsetStatistics, warn_left_out
from penstock.spark_sink.sinks.frames import (
    PICKLED,
    POSITION,
    as_row,
    from_row,
    not_utf8,
    require_columns,
    require_position,
    run_job,
    steps,
)
from penstock.spark_sink.sinks.kafka_ledger import (
    LEDGER_TOPIC,
    SLOTS,
    KafkaLedger,
    Target,
    require_settings,
    require_target,
)
from penstock.spark_sink.sinks.kafka_publisher import Row, SinkPublisher, change_ledger, publishing
from penstock.spark_sink.sinks.sink import Changes, Entries, LedgerSink, micro_batch, origin_of, stored_batches
from penstock.spark_sink.source.plan import TopicPartition
from penstock.spark_sink.source.pool import WorkerPool

#: Most rows, and most bytes of keys and values, of one transaction, all of one source partition.
PIECE_ROWS = 10_000
PIECE_BYTES = 8 * 1024 * 1024

#: The sort order of rows; `place` is the index of a row among the rows of one message.
ORDER = (*POSITION, "place")
#: The place of a row that publishes nothing but marks the end of a batch in a source partition. Without a topic, its
#: `value` is a report of the task that made the rows.
MARK = -1
#: The columns. For target partition -1, the partitioner chooses.
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

#: The kept publishers of this process's tasks.
_publishers = WorkerPool[SinkPublisher]()
#: The column with the topic of a row, if the sink names none.
TARGET_TOPIC = "target_topic"
_HEADERS = "array<struct<key:string,value:binary>>"


def published(rows: DataFrame, target: Target, batch: Batch, parallelism: int) -> DataFrame:
    """Return the frame whose job publishes a batch with columns `PUBLISHED`; see `publish_task`.

    Rows of one slot go to one task. A row is added for the planned end of each partition: the ledger moves there, even
    if a filter dropped rows.
    """
    ends = [(*part, end - 1) for part, (start, end) in sorted(batch.planned.items()) if start != end]
    if ends:
        values = ", ".join(f"(?, {partition}, {offset}L, {MARK})" for _, partition, offset in ends)
        query = f"SELECT * FROM VALUES {values} AS ends ({', '.join(ORDER)})"  # noqa: S608 - of numbers and our names
        marks = rows.sparkSession.sql(query, args=[topic for topic, *_ in ends])
        rows = rows.unionByName(marks.coalesce(1), allowMissingColumns=True)
    slots = rows.repartitionById(parallelism, slot_column()).sortWithinPartitions(*ORDER)
    return slots.mapInArrow(partial(publish_task, target, batch), PICKLED)


def slot_column() -> Column:
    """Return the slot of a row's source partition, as `kafka_ledger.slot_of`; any slot for a row without one."""
    place = F.concat_ws("/", F.col("topic"), F.col("partition").cast("string"))
    return F.pmod(F.crc32(place.cast("binary")), F.lit(SLOTS)).cast("int")


def publish_task(target: Target, batch: Batch, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Publish the rows of one Spark task, sorted by `ORDER`; yield counts of published rows, and their reports."""
    reports: list[bytes] = []
    yield as_row((publish_rows(target, batch, rows_of(batches, target.name, reports)), reports))
    imports_set_aside("publishing")


def rows_of(batches: Iterable[pa.RecordBatch], name: str, reports: list[bytes]) -> Iterator[Row]:
    """Yield rows for the sink of that name; reports are appended to `reports`."""
    for batch in batches:
        if any(batch[column].null_count for column in POSITION):
            require_position(batch.filter(pc.not_equal(batch["place"], MARK)), f"sink {name}")
        for column in (TARGET_TOPIC, "headers"):
            for at in not_utf8(batch[column])[:1]:
                source = "{}:{}@{}".format(*(batch[own][at].as_py() for own in POSITION))
                what = f"{column} has text that is not UTF-8 in a row from {source} for sink {name}"
                raise SinkError(f"{what}; change it in the query, or filter such rows out")
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
                        f"{topic}:{partition}@{offset} for sink {name}; give it a value in the query, or "
                        "filter such rows out"
                    )
                yield Row((topic, partition), offset, target, key, value, pairs, target_partition)


def pieces(rows: Iterable[Row]) -> Iterator[Sequence[Row]]:
    """Cut sorted rows into transactions: rows of one source partition, with all rows of an offset together."""
    piece: list[Row] = []
    size = 0
    for row in rows:
        is_full = len(piece) >= PIECE_ROWS or size >= PIECE_BYTES
        last = piece[-1] if piece else row
        if row.source != last.source or (is_full and row.offset != last.offset):
            yield piece
            piece, size = [], 0
        piece.append(row)
        size += len(row.key or b"") + len(row.value or b"")
    if piece:
        yield piece


def publish_rows(
    target: Target, batch: Batch, rows: Iterable[Row], publishers: WorkerPool[SinkPublisher] = _publishers
) -> OffsetStatistics:
    """Publish rows of a batch, sorted by source partition and offset; return their number, and how many were before.

    It uses a publisher of `publishers`; default: the process's pool. No two tasks at a time have rows of one slot.
    Raises `SinkError` or `MissingRightError` for the first transaction that fails.
    """
    found = OffsetStatistics()
    with publishers.lend(target, lambda: SinkPublisher(target)) as publisher:
        for piece in pieces(rows):
            found.rows += publishing(piece)
            found.applied += Counter({piece[0].source: publisher.publish(batch, piece)})
    return found


class PublishingSink(LedgerSink):
    """The base of sinks that publish to Kafka. Their ledger is a topic, with entries by sink name."""

    __slots__ = ()

    bootstrap_servers: str | None
    ledger_topic: str
    parallelism: int

    @abstractmethod
    def _target(self) -> Target | None:
        """Return the target; None: the sink publishes nothing and has no ledger."""

    @abstractmethod
    def _topics(self) -> tuple[Collection[str], Mapping[str, Collection[str]]]:
        """Return the topics that its settings name, and its dead-letter topics, each with its source topics."""

    @abstractmethod
    def _check_columns(self, schema: StructType) -> None:
        """Raise `SchemaMismatchError` for a frame that does not fit."""

    @abstractmethod
    def _messages(self, batch: DataFrame) -> DataFrame:
        """Return the messages of a batch, with the columns `PUBLISHED`."""

    def _run(self, job: DataFrame, before: str) -> list[SparkRow]:
        """Run a Spark job, as `run_job` does."""
        return run_job(job, before)

    @property
    def has_ledger(self) -> bool:
        """Whether it has a ledger of its published rows."""
        return self._target() is not None

    def check(self, schema: StructType) -> None:
        """Check the schema and the target topics; create the ledger's topic and dead-letter topics.

        Raises:
            SchemaMismatchError: a column is missing or has a wrong type.
            MissingRightError: the permission to publish to a topic, or to use the ledger, is missing.
            TopicNotFoundError: a topic does not exist.
            BrokerConnectionError: no broker answered.
            ConfigurationError: the ledger's topic cannot be used, or the client library refuses the settings.
        """
        self._check_columns(schema)
        if (target := self._target()) is not None:
            require_target(target, *self._topics())

    def least_rights(self, _topics: Iterable[str]) -> list[Right]:
        """Return the permissions of its client, without those on topics that rows or an `Outgoing` name."""
        target = self._target()
        return [] if target is None else target.least_rights(*self._topics())

    def ledger(self) -> dict[str, Entries]:
        """Return the entries of all sinks in the ledger's topic, by name."""
        target = self._target()
        if target is None:
            return {}
        with closing(KafkaLedger(target)) as ledger:
            return ledger.read_all()

    def _change_ledger(
        self, query: str, parts: Collection[TopicPartition], change: Callable[[Entries], Changes]
    ) -> None:
        if (target := self._target()) is not None:
            change_ledger(replace(target, name=query), parts, change)

    @property
    def ledger_key(self) -> Hashable:
        """The identity of its ledger in this process."""
        return self.bootstrap_servers, self.name, self.ledger_topic

    def _publish(self, batch: DataFrame, batch_id: int) -> list[bytes]:
        """Publish the messages of a batch, if the sink publishes; return the reports of its tasks."""
        target, before = self._target(), f"batch {batch_id}: "
        if target is None:
            self.check(batch.schema)
            return [row["value"] for row in self._run(self._messages(batch).select("value"), before)]
        origin = origin_of(batch, target.name)
        # A run that has published a batch was checked already.
        if not stored_batches.has_any_of(self.ledger_key, origin):
            self.check(batch.schema)
        what = micro_batch(
            batch, batch_id, origin, f"sink {target.name}", f"--kafka --ledger-topic {shlex.quote(target.ledger)}"
        )
        seen, reports = OffsetStatistics(), list[bytes]()
        with stored_batches.one_call(self.ledger_key, origin, what):
            for task in self._run(published(self._messages(batch), target, what, self.parallelism), before):
                found, others = from_row(task)
                seen.add(found)
                reports += others
            warn_left_out(batch_id, what.target, seen)
        return reports


def require_text_or_bytes(schema: StructType, target: str, names: Iterable[str]) -> None:
    """Raise `SchemaMismatchError` if one of these columns is neither text nor bytes."""
    for name in names:
        if name in schema.names and not isinstance(schema[name].dataType, StringType | BinaryType):
            raise SchemaMismatchError(
                f"column {name} of the frame for {target} is {schema[name].dataType.simpleString()}; messages are "
                f"text or bytes: cast it, or make text of it with to_json(...)"
            )


@dataclass(frozen=True, slots=True)
class KafkaSink(PublishingSink):
    """Publishes the rows of micro-batches to Kafka, each once for readers of committed messages.

    Use it with `writeStream.foreachBatch(sink)`, once for each batch and name: a second call in the same batch is an
    error. The frame needs `topic`, `partition` and `offset` of the source, and `value`; optional are `key` (text or
    bytes) and `headers` (as the source gives them). Messages of one source partition are published in order of offset;
    several rows of one message in any order.

    Rows and the ledger are written in one Kafka transaction for each source partition; in several if a batch has more
    than 10,000 rows or 8 MB of one. So readers see a batch in parts, each complete.

    A name belongs to one query. If a second copy is started by mistake, both fence each other: each row is published
    once, and one of them may fail after some tries. A sink can be pickled.

    Attributes:
        bootstrap_servers: addresses of the brokers to publish to.
        topic: the topic of all rows, which must exist; without it, the column `target_topic` names it.
        name: name of the query, in the transactional ids `<name>/<0 to 63>` and in the ledger. Under another name, all
            rows are published again.
        config: client settings by librdkafka's names; they may contain secrets and are never shown.
        parallelism: number of publishing tasks; at most 64 have work.
        ledger_topic: topic of the ledger, created if it does not exist; many sinks may share it.
    """

    bootstrap_servers: str
    topic: str | None = None
    name: str = field(kw_only=True)
    config: ClientConfig = field(default_factory=dict, kw_only=True, repr=False)
    parallelism: int = field(default=4, kw_only=True)
    ledger_topic: str = field(default=LEDGER_TOPIC, kw_only=True)

    def __post_init__(self) -> None:
        """Check the settings; `ConfigurationError` names a wrong one."""
        require_settings("KafkaSink", self._target())
        if self.topic is not None:
            not_empty("topic", self.topic)
        if self.topic == self.ledger_topic:
            raise ConfigurationError("topic and ledger_topic must differ; rename one")
        positive_int("parallelism", self.parallelism)
        object.__setattr__(self, "config", dict(self.config))

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Publish one micro-batch.

        Raises:
            SinkError: some rows could not be published. Others may be; they are left out when the batch is repeated.
            MissingRightError: the same, because a permission is missing.
            TopicNotFoundError: the topic does not exist.
            BrokerConnectionError: no broker answered.
        """
        self._publish(batch, batch_id)

    def _target(self) -> Target:
        return Target(self.bootstrap_servers, self.config, self.name, self.ledger_topic)

    def _topics(self) -> tuple[Collection[str], Mapping[str, Collection[str]]]:
        return [] if self.topic is None else [self.topic], {}

    def _messages(self, batch: DataFrame) -> DataFrame:
        given = {name: F.col(name) for name in batch.columns if name in PUBLISHED.names}
        given |= {"place": F.lit(0), "target_partition": F.lit(-1)}
        if self.topic is not None:
            given[TARGET_TOPIC] = F.lit(self.topic)
        kinds = from_arrow_schema(PUBLISHED)
        return batch.select(
            *(given.get(kind.name, F.lit(None)).cast(kind.dataType).alias(kind.name) for kind in kinds.fields)
        )

    def _check_columns(self, schema: StructType) -> None:
        target = f"sink {self.name}"
        needed = ["value"] if self.topic is not None else ["value", TARGET_TOPIC]
        require_columns(schema.names, target, needed)
        require_text_or_bytes(schema, target, ["key", *needed])
        headers = schema["headers"].dataType if "headers" in schema.names else None
        if headers is not None and headers.simpleString() != _HEADERS:
            raise SchemaMismatchError(
                f"column headers of the frame for {target} is {headers.simpleString()}, not {_HEADERS}; shape it so"
            )
