"""Distribution of a frame's rows over tasks, and their conversion to records of the Kafka client.

Rows that must be handled in order get the same lane, by the identities of `Ordering`. Lane numbers have no meaning and
may differ from the consumer's. Spark computes them without Python, unless handlers have key functions.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Message
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined] # it has no types

from penstock.consumer.handlers.handler import Handler, orderings_of
from penstock.consumer.handlers.ordering import Keyless, Order, Ordering
from penstock.message import Record
from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks.frames import POSITION, require_position, steps

#: The column with a row's lane.
LANE = "penstock_lane"
#: Columns of rows; the last three may be missing. Keys and values may also be texts.
COLUMNS = (*POSITION, "key", "value", "timestamp", "timestampType", "headers")
_CASTS = {"topic": "string", "partition": "int", "offset": "bigint", "key": "binary", "value": "binary"}

#: A missing timestamp in the client's form: type and milliseconds.
_NO_TIMESTAMP = (0, -1)

#: Lanes per task, as many as per worker: enough that the largest lane is little more than one key of the batch.
_LANES_PER_TASK = 64


def stretches(batches: Iterable[pa.RecordBatch], topics: Collection[str]) -> Iterator[list[Record]]:
    """Yield the rows of a task in order, in lists of one source partition each.

    `SchemaMismatchError` if a row has no position, or its topic is not in `topics`, which have handlers.
    """
    for batch in batches:
        _require_handled({name: batch.column(name) for name in POSITION}, topics)
        for part in steps(batch):
            yield from _by_partition({name: part.column(name) for name in batch.schema.names})


def _require_handled(columns: Mapping[str, pa.Array], topics: Collection[str]) -> None:
    require_position(columns, "handlers")
    for topic in pc.unique(columns["topic"]).to_pylist():
        if topic not in topics:
            raise SchemaMismatchError(
                f"the frame has rows of topic {topic}, which has no handler in this sink; give it one, or leave the "
                "topic out of the query"
            )


def _by_partition(columns: Mapping[str, pa.Array]) -> Iterator[list[Record]]:
    """Yield the rows in lists of one source partition each."""
    records, ends = list(_records(columns)), set[int]()
    for name in ("topic", "partition"):
        ends.update(pc.run_end_encode(columns[name]).run_ends.to_pylist())
    begin = 0
    for end in sorted(ends):
        yield records[begin:end]
        begin = end


def _records(columns: Mapping[str, pa.Array]) -> Iterator[Record]:
    def values(name: str) -> Iterable[Any]:
        return columns[name].to_pylist() if name in columns else repeat(None)

    timestamps: Iterable[tuple[int, int]] = repeat(_NO_TIMESTAMP)
    if "timestamp" in columns:
        milliseconds = pc.divide(columns["timestamp"].cast(pa.int64()), 1_000)  # of microseconds
        kinds = columns["timestampType"] if "timestampType" in columns else pa.nulls(len(milliseconds), pa.int32())
        # The client's types: 0 none, 1 set by the sender, 2 set by the broker. Spark's are one lower.
        kinds = pc.if_else(pc.is_null(milliseconds), 0, pc.add(pc.fill_null(kinds, 0), 1))
        timestamps = zip(kinds.to_pylist(), pc.fill_null(milliseconds, -1).to_pylist(), strict=True)
    headers: Iterable[Any] = repeat(None)
    if "headers" in columns:
        headers = [
            [(header["key"], header["value"]) for header in found] if found else None for found in values("headers")
        ]
    places = (values(name) for name in (*POSITION, "key", "value"))
    return cast("Iterator[Record]", map(Message, *places, headers, repeat(None), timestamps))


def spread(batch: DataFrame, handlers: Mapping[str, Handler], parallelism: int) -> DataFrame:
    """Return a batch's rows, distributed over tasks and sorted in the order of handling."""
    columns, lanes = [name for name in COLUMNS if name in batch.columns], parallelism * _LANES_PER_TASK
    if all(handler.key is None for handler in handlers.values()):
        lane = lane_column(handlers, lanes)
    else:
        number = arrow_udf(lanes_by_keys(orderings_of(handlers, lanes), columns), "int")
        lane = cast("Column", number(*map(F.col, columns)))
    rows = batch.select(*columns).withColumns({name: F.col(name).cast(kind) for name, kind in _CASTS.items()})
    orders = {handler.order for handler in handlers.values()}
    if orders <= {Order.NONE, Order.PARTITION}:
        tasks, parts = _source_layout(batch)
        if orders == {Order.NONE} and tasks >= parallelism:
            return rows.coalesce(parallelism)
        if parts and tasks >= (parallelism if Order.NONE in orders else min(parallelism, parts)):
            return rows.coalesce(parallelism).sortWithinPartitions(*POSITION)  # the user may have sorted them
    return rows.withColumn(LANE, lane).repartitionById(parallelism, LANE).sortWithinPartitions(*POSITION)


