"""`@app.sink` on real Spark: an app runs its sinks beside its handlers, and says why one ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from kafka_tools import Recorder, produce, transactional
from penstock.app import App
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError, SinkError, TopicNotFoundError
from penstock.spark_sink import SqlSink
from waiting import wait_until

NewTopic = Callable[..., str]


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
        wait_until(lambda: len(stored()) == 10, timeout=90)
        wait_until(lambda: len(seen.calls) == 10)
        (query,) = running.queries

    assert stored() == {f"kept{number}" for number in range(10)}
    assert query.name == "both-keep"
    assert not query.isActive


def test_an_app_of_sinks_alone_ends_when_all_is_read(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"x")] * 7)
    counts: list[int] = []
    app = App("alone", bootstrap_servers=broker.bootstrap_servers)
    app.sink(topic, trigger="available now", name="counting")(lambda batch, _: counts.append(batch.count()))

    with app.start() as running:
        assert running.wait(90)

    assert sum(counts) == 7


def test_a_sink_that_fails_stops_the_app_with_a_sentence(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"x")])
    app = App("fails", bootstrap_servers=broker.bootstrap_servers)

    @app.sink(topic, trigger="1 second", name="broken")
    def broken(_batch: DataFrame, _batch_id: int) -> None:
        raise ValueError("no room")

    with app.start() as running, pytest.raises(SinkError, match="the query broken ended"):
        running.wait(90)


def test_a_sink_that_does_not_start_leaves_no_other_running(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    app = App("leak", bootstrap_servers=broker.bootstrap_servers)
    app.sink(topic, name="first")(lambda _batch, _batch_id: None)
    app.sink(topic, name="second", options={"maxOffsetPerTrigger": "10"})(lambda _batch, _batch_id: None)

    with pytest.raises(AnalysisException, match="did you mean maxOffsetsPerTrigger"):
        app.start()

    assert [query.name for query in spark.streams.active] == []


def test_a_sink_beside_a_handler_takes_its_options_and_of_the_settings_what_means_something_to_it(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic
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
    app.sink(topic, trigger="1 second", options={"maxOffsetsPerTrigger": "10"})(
        lambda batch, _: counts.append(batch.count())
    )

    with app.start():
        wait_until(lambda: sum(counts) == 25 and len(seen.calls) == 25, timeout=90)

    assert max(counts) <= 10


def test_of_several_processes_the_first_runs_the_sinks(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic()
    app = App("several", bootstrap_servers=broker.bootstrap_servers)
    app.sink(topic)(lambda _batch, _batch_id: None)
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


def test_a_sink_for_a_missing_topic_is_refused_before_spark_starts_it(spark: SparkSession, broker: DevBroker) -> None:
    app = App("missing", bootstrap_servers=broker.bootstrap_servers)
    app.sink("nobody-made-this")(lambda _batch, _batch_id: None)

    with pytest.raises(TopicNotFoundError, match="nobody-made-this"):
        app.start()
