"""`SqlSink(mode="batch")`: results of state, which come from no message, apply once by the number of their batch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException
from streams import lose_commit, run_sink

from commands import commands
from databases import TestDatabase
from penstock.devbroker import DevBroker
from penstock.errors import SinkError
from penstock.spark_sink import SqlSink
from penstock.spark_sink.sinks.sink import Origin
from penstock.spark_sink.sinks.sql import sink as sql_sink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def test_several_rows_of_one_key_are_refused_and_so_are_frames_with_a_position(
    spark: SparkSession, postgresql: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = SqlSink(postgresql.url, "totals", ["id"], mode="batch")
    twins = spark.createDataFrame([("a", 1), ("b", 1), ("a", 2)], "id STRING, n BIGINT")

    monkeypatch.setattr(sql_sink, "origin_of", lambda *_: Origin("totals"))
    with pytest.raises(SinkError, match="only streaming queries have"):
        sink(twins, 0)
    monkeypatch.setattr(sql_sink, "origin_of", lambda *_: Origin("totals", "run", "kept"))
    with pytest.raises(SinkError, match="batch 0 has several rows of one key for table totals"):
        sink(twins, 0)
    with pytest.raises(SinkError, match=r'the frame for table totals has topic, names .* mode="batch"'):
        sink(twins.withColumnRenamed("n", "topic"), 0)


def test_totals_of_windows_survive_a_repeated_batch_and_a_lost_checkpoint_is_refused(  # noqa: PLR0917 - fixtures
    spark: SparkSession,
    broker: DevBroker,
    new_topic: Callable[..., str],
    write: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    topic, begun = new_topic(), list[int]()
    database = TestDatabase("sqlite", f"sqlite:///{tmp_path / 'test.db'}")
    # Without a key each change of a total is a row, and a batch that applied twice would show.
    changes = SqlSink(database.url, "changes", mode="batch")

    def totals(messages: DataFrame) -> DataFrame:
        return (
            messages.selectExpr("window(timestamp, '10000 days').start AS begin", "CAST(key AS STRING) id")
            .groupBy("begin", "id")
            .count()
        )

    def run(checkpoint: str) -> None:
        def store(batch: DataFrame, batch_id: int) -> None:
            begun.append(batch_id)
            changes(batch, batch_id)

        given: dict[str, Any] = {"rows": totals, "output_mode": "update", "options": {"maxOffsetsPerTrigger": "20"}}
        run_sink(spark, broker.bootstrap_servers, topic, store, tmp_path / checkpoint, **given)

    def stored() -> list[tuple[str, int]]:
        return sorted(database.rows('SELECT id, "count" FROM changes'))

    write(topic, 0, [(b"%d" % (n % 2), b"") for n in range(40)])
    run("kept")
    lose_commit(tmp_path / "kept", 1)
    write(topic, 0, [(b"0", b"")] * 5)
    run("kept")
    after_repetition = stored()
    with pytest.raises(StreamingQueryException, match="does not follow what table changes holds") as lost:
        run("lost")
    refused = stored()
    (command,) = re.findall("run `penstock (sink reset [^`]+)`", str(lost.value))
    assert commands(monkeypatch, capsys)(*shlex.split(command)).code == 0
    database.execute("DELETE FROM changes")
    run("lost")

    assert begun[:4] == [0, 1, 1, 2]
    assert after_repetition == refused == stored() == [("0", 10), ("0", 20), ("0", 25), ("1", 10), ("1", 20)]