def _source_layout(batch: DataFrame) -> tuple[int, int | None]:
    """Return the number of tasks of a frame, and of its source partitions; None unless each partition is in one task.

    This is known if each task processes the rows of one task of the source: not after a user's union or `coalesce`,
    and not of another source. After a shuffle no task is known, because a look would run the shuffle.
    """
    try:
        java: Any = batch._jdf.queryExecution()  # noqa: SLF001 - no public function gives the source's tasks
        if "Exchange" in java.executedPlan().toString():
            return 0, None
        rows = java.toRdd()
        tasks = int(rows.getNumPartitions())
        while rows.getClass().getSimpleName() != "DataSourceRDD":
            parents = rows.dependencies()
            if parents.size() != 1 or parents.head().getClass().getSimpleName() != "OneToOneDependency":
                return tasks, None
            rows = parents.head().rdd()
        read = [pickle.loads(task.inputPartition().get().pickedPartition()).value for task in rows.partitions()]  # noqa: S301 - made by the source, in this query
        parts = [offsets.part for ranges in read for offsets in ranges or ()]
    except Exception:  # noqa: BLE001 - another version of Spark, or another source: a shuffle works for all
        return 0, None
    return tasks, len(parts) if len(set(parts)) == len(parts) else None


def lane_column(handlers: Mapping[str, Handler], lanes: int) -> Column:
    """Return the lane of each row, for handlers without key functions. Rows of other topics get any lane."""
    numbers = {space: number for number, space in enumerate({handler.space for handler in handlers.values()})}
    kinds = {
        topic: (handler.order, handler.keyless, numbers[handler.space] if handler.order is Order.KEY else 0)
        for topic, handler in handlers.items()
    }
    first, *others = dict.fromkeys(kinds.values())
    hashed = _hash(*first)
    for kind in others:
        topics = [topic for topic, kind_of_topic in kinds.items() if kind_of_topic == kind]
        hashed = F.when(F.col("topic").isin(topics), _hash(*kind)).otherwise(hashed)
    return F.pmod(hashed, F.lit(lanes)).cast("int")


def _hash(order: Order, keyless: Keyless, space: int) -> Column:
    by_place, by_partition = F.xxhash64(*POSITION), F.xxhash64("topic", "partition")
    if order is not Order.KEY:
        return by_partition if order is Order.PARTITION else by_place
    by_key = F.xxhash64(F.lit(space), F.col("key"))
    if keyless is Keyless.TOGETHER:
        return by_key  # the same for all NULLs
    return F.when(F.col("key").isNotNull(), by_key).otherwise(
        by_partition if keyless is Keyless.PARTITION else by_place
    )


def lanes_by_keys(orderings: Mapping[str, Ordering], names: Sequence[str]) -> Callable[..., pa.Array]:
    """Return a function for Spark that computes rows' lanes with users' key functions, from columns of these names.

    A row without a position, or of a topic without a handler, is a `SchemaMismatchError`.
    """

    def lanes(*arrays: pa.Array) -> pa.Array:
        columns = dict(zip(names, arrays, strict=True))
        _require_handled(columns, orderings)
        found: list[int] = []
        for records in _by_partition(columns):
            topic = records[0].topic()
            found += orderings[topic].lane_numbers(topic, records[0].partition(), records)
        return pa.array(found, type=pa.int32())

    return lanes
