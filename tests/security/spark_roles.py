"""The main paths of the Spark part; `roles` has the others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from roles_of_transactions import make_topic
from world import STEP_S, World

import penstock
from canary import MESSAGE
from databases import TestDatabase
from penstock.errors import PenstockError, SinkError
from penstock.spark_sink import DeadLetters, DeltaSink, KafkaSink, SqlSink
from penstock.spark_sink.ledger.rules import Batch
from penstock.spark_sink.progress import SinkState
from penstock.spark_sink.sinks.kafka_ledger import PARTITIONS, require_target
from penstock.spark_sink.sinks.kafka_publisher import Row, SinkPublisher
from penstock.spark_sink.sinks.sql.dead_letters import Rejected
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.source import BatchReader
from rights import Right
from waiting import wait_until


def make_target(world: World) -> None:
    """Make the source topic, the target topics, and the ledger."""
    make_topic(world)
    world.broker.create_topic(world.names["target"])
    world.broker.create_topic(world.names["ledger"], PARTITIONS)
    world.broker.create_topic(f"dlq.{world.names['topic']}", 2)


def run(
    world: World,
    sink: Callable[[DataFrame, int], None],
    source: World,
    rows: Callable[[DataFrame], DataFrame] = lambda messages: messages,
) -> None:
    """Have messages written, and a query of an app hand them to a sink; then start it again, as after an end.

    Args:
        world: where.
        sink: takes the batches.
        source: whose the app is, and so what it reads with.
        rows: makes what is stored.
    """

    def start() -> penstock.RunningApp:
        app = penstock.App(world.names["app"], bootstrap_servers=world.servers, config=source.config)
        app.sink(
            world.names["topic"],
            sink=sink,
            name=world.names["name"],
            trigger="200 milliseconds",
            checkpoint_location=str(world.folder / "checkpoint"),
        )(rows)
        running = app.start()
        try:
            finish(running)
        except BaseException:
            with suppress(PenstockError):
                running.stop()
            raise
        return running

    def finish(running: penstock.RunningApp) -> None:
        wait_until(lambda: position(running) == len(world.sent), 3 * STEP_S)

    def work(running: penstock.RunningApp) -> None:
        world.write()
        finish(running)

    world.write()
    with world.entered(start) as running:
        world.trial.rounds(lambda: work(running))
    # Before it starts: where nothing is new, Spark reports no position.
    world.write()
    with world.entered(start):
        pass


def position(running: penstock.RunningApp) -> int:
    """Return how many messages the query has handed over; raise where it has ended, as one does that never could."""
    (found,) = running.sinks()
    if found.state is SinkState.FAILED:
        raise SinkError(found.last_error or "")
    return sum(part.position or 0 for part in found.partitions)


def source(world: World, _spark: SparkSession) -> None:
    """Read into a folder, for which no sink needs a right in Kafka."""
    folder = str(world.folder / "table")
    run(world, DeltaSink(folder, name=world.names["name"]), world)
    assert sorted(DeltaTable(folder).to_pyarrow_table()["value"].to_pylist()) == sorted(world.sent)


def kafka_sink(world: World, _spark: SparkSession) -> None:
    """Publish a batch, and a second one that begins by reading the ledger."""
    target, name = world.names["target"], world.names["name"]
    sink = KafkaSink(world.servers, target, name=name, config=world.config, ledger_topic=world.names["ledger"])
    run(world, sink, world.as_administrator())
    world.require_all_once(target)


def sql_sink(world: World, _spark: SparkSession) -> None:
    """Have a table refuse each row, and its message become a dead letter."""
    database = TestDatabase("sqlite", f"sqlite:///{world.folder / 'table.db'}")
    database.execute("CREATE TABLE orders (text TEXT PRIMARY KEY CHECK (text NOT LIKE 'canary%'))")
    refused = DeadLetters(world.servers, config=world.config)
    sink = SqlSink(database.url, "orders", ["text"], dead_letters=refused)
    texts = "cast(value as string) text", "topic", "partition", "offset"
    run(world, sink, world.as_administrator(), lambda messages: messages.selectExpr(*texts))
    world.require_all_once(f"dlq.{world.names['topic']}")


def handler_sink(world: World, _spark: SparkSession) -> None:
    """Have a handler on executors fail, and its message become a dead letter."""
    app = penstock.App(world.names["app"], bootstrap_servers=world.servers, config=world.config)

    @app.handler(world.names["topic"], retry=penstock.retry(attempts=1), on_failure="dead_letter")
    def fail(message: penstock.Message) -> None:
        raise ValueError(f"no good: {message.value!r}")

    name, ledger = world.names["name"], world.names["ledger"]
    sink = app.handler_sink(parallelism=1, headers=False, name=name, ledger_topic=ledger)
    run(world, sink, world.as_administrator())
    world.require_all_once(f"dlq.{world.names['topic']}")


def publishing_handler_sink(world: World, _spark: SparkSession) -> None:
    """Publish the results of a handler on executors, and a second batch that begins by reading the ledger."""
    app = penstock.App(world.names["app"], bootstrap_servers=world.servers, config=world.config)
    target, name = world.names["target"], world.names["name"]

    @app.handler(world.names["topic"], to=target)
    def copy(message: penstock.Message) -> bytes | None:
        return message.value

    sink = app.handler_sink(parallelism=1, headers=False, name=name, ledger_topic=world.names["ledger"])
    run(world, sink, world.as_administrator())
    world.require_all_once(target)


PARTS: dict[str, Callable[[World, SparkSession], None]] = {
    "source for Spark": source,
    "KafkaSink": kafka_sink,
    "SqlSink with dead letters": sql_sink,
    "HandlerSink with dead letters": handler_sink,
    "HandlerSink that publishes": publishing_handler_sink,
}


def read(world: World) -> None:
    """Plan and read the topic, as Spark's driver and tasks do."""
    options = {"kafka.bootstrap.servers": world.servers, "subscribe": world.names["topic"]}
    options |= {f"kafka.{name}": value for name, value in world.config.items()}

    def rows() -> int:
        reader = BatchReader(SourceOptions.parse(options))
        return sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part))

    def work() -> None:
        assert world.trial.attempt(rows) == len(world.sent)

    world.write()
    world.trial.rounds(work)


