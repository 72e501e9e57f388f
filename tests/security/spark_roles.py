"""The main paths of the Spark half, as `roles` has those of the others."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from roles import STEP_S, World, make_topic

from penstock.spark_sink import KafkaSink, start_sink
from penstock.spark_sink.kafka_ledger import PARTITIONS


def make_target(world: World) -> None:
    """Make the topic that is read, the one that is written, and the ledger."""
    make_topic(world)
    world.broker.create_topic(world.names["target"])
    world.broker.create_topic(world.names["ledger"], PARTITIONS)


def source(world: World, spark: SparkSession) -> None:
    rows: list[int] = []

    def count(batch: DataFrame, _batch_id: int) -> None:
        rows.append(batch.count())

    world.write()
    query = start_sink(
        spark,
        world.names["topic"],
        count,
        bootstrap_servers=world.servers,
        config=world.config,
        trigger="available now",
        name=world.names["name"],
        checkpoint_location=str(world.folder / "checkpoint"),
    )
    assert query.awaitTermination(int(3 * STEP_S))
    assert rows == [1]


def kafka_sink(world: World, spark: SparkSession) -> None:
    """Publish a batch, and another one that begins by reading the ledger."""
    target, name = world.names["target"], world.names["name"]
    sink = KafkaSink(world.servers, target, name=name, config=world.config, ledger_topic=world.names["ledger"])
    for _ in range(2):
        world.write()
        query = start_sink(
            spark,
            world.names["topic"],
            sink,
            bootstrap_servers=world.servers,
            config=world.admin_config,
            trigger="available now",
            name=name,
            checkpoint_location=str(world.folder / "checkpoint"),
        )
        assert query.awaitTermination(int(3 * STEP_S))
