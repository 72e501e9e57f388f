"""`@app.sink` on real Spark: an app ends its sinks behind a finished batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from streams import SPARK_S

from kafka_tools import NewTopic, produce
from penstock.app import App
from penstock.devbroker import DevBroker
from penstock.spark_sink.queries.gate import Gate, sleep_in_jvm
from waiting import wait_until


@pytest.mark.thorough
def test_a_stop_finishes_the_batch_under_way_and_the_next_start_goes_on_behind_it(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"%d" % number) for number in range(15)])
    begun: list[int] = []
    rows: list[int] = []
    go_on = threading.Event()

    def slow(batch: DataFrame, batch_id: int) -> None:
        begun.append(batch_id)
        go_on.wait(120)
        rows.append(batch.count())

    def new_app() -> App:
        app = App(topic, bootstrap_servers=broker.bootstrap_servers, stop_timeout=SPARK_S)
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
    wait_until(lambda: running._sinks.supervised[0].gate.is_closed)  # type: ignore[union-attr] # it has both
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


@pytest.mark.thorough
def test_a_batch_behind_a_closed_gate_is_woken_by_sparks_stop_which_is_no_failure(
    spark: SparkSession, read: Callable[..., DataFrame], broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"x")])
    waits: list[int] = []

    def park(batch: DataFrame, milliseconds: int) -> None:
        waits.append(milliseconds)
        sleep_in_jvm(batch, 3_600_000)

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


def numbers(folder: Path) -> list[int]:
    """Return the batches that a folder of a checkpoint knows."""
    return sorted(int(one.name) for one in folder.iterdir() if one.name.isdecimal())


def wait_briefly(condition: Callable[[], bool], seconds: float) -> bool:
    """Tell whether a condition comes true within so many seconds."""
    try:
        return wait_until(condition, timeout=seconds)
    except AssertionError:
        return False
