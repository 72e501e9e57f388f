"""Rows per second of the Spark source, beside what one process reads into Arrow in the same run.

    python benchmarks/spark_source.py [--rows 1000000] [--partitions 8]

It starts its own broker, writes the topic, and runs on local[2]. "steady" leaves out the start of the session
and of Spark's Python workers, by reading the topic once before. Of what is repeated, the best counts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import Consumer, Producer, TopicPartition
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from penstock.devbroker import DevBroker, spark_environment
from penstock.kafka import TopicSpec, admin_client, ensure_topics
from penstock.spark_sink import register
from penstock.spark_sink.log_view import LogView, consumer_config
from penstock.spark_sink.options import SourceOptions
from penstock.spark_sink.planning import OffsetRange
from penstock.spark_sink.reading import read_range
from penstock.spark_sink.source import source_schema

TOPIC = "benchmark"
VALUE_BYTES = 100
KEYS = 10_000
REPEATS = 3


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--partitions", type=int, default=8)
    chosen = parser.parse_args()
    with DevBroker() as broker:
        write(broker.bootstrap_servers, chosen.rows, chosen.partitions)
        options = SourceOptions.parse({"kafka.bootstrap.servers": broker.bootstrap_servers, "subscribe": TOPIC})
        view = LogView(options)
        parts = view.partitions()
        ranges = [OffsetRange(topic, number, 0, end) for (topic, number), end in view.latest(parts).items()]
        bare = min(consume(options, ranges) for _ in range(REPEATS))
        read_in_one_process(options, ranges[:1])  # loads what the first conversion to Arrow loads
        arrow = min(read_in_one_process(options, ranges) for _ in range(REPEATS))
        report("bare consume, one process", chosen.rows, bare)
        report("bare consume -> Arrow, one process", chosen.rows, arrow)
        spark(broker.bootstrap_servers, chosen.rows, bare, arrow)


def write(servers: str, rows: int, partitions: int) -> None:
    """Fill the topic."""
    ensure_topics(admin_client(servers, {}), servers, [TopicSpec(TOPIC, partitions)])
    producer = Producer(
        {
            "bootstrap.servers": servers,
            "linger.ms": 50,
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    value = os.urandom(VALUE_BYTES)
    for number in range(rows):
        producer.produce(TOPIC, partition=number % partitions, key=b"key-%d" % (number % KEYS), value=value)
        if number % 10_000 == 0:
            producer.poll(0)
    assert producer.flush(120) == 0


def consume(options: SourceOptions, ranges: list[OffsetRange]) -> float:
    """Return the seconds one consumer takes for all records, looking at none."""
    consumer = Consumer(consumer_config(options))
    consumer.assign([TopicPartition(part.topic, part.partition, part.start) for part in ranges])
    wanted = sum(part.size for part in ranges)
    with stopwatch() as took:
        seen = 0
        while seen < wanted:
            seen += sum(1 for message in consumer.consume(4_000, 0.1) if message.error() is None)
    consumer.close()
    return took[0]


def read_in_one_process(options: SourceOptions, ranges: list[OffsetRange]) -> float:
    """Return the seconds this process takes to read all ranges, one after the other, into Arrow."""
    schema = to_arrow_schema(source_schema(include_headers=False), timezone="UTC")
    with stopwatch() as took:
        rows = sum(batch.num_rows for part in ranges for batch in read_range(options, schema, part))
    assert rows == sum(part.size for part in ranges)
    return took[0]


def spark(servers: str, rows: int, bare_s: float, arrow_s: float) -> None:
    """Run the query cold, then warm, and print both."""
    os.environ.update(spark_environment())
    with stopwatch() as started:
        session = (
            SparkSession.builder.master("local[2]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
            .getOrCreate()
        )
        session.sparkContext.setLogLevel("ERROR")
        register(session)
    with tempfile.TemporaryDirectory() as folder:
        first = query(session, servers, rows, Path(folder) / "first")
        steady = min(query(session, servers, rows, Path(folder) / str(n)) for n in range(REPEATS))
    session.stop()
    report("Spark local[2], from session start", rows, started[0] + first)
    report("Spark local[2], steady", rows, steady)
    print(f"steady / one process into Arrow: {arrow_s / steady:.2f}")
    print(f"steady / bare consume in one process: {bare_s / steady:.2f}")


def query(session: SparkSession, servers: str, rows: int, checkpoint: Path) -> float:
    """Return the seconds a query takes from start to its end; it counts all rows."""
    counts: list[int] = []

    def count(batch: DataFrame, _batch_id: int) -> None:
        counts.append(batch.count())

    frame = (
        session.readStream.format("penstock")
        .option("kafka.bootstrap.servers", servers)
        .option("subscribe", TOPIC)
        .option("startingOffsets", "earliest")
        .load()
    )
    with stopwatch() as took:
        running = (
            frame.writeStream.foreachBatch(count)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        running.awaitTermination()
    assert sum(counts) == rows
    print("    phases (ms):", dict(running.recentProgress[0]["durationMs"]))
    return took[0]


def report(what: str, rows: int, took_s: float) -> None:
    """Print one line of the result."""
    print(f"{what:40} {took_s:7.2f} s {rows / took_s:12,.0f} rows/s")


@contextmanager
def stopwatch() -> Iterator[list[float]]:
    """Give a list that holds the seconds spent inside, after it is left."""
    took: list[float] = []
    begun = time.perf_counter()
    yield took
    took.append(time.perf_counter() - begun)


if __name__ == "__main__":
    main()
