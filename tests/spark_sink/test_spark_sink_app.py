"""`@app.sink` on real Spark: an app runs sinks and handlers, and reports why a sink ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType
from streams import SPARK_S

from kafka_tools import Recorder, produce, transactional
from penstock.app import App
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError, SinkError, TopicNotFoundError
from penstock.spark_sink import SqlSink
from penstock.spark_sink.progress import SinkState
from waiting import wait_until


def test_an_app_gives_committed_messages_to_its_handler_and_its_sink(
    spark: SparkSession, broker: DevBroker, new_topic: Callable[..., str], tmp_path: Path
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
    app = App(topic, bootstrap_servers=broker.bootstrap_servers, workers=2)
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
    assert query.name == f"{topic}-keep"
    assert not query.isActive


@pytest.mark.thorough
def test_a_failed_batch_is_done_again_and_a_stop_finishes_the_one_under_way(
    spark: SparkSession, broker: DevBroker, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"%d" % number) for number in range(20)])
    begun: list[int] = []
    stored: list[bytes] = []
    go_on = threading.Event()
    seen = Recorder()

    def shaky(batch: DataFrame, batch_id: int) -> None:
        begun.append(batch_id)
        rows = [row.value for row in batch.select("value").collect()]
        if begun.count(1) in (1, 2) and batch_id == 1:
            raise ConnectionError("the database is away")
        if batch_id == 2:
            go_on.wait(120)
        stored.extend(rows)

    def new_app() -> App:
        config = {"auto.offset.reset": "earliest"}
        app = App(topic, bootstrap_servers=broker.bootstrap_servers, config=config, stop_timeout=SPARK_S)
        app.handler(topic)(seen)
        options = {"maxOffsetsPerTrigger": "5"}
        app.sink(topic, trigger="100 milliseconds", checkpoint_location=str(tmp_path / "checkpoint"), options=options)(
            shaky
        )
        return app

    running = new_app().start()
    wait_until(lambda: begun.count(1) == 1, timeout=SPARK_S)
    wait_until(lambda: len(seen.calls) == 20)  # the handler goes on meanwhile
    wait_until(lambda: 2 in begun, timeout=SPARK_S)
    (sink,) = wait_until(lambda: [shown for shown in running.sinks() if shown.rows == 10])
    answers: list[bool] = []
    stop = threading.Thread(target=lambda: answers.append(running.stop()))
    stop.start()
    (query,) = running.queries
    wait_until(lambda: running._sinks.supervised[0].gate.is_closed)  # type: ignore[union-attr] # it has both
    assert query.isActive
    go_on.set()
    stop.join(SPARK_S)

    # On a machine with much to do Spark's own parts may fail as well, and are started again like it.
    assert (sink.state, sink.restarts >= 2, sink.last_error is not None) == (SinkState.RUNNING, True, True)
    assert (answers, query.isActive, query.exception()) == ([True], False, None)
    assert begun == [0, 1, 1, 1, 2], "a restart goes on where the last committed batch ended"
    assert {path.name for path in (tmp_path / "checkpoint" / "commits").glob("[0-9]*")} == {"0", "1", "2"}
    with new_app().start():
        wait_until(lambda: len(stored) == 20, timeout=SPARK_S)
    assert sorted(stored) == sorted(b"%d" % number for number in range(20))


class Refusing:
    """A sink that refuses the frames of its query before it begins."""

    def check(self, schema: StructType) -> None:
        raise SinkError(f"table orders has no column {schema.fieldNames()[0]}; add it, or leave it out of the frame")

    def __call__(self, _batch: DataFrame, _batch_id: int) -> None:
        pytest.fail("a batch came")


@pytest.mark.thorough
def test_a_sink_and_its_topic_are_checked_before_the_query_begins(
    spark: SparkSession, broker: DevBroker, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = new_topic()
    app = App(topic, bootstrap_servers=broker.bootstrap_servers)
    app.sink(topic, sink=Refusing(), checkpoint_location=str(tmp_path))(
        lambda messages: messages.selectExpr("length(value) amount", "topic", "partition", "offset")
    )

    with pytest.raises(SinkError, match="table orders has no column amount"):
        app.start()

    missing = App("missing", bootstrap_servers=broker.bootstrap_servers)
    missing.sink("nobody-made-this")(lambda _batch, _batch_id: None)
    with pytest.raises(TopicNotFoundError, match="nobody-made-this"):
        missing.start()

    assert [query.name for query in spark.streams.active] == []


def test_wrong_settings_of_sinks_are_refused_at_once() -> None:
    app = App("wrong", bootstrap_servers="127.0.0.1:1")
    app.sink("orders", name="one")(lambda _batch, _batch_id: None)

    for wrong, said in (
        ({"name": "one"}, "two sinks have the name 'one'"),
        ({"name": "two", "group": "shown"}, "has no option group any more: the offsets of <app>-sinks, the group of"),
        ({"name": "two", "restarts": -1}, "restarts must be zero or more"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            app.sink("orders", **wrong)(lambda _batch, _batch_id: None)  # type: ignore[arg-type] # each is one option
    with pytest.raises(ConfigurationError, match="sink must be a function or another callable"):
        app.sink("orders", sink="sqlite://")(lambda frame: frame)  # type: ignore[arg-type] # it is the mistake


def test_of_several_processes_the_first_runs_the_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App("shared", bootstrap_servers="127.0.0.1:1")
    app.sink("orders")(lambda _batch, _batch_id: None)
    alone = app._new_sinks()

    monkeypatch.setenv("PENSTOCK_PROCESS", "2")
    with pytest.raises(ConfigurationError, match="has sinks only, which run in one process"):
        app.start()
    app.handler("orders")(Recorder())
    in_the_second = app._new_sinks()
    monkeypatch.setenv("PENSTOCK_PROCESS", "1")

    assert in_the_second is None
    assert alone is not None
    assert app._new_sinks() is not None
