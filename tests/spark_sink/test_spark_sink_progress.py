"""What is shown of Spark's queries: reports as statistics, metrics and offsets of groups."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import SparkSession
from streams import SPARK_S
from supervised_world import IDLE, FakeQuery, report

from kafka_tools import committed, ends, produce
from penstock.app import App
from penstock.devbroker import DevBroker, User
from penstock.spark_sink import SqlSink
from penstock.spark_sink.ledger.rules import Batch
from penstock.spark_sink.progress import GroupOffsets, QueryProgress, SinkPartition, SinkState, SinkStatistics
from penstock.spark_sink.sinks.sink import Origin, stored_batches
from rights import give, on_group, on_topic, take
from telemetry_tools import Recorded
from waiting import wait_until


def values(recorded: Recorded, name: str) -> dict[tuple[str, ...], float]:
    """Return a metric's values by topic and partition, and see that each names its query."""
    found = {}
    for point in recorded.points(name):
        assert point.attributes["penstock.spark.query"] in ("orders", "store")
        place = [point.attributes.get(f"messaging.destination.{part}") for part in ("name", "partition.id")]
        found[tuple(part for part in place if part is not None)] = getattr(point, "value", 0)
    return found


def test_each_batch_counts_once_however_often_it_is_reported_and_an_idle_query_says_where_it_is() -> None:
    query: Any = FakeQuery()
    progress = QueryProgress("orders")
    for number in (0, 0, 1, 3):
        query.recentProgress += [report(n) for n in range(len(query.recentProgress), number + 1)]
        progress.follow(query)
    query.recentProgress.append(report(4, rows=0, phases=IDLE, latest={"orders": {"0": 9}}))
    progress.follow(query)

    assert progress.statistics == SinkStatistics(
        name="orders",
        state=SinkState.RUNNING,
        batch_id=3,
        batches=4,
        rows=40,
        rows_per_s=5.3,
        batch_seconds=1.877,
        lag=5,
        partitions=(SinkPartition("orders", 0, 4, 5), SinkPartition("orders", 1, 6, None)),
    )
    query.recentProgress = [report(4, run="run-2"), report(5, run="run-2", end={"logOffset": 7}, latest="None")]
    progress.follow(query)
    assert (progress.statistics.batches, progress.statistics.rows) == (6, 60), "a restarted query goes on counting"
    assert len(progress.statistics.partitions) == 2, "a source that is not Kafka's says nothing of the position"


def test_metrics_equal_the_reports_and_end_with_the_query(recorded: Recorded) -> None:
    query: Any = FakeQuery()
    sink = SimpleNamespace(ledger_key=object())
    stored = Batch("table orders", 7, "id", {("orders", 0): (1, 3)})
    with stored_batches.one_call(sink.ledger_key, Origin("orders", "run", "id"), stored):
        pass
    progress = QueryProgress("orders", recorded.telemetry(), sink=sink)
    query.recentProgress = [report(0), report(1, end={"orders": {"0": 5, "1": 12}})]
    progress.follow(query)

    shown = {name: values(recorded, name) for name in recorded.metrics()}
    durations = {
        point.attributes["penstock.spark.phase"]: (point.count, point.sum)
        for point in recorded.points("penstock.spark.batch.duration")
    }
    progress.close()

    assert shown["penstock.spark.rows"] == {(): 20}
    assert shown["penstock.spark.rows_per_second"] == {(): 5.3}
    assert shown["penstock.spark.restarts"] == {(): 0}
    assert shown["penstock.spark.ledger.position"] == {("orders", "0"): 3}
    assert shown["penstock.spark.partition.lag"] == {("orders", "0"): 3, ("orders", "1"): 0}
    assert durations["triggerExecution"] == (2, pytest.approx(2 * 1.877))
    assert set(durations) == {"addBatch", "latestOffset", "triggerExecution"}
    assert recorded.points("penstock.spark.rows") == [], "what has ended is shown no more"


def offsets_of(group: GroupOffsets, servers: str, topic: str, partitions: int) -> dict[int, int]:
    """Return the offsets of a group once all that was written has been answered."""
    group.close()
    standing = committed(servers, group.group, topic, partitions)
    return {number: place.offset for number, place in standing.items()}


