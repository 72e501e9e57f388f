"""How a handler sink spreads rows over lanes and tasks, on real Spark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from handler_log import logging_handler, read_log
from pyspark.sql import DataFrame, SparkSession
from streams import read_to_end

from kafka_tools import produce
from penstock.consumer import Handler, handler
from penstock.consumer.handlers.handler import orderings_of
from penstock.devbroker import DevBroker
from penstock.message import FixedRecord, Message
from penstock.spark_sink import HandlerSink
from penstock.spark_sink.sinks.handlers.rows import LANE, lane_column, spread


def nothing(_message: Message) -> None:
    pass


def test_a_partition_is_handled_in_its_order_by_one_task_however_the_source_has_cut_it(
    spark: SparkSession, broker: DevBroker, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = new_topic(partitions=2)
    for partition in range(2):
        produce(broker.bootstrap_servers, topic, [(b"%d" % (n % 7), b"x") for n in range(900)], partition=partition)
    settings = {"kafka.bootstrap.servers": broker.bootstrap_servers, "subscribe": topic, "minPartitions": "8"}
    batch = spark.read.format("penstock").options(**settings).load()
    work = handler(logging_handler(tmp_path), order="partition")
    sink = HandlerSink({topic: work}, group="g", parallelism=2, headers=False)

    # As a query of the user's may leave them.
    sink(batch.sortWithinPartitions("key"), 0)

    handled = defaultdict(list)
    for one in read_log(tmp_path):
        handled[one.partition].append(one)
    assert {part: [one.offset for one in found] for part, found in handled.items()} == {
        part: list(range(900)) for part in range(2)
    }
    assert all(len({one.pid for one in found}) == 1 for found in handled.values())
    assert sink.last_report is not None
    assert sink.last_report.tasks in (1, 2), "a shuffle may bring both to one task"


LANES = 1_000
COLUMNS = "topic STRING, partition INT, offset BIGINT, key BINARY, value BINARY"


def made_up(spark: SparkSession) -> DataFrame:
    """Return rows of two topics with two partitions each, of 20 keys and of none."""
    places = [(topic, part, at) for topic in ("orders", "payments") for part in range(2) for at in range(60)]
    rows = [(*place, b"%d" % (place[2] % 20) if place[2] % 3 else None, b"x") for place in places]
    return spark.createDataFrame(rows, COLUMNS)


def separate(order: str, keyless: str) -> dict[str, Handler]:
    return {topic: handler(nothing, order=order, keyless=keyless) for topic in ("orders", "payments")}


def together(order: str, keyless: str) -> dict[str, Handler]:
    return {topic: handler(nothing, order=order, keyless=keyless, key_space="all") for topic in ("orders", "payments")}


def mixed(order: str, keyless: str) -> dict[str, Handler]:
    return {"orders": handler(nothing, order=order, keyless=keyless), "payments": handler(nothing, order="none")}


@pytest.mark.parametrize(
    ("handlers_of", "order", "keyless"),
    [
        pytest.param(separate, "key", "partition", marks=pytest.mark.thorough),
        pytest.param(separate, "key", "spread", marks=pytest.mark.thorough),
        pytest.param(separate, "none", "partition", marks=pytest.mark.thorough),
        (mixed, "partition", "partition"),
        (together, "key", "together"),
    ],
)
def test_messages_that_wait_for_each_other_share_a_lane_and_others_are_spread(
    spark: SparkSession, handlers_of: Callable[[str, str], dict[str, Handler]], order: str, keyless: str
) -> None:
    handlers = handlers_of(order, keyless)
    orderings = orderings_of(handlers, LANES)

    rows = made_up(spark).withColumn("lane", lane_column(handlers, LANES)).collect()

    lanes: dict[object, set[int]] = {}
    for row in rows:
        record = FixedRecord(row.topic, row.partition, row.offset, row.key and bytes(row.key), b"x", (), None)
        lanes.setdefault(orderings[row.topic].identity(record), set()).add(row.lane)
    assert all(len(found) == 1 for found in lanes.values())
    assert all(0 <= row.lane < LANES for row in rows)
    # Of a few hundred identities some meet in one of a thousand lanes.
    assert len(set.union(*lanes.values())) >= 0.8 * len(lanes)


def test_rows_without_an_order_go_through_a_shuffle_only_where_it_brings_more_tasks(spark: SparkSession) -> None:
    rows = spark.createDataFrame(spark.sparkContext.parallelize(made_up(spark).collect(), 4), COLUMNS)
    free, by_key = handler(nothing, order="none"), handler(nothing)

    unordered = spread(rows, {"orders": free, "payments": free}, 2)
    wider = spread(rows, {"orders": free, "payments": free}, 5)
    ordered = spread(rows, {"orders": free, "payments": by_key}, 2)

    assert [LANE in plan_of(frame) for frame in (unordered, wider, ordered)] == [False, True, True]
    assert [frame.rdd.getNumPartitions() for frame in (unordered, wider)] == [2, 5]
    assert unordered.count() == wider.count() == ordered.count() == rows.count()


@pytest.mark.parametrize(
    ("options", "order", "changed", "is_shuffled"),
    [
        ({}, "partition", lambda rows: rows.where("offset >= 0").sortWithinPartitions("value"), False),
        ({}, "partition", lambda rows: rows.union(rows), True),
        ({}, "partition", lambda rows: rows.repartition(3), True),
        ({}, "key", lambda rows: rows, True),
        ({"minPartitions": "4"}, "partition", lambda rows: rows, True),
    ],
    ids=["as they are read", "united", "spread by the user", "by key", "partitions divided"],
)
def test_rows_by_partition_stay_where_they_are_read_if_one_task_reads_a_partition(
    spark: SparkSession,
    broker: DevBroker,
    new_topic: Callable[..., str],
    *,
    options: dict[str, str],
    order: str,
    changed: Callable[[DataFrame], DataFrame],
    is_shuffled: bool,
) -> None:
    topic = new_topic(partitions=2)
    for partition in range(2):
        produce(broker.bootstrap_servers, topic, [(b"%d" % n, b"%d" % -n) for n in range(50)], partition=partition)
    settings = {"kafka.bootstrap.servers": broker.bootstrap_servers, "subscribe": topic, **options}
    read = changed(spark.read.format("penstock").options(**settings).load())

    rows = spread(read, {topic: handler(nothing, order=order)}, 1)

    assert (LANE in plan_of(rows)) is is_shuffled
    assert rows.count() == read.count() > 0
    for found in rows.select("partition", "offset").rdd.glom().collect():
        for partition in range(2):
            offsets = [row.offset for row in found if row.partition == partition]
            assert offsets == sorted(offsets)


def test_rows_of_a_query_stay_where_they_are_read(
    spark: SparkSession, broker: DevBroker, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, plans = new_topic(partitions=2), list[str]()
    for partition in range(2):
        produce(broker.bootstrap_servers, topic, [(b"k", b"v")], partition=partition)
    settings = {"kafka.bootstrap.servers": broker.bootstrap_servers, "subscribe": topic}
    read = spark.readStream.format("penstock").options(startingOffsets="earliest", **settings).load()
    work = {topic: handler(nothing, order="partition")}

    query = read.writeStream.foreachBatch(lambda rows, _: plans.append(plan_of(spread(rows, work, 1))))
    read_to_end(query.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start)

    assert [LANE in plan for plan in plans] == [False]


def plan_of(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().executedPlan())