def publish(world: World) -> None:
    """Check a `KafkaSink` as the driver does; then publish rows as a task does, each twice as in a retry."""
    copies, name = world.names["target"], world.names["name"]
    sink = KafkaSink(world.servers, copies, name=name, config=world.config, ledger_topic=world.names["ledger"])
    target, source = sink._target(), ("orders", 0)

    def task() -> int:
        publisher = SinkPublisher(target)
        row = Row(source, len(world.sent), copies, MESSAGE, world.sent[-1], [])
        try:
            return publisher.publish(Batch("", -1), [row])
        finally:
            publisher.close()

    def work() -> None:
        world.sent.append(world.value())
        assert world.trial.attempt(task) == 0
        assert world.trial.attempt(task) == 1

    world.trial.attempt(lambda: require_target(target, [copies], {}))
    world.trial.rounds(work)
    entries = world.trial.attempt(lambda: sink.ledger_entries("", [source]))
    assert entries[source].end == len(world.sent) + 1
    world.require_all_once(copies)


def write_dead_letters(world: World) -> None:
    """Write dead letters of a message, as a table that refuses its row does."""
    writer = DeadLetters(world.servers, config=world.config)
    rejected = [Rejected(world.names["topic"], 0, 0, "CheckViolation")]
    world.write()
    world.trial.rounds(lambda: world.trial.attempt(lambda: writer.write(rejected)))


#: What only an app with `@app.sink` needs, which runs a sink in one of its replicas.
OF_AN_APP = frozenset({Right("group", "<app>-sinks", "READ")})

#: What the parts do on the driver and in tasks, without a Spark that starts for it.
WITHOUT_SPARK: dict[str, Callable[[World], None]] = {
    "source for Spark": read,
    "KafkaSink": publish,
    "SqlSink with dead letters": write_dead_letters,
}
