"""The query of a batch and its plan, as sinks find them in Spark's own properties."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import pytest
from pyspark.sql import DataFrame
from streams import read_to_end

from penstock.errors import SinkError
from penstock.spark_sink import SqlSink
from penstock.spark_sink.sinks.sink import Origin, merged, origin_of, planned_offsets

#: What Spark says of a query's batch.
RUNNING = {"streaming.sql.batchId": "0", "spark.jobGroup.id": "run", "sql.streaming.queryId": "7"}


def batch_of(**properties: str) -> Any:
    """Return a batch whose session has these local properties."""
    return mock.Mock(**{"sparkSession.sparkContext.getLocalProperty.side_effect": properties.get})


def test_a_name_that_spark_does_not_tell_or_have_is_an_error_unless_the_sink_has_one() -> None:
    changed, unnamed = batch_of(**RUNNING), batch_of(**RUNNING)
    changed.sparkSession._jsparkSession.sharedState.side_effect = AttributeError
    unnamed.sparkSession._jsparkSession.sharedState().activeStreamingQueries().get().name.return_value = None

    with pytest.raises(SinkError, match=r"does not tell the name of the query.*give the sink name="):
        origin_of(changed)
    assert origin_of(changed, "own") == Origin("own", "run", "7")
    with pytest.raises(SinkError, match=r'the query has no name.*write \.queryName\("orders"\) before \.start\(\), or'):
        SqlSink("sqlite:///never-made.db", "orders")(unnamed, 0)


def test_what_was_planned_is_what_all_sources_say_of_a_partition() -> None:
    kafka = ('{"t": {"0": 5, "1": 7}}', '{"t": {"0": 9, "1": 7, "2": 4}}')

    assert merged([kafka, ('{"logOffset":1}', '{"logOffset":2}'), ("0", "1")]) == {
        ("t", 0): (5, 9), ("t", 1): (7, 7), ("t", 2): (0, 4)
    }  # fmt: skip
    assert merged([kafka, ('{"t": {"0": 6, "1": 7}}', '{"t": {"0": 9, "1": 7}}')]) == {
        ("t", 1): (7, 7),
        ("t", 2): (0, 4),
    }
    assert merged([("{}", '{"t": {"0": -1}}')]) == {}


def test_without_a_query_that_runs_nothing_is_known_of_a_plan(caplog: pytest.LogCaptureFixture) -> None:
    query_id = str(uuid.uuid4())

    assert origin_of(batch_of()) == Origin()
    assert planned_offsets(batch_of(), 0, Origin()) == {}
    assert planned_offsets(mock.Mock(spec=["sparkSession"]), 0, Origin("q", "run", query_id)) == {}


def test_spark_says_of_a_batch_its_query_and_what_was_planned_behind_a_filter_and_in_an_empty_batch(
    read: Callable[..., DataFrame], new_topic: Callable[..., str], write: Callable[..., None], tmp_path: Path
) -> None:
    topic, origins, plans = new_topic(partitions=2), list[Origin](), list[Any]()
    name = "id = 1\nrunId = 2<br/>\nbatch = 3"
    write(topic, 0, [(None, b"x")] * 5)

    def look(batch: DataFrame, batch_id: int) -> None:
        copied = batch.sparkSession.createDataFrame([(1,)], "n INT")  # of a plan of its own
        plans.append([planned_offsets(frame, batch_id, origin_of(batch)) for frame in (batch, copied)])
        thread = Thread(target=lambda: origins.append(origin_of(batch)))
        thread.start()
        thread.join()
        origins.append(origin_of(batch))

    def run() -> Origin:
        frame = read(stream=True, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger="3")
        writer = frame.where("offset = 4").writeStream.foreachBatch(look).queryName(name)
        query = read_to_end(writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start)
        return Origin(name, str(query.runId), str(query.id))

    first = run()
    write(topic, 1, [(None, b"y")])
    second = run()

    wanted = [
        {(topic, 0): (0, 3), (topic, 1): (0, 0)},
        {(topic, 0): (3, 5), (topic, 1): (0, 0)},
        {(topic, 0): (5, 5), (topic, 1): (0, 1)},
    ]
    assert plans == [[plan, plan] for plan in wanted]
    assert origins == [Origin(), first, Origin(), first, Origin(), second]
