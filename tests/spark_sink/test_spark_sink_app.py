"""`@app.sink` on real Spark: an app runs its sinks beside its handlers, and says why one ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession

from kafka_tools import Recorder, produce, transactional
from penstock.app import App
from penstock.devbroker import DevBroker
from penstock.errors import SinkError, TopicNotFoundError
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


def test_a_sink_for_a_missing_topic_is_refused_before_spark_starts_it(spark: SparkSession, broker: DevBroker) -> None:
    app = App("missing", bootstrap_servers=broker.bootstrap_servers)
    app.sink("nobody-made-this")(lambda _batch, _batch_id: None)

    with pytest.raises(TopicNotFoundError, match="nobody-made-this"):
        app.start()
