"""Where a handler sink leaves rows in the tasks in which the source has read them, and where it must not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from handler_log import logging_handler, read_log
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name under which everybody knows it

from kafka_tools import produce
from penstock.consumer import Handler, handler
from penstock.consumer.handlers.handler import orderings_of
from penstock.devbroker import DevBroker
from penstock.message import FixedRecord, Message
from penstock.spark_sink import HandlerSink
from penstock.spark_sink.sinks.frames import whole_partitions
from penstock.spark_sink.sinks.handlers.rows import lane_column, spread

#: Options of the source under which it reads two partitions of 1,500 messages.
WHOLE: dict[str, str] = {}
DIVIDED = {"minPartitions": "8"}
PACKED = {"endingOffsets": "small"}


def nothing(_message: Message) -> None:
    pass


@pytest.fixture
def frame(
    spark: SparkSession, broker: DevBroker, new_topic: Callable[..., str]
) -> Callable[..., tuple[str, DataFrame]]:
    """Return a function that makes a topic of two partitions and a frame of it, with options of the source."""

    def make(options: dict[str, str]) -> tuple[str, DataFrame]:
        topic = new_topic(partitions=2)
        for partition in range(2):
            records = [(b"%d" % (n % 7), b"x") for n in range(1_500)]
            produce(broker.bootstrap_servers, topic, records, partition=partition)
        ends = {"endingOffsets": f'{{"{topic}": {{"0": 300, "1": 300}}}}'} if "endingOffsets" in options else {}
        settings = {"kafka.bootstrap.servers": broker.bootstrap_servers, "subscribe": topic, **options, **ends}
        return topic, spark.read.format("penstock").options(**settings).load()

    return make


def shuffles(topic: str, batch: DataFrame, order: str, parallelism: int = 2) -> bool:
    rows = spread(batch, {topic: handler(nothing, order=order)}, parallelism)
    assert rows.rdd.getNumPartitions() <= parallelism
    return "Exchange" in rows._jdf.queryExecution().toString()  # type: ignore[attr-defined] # to look at the plan


@pytest.mark.thorough
def test_rows_stay_where_they_are_read_unless_their_partition_is_divided_or_waits_in_a_task_with_others(
    frame: Callable[..., tuple[str, DataFrame]],
) -> None:
    topic, batch = frame(WHOLE)
    changed = batch.where("offset % 2 = 0").withColumn("more", F.col("offset") + 1).sortWithinPartitions("key")
    unknown = (batch.repartition(2), batch.union(batch), batch.coalesce(1), batch.orderBy("offset"), batch.limit(9))
    divided, in_parts = frame(DIVIDED)
    packed, together = frame(PACKED)

    assert whole_partitions(batch) == whole_partitions(changed) == 2
    assert [whole_partitions(one) for one in (*unknown, in_parts)] == [None] * 6
    assert [one.rdd.getNumPartitions() for one in (in_parts, together)] == [8, 1]
    # There are two to be handled side by side, and so many tasks.
    stay = [(topic, batch, "partition", 2), (topic, changed, "partition", 2), (topic, batch, "partition", 4)]
    stay += [(topic, batch, "none", 2), (divided, in_parts, "none", 2), (packed, together, "partition", 1)]
    spread_out = [(topic, one, "partition", 2) for one in unknown] + [(topic, batch, "key", 2)]
    spread_out += [(divided, in_parts, "partition", 2), (packed, together, "partition", 2)]
    assert [shuffles(*one) for one in stay] == [False] * len(stay)
    assert [shuffles(*one) for one in spread_out] == [True] * len(spread_out)


@pytest.mark.parametrize(
    ("options", "parallelism"),
    [
        (WHOLE, 2),
        *(pytest.param(*one, marks=pytest.mark.thorough) for one in ((WHOLE, 1), (DIVIDED, 2), (PACKED, 2))),
    ],
)
def test_a_partition_is_handled_in_its_order_by_one_task_however_the_source_has_cut_it(
    frame: Callable[..., tuple[str, DataFrame]], tmp_path: Path, options: dict[str, str], parallelism: int
) -> None:
    topic, batch = frame(options)
    work = handler(logging_handler(tmp_path), order="partition")
    sink = HandlerSink({topic: work}, group="g", parallelism=parallelism, headers=False)

    # As a query of the user's may leave them.
    sink(batch.sortWithinPartitions("key"), 0)

    handled = defaultdict(list)
    for one in read_log(tmp_path):
        handled[one.partition].append(one)
    count = 300 if options == PACKED else 1_500
    assert {part: [one.offset for one in found] for part, found in handled.items()} == {
        part: list(range(count)) for part in range(2)
    }
    assert all(len({one.pid for one in found}) == 1 for found in handled.values())
    assert sink.last_report is not None
    # A shuffle may bring both to one task.
    assert sink.last_report.tasks in ((parallelism,) if options == WHOLE else (1, parallelism))


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
