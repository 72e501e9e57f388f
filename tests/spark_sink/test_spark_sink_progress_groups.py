"""Offsets of groups that follow Spark's queries, and all that is shown of queries, on real Spark."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from app_sinks import SPARK_S, NewTopic
from confluent_kafka import Consumer, TopicPartition
from progress_reports import Ledger, values
from pyspark.sql import DataFrame, SparkSession

from kafka_tools import committed, ends, produce
from penstock.app import App
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError
from penstock.spark_sink import ProgressListener
from penstock.spark_sink.monitoring.group_offsets import GroupOffsets
from penstock.spark_sink.monitoring.progress import SinkState
from telemetry_tools import Recorded
from waiting import wait_until


def test_a_groups_offsets_follow_and_never_go_back(
    broker: DevBroker, new_topic: NewTopic, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic(partitions=2)
    produce(broker.bootstrap_servers, topic, [(b"k", b"v")] * 10)
    group = GroupOffsets(f"shown-{topic}", bootstrap_servers=broker.bootstrap_servers)

    assert group.advance({(topic, 0): 4, (topic, 1): 0}) == {(topic, 0): 4, (topic, 1): 0}
    assert group.advance({(topic, 0): 4, (topic, 1): 3}) == {(topic, 1): 3}
    assert "moved back" not in caplog.text
    assert group.advance({(topic, 0): 1, (topic, 1): 5}) == {(topic, 1): 5}

    standing = committed(broker.bootstrap_servers, f"shown-{topic}", topic, 2)
    group.close()
    assert {number: one.offset for number, one in standing.items()} == {0: 4, 1: 5}
    assert f"is at offset 4 of {topic}[0], the query at 1: its offsets are not moved back" in caplog.text


def test_a_group_with_members_is_left_alone_with_one_warning(
    broker: DevBroker, new_topic: NewTopic, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic()
    name = f"members-{topic}"
    consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": name})
    consumer.subscribe([topic])
    wait_until(lambda: consumer.poll(0.1) is None and consumer.assignment())
    group = GroupOffsets(name, bootstrap_servers=broker.bootstrap_servers)

    assert group.advance({(topic, 0): 4}) == {}
    assert group.advance({(topic, 0): 5}) == {}
    (standing,) = consumer.committed([TopicPartition(topic, 0)], timeout=30)
    consumer.close()

    assert standing.offset < 0
    assert [one.levelno for one in caplog.records if "has members" in one.message] == [logging.WARNING]
    assert wait_until(lambda: group.advance({(topic, 0): 5})) == {(topic, 0): 5}, "once they have left, it is written"
    group.close()


def test_groups_need_brokers() -> None:
    with pytest.raises(ConfigurationError, match="give bootstrap_servers as well"):
        ProgressListener(groups={"store": "shown"})


def test_an_apps_sink_shows_its_progress_as_statistics_metrics_and_offsets_of_a_group(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic, recorded: Recorded
) -> None:
    topic = new_topic(partitions=2)
    group = f"shown-{topic}"
    produce(broker.bootstrap_servers, topic, [(b"%d" % number, b"v") for number in range(20)])
    at_end = ends(broker.bootstrap_servers, topic, 2)
    ledger = Ledger(topic, 0)
    ledger.asked = 1
    app = App("shows", bootstrap_servers=broker.bootstrap_servers, telemetry=recorded.telemetry())
    app.sink(topic, name="store", trigger="available now", group=group, options={"maxOffsetsPerTrigger": "15"})(
        Telling(ledger)
    )

    with app.start() as running:
        # Looked at before the app's end, which takes the metrics off the board.
        assert running.wait(SPARK_S)
        (sink,) = running.sinks()
        explained: Any = running.explanation("shows")
        wait_until(lambda: recorded.points("penstock.spark.ledger.position"))
        rows = values(recorded, "penstock.spark.rows")
        lag = values(recorded, "penstock.spark.partition.lag")

    assert (sink.state, sink.rows, sink.batches, sink.lag) == (SinkState.ENDED, 20, 2, 0)
    assert {one.partition: one.position for one in sink.partitions} == at_end
    assert sink.batch_seconds > 0
    assert explained["sinks"][0]["text"] == str(sink)
    assert json.loads(json.dumps(explained))["sinks"][0]["state"] == "ended"
    assert rows == {(): 20}
    assert [(one.attributes or {})["penstock.spark.batch.id"] for one in recorded.spans("process store")] == [0, 1]
    assert lag == {(topic, "0"): 0, (topic, "1"): 0}
    standing = committed(broker.bootstrap_servers, group, topic, 2)
    assert {number: one.offset for number, one in standing.items()} == at_end


class Telling:
    """A sink with the ledger of another."""

    def __init__(self, ledger: Ledger) -> None:
        self.position = ledger.position

    def __call__(self, batch: DataFrame, _batch_id: int) -> None:
        batch.count()


def test_a_listener_of_ones_own_shows_queries_that_are_started_by_hand(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic, recorded: Recorded, read: Callable[..., DataFrame]
) -> None:
    topic = new_topic()
    group = f"by-hand-{topic}"
    produce(broker.bootstrap_servers, topic, [(b"k", b"v")] * 5)
    listener = ProgressListener(
        recorded.telemetry(), groups={"store": group}, bootstrap_servers=broker.bootstrap_servers
    )
    spark.streams.addListener(listener)
    frame = read(stream=True, subscribe=topic, startingOffsets="earliest")
    query = frame.writeStream.foreachBatch(lambda batch, _: batch.count()).queryName("store").start()

    try:
        wait_until(lambda: values(recorded, "penstock.spark.rows") == {(): 5}, timeout=SPARK_S)
        wait_until(lambda: committed(broker.bootstrap_servers, group, topic, 1)[0].offset == 5)
        query.stop()
        wait_until(lambda: recorded.points("penstock.spark.rows") == [])
    finally:
        query.stop()
        spark.streams.removeListener(listener)
        listener.close()
