"""Which query a batch comes from, as sinks find it: by Spark's own words, by `start_sink`, and under Connect."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any
from unittest import mock

import pytest
from pyspark.sql import DataFrame
from streams import read_to_end

from penstock.errors import SinkError
from penstock.spark_sink.sinks import sink as sinks
from penstock.spark_sink.sinks.sink import OfQuery, Origin, origin_of


class Connected:
    """A batch of a Connect session, which refuses to tell of its context."""

    @property
    def sparkSession(self) -> Any:  # noqa: N802 - Spark's name
        """A session without a context."""
        return mock.Mock(spec=["streams"])


#: What Spark says of a query's batch.
RUNNING = {"streaming.sql.batchId": "0", "spark.jobGroup.id": "run", "sql.streaming.queryId": "7"}


def batch_of(**properties: str) -> Any:
    """Return a batch whose session has these local properties."""
    return mock.Mock(**{"sparkSession.sparkContext.getLocalProperty.side_effect": properties.get})


@pytest.mark.thorough
def test_a_query_s_name_and_run_are_what_spark_says(
    read: Callable[..., DataFrame], new_topic: Callable[..., str], write: Callable[..., None]
) -> None:
    topic, found = new_topic(), list[Origin]()
    write(topic, 0, [(None, b"x")])
    name = "id = 1\nrunId = 2<br/>\nbatch = 3"  # the worst of names

    def look(batch: DataFrame, _batch_id: int) -> None:
        found.append(origin_of(batch))
        thread = Thread(target=lambda: found.append(origin_of(batch)))
        thread.start()
        thread.join()

    for writer in (read(stream=True, subscribe=topic, startingOffsets="earliest").writeStream for _ in range(2)):
        named = writer.queryName(name) if not found else writer
        query = read_to_end(named.foreachBatch(look).trigger(availableNow=True).start)
        assert found[-2:] == [Origin(name if len(found) == 2 else "", str(query.runId)), Origin()]


def test_a_query_that_start_sink_started_is_known_by_its_name_there() -> None:
    found = list[Origin]()
    look: Callable[[Any, int], None] = lambda batch, _: found.append(origin_of(batch))  # noqa: E731 - shorter

    OfQuery(look, "named")(batch_of(), 0)
    OfQuery(look, "named")(batch_of(**RUNNING), 0)
    look(batch_of(), 0)

    assert found == [Origin("named"), Origin("named", "run"), Origin()]


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("by Spark 4.3\nid = 7\nrunId = run\nbatch = 0", "by Spark 4.3"),
        ("before it<br/>id = 7<br/>runId = run<br/>batch = 0", "before it"),
        ("\nid = 7\nrunId = run\nbatch = 0", ""),
        ("id = 7<br/>runId = run<br/>batch = 0", ""),
    ],
)
def test_a_name_that_spark_tells_in_another_way_is_an_error_unless_the_sink_has_one(said: str, name: str) -> None:
    assert origin_of(batch_of(**RUNNING | {"spark.job.description": said})).query == name

    changed = batch_of(**RUNNING | {"spark.job.description": f"query {said}."})
    with pytest.raises(SinkError, match=r"does not tell the name of the query.*give the sink name="):
        origin_of(changed)
    assert origin_of(changed, "own") == Origin("own", "run")


def test_under_connect_the_run_is_that_of_the_process_that_calls_functions_of_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch: Any = Connected()
    by_hand = origin_of(batch)
    monkeypatch.setenv("SPARK_CONNECT_LOCAL_URL", "sc://127.0.0.1:1/")

    first, again = origin_of(batch), origin_of(batch)
    sinks._process_run.cache_clear()  # as in another process
    other = origin_of(batch)

    assert by_hand == Origin()
    assert first == again
    assert None not in (first.run, other.run)
    assert first.run != other.run
