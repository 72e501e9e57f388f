"""What is shown of Spark's queries: reports as values, metrics, ledgers."""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import DataFrame, SparkSession
from streams import SPARK_S

from kafka_tools import committed, ends, produce
from penstock.app import App
from penstock.devbroker import DevBroker
from penstock.spark_sink.ledger.rules import Batch
from penstock.spark_sink.monitoring import progress_publisher
from penstock.spark_sink.monitoring.group_offsets import GroupOffsets
from penstock.spark_sink.monitoring.progress import QueryProgress, SinkState
from penstock.spark_sink.monitoring.progress_publisher import ProgressPublisher
from penstock.spark_sink.sinks.sink import Origin, stored_batches
from penstock.spark_sink.source.plan import Offsets
from telemetry_tools import Recorded
from waiting import wait_until


class Ledger:
    """A sink that tells its ledger."""

    def __init__(self, topic: str = "orders", offset: int = 3) -> None:
        self.asked = 0
        self._ledger = {(topic, 0): offset}

    def position(self, _query: str) -> Offsets:
        self.asked += 1
        if self.asked == 1:
            raise ConnectionError("secret-of-the-url")
        return self._ledger


def values(recorded: Recorded, name: str) -> dict[tuple[str, ...], float]:
    """Return a metric's values by topic and partition, and see that each names its query."""
    found = {}
    for point in recorded.points(name):
        assert point.attributes["penstock.spark.query"] == "store"
        place = [point.attributes.get(f"messaging.destination.{part}") for part in ("name", "partition.id")]
        found[tuple(one for one in place if one is not None)] = getattr(point, "value", 0)
    return found


PHASES = {"addBatch": 1433, "latestOffset": 169, "triggerExecution": 1877}


def report(  # each part of a report by its name
    batch_id: int,
    *,
    name: str | None = "store",
    run: str = "run-1",
    rows: int = 10,
    phases: Mapping[str, int] = PHASES,
    end: object = None,
    latest: object = None,
    **more: object,
) -> str:
    """Return a report as Spark 4.3 writes it."""
    source = {
        "description": "PythonMicroBatchStreamWithTriggerAvailableNow@4255c707",
        "startOffset": None,
        "endOffset": {"orders": {"0": 4, "1": 6}} if end is None else end,
        "latestOffset": {"orders": {"0": 8, "1": 12}} if latest is None else latest,
        "numInputRows": rows,
    }
    return json.dumps(
        {
            "id": "852c7024",
            "runId": run,
            "name": name,
            "batchId": batch_id,
            "numInputRows": rows,
            "processedRowsPerSecond": 5.3,
            "durationMs": phases,
            "sources": [source],
            **more,
        }
    )


IDLE = {"latestOffset": 3, "triggerExecution": 3}


def test_a_report_becomes_rows_seconds_offsets_and_lag() -> None:
    progress = QueryProgress.parse(report(7))

    assert (progress.name, progress.run_id, progress.batch_id, progress.executed) == ("store", "run-1", 7, True)
    assert (progress.rows, progress.rows_per_s) == (10, 5.3)
    assert progress.seconds["triggerExecution"] == 1.877
    assert progress.ends == {("orders", 0): 4, ("orders", 1): 6}
    assert progress.lag == {("orders", 0): 4, ("orders", 1): 6}


def test_what_is_no_report_costs_a_warning_and_the_next_one_counts(caplog: pytest.LogCaptureFixture) -> None:
    publisher = ProgressPublisher()
    with caplog.at_level(logging.WARNING):
        publisher.take("nonsense")
        publisher.take("nonsense")
        publisher.take(report(0))

    assert publisher.shown("store").rows == 10
    assert len([one for one in caplog.records if "does not read" in one.message]) == 1


def test_each_batch_counts_once_in_whatever_order_its_reports_come() -> None:
    publisher = ProgressPublisher()
    for text in (report(0), report(0), report(3), report(1), report(2), report(3), report(4, rows=0, phases=IDLE)):
        publisher.take(text)

    shown = publisher.shown("store")
    assert (shown.batches, shown.rows, shown.batch_id) == (4, 40, 3)


def test_a_restarted_query_goes_on_counting_and_its_former_run_says_nothing_new_of_the_position() -> None:
    publisher = ProgressPublisher()
    publisher.take(report(5, end={"orders": {"0": 50}}))
    publisher.take(report(6, run="run-2", end={"orders": {"0": 60}}))
    publisher.take(report(7, end={"orders": {"0": 70}}))

    shown = publisher.shown("store")
    assert (shown.position, shown.batch_id, shown.rows) == ({("orders", 0): 60}, 6, 30)


