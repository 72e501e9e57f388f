"""The way from a topic through Spark into each sink: a batch that comes again, and a lost checkpoint (I9)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lakes import DeltaLake, IcebergLake, Lake
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from streams import lose_commit, run_sink

from commands import commands
from databases import TestDatabase, new_database
from kafka_tools import read_all
from penstock import Outgoing
from penstock.consumer import handler, retry
from penstock.devbroker import DevBroker
from penstock.message import Message
from penstock.spark_sink import HandlerSink, KafkaSink, SqlSink

#: A sink, and what it has stored.
Made = tuple[Any, Callable[[], list[int]]]
Given = Callable[[str], Any]


def sql(database: TestDatabase, **options: Any) -> Made:
    sink = SqlSink(database.url, "events", **options)
    return sink, lambda: [int(value) for (value,) in database.rows("SELECT value FROM events")]


def in_lake(lake: Lake) -> Made:
    return lake.sink(name="copy"), lambda: [int(value) for value in lake.rows()["value"].to_pylist()]


def published(servers: str, topic: str) -> list[int]:
    return [int(message.value() or b"") for message in read_all(servers, topic)]


def kafka(given: Given) -> Made:
    servers, topic = given("broker").bootstrap_servers, given("new_topic")()
    sink = KafkaSink(servers, topic, name=topic, ledger_topic=given("ledger_topic"))
    return sink, lambda: published(servers, topic)


def handlers(given: Given, source: str) -> Made:
    """Publish most messages, and give up those that end with 7."""
    servers, topic = given("broker").bootstrap_servers, given("new_topic")()

    def copy(message: Message) -> Outgoing:
        if (message.value or b"").endswith(b"7"):
            raise ValueError("no such order")
        return Outgoing(topic, message.value)

    one = handler(copy, on_failure="dead_letter", retry=retry(1))
    where = {"bootstrap_servers": servers, "name": topic, "ledger_topic": given("ledger_topic")}
    sink = HandlerSink({source: one}, group="copies", parallelism=2, headers=False, **where)
    return sink, lambda: published(servers, topic) + published(servers, f"dlq.{source}")


def as_text(messages: DataFrame) -> DataFrame:
    return messages.selectExpr("cast(value AS STRING) value", "topic", "partition", "offset")


#: How each sink is made, of the fixtures by name, a folder and the topic that is read.
SINKS: dict[str, Callable[[Given, Path, str], Made]] = {
    "sqlite": lambda _given, folder, _: sql(TestDatabase("sqlite", f"sqlite:///{folder / 'test.db'}")),
    "postgresql": lambda given, *_: sql(new_database(given("postgresql_url"))),
    "mariadb": lambda given, *_: sql(new_database(given("mariadb_url"))),
    "kafka": lambda given, *_: kafka(given),
    "handlers": lambda given, _, topic: handlers(given, topic),
    "delta": lambda _given, folder, _: in_lake(DeltaLake(folder)),
    "iceberg": lambda _given, folder, _: in_lake(IcebergLake(folder)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "postgresql" else [pytest.mark.thorough]) for name in SINKS]
)
def test_a_repeated_batch_and_a_lost_checkpoint_store_nothing_twice(  # noqa: PLR0917 - fixtures
    spark: SparkSession,
    broker: DevBroker,
    new_topic: Callable[..., str],
    write: Callable[..., None],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    name: str,
) -> None:
    topic, begun = new_topic(partitions=2), list[int]()
    sink, stored = SINKS[name](request.getfixturevalue, tmp_path, topic)

    def store(batch: DataFrame, batch_id: int) -> None:
        begun.append(batch_id)
        sink(batch if name == "handlers" else as_text(batch), batch_id)

    def run(checkpoint: str) -> None:
        most = {"maxOffsetsPerTrigger": "60"}
        run_sink(spark, broker.bootstrap_servers, topic, store, tmp_path / checkpoint, options=most)

    for partition in (0, 1):
        write(topic, partition, [(None, b"%d" % n) for n in range(partition, 120, 2)])
    run("checkpoint")
    lose_commit(tmp_path / "checkpoint", 1)
    run("checkpoint")
    after_repetition = sorted(stored())
    run("another checkpoint")

    assert begun == [0, 1, 1, 0, 1]  # the batches really came twice
    assert after_repetition == sorted(stored()) == list(range(120))


@pytest.mark.thorough
def test_what_a_restored_database_lacks_is_named_and_read_again_from_its_ledger_or_left_out(  # noqa: PLR0917 - fixtures
    spark: SparkSession,
    broker: DevBroker,
    new_topic: Callable[..., str],
    write: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    topic, database = new_topic(), tmp_path / "test.db"
    sink, stored = sql(TestDatabase("sqlite", f"sqlite:///{database}"))

    def run(numbers: range, checkpoint: str = "kept") -> None:
        write(topic, 0, [(None, b"%d" % n) for n in numbers])
        even = {"rows": lambda messages: as_text(messages).where("offset % 2 = 0")}
        run_sink(spark, broker.bootstrap_servers, topic, sink, tmp_path / checkpoint, **even)

    run(range(10))
    backup = database.read_bytes()
    run(range(10, 20))
    database.write_bytes(backup)

    with pytest.raises(StreamingQueryException, match=r"offset 20 of .*:0.* offsets 10 to 19 would be missing") as hole:
        run(range(20, 30))
    restored = database.read_bytes()
    run(range(30, 30), "another")
    read_again = sorted(stored())
    database.write_bytes(restored)
    (command,) = re.findall("run `penstock (sink reset [^`]+)`", str(hole.value))
    penstock = commands(monkeypatch, capsys)
    assert penstock(*shlex.split(command)).code == 0
    run(range(30, 30))
    left_out = sorted(stored())
    assert penstock("sink", "reset", topic, "--sql", f"sqlite:///{database}", "--to", f"{topic}:0@4").code == 0
    run(range(30, 30), "third")

    assert read_again == list(range(0, 30, 2))
    assert left_out == [*range(0, 10, 2), *range(20, 30, 2)]
    assert sorted(stored()) == sorted([*left_out, *range(4, 30, 2)])


def test_what_comes_between_a_first_start_at_the_end_and_the_next_is_read(
    spark: SparkSession, broker: DevBroker, new_topic: Callable[..., str], write: Callable[..., None], tmp_path: Path
) -> None:
    topic = new_topic(partitions=2)
    sink, stored = sql(TestDatabase("sqlite", f"sqlite:///{tmp_path / 'test.db'}"))

    for number, checkpoint in enumerate(("first", "second", "third")):
        write(topic, number % 2, [(None, b"%d" % number)])
        given = {"rows": as_text, "starting_offsets": "latest"}
        run_sink(spark, broker.bootstrap_servers, topic, sink, tmp_path / checkpoint, **given)

    assert sorted(stored()) == [1, 2], "neither what came before the first start, nor less than what came since"
