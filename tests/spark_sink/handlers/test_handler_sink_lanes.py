"""The lanes that Spark computes: what waits for each other shares one, and what has no order is not sent around."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.consumer import Handler, handler
from penstock.consumer.handlers.handler import orderings_of
from penstock.message import Message
from penstock.spark_sink import HandlerSink
from penstock.spark_sink.sinks.frames import tasks_of
from penstock.spark_sink.sinks.handlers.execution.rows import RowRecord
from penstock.spark_sink.sinks.handlers.lanes import lane_column

LANES = 1_000
COLUMNS = "topic STRING, partition INT, offset BIGINT, key BINARY, value BINARY"


def nothing(_message: Message) -> None:
    pass


def frame(spark: SparkSession, tasks: int = 2) -> DataFrame:
    """Return rows of two topics with two partitions each, of 20 keys and of none."""
    places = [(topic, part, at) for topic in ("orders", "payments") for part in range(2) for at in range(60)]
    rows = [(*place, b"%d" % (place[2] % 20) if place[2] % 3 else None, b"x") for place in places]
    return spark.createDataFrame(rows, COLUMNS).repartition(tasks)


def separate(order: str, keyless: str) -> dict[str, Handler]:
    return {topic: handler(nothing, order=order, keyless=keyless) for topic in ("orders", "payments")}


def together(order: str, keyless: str) -> dict[str, Handler]:
    return {topic: handler(nothing, order=order, keyless=keyless, key_space="all") for topic in ("orders", "payments")}


def mixed(order: str, keyless: str) -> dict[str, Handler]:
    return {"orders": handler(nothing, order=order, keyless=keyless), "payments": handler(nothing, order="none")}


KEYED = [("key", "partition"), ("key", "together"), ("key", "spread")]
OTHERS = [("partition", "partition"), ("none", "partition")]


@pytest.mark.parametrize(
    ("handlers_of", "order", "keyless"),
    [
        *((handlers_of, *one) for handlers_of in (separate, mixed) for one in (*KEYED, *OTHERS)),
        *((together, *one) for one in KEYED),  # a key space is of keys
    ],
)
def test_messages_that_wait_for_each_other_share_a_lane_and_others_are_spread(
    spark: SparkSession, handlers_of: Callable[[str, str], dict[str, Handler]], order: str, keyless: str
) -> None:
    handlers = handlers_of(order, keyless)
    orderings = orderings_of(handlers, LANES)

    rows = frame(spark).withColumn("lane", lane_column(handlers, LANES)).collect()

    lanes: dict[object, set[int]] = {}
    for row in rows:
        record = RowRecord(row.topic, row.partition, row.offset, row.key and bytes(row.key), b"x", None, None, None)
        lanes.setdefault(orderings[row.topic].identity(record), set()).add(row.lane)
    assert all(len(found) == 1 for found in lanes.values())
    assert all(0 <= row.lane < LANES for row in rows)
    # Of a few hundred identities some meet in one of a thousand lanes.
    assert len(set.union(*lanes.values())) >= 0.8 * len(lanes)


def test_rows_without_an_order_stay_in_the_tasks_in_which_they_are_read_where_those_are_enough(
    spark: SparkSession,
) -> None:
    def shuffles(order: str, tasks: int) -> bool:
        sink = HandlerSink({"orders": handler(nothing, order=order)}, group="g", parallelism=2, headers=False)
        rows = spark.sparkContext.parallelize([("orders", 0, n, None, b"x") for n in range(10)], tasks)
        batch = spark.createDataFrame(rows, COLUMNS)
        assert tasks_of(batch) == tasks
        spread = sink._spread(batch.withColumn("penstock_lane", lane_column(sink.handlers, 2)), batch)
        assert spread.rdd.getNumPartitions() == 2
        return "Exchange" in spread._jdf.queryExecution().toString()  # type: ignore[attr-defined] # to look at the plan

    assert not shuffles("none", 2)
    assert not shuffles("none", 5)
    assert shuffles("none", 1)
    assert shuffles("partition", 5)
    assert shuffles("key", 2)
    assert tasks_of(frame(spark)) is None  # behind a shuffle
