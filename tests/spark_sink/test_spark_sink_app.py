"""`@app.sink` on real Spark: an app runs its sinks beside its handlers, and says why one ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from kafka_tools import Recorder, produce, transactional
from penstock.app import App
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError, SinkError, TopicNotFoundError
from penstock.spark_sink import SqlSink
from penstock.spark_sink.monitoring.progress import SinkState
from penstock.spark_sink.queries.gate import Gate, sleep_in_jvm
from waiting import wait_until

NewTopic = Callable[..., str]

#: Seconds that Spark may take for some batches on a machine that has other things to do.
SPARK_S = 150.0


def test_an_app_gives_committed_messages_to_its_handler_and_its_sink(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic = new_topic(partitions=2)
    producer = transactional(broker.bootstrap_servers)
    for ending, key in ((producer.commit_transaction, b"kept"), (producer.abort_transaction, b"gone")):
        producer.begin_transaction()
        for number in range(10):
            producer.produce(topic, b"%d" % number, key=key + b"%d" % number)
        producer.flush()
        ending()
    url = f"sqlite:///{tmp_path}/rows.db"
    store = SqlSink(url, table="rows", key=["name"])
    app = App("both", bootstrap_servers=broker.bootstrap_servers, workers=2)
    seen = Recorder()
    app.handler(topic)(seen)

    @app.sink(topic, trigger="1 second", checkpoint_location=str(tmp_path / "checkpoint"))
    def keep(batch: DataFrame, batch_id: int) -> None:
        store(batch.selectExpr("cast(key as string) name", "topic", "partition", "offset"), batch_id)

    def stored() -> set[str]:
        engine = sa.create_engine(url)
        if not sa.inspect(engine).has_table("rows"):
            return set()
        with engine.connect() as connection:
            return {row[0] for row in connection.exec_driver_sql("SELECT name FROM rows")}

    with app.start() as running:
        wait_until(lambda: len(stored()) == 10, timeout=SPARK_S)
        wait_until(lambda: len(seen.calls) == 10)
        (query,) = running.queries

    assert stored() == {f"kept{number}" for number in range(10)}
    assert query.name == "both-keep"
    assert not query.isActive


def test_an_app_of_sinks_alone_ends_when_all_is_read(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"x")] * 7)
    counts: list[int] = []
    app = App("alone", bootstrap_servers=broker.bootstrap_servers)
    app.sink(topic, trigger="available now", name="counting", checkpoint_location=str(tmp_path))(
        lambda batch, _: counts.append(batch.count())
    )

    with app.start() as running:
        assert running.wait(SPARK_S)

    assert sum(counts) == 7


def test_a_sink_that_fails_is_started_again_while_the_handler_goes_on(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"%d" % number) for number in range(10)])
    stored: list[bytes] = []
    failures: list[int] = []
    seen = Recorder()
    app = App("again", bootstrap_servers=broker.bootstrap_servers, config={"auto.offset.reset": "earliest"})
    app.handler(topic)(seen)

    @app.sink(
        topic,
        trigger="200 milliseconds",
        checkpoint_location=str(tmp_path),
        options={"maxOffsetsPerTrigger": "5"},
    )
    def shaky(batch: DataFrame, batch_id: int) -> None:
        rows = [row.value for row in batch.select("value").collect()]
        if batch_id == 1 and len(failures) < 2:
            failures.append(batch_id)
            raise ConnectionError("the database is away")
        stored.extend(rows)

    with app.start() as running:
        wait_until(lambda: len(failures) == 1, timeout=SPARK_S)
        produce(broker.bootstrap_servers, topic, [(b"k", b"late")])
        wait_until(lambda: len(seen.calls) == 11)
        wait_until(lambda: len(stored) == 11, timeout=SPARK_S)
        (sink,) = wait_until(lambda: [one for one in running.sinks() if one.rows == 11])

    # The first five are not stored again: a restart goes on where the last committed batch ended.
    assert sorted(stored) == sorted([*(b"%d" % number for number in range(10)), b"late"])
    assert failures == [1, 1]
    assert (sink.state, sink.lag) == (SinkState.RUNNING, 0)
    # On a machine with much to do Spark's own parts may fail as well, and are started again like it.
    assert sink.restarts >= 2
    assert sink.last_error is not None


def test_a_sink_that_fails_too_often_stops_the_app_with_a_sentence(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"x")])
    app = App("fails", bootstrap_servers=broker.bootstrap_servers)
    calls: list[int] = []

    @app.sink(topic, trigger="1 second", name="broken", restarts=1, checkpoint_location=str(tmp_path))
    def broken(_batch: DataFrame, batch_id: int) -> None:
        calls.append(batch_id)
        raise ValueError("no room")

    with app.start() as running, pytest.raises(SinkError, match=r"the query broken ended: .* started again 1 time "):
        running.wait(SPARK_S)

    assert set(calls) == {0}


def test_a_stop_finishes_the_batch_under_way_and_the_next_start_goes_on_behind_it(
    spark: SparkSession,
    broker: DevBroker,
    new_topic: NewTopic,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"%d" % number) for number in range(15)])
    begun: list[int] = []
    rows: list[int] = []
    go_on, closed, close = threading.Event(), threading.Event(), Gate.close
    monkeypatch.setattr(Gate, "close", lambda gate: (close(gate), closed.set()))

    def slow(batch: DataFrame, batch_id: int) -> None:
        begun.append(batch_id)
        go_on.wait(120)
        rows.append(batch.count())

    def new_app() -> App:
        app = App("stops", bootstrap_servers=broker.bootstrap_servers, stop_timeout=SPARK_S)
        app.sink(
            topic,
            trigger="100 milliseconds",
            checkpoint_location=str(tmp_path / "checkpoint"),
            options={"maxOffsetsPerTrigger": "5"},
        )(slow)
        return app

    running = new_app().start()
    wait_until(lambda: begun == [0], timeout=SPARK_S)
    answers: list[bool] = []
    stop = threading.Thread(target=lambda: answers.append(running.stop()))
    stop.start()
    (query,) = running.queries
    assert closed.wait(60)
    # Long enough for Spark's own stop to have been through.
    assert not wait_briefly(lambda: not query.isActive, 1.0)
    go_on.set()
    stop.join(SPARK_S)

    assert answers == [True]
    assert (begun, rows) == ([0], [5])
    assert not query.isActive
    assert query.exception() is None, "a stop is no failure"
    assert numbers(tmp_path / "checkpoint" / "commits") == [0]
    with new_app().start():
        wait_until(lambda: len(rows) == 3, timeout=SPARK_S)
    assert (begun, rows) == ([0, 1, 2], [5, 5, 5])


def test_a_batch_behind_a_closed_gate_is_woken_by_sparks_stop_which_is_no_failure(
    spark: SparkSession, read: Callable[..., DataFrame], broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"x")])
    waits: list[int] = []

    def park(batch: DataFrame, milliseconds: int) -> None:
        waits.append(milliseconds)
        sleep_in_jvm(batch, 120_000)

    gate = Gate(lambda _batch, _batch_id: pytest.fail("the batch began"), park=park)
    gate.close()
    stream = read(stream=True, subscribe=topic, startingOffsets="earliest").writeStream.foreachBatch(gate)
    query = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    wait_until(lambda: len(waits) == 1, timeout=SPARK_S)

    begun = time.monotonic()
    query.stop()

    assert time.monotonic() - begun < 60, "the stop waited for the batch"
    assert query.exception() is None
    assert numbers(tmp_path / "checkpoint" / "offsets") == [0], "it was planned"
    assert numbers(tmp_path / "checkpoint" / "commits") == []


class Stored:
    """A sink that keeps rows, and tells what it was asked."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.schemas: list[list[str]] = []
        self.rows: list[tuple[object, ...]] = []
        self._refuses = refuses

    def check(self, schema: StructType) -> None:
        self.schemas.append(schema.fieldNames())
        if self._refuses:
            raise SinkError("table orders has no column value; add it, or leave it out of the frame")

    def __call__(self, batch: DataFrame, _batch_id: int) -> None:
        self.rows += [tuple(row) for row in batch.collect()]