class Group:
    """Takes positions, and may fail or hang."""

    def __init__(self) -> None:
        self.taken: list[Offsets] = []
        self.go = threading.Event()
        self.go.set()
        self.fails = False
        self.closed = False

    def advance(self, position: Offsets) -> None:
        self.go.wait(60)
        self.taken.append(position)
        if self.fails:
            raise RuntimeError("no broker")

    def close(self) -> None:
        self.closed = True


def test_metrics_equal_the_reports_and_end_with_the_publisher(recorded: Recorded) -> None:
    publisher = ProgressPublisher(recorded.telemetry(), sinks={"store": Ledger()}, only=("store",))
    publisher.take(report(0))
    publisher.take(report(1, end={"orders": {"0": 5, "1": 12}}))
    publisher.restarted("store", 2)
    # A batch of its own each time: the first question fails, and what comes while it is asked may be one with the next.
    later = itertools.count(2)
    wait_until(lambda: recorded.points("penstock.spark.ledger.position") or publisher.take(report(next(later))))

    shown = {name: values(recorded, name) for name in recorded.metrics()}
    durations = {
        point.attributes["penstock.spark.phase"]: (point.count, point.sum)
        for point in recorded.points("penstock.spark.batch.duration")
    }
    publisher.close()

    assert shown["penstock.spark.rows"][()] >= 20
    assert shown["penstock.spark.rows_per_second"] == {(): 5.3}
    assert shown["penstock.spark.restarts"] == {(): 2}
    assert shown["penstock.spark.ledger.position"] == {("orders", "0"): 3}
    assert set(shown["penstock.spark.partition.lag"]) == {("orders", "0"), ("orders", "1")}
    count, seconds = durations["triggerExecution"]
    assert seconds == pytest.approx(1.877 * count)
    assert set(durations) == {"addBatch", "latestOffset", "triggerExecution"}
    assert recorded.points("penstock.spark.rows") == [], "what has ended is shown no more"


def test_a_group_that_hangs_holds_no_report_up_and_gets_the_latest_position() -> None:
    group = Group()
    group.go.clear()
    publisher = ProgressPublisher(groups={"store": group})
    for batch in range(20):
        publisher.take(report(batch, end={"orders": {"0": batch}}))
    assert publisher.shown("store").batches == 20

    group.go.set()
    publisher.close()

    assert group.closed
    assert group.taken[-1] == {("orders", 0): 19}
    assert len(group.taken) <= 2, "what a later batch has overtaken is not written"


def test_a_groups_offsets_follow_and_never_go_back(
    broker: DevBroker, new_topic: Callable[..., str], caplog: pytest.LogCaptureFixture
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
    broker: DevBroker, new_topic: Callable[..., str], caplog: pytest.LogCaptureFixture
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


@pytest.mark.thorough
def test_an_apps_sink_shows_its_progress_as_statistics_metrics_and_offsets_of_a_group(
    spark: SparkSession, broker: DevBroker, new_topic: Callable[..., str], recorded: Recorded
) -> None:
    topic = new_topic(partitions=2)
    group = f"shown-{topic}"
    produce(broker.bootstrap_servers, topic, [(b"%d" % number, b"v") for number in range(20)])
    at_end = ends(broker.bootstrap_servers, topic, 2)
    ledger = Ledger(topic, 0)
    ledger.asked = 1
    app = App(topic, bootstrap_servers=broker.bootstrap_servers, telemetry=recorded.telemetry())
    app.sink(topic, name="store", trigger="available now", group=group, options={"maxOffsetsPerTrigger": "15"})(
        Telling(ledger)
    )

    with app.start() as running:
        # Looked at before the app's end, which takes the metrics off the board.
        assert running.wait(SPARK_S)
        # Spark reports the last batch on a thread of its own.
        sink = wait_until(lambda: next((sink for sink in running.sinks() if sink.rows == 20), None))
        explained: Any = running.explanation(topic)
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


def test_a_sink_whose_batches_were_stored_in_this_process_is_not_asked_for_its_ledger() -> None:
    class Unasked:
        ledger_key = object()

        def position(self, query: str) -> Offsets:
            pytest.fail(f"asked for {query}")

    sink, stored = Unasked(), {("orders", 0): 5}
    batch = Batch("table orders", 7, "id", {("orders", 0): (3, 5)})
    with stored_batches.one_call(sink.ledger_key, Origin("shop", "run", "id"), batch):
        pass

    assert progress_publisher._ledger(sink, "shop", stored) == stored
