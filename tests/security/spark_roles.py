"""The main paths of the Spark half, as `roles` has those of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyspark.sql import DataFrame, SparkSession
from roles import STEP_S, World, letters, make_topic

import penstock
from databases import TestDatabase
from penstock.spark_sink import DeadLetters, KafkaSink, ParquetSink, SqlSink, start_sink
from penstock.spark_sink.ledger.kafka_ledger import PARTITIONS


def make_target(world: World) -> None:
    """Make the topic that is read, those that are written, and the ledger."""
    make_topic(world)
    world.broker.create_topic(world.names["target"])
    world.broker.create_topic(world.names["ledger"], PARTITIONS)
    world.broker.create_topic(f"dlq.{world.names['topic']}", 2)


def drain(
    world: World,
    spark: SparkSession,
    sink: Callable[[DataFrame, int], None],
    config: Mapping[str, str],
    rows: Callable[[DataFrame], DataFrame] | None = None,
) -> None:
    """Have a message written, and a query hand it to a sink; the source reads with these settings."""
    world.write()
    query = start_sink(
        spark,
        world.names["topic"],
        sink,
        rows=rows,
        bootstrap_servers=world.servers,
        config=config,
        trigger="available now",
        name=world.names["name"],
        checkpoint_location=str(world.folder / "checkpoint"),
    )
    assert query.awaitTermination(int(3 * STEP_S))


def source(world: World, spark: SparkSession) -> None:
    """Read into a folder, for which no sink needs a right in Kafka."""
    folder = str(world.folder / "table")
    drain(world, spark, ParquetSink(folder), world.config)
    assert spark.read.parquet(folder).count() == 1


def kafka_sink(world: World, spark: SparkSession) -> None:
    """Publish a batch, and another one that begins by reading the ledger."""
    target, name = world.names["target"], world.names["name"]
    sink = KafkaSink(world.servers, target, name=name, config=world.config, ledger_topic=world.names["ledger"])
    for _ in range(2):
        drain(world, spark, sink, world.admin_config)


def sql_sink(world: World, spark: SparkSession) -> None:
    """Have a table refuse a row, and its message become a dead letter."""
    database = TestDatabase("sqlite", f"sqlite:///{world.folder / 'table.db'}")
    database.execute("CREATE TABLE orders (text TEXT PRIMARY KEY CHECK (text NOT LIKE 'canary%'))")
    refused = DeadLetters(world.servers, config=world.config)
    sink = SqlSink(database.url, "orders", ["text"], dead_letters=refused)
    texts = "cast(value as string) text", "topic", "partition", "offset"
    drain(world, spark, sink, world.admin_config, lambda messages: messages.selectExpr(*texts))
    assert letters(world) == 1


def handler_sink(world: World, spark: SparkSession) -> None:
    """Have a handler on executors fail, and its message become a dead letter."""
    app = penstock.App(world.names["app"], bootstrap_servers=world.servers, config=world.config)

    @app.handler(world.names["topic"], retry=penstock.retry(attempts=1), on_failure="dead_letter")
    def fail(message: penstock.Message) -> None:
        raise ValueError(f"no good: {message.value!r}")

    drain(world, spark, app.handler_sink(parallelism=1, headers=False), world.admin_config)
    assert letters(world) == 1