def test_a_sink_is_checked_before_the_query_begins_and_takes_rows_that_a_function_makes(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"7")])
    stored, refusing = Stored(), Stored(refuses=True)
    app = App("checked", bootstrap_servers=broker.bootstrap_servers)

    @app.sink(topic, sink=stored, trigger="available now", checkpoint_location=str(tmp_path / "stored"))
    def amounts(messages: DataFrame) -> DataFrame:
        return messages.selectExpr("cast(cast(value as string) as int) amount", "topic", "partition", "offset")

    with app.start() as running:
        assert running.wait(SPARK_S)
        names = [one.name for one in running.sinks()]
    refused = App("refused", bootstrap_servers=broker.bootstrap_servers)
    refused.sink(topic, checkpoint_location=str(tmp_path / "refused"))(refusing)
    with pytest.raises(SinkError, match="table orders has no column value"):
        refused.start()

    assert names == ["checked-amounts"]
    # At each start: on a machine with much to do Spark's own parts may fail, and the query is started again.
    assert stored.schemas[0] == ["amount", "topic", "partition", "offset"]
    assert stored.rows == [(7, topic, 0, 0)]
    assert (len(refusing.schemas), refusing.rows) == (1, [])
    assert [query.name for query in spark.streams.active] == []


def test_wrong_settings_of_sinks_are_refused_at_once() -> None:
    app = App("wrong", bootstrap_servers="127.0.0.1:1")
    app.sink("orders", name="one", group="shown")(lambda _batch, _batch_id: None)

    for wrong, said in (
        ({"name": "one"}, "two sinks have the name 'one'"),
        ({"name": "two", "group": "shown"}, "two sinks have the group 'shown'"),
        ({"name": "two", "restarts": -1}, "restarts must be a whole number"),
        ({"name": "two", "group": " "}, "group must be a name"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            app.sink("orders", **wrong)(lambda _batch, _batch_id: None)  # type: ignore[arg-type] # each is one option
    with pytest.raises(ConfigurationError, match="sink must be a function or another callable"):
        app.sink("orders", sink="sqlite://")(lambda frame: frame)  # type: ignore[arg-type] # it is the mistake


def test_a_sink_that_does_not_start_leaves_no_other_running(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic = new_topic()
    app = App("leak", bootstrap_servers=broker.bootstrap_servers)
    for name, options in (("first", {}), ("second", {"maxOffsetPerTrigger": "10"})):
        app.sink(topic, name=name, options=options, checkpoint_location=str(tmp_path / name))(
            lambda _batch, _batch_id: None
        )

    with pytest.raises(ConfigurationError, match="did you mean maxOffsetsPerTrigger"):
        app.start()

    assert [query.name for query in spark.streams.active] == []


def test_a_sink_beside_a_handler_takes_its_options_and_of_the_settings_what_means_something_to_it(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"x")] * 25)
    counts: list[int] = []
    seen = Recorder()
    app = App(
        "settings",
        bootstrap_servers=broker.bootstrap_servers,
        config={"auto.offset.reset": "earliest", "session.timeout.ms": 6000, "error_cb": print, "client.id": "both"},
    )
    app.handler(topic)(seen)
    app.sink(topic, trigger="1 second", options={"maxOffsetsPerTrigger": "10"}, checkpoint_location=str(tmp_path))(
        lambda batch, _: counts.append(batch.count())
    )

    with app.start():
        wait_until(lambda: sum(counts) == 25 and len(seen.calls) == 25, timeout=SPARK_S)

    assert max(counts) <= 10


def test_of_several_processes_the_first_runs_the_sinks(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    topic = new_topic()
    app = App("several", bootstrap_servers=broker.bootstrap_servers)
    app.sink(topic, checkpoint_location=str(tmp_path))(lambda _batch, _batch_id: None)
    alone = App("several", bootstrap_servers=broker.bootstrap_servers)
    alone.sink(topic)(lambda _batch, _batch_id: None)
    app.handler(topic)(Recorder())

    monkeypatch.setenv("PENSTOCK_PROCESS", "2")
    with app.start() as second:
        in_the_second = list(second.queries)
    with pytest.raises(ConfigurationError, match="has sinks only, which run in one process"):
        alone.start()
    monkeypatch.setenv("PENSTOCK_PROCESS", "1")
    with app.start() as first:
        in_the_first = [query.isActive for query in first.queries]

    assert (in_the_second, in_the_first) == ([], [True])


def test_a_sink_that_remembers_nothing_is_refused_without_a_checkpoint(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    app = App("forgets", bootstrap_servers=broker.bootstrap_servers)
    app.sink(topic, name="forgetful")(lambda _batch, _batch_id: None)

    with pytest.raises(ConfigurationError, match="the sink of the query forgetful has no ledger, and the query no che"):
        app.start()

    assert [query.name for query in spark.streams.active] == []


def test_a_sink_for_a_missing_topic_is_refused_before_spark_starts_it(spark: SparkSession, broker: DevBroker) -> None:
    app = App("missing", bootstrap_servers=broker.bootstrap_servers)
    app.sink("nobody-made-this")(lambda _batch, _batch_id: None)

    with pytest.raises(TopicNotFoundError, match="nobody-made-this"):
        app.start()


RUN = """
import os, pathlib, time
import penstock.app

here = pathlib.Path.cwd()
app = penstock.app.App("{topic}", bootstrap_servers="{servers}", stop_timeout=120,
                       config={{"auto.offset.reset": "earliest"}})

@app.handler("{topic}")
def handle(message):
    (here / f"handled-{{message.offset}}").touch()

@app.sink("{topic}", trigger="100 milliseconds", checkpoint_location=str(here / "checkpoint"),
          options={{"maxOffsetsPerTrigger": "5"}})
def store(batch, batch_id):
    (here / f"begun-{{batch_id}}").touch()
    while not (here / "go").exists():  # a slow sink, until the test says so
        time.sleep(0.05)
    (here / f"stored-{{batch_id}}").write_text(str(batch.count()))
"""


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_penstock_run_ends_its_sinks_behind_a_finished_batch(
    broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    """Take a Spark of its own: 20 s on a quiet machine."""
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"%d" % number) for number in range(15)])
    (tmp_path / "shop.py").write_text(RUN.format(topic=topic, servers=broker.bootstrap_servers))
    # Without a JAVA_HOME, which the command finds by itself.
    environment = {key: value for key, value in os.environ.items() if key not in ("JAVA_HOME", "PYSPARK_PYTHON")}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "run", "shop:app"],
            cwd=tmp_path,
            env=environment | {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(lambda: process.poll() is not None or (tmp_path / "begun-0").exists(), timeout=SPARK_S)
        wait_until((tmp_path / "handled-14").exists, timeout=SPARK_S)
        process.send_signal(signal.SIGTERM)
        assert not wait_briefly(lambda: process.poll() is not None, 2.0), "it does not end before its batch"
        (tmp_path / "go").touch()
        assert process.wait(SPARK_S) == 0
    finally:
        process.kill()
        process.wait()

    said = (tmp_path / "log").read_text()
    assert [one.name for one in sorted(tmp_path.glob("begun-*"))] == ["begun-0"], said
    assert (tmp_path / "stored-0").read_text() == "5"
    assert numbers(tmp_path / "checkpoint" / "commits") == [0]
    assert "BatchLeftError" not in said, "a stop is no error"


def numbers(folder: Path) -> list[int]:
    """Return the batches that a folder of a checkpoint knows."""
    return sorted(int(one.name) for one in folder.iterdir() if one.name.isdecimal())


def wait_briefly(condition: Callable[[], bool], seconds: float) -> bool:
    """Tell whether a condition comes true within so many seconds."""
    try:
        return wait_until(condition, timeout=seconds)
    except AssertionError:
        return False
