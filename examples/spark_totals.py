"""Totals per aircraft in SQLite, kept by Spark from a Kafka topic: counted once, even after the checkpoint is lost.

    python examples/spark_totals.py

It starts its own broker and its own Spark, and needs `pip install 'penstock[spark,sql,dev-broker]'`.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
from pathlib import Path

from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's customary name

from penstock.devbroker import DevBroker, spark_environment
from penstock.spark_sink import SqlSink, register

FLIGHTS = [("N14228", 11), ("N24211", 20), ("N14228", -3), ("N619AA", 33), ("N14228", 5)]


def send_flights(bootstrap_servers: str, topic: str) -> None:
    """Send the flights, keyed by aircraft, so that those of one aircraft share a partition and an order."""
    producer = Producer({"bootstrap.servers": bootstrap_servers, "enable.idempotence": True})
    for tail, delay in FLIGHTS:
        producer.produce(topic, key=tail, value=json.dumps({"tail": tail, "delay": delay}))
    producer.flush(30)


def flights(spark: SparkSession, bootstrap_servers: str, topic: str) -> DataFrame:
    """Return the stream of flights, with the position of each message for the sink's ledger."""
    messages = (
        spark.readStream.format("penstock")
        .option("kafka.bootstrap.servers", bootstrap_servers)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    flight = F.from_json(F.col("value").cast("string"), "tail STRING, delay INT")
    return messages.select(flight.alias("flight"), "topic", "partition", "offset").select(
        "flight.tail",
        F.lit(1).alias("flights"),
        F.col("flight.delay").alias("delay_minutes"),
        F.col("flight.delay").alias("last_delay"),
        "topic",
        "partition",
        "offset",
    )


def main(bootstrap_servers: str, topic: str, folder: Path) -> None:
    """Run the same query twice with two checkpoints: the second run finds everything applied."""
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    register(spark)
    send_flights(bootstrap_servers, topic)
    database = folder / "totals.db"
    sink = SqlSink(f"sqlite:///{database}", "totals", key=["tail"], sum_columns=["flights", "delay_minutes"])
    for checkpoint in ("first", "second"):
        query = (
            flights(spark, bootstrap_servers, topic)
            .writeStream.foreachBatch(sink)
            .queryName("totals")
            .option("checkpointLocation", str(folder / checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        with sqlite3.connect(database) as connection:
            for row in connection.execute("SELECT * FROM totals ORDER BY tail"):
                print(checkpoint, *row)


if __name__ == "__main__":
    os.environ.update(spark_environment())
    with DevBroker() as broker, tempfile.TemporaryDirectory() as temporary:
        main(broker.bootstrap_servers, "flights", Path(temporary))
