"""A query on three brokers, of which one is killed; `tests/chaos` has the rest, at length."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession, functions
from streams import SPARK_S

from penstock.devbroker import DevBroker
from penstock.spark_sink import SqlSink
from waiting import wait_until

HALF = 100


@pytest.mark.thorough
def test_a_query_goes_on_when_a_leader_is_killed_and_stores_each_row_once(spark: SparkSession, tmp_path: Path) -> None:
    database = tmp_path / "rows.db"

    def stored() -> dict[str, int]:
        with closing(sqlite3.connect(database, timeout=30)) as connection:
            return dict(connection.execute("SELECT value, times FROM seen").fetchall())

    with DevBroker(nodes=3, start_timeout=150) as cluster:
        cluster.create_topic("fed", 3)
        producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "enable.idempotence": True})
        read = spark.readStream.format("penstock").option("kafka.bootstrap.servers", cluster.bootstrap_servers)
        frame = read.option("subscribe", "fed").option("startingOffsets", "earliest").load()
        rows = frame.selectExpr("string(value) AS value", "topic", "partition", "offset")
        sink = SqlSink(f"sqlite:///{database}", "seen", key=["value"], sum_columns=["times"])
        sink.check(rows.withColumn("times", functions.lit(1)).schema)
        writer = rows.withColumn("times", functions.lit(1)).writeStream.queryName("seen").foreachBatch(sink)
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        for number in range(2 * HALF):
            if number == HALF:
                assert producer.flush(60) == 0
                wait_until(lambda: len(stored()) == HALF, SPARK_S)
                cluster.kill(cluster.leader_of("fed"))
            producer.produce("fed", str(number), str(number))
        assert producer.flush(120) == 0
        wait_until(lambda: len(stored()) == 2 * HALF or not query.isActive, SPARK_S)
        query.stop()

    assert query.exception() is None
    assert stored() == {str(number): 1 for number in range(2 * HALF)}
