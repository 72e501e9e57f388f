"""`start_sink` on real Spark: every batch reaches its function, and where a query begins."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import SparkSession

from penstock.devbroker import DevBroker
from penstock.spark_sink import SqlSink, start_sink


def test_a_query_that_lost_its_checkpoint_begins_where_the_ledger_says_and_not_at_a_default(
    spark: SparkSession, broker: DevBroker, new_topic: Callable[..., str], write: Callable[..., None], tmp_path: Path
) -> None:
    topic = new_topic(partitions=2)
    url = f"sqlite:///{tmp_path / 'rows.db'}"

    def run(checkpoint: str, starting_offsets: str) -> int:
        query = start_sink(
            spark,
            topic,
            SqlSink(url, table="rows"),
            rows=lambda messages: messages.selectExpr("cast(value as string) text", "topic", "partition", "offset"),
            bootstrap_servers=broker.bootstrap_servers,
            trigger="available now",
            name="lost",
            checkpoint_location=str(tmp_path / checkpoint),
            starting_offsets=starting_offsets,
        )
        assert query.awaitTermination(150)
        return sum(report.numInputRows for report in query.recentProgress)

    write(topic, 0, [(None, b"first")] * 4)
    assert run("kept", "earliest") == 4
    write(topic, 0, [(None, b"between")] * 6)
    write(topic, 1, [(None, b"of a partition that had none")] * 2)

    assert run("lost", "latest") == 8, "neither less than the ledger lacks, nor what it has"
    with sqlite3.connect(tmp_path / "rows.db") as connection:
        assert connection.execute("SELECT count(*) FROM rows").fetchone() == (12,)
