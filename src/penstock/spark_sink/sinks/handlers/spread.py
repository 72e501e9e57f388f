"""Which task handles a row: the lane of each, and how rows are spread over tasks by it.

What waits for each other has one lane, as `Ordering` says of identities; which number it is means nothing, and need not
be the consumer's. Spark computes it by itself, without a step through Python, unless handlers have key functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name under which everybody knows it
from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined] # it has no types

from penstock.consumer.handlers.handler import Handler, SpaceNumbers, orderings_of, space_of
from penstock.consumer.handlers.options.ordering import Keyless, Order, Ordering
from penstock.spark_sink.sinks.frames import tasks_of, whole_partitions
from penstock.spark_sink.sinks.handlers.pickling import pack, unpack
from penstock.spark_sink.sinks.handlers.rows import COLUMNS, LANE, lane_numbers
from penstock.spark_sink.sinks.position import POSITION

#: Lanes for each task, as many as a worker has: the largest tells how much of a batch one key is.
_LANES_PER_TASK = 64


def spread(batch: DataFrame, handlers: Mapping[str, Handler], parallelism: int) -> DataFrame:
    """Return a batch's rows with their lanes, spread over tasks in the order in which they are handled.

    Where a shuffle would not bring more tasks to what may be handled side by side, rows stay where they are read.
    """
    columns, lanes = [name for name in COLUMNS if name in batch.columns], parallelism * _LANES_PER_TASK
    if all(handler.key is None for handler in handlers.values()):
        lane = lane_column(handlers, lanes)
    else:
        number = arrow_udf(lanes_by_keys(pack(orderings_of(handlers, lanes)), columns), "int")
        lane = cast("Column", number(*map(F.col, columns)))
    rows = batch.select(*columns).withColumn(LANE, lane)
    orders = {handler.order for handler in handlers.values()}
    # Others of a key may be read by another task.
    found = None if Order.KEY in orders else tasks_of(batch)
    if found is not None and orders == {Order.NONE}:
        if found >= parallelism:
            return rows.coalesce(parallelism)
    elif found is not None:
        partitions = whole_partitions(batch)
        if partitions is not None and found >= min(parallelism, partitions):
            # The user may have sorted them otherwise since they were read.
            return rows.coalesce(parallelism).sortWithinPartitions(*POSITION)
    return rows.repartitionById(parallelism, LANE).sortWithinPartitions(*POSITION)


def lane_column(handlers: Mapping[str, Handler], lanes: int) -> Column:
    """Return the lane of each row, for handlers without key functions. Rows of other topics have any."""
    numbers: SpaceNumbers = {}
    kinds = {
        topic: (handler.order, handler.keyless, space_of(handler, numbers) if handler.order is Order.KEY else 0)
        for topic, handler in handlers.items()
    }
    first, *others = dict.fromkeys(kinds.values())
    hashed = _hash(*first)
    for kind in others:
        topics = [topic for topic, its in kinds.items() if its == kind]
        hashed = F.when(F.col("topic").isin(topics), _hash(*kind)).otherwise(hashed)
    return F.pmod(hashed, F.lit(lanes)).cast("int")


def _hash(order: Order, keyless: Keyless, space: int) -> Column:
    by_place, by_partition = F.xxhash64(*POSITION), F.xxhash64("topic", "partition")
    if order is not Order.KEY:
        return by_partition if order is Order.PARTITION else by_place
    by_key = F.xxhash64(F.lit(space), F.col("key"))
    if keyless is Keyless.TOGETHER:
        return by_key  # of all NULLs it is the same
    return F.when(F.col("key").isNotNull(), by_key).otherwise(
        by_partition if keyless is Keyless.PARTITION else by_place
    )


def lanes_by_keys(packed: bytes, names: Sequence[str]) -> Callable[..., pa.Array]:
    """Return what Spark calls to find rows' lanes where a user's function gives the keys.

    Given are the packed orders of the topics and the columns' names.
    """
    orderings: dict[str, Ordering] = {}

    def lanes(*columns: pa.Array) -> pa.Array:
        if not orderings:
            orderings.update(unpack(packed))
        return lane_numbers(orderings, dict(zip(names, columns, strict=True)))

    return lanes
