"""Reports of Spark's queries: statistics, metrics, and offsets of the group of an app's sinks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from streams import SPARK_S
from supervised_world import IDLE, FakeQuery, report

from kafka_tools import committed, ends, produce
from penstock.app import App
from penstock.devbroker import DevBroker
from penstock.spark_sink import SqlSink
from penstock.spark_sink.progress import QueryProgress, SinkPartition, SinkState, SinkStatistics
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
    progress = QueryProgress("orders", recorded.telemetry())
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
    assert shown["penstock.spark.partition.lag"] == {("orders", "0"): 3, ("orders", "1"): 0}
    assert durations["triggerExecution"] == (2, pytest.approx(2 * 1.877))
    assert set(durations) == {"addBatch", "latestOffset", "triggerExecution"}
    assert recorded.points("penstock.spark.rows") == [], "an ended query is no longer shown"


@pytest.mark.thorough
def test_an_apps_sink_shows_its_progress_as_statistics_metrics_and_offsets_of_a_group(
    spark: SparkSession, broker: DevBroker, new_topic: Callable[..., str], recorded: Recorded, tmp_path: Path
) -> None:
    topic = new_topic(partitions=2)
    group = f"{topic}-sinks"
    produce(broker.bootstrap_servers, topic, [(b"%d" % number, b"v") for number in range(20)])
    at_end = ends(broker.bootstrap_servers, topic, 2)
    app = App(topic, bootstrap_servers=broker.bootstrap_servers, telemetry=recorded.telemetry())
    store = SqlSink(f"sqlite:///{tmp_path}/rows.db", table="rows")
    app.sink(topic, sink=store, name="store", trigger="available now", options={"maxOffsetsPerTrigger": "15"})(
        lambda messages: messages.select("value", "topic", "partition", "offset")
    )

    with app.start() as running:
        # Looked at before the app's end, which takes the metrics off the board.
        assert running.wait(SPARK_S)
        # Spark reports the last batch on a thread of its own.
        sink = wait_until(lambda: next((sink for sink in running.sinks() if sink.rows == 20), None))
        explained: Any = running.explanation(topic)
        rows = values(recorded, "penstock.spark.rows")
        lag = values(recorded, "penstock.spark.partition.lag")

    assert (sink.state, sink.rows, sink.batches, sink.lag) == (SinkState.ENDED, 20, 2, 0)
    assert {part.partition: part.position for part in sink.partitions} == at_end
    assert sink.batch_seconds > 0
    assert explained["sinks"][0]["text"] == str(sink)
    assert json.loads(json.dumps(explained))["sinks"][0]["state"] == "ended"
    assert rows == {(): 20}
    assert [(span.attributes or {})["penstock.spark.batch.id"] for span in recorded.spans("process store")] == [0, 1]
    assert lag == {(topic, "0"): 0, (topic, "1"): 0}
    standing = committed(broker.bootstrap_servers, group, topic, 2)
    assert {number: part.offset for number, part in standing.items()} == at_end
