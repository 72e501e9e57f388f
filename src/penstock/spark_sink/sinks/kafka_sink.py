"""`KafkaSink`: a foreachBatch function that publishes rows to Kafka, each once whatever is repeated.

Executors publish, one source partition at a time; a Kafka transaction holds rows and ledger together (`kafka_ledger`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name under which everybody knows it
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import BinaryType, StringType, StructType

from penstock.clients.gc_pause import imports_set_aside
from penstock.clients.rights import Right
from penstock.errors import ConfigurationError, SinkError
from penstock.options import ClientConfig, not_empty, positive_int
from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.ledger.rules import LedgerEntry
from penstock.spark_sink.sinks.handlers.rows import steps
from penstock.spark_sink.sinks.kafka_ledger import (
    LEDGER_TOPIC,
    Target,
    ledger_of,
    ledger_options,
    ledgers_of,
    require_settings,
    require_target,
)
from penstock.spark_sink.sinks.kafka_publication import (
    COMMIT_MESSAGE,
    IS_END,
    WriterCommitMessage,
    conclude,
    in_lanes,
    publish_rows,
)
from penstock.spark_sink.sinks.kafka_publisher import Row, begin_ledger
from penstock.spark_sink.sinks.planned_offsets import micro_batch
from penstock.spark_sink.sinks.position import POSITION, require_columns, require_position
from penstock.spark_sink.sinks.sink import origin_of, stored_batches
from penstock.spark_sink.source.plan import TopicPartition

#: Column that names the topic of a row, where the sink names none.
TARGET_TOPIC = "target_topic"

#: The columns of a row as it goes to the tasks, in this order.
_MESSAGE = (*POSITION, TARGET_TOPIC, "key", "value", "headers", IS_END)

_HEADERS = "array<struct<key:string,value:binary>>"


@dataclass(frozen=True, slots=True)
class KafkaSink:
    """Publishes the rows of micro-batches to Kafka, each once for readers of committed messages.

    Use it with `writeStream.foreachBatch(sink)`, once for each batch and name: a second call in the same batch is
    an error. The frame carries `topic`, `partition` and `offset` of the source,
    `value` and, if wanted, `key` (text or bytes) and `headers` (as the source gives them). Messages of one source
    partition are published in the order of their offsets; several rows of one message in any order.

    Rows and the ledger are written in one Kafka transaction for each source partition, or several where a batch holds
    more than 10,000 rows or 8 MB of one: readers see a batch in parts, each whole. With `atomic_batches` a batch is one
    transaction: readers see all of it or nothing.

    Only one query has a name. A second copy of it, started by mistake, shuts out the first and is shut out by it; what
    both publish is published once, and after some tries one of them may fail. A sink can be pickled.

    Attributes:
        bootstrap_servers: addresses of the brokers to publish to.
        topic: the topic of all rows; without one the column `target_topic` names it. It must exist.
        name: of the query, in the transactional ids `<name>/<0 to 63>` and in the ledger. It is the memory of what was
            published: under another name all of it is published again.
        config: client settings by librdkafka's names; may hold secrets and is never shown.
        parallelism: number of tasks that publish; 64 at most have something to do.
        atomic_batches: whether a batch is one transaction. Its rows go through one task, which has to hold them,
            within 30 seconds. Change it only when the query has stopped for good.
        ledger_topic: topic of the ledger, made if it does not exist; many sinks may share it.
    """

    bootstrap_servers: str
    topic: str | None = None
    name: str = field(kw_only=True)
    config: ClientConfig = field(default_factory=dict, kw_only=True, repr=False)
    parallelism: int = field(default=4, kw_only=True)
    atomic_batches: bool = field(default=False, kw_only=True)
    ledger_topic: str = field(default=LEDGER_TOPIC, kw_only=True)

    def __post_init__(self) -> None:
        """Check the settings; a `ConfigurationError` names a wrong one."""
        require_settings("KafkaSink", self.bootstrap_servers, self.name, self.ledger_topic, self.config)
        if self.topic is not None:
            not_empty("topic", self.topic)
        if self.topic == self.ledger_topic:
            raise ConfigurationError("topic and ledger_topic must differ; rename one")
        positive_int("parallelism", self.parallelism)
        object.__setattr__(self, "config", dict(self.config))

    def check(self, schema: StructType) -> None:
        """Say what is wrong with a frame of this schema, or with the topics; make the ledger's.

        Raises:
            SinkError: a column is missing or has another type than a message's.
            MissingRightError: the client may not publish to the topic, or not keep the ledger.
            TopicNotFoundError: the topic does not exist.
            BrokerConnectionError: no broker answered.
            ConfigurationError: the ledger's topic cannot be used, or the client library refuses the settings.
        """
        self._check_columns(schema)
        require_target(self._target(), [] if self.topic is None else [self.topic])

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Publish one micro-batch.

        Raises:
            SinkError: some rows could not be published; others may be, and are left out when the batch comes again.
            MissingRightError: the same, for want of a right.
            TopicNotFoundError: the topic does not exist.
            BrokerConnectionError: no broker answered.
        """
        origin = origin_of(batch, self.name)
        if not stored_batches.has_any_of(self.ledger_key, origin):
            self.check(batch.schema)
        what = micro_batch(batch, batch_id, origin, f"sink {self.name}", ledger_options(self.ledger_topic))
        target = replace(self._target(), batch=what)
        with stored_batches.one_call(self.ledger_key, origin, what):
            lanes = in_lanes(self._as_messages(batch), target, self.parallelism).sortWithinPartitions(*POSITION)
            found = lanes.mapInArrow(_Task(target), from_arrow_schema(COMMIT_MESSAGE)).collect()
            conclude(batch_id, self.name, [WriterCommitMessage(*message) for message in found])

    def ledger_entries(self, _query: str, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, LedgerEntry]:
        """Return what the ledger has of some partitions. The sink's own name counts.

        Raises:
            MissingRightError: the client may not read the ledger.
            SinkError: the ledger cannot be read.
            BrokerConnectionError: no broker answered.
        """
        return ledger_of(self._target(), partitions)

    def begin_ledger(self, _query: str, entries: Mapping[TopicPartition, LedgerEntry]) -> None:
        """Write where a query begins, in partitions that the ledger does not know; `SinkError` where it cannot."""
        begin_ledger(self._target(), entries)

    @property
    def ledger_key(self) -> Hashable:
        """What tells its ledger from those of others in this process."""
        return self.bootstrap_servers, self.name, self.ledger_topic

    def ledger(self) -> dict[str, dict[TopicPartition, LedgerEntry]]:
        """Return what the ledger's topic has of each sink, by their names. Raises as `ledger_entries`."""
        return ledgers_of(self._target())

    def write_ledger(self, query: str, entries: Mapping[TopicPartition, LedgerEntry | None]) -> None:
        """Have the ledger of a sink hold these entries, None for none; `SinkError` where it cannot.

        What a query of that name publishes at the moment is refused and tried again, by the new entries.
        """
        for whole in (True, False):  # a sink goes by either kind of transactional ids
            begin_ledger(replace(self._target(), name=query, whole=whole), entries, overwrite=True)

    def least_rights(self, _topics: Iterable[str]) -> list[Right]:
        """Return the rights that its client needs, save those on topics that the rows name."""
        return self._target().least_rights([] if self.topic is None else [self.topic])

    def _target(self) -> Target:
        where = self.bootstrap_servers, self.config, self.name, self.ledger_topic
        return Target(*where, whole=self.atomic_batches)

    def _as_messages(self, batch: DataFrame) -> DataFrame:
        """Return the frame with the columns of `_rows_of`, whatever it had."""
        absent = F.lit(None)
        columns = set(batch.columns)
        return batch.select(
            F.col("topic").cast("string"),
            F.col("partition").cast("int"),
            F.col("offset").cast("bigint"),
            (F.lit(self.topic) if self.topic is not None else F.col(TARGET_TOPIC)).alias(TARGET_TOPIC),
            (F.col("key") if "key" in columns else absent).cast("binary").alias("key"),
            F.col("value").cast("binary").alias("value"),
            (F.col("headers") if "headers" in columns else absent).cast(_HEADERS).alias("headers"),
            F.lit(False).alias(IS_END),  # noqa: FBT003 - Spark's function takes a value
        )

    def _check_columns(self, schema: StructType) -> None:
        target = f"sink {self.name}"
        require_columns(schema.names, target, ["value"] if self.topic is not None else ["value", TARGET_TOPIC])
        for name in ("key", "value", *(() if self.topic is not None else (TARGET_TOPIC,))):
            if name in schema.names and not isinstance(schema[name].dataType, StringType | BinaryType):
                raise SchemaMismatchError(
                    f"column {name} of the frame for {target} is {schema[name].dataType.simpleString()}; messages are "
                    f"text or bytes: cast it, or make text of it with to_json(...)"
                )
        headers = schema["headers"].dataType if "headers" in schema.names else None
        if headers is not None and headers.simpleString() != _HEADERS:
            raise SchemaMismatchError(
                f"column headers of the frame for {target} is {headers.simpleString()}, not {_HEADERS}; shape it so"
            )