def test_a_group_with_members_is_left_alone_with_one_warning(
    broker: DevBroker, new_topic: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic()
    name = f"members-{topic}"
    consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": name})
    consumer.subscribe([topic])
    wait_until(lambda: consumer.poll(0.1) is None and consumer.assignment())
    group = GroupOffsets(name, bootstrap_servers=broker.bootstrap_servers)
    caplog.set_level(logging.DEBUG, "penstock.spark_sink")

    def warnings() -> list[int]:
        group.follow({(topic, 0): 4})
        return [record.levelno for record in caplog.records if "the group has members" in record.message]

    levels = wait_until(lambda: len(found := warnings()) > 1 and found)
    (standing,) = consumer.committed([TopicPartition(topic, 0)], timeout=30)
    consumer.close()
    group.follow({(topic, 0): 5})

    assert standing.offset < 0
    assert levels[:2] == [logging.WARNING, logging.DEBUG]
    assert offsets_of(group, broker.bootstrap_servers, topic, 1) == {0: 5}, "once they have left, it is written"


@pytest.mark.thorough
def test_an_apps_sink_shows_its_progress_as_statistics_metrics_and_offsets_of_a_group(
    spark: SparkSession, broker: DevBroker, new_topic: Callable[..., str], recorded: Recorded, tmp_path: Path
) -> None:
    topic = new_topic(partitions=2)
    group = f"shown-{topic}"
    produce(broker.bootstrap_servers, topic, [(b"%d" % number, b"v") for number in range(20)])
    at_end = ends(broker.bootstrap_servers, topic, 2)
    app = App(topic, bootstrap_servers=broker.bootstrap_servers, telemetry=recorded.telemetry())
    store = SqlSink(f"sqlite:///{tmp_path}/rows.db", table="rows")
    app.sink(
        topic, sink=store, name="store", trigger="available now", group=group, options={"maxOffsetsPerTrigger": "15"}
    )(lambda messages: messages.select("value", "topic", "partition", "offset"))

    with app.start() as running:
        # Looked at before the app's end, which takes the metrics off the board.
        assert running.wait(SPARK_S)
        # Spark reports the last batch on a thread of its own.
        sink = wait_until(lambda: next((sink for sink in running.sinks() if sink.rows == 20), None))
        explained: Any = running.explanation(topic)
        ledger = values(recorded, "penstock.spark.ledger.position")
        rows = values(recorded, "penstock.spark.rows")
        lag = values(recorded, "penstock.spark.partition.lag")

    assert (sink.state, sink.rows, sink.batches, sink.lag) == (SinkState.ENDED, 20, 2, 0)
    assert {part.partition: (part.position, part.ledger) for part in sink.partitions} == {
        number: (offset, offset) for number, offset in at_end.items()
    }
    assert ledger == {(topic, str(number)): offset for number, offset in at_end.items()}
    assert sink.batch_seconds > 0
    assert explained["sinks"][0]["text"] == str(sink)
    assert json.loads(json.dumps(explained))["sinks"][0]["state"] == "ended"
    assert rows == {(): 20}
    assert [(span.attributes or {})["penstock.spark.batch.id"] for span in recorded.spans("process store")] == [0, 1]
    assert lag == {(topic, "0"): 0, (topic, "1"): 0}
    standing = committed(broker.bootstrap_servers, group, topic, 2)
    assert {number: part.offset for number, part in standing.items()} == at_end


@pytest.mark.thorough
def test_offsets_of_a_group_that_may_not_be_written_are_told_once_and_written_when_they_may(
    secured: DevBroker,
    new_user: Callable[..., User],
    new_secured_topic: Callable[..., str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic = new_secured_topic()
    group = f"group-of-{topic}"
    rights = [*on_group(group, "READ"), *on_topic(topic, "READ")]
    user = new_user(*rights)
    offsets = GroupOffsets(group, bootstrap_servers=secured.bootstrap_servers, config=user.config)
    onlooker = Consumer({**user.config, "bootstrap.servers": secured.bootstrap_servers, "group.id": group})

    def is_written(number: int) -> bool:
        offsets.follow({(topic, 0): number})
        (found,) = onlooker.committed([TopicPartition(topic, 0)], timeout=30)
        return found.error is None and found.offset == number

    wait_until(lambda: is_written(1))
    assert caplog.text == ""
    for number, right in enumerate(rights, start=2):
        take(secured, user, [right])
        caplog.clear()
        wait_until(lambda number=number: offsets.follow({(topic, 0): number}) or "lacks the permission" in caplog.text)
        assert f"--allow-principal 'User:{user.name}' --operation Read --{right.resource} '{right.name}'" in caplog.text
        offsets.follow({(topic, 0): number})
        assert caplog.text.count("lacks the permission") == 1, "it is told once"
        give(secured, user, [right])
        wait_until(lambda number=number: is_written(number))
    offsets.close()
    onlooker.close()
