"""`ParquetSink` on real files: each row once (I9), a batch whole or not at all, whatever is repeated or killed."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

import pyarrow.parquet as pq
import pytest
from checkpoints import lose_commit
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name under which everybody knows it

from penstock.devbroker import DevBroker, spark_environment
from penstock.errors import ConfigurationError, SinkError
from penstock.spark_sink import ParquetSink, start_sink
from penstock.spark_sink.ledger.folder_ledger import STAGING, FolderLedger, FolderState
from penstock.spark_sink.sinks.sink import ledger_positions
from waiting import wait_until

FrameOf = Callable[..., DataFrame]


def numbers(first: int, last: int, partition: int = 0) -> list[tuple[int, int, int]]:
    """Return rows of one column that repeats the offset."""
    return [(partition, offset, offset) for offset in range(first, last + 1)]


def found(folder: Path) -> list[int]:
    """Return what a plain Parquet reader sees of the column `n`."""
    return sorted(pq.read_table(folder).column("n").to_pylist()) if folder.is_dir() and batches(folder) else []


def batches(folder: Path) -> list[str]:
    """Return the names of the batches that are visible."""
    return sorted(path.name for path in folder.glob("penstock_batch=*"))


@dataclass(frozen=True)
class Place:
    """Where a query reads from and writes to."""

    spark: SparkSession
    servers: str
    topic: str
    folder: Path


@pytest.fixture
def place(spark: SparkSession, broker: DevBroker, new_topic: Callable[..., str], tmp_path: Path) -> Place:
    """A topic of two partitions and a folder."""
    return Place(spark, broker.bootstrap_servers, new_topic(partitions=2), tmp_path)


def test_a_replayed_batch_and_a_lost_checkpoint_store_nothing_twice(
    place: Place, write: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    spark, topic, folder, seen, calls = place.spark, place.topic, place.folder / "lake", list[int](), [1]
    sink = ParquetSink(str(folder))

    def store(batch: DataFrame, batch_id: int) -> None:
        for _ in range(calls[-1]):
            seen.append(batch_id)
            sink(batch.withColumn("n", F.col("value").cast("string").cast("int")).drop("key", "value"), batch_id)

    def run(checkpoint: str) -> None:
        query = start_sink(
            spark,
            topic,
            store,
            bootstrap_servers=place.servers,
            trigger="available now",
            name=topic,
            checkpoint_location=str(place.folder / checkpoint),
        )
        assert query.awaitTermination(150)

    for start in (0, 60):
        for partition in (0, 1):
            values = range(start + partition, start + 60, 2)
            write(topic, partition, [(None, b"%d" % n) for n in values])
        run("checkpoint")
    lose_commit(place.folder / "checkpoint", 1)
    run("checkpoint")

    assert seen == [0, 1, 1]  # the batch really came twice
    assert "60 of 60 rows for folder" in caplog.text
    assert found(folder) == list(range(120))

    write(topic, 0, [(None, b"120")])
    calls.append(2)
    with pytest.raises(StreamingQueryException, match=r"batch 0 was given to folder .* twice: rows of .*\[0\]"):
        run("another checkpoint")

    assert seen == [0, 1, 1, 0, 0]
    assert "120 of 121 rows for folder" in caplog.text
    assert found(folder) == list(range(121))
    assert batches(folder) == ["penstock_batch=1", "penstock_batch=2", "penstock_batch=3"]
    ledger = json.loads((folder / "penstock_batch=3" / "_ledger.json").read_text())
    assert ledger["queries"][topic]["next_offsets"] == {topic: {"0": 61, "1": 60}}
    assert sink.position(topic) == {(topic, 0): 61, (topic, 1): 60}
    assert sorted(spark.read.parquet(str(folder)).columns) == ["n", "penstock_batch", "timestamp", "timestampType"]


def test_readers_see_all_of_a_batch_or_nothing(
    spark: SparkSession, frame_of: FrameOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, looks = tmp_path / "lake", list[tuple[int, int, int]]()
    sink = ParquetSink(str(folder), keep_position=True)
    publish = FolderLedger.publish

    def look_first(ledger: FolderLedger, staged: Path, after: FolderState) -> bool:
        written = pq.read_table(staged).num_rows
        by_spark = spark.read.parquet(str(folder)).count() if batches(folder) else 0
        looks.append((written, len(found(folder)), by_spark))
        return publish(ledger, staged, after)

    sink(frame_of("n INT", numbers(0, 99)), 0)
    monkeypatch.setattr(FolderLedger, "publish", look_first)
    sink(frame_of("n INT", numbers(100, 149)).repartition(3), 1)

    assert looks == [(50, 100, 100)]  # all of it was on the disk, and no reader saw any
    assert found(folder) == list(range(150))
    assert not any((folder / STAGING).iterdir())


def test_a_writer_that_fails_between_stage_and_rename_leaves_nothing_to_be_seen(
    frame_of: FrameOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, staged = tmp_path / "lake", list[int]()
    sink = ParquetSink(str(folder))
    sink(frame_of("n INT", numbers(0, 9)), 0)

    def broken(path: Path, _target: Path) -> Path:
        staged.append(pq.read_table(path).num_rows)
        raise OSError(errno.EIO, "the disk is gone")

    frame = frame_of("n INT", numbers(10, 19))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", broken)
        with pytest.raises(SinkError, match="took no batch 2: the disk is gone"):
            sink(frame, 1)
    after_failure = found(folder)
    sink(frame_of("n INT", numbers(5, 19)), 1)

    assert staged == [10]
    assert after_failure == list(range(10))
    assert found(folder) == list(range(20))


def test_two_copies_of_a_query_by_mistake_store_each_row_once(
    frame_of: FrameOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, outcomes, together = tmp_path / "lake", list[bool](), Barrier(2)
    sink = ParquetSink(str(folder))
    publish = FolderLedger.publish

    def meet(ledger: FolderLedger, staged: Path, after: FolderState) -> bool:
        if after.number == 1:
            together.wait(60)  # both have written, and both believe that theirs is the first batch
        outcomes.append(publish(ledger, staged, after))
        return outcomes[-1]

    monkeypatch.setattr(FolderLedger, "publish", meet)
    frames = [frame_of("n INT", numbers(0, 69)), frame_of("n INT", numbers(0, 99))]
    with ThreadPoolExecutor(2) as copies:
        list(copies.map(lambda frame: sink(frame, 0), frames))

    assert outcomes.count(False) == 1  # one of the two really came second
    assert found(folder) == list(range(100))


def test_two_queries_fill_one_folder_and_neither_writes_its_rows_again_for_the_other_s_batch(
    frame_of: FrameOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (ParquetSink(str(tmp_path), name=name) for name in ("one", "other"))
    frames = {one: frame_of("n INT", numbers(0, 4)), other: frame_of("n INT", numbers(100, 104))}
    publish, staged = FolderLedger.publish, list[tuple[str, int]]()

    def interfere(ledger: FolderLedger, folder: Path, after: FolderState) -> bool:
        if not staged:
            staged.append(("", 0))
            other(frames[other], 0)  # between the first one's look at the ledger and its rename
        staged.append((folder.name, after.number))
        return publish(ledger, folder, after)

    monkeypatch.setattr(FolderLedger, "publish", interfere)
    one(frames[one], 0)
    for sink in (one, other):
        sink(frames[sink], 1)

    assert found(tmp_path) == [*range(5), *range(100, 105)]
    assert [number for _, number in staged[1:]] == [1, 1, 2]
    assert staged[2][0] == staged[3][0]  # written once
    assert ledger_positions(one, "", [("orders", 0)]) == {("orders", 0): 5}
    assert ledger_positions(other, "", [("orders", 0), ("orders", 1)]) == {("orders", 0): 105}


def test_columns_become_folders_and_any_name_is_a_name(frame_of: FrameOf, spark: SparkSession, tmp_path: Path) -> None:
    sink = ParquetSink(f"file://{tmp_path}/lake", ["the day"], keep_position=True)
    columns = "`the day` STRING, `a``b.c` INT, n INT"

    sink(frame_of(columns, [(0, 0, "x/y", 1, 5), (3, 7, "z", 2, 6)]), 0)
    sink(frame_of(columns, []), 1)
    sink(frame_of(columns, [(3, 8, None, None, 7)]), 2)

    rows = spark.read.parquet(str(tmp_path / "lake")).orderBy("n").collect()
    assert [(row["the day"], row["a`b.c"], row["partition"], row["offset"]) for row in rows] == [
        ("x/y", 1, 0, 0),
        ("z", 2, 3, 7),
        (None, None, 3, 8),
    ]
    assert [row["penstock_batch"] for row in rows] == [1, 1, 2]


def test_what_a_writer_left_behind_goes_after_a_day_and_not_before(frame_of: FrameOf, tmp_path: Path) -> None:
    old, young = tmp_path / STAGING / "old", tmp_path / STAGING / "young"
    for left in (old, young):
        left.mkdir(parents=True)
        (left / "part-0.parquet").write_bytes(b"PAR1")
    os.utime(old, (1, 1))

    ParquetSink(str(tmp_path))(frame_of("n INT", numbers(0, 3)), 0)

    assert [left.exists() for left in (old, young)] == [False, True]
    assert found(tmp_path) == [0, 1, 2, 3]


def test_frames_and_folders_that_cannot_be_are_refused_with_a_sentence(frame_of: FrameOf, tmp_path: Path) -> None:
    sink = ParquetSink(str(tmp_path), ["day"])
    frame = frame_of("day STRING, n INT", [(0, 0, "x", 1)])

    sink.check(frame.schema)
    with pytest.raises(SinkError, match="lacks offset, day"):
        sink.check(frame.drop("day", "offset").schema)
    with pytest.raises(SinkError, match="no column to store"):
        sink.check(frame.drop("n").schema)
    with pytest.raises(SinkError, match="penstock_batch, a name the sink needs"):
        sink(frame.withColumn("penstock_batch", F.lit(1)), 0)
    with pytest.raises(SinkError, match=r"column offset of the frame for folder .* is NULL"):
        sink(frame.withColumn("offset", F.lit(None).cast("bigint")), 0)
    sink(frame, 0)
    (tmp_path / "penstock_batch=1" / "_ledger.json").write_text("{")
    with pytest.raises(SinkError, match=r"penstock_batch=1/_ledger.json, the ledger of the newest batch, cannot be"):
        sink(frame, 1)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"folder": " "}, "folder must be a name"),
        ({"folder": "s3a://bucket/lake"}, "at s3a, .* DeltaSink"),
        ({"partition_by": ["offset"]}, "keep_position"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        ParquetSink(**{"folder": "lake"} | settings)


def test_a_sink_can_be_pickled() -> None:
    sink = ParquetSink("lake", "day")

    assert pickle.loads(pickle.dumps(sink)) == sink  # noqa: S301 - the test's own bytes


#: A driver that stores one batch and is killed between the second one's stage and its rename.
KILLED = """
import os, signal, sys
from pathlib import Path
from pyspark.sql import SparkSession
from penstock.spark_sink import ParquetSink
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
print("jvm", spark.sparkContext._gateway.proc.pid, flush=True)
def frame(first, last):
    rows = [("orders", 0, offset, offset) for offset in range(first, last + 1)]
    return spark.createDataFrame(rows, "topic STRING, partition INT, offset BIGINT, n INT")
sink = ParquetSink(sys.argv[1])
sink(frame(0, 9), 0)
Path.rename = lambda path, target: os.kill(os.getpid(), signal.SIGKILL)
sink(frame(10, 19), 1)
"""


@pytest.mark.chaos
def test_a_driver_killed_between_stage_and_rename_leaves_nothing_to_be_seen(frame_of: FrameOf, tmp_path: Path) -> None:
    """A driver of its own: about 15 seconds."""
    environment = {**os.environ, **spark_environment(), "SPARK_LOCAL_IP": "127.0.0.1"}
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    jvm = int(child.stdout.split()[1])
    wait_until(lambda: not Path(f"/proc/{jvm}").exists(), 60)
    staged = list((tmp_path / STAGING).iterdir())
    after_kill = found(tmp_path)
    ParquetSink(str(tmp_path))(frame_of("n INT", numbers(0, 19)), 1)

    assert child.returncode == -signal.SIGKILL
    assert [pq.read_table(one).num_rows for one in staged] == [10]  # it was whole, and was not made visible
    assert after_kill == list(range(10))
    assert found(tmp_path) == list(range(20))


@pytest.fixture(autouse=True)
def _warnings_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "penstock.spark_sink")