@dataclass(frozen=True, slots=True)
class _Task:
    """Publishes the rows of one Spark task, sorted by source partition and offset. Can be pickled."""

    target: Target

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = (row for batch in batches for row in _rows_of(batch, self.target))
        for message in publish_rows(self.target, rows):
            yield pa.RecordBatch.from_pylist([message._asdict()], schema=COMMIT_MESSAGE)
        imports_set_aside("publishing")


def _rows_of(batch: pa.RecordBatch, target: Target) -> Iterator[Row]:
    require_position(batch, f"sink {target.name}")
    for part in steps(batch):
        for cells in zip(*(part.column(name).to_pylist() for name in _MESSAGE), strict=True):
            yield _row_of(cells, target)


def _row_of(cells: tuple[Any, ...], target: Target) -> Row:
    topic, partition, offset, target_topic, key, value, headers, is_end = cells
    if is_end:
        return Row((topic, partition), offset, None, None, None, ())
    pairs = [(header["key"], header["value"]) for header in headers if header is not None] if headers else ()
    if target_topic is None or (pairs and any(name is None for name, _ in pairs)):
        empty = TARGET_TOPIC if target_topic is None else "headers.key"
        raise SinkError(
            f"{empty} is NULL in a row from {topic}[{partition}] offset {offset} for sink {target.name}; give it a "
            "value in the query, or filter such rows out"
        )
    return Row((topic, partition), offset, target_topic, key, value, pairs)
