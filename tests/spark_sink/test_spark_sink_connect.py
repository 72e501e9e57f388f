"""The source and the sinks from a Spark Connect session: a client that has no JVM, in a process of its own."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from penstock.devbroker import DevBroker, spark_environment

#: What a user writes. A session of Connect cannot share a process with one that is not.
SESSION = """
import json, sys, time
from pyspark.sql import SparkSession, functions as F
from penstock.spark_sink import ParquetSink, SqlSink, register
servers, topic, folder = sys.argv[1:]
begun = time.monotonic()
def say(what):
    print(f"{what} after {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
builder = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
spark = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
say("session")
register(spark)
options = {"kafka.bootstrap.servers": servers, "subscribe": topic}
frame = spark.read.format("penstock").options(**options).load()
facts = {"session": type(spark).__module__, "rows": frame.count()}
say("source")
table = SqlSink(f"sqlite:///{folder}/test.db", "numbers", ["n"])
lake = ParquetSink(f"{folder}/lake", keep_position=True)
words = [F.col("value").cast("string").alias("n"), "topic", "partition", "offset"]
"""

#: A batch handed over twice, by hand.
BY_HAND = """
for batch_id in (0, 1):
    for sink in (table, lake):
        sink.check(frame.select(*words).schema)
        sink(frame.select(*words), batch_id)
    say(f"batch {batch_id}")
"""

END = """
print(json.dumps(facts))
spark.stop()
"""


@pytest.fixture
def connect(
    broker: DevBroker, new_topic: Callable[..., str], write: Callable[..., None], tmp_path: Path
) -> Callable[[str], dict[str, Any]]:
    """Return a function that runs a program over a topic of 50 messages and returns the facts it reports."""

    def run(program: str) -> dict[str, Any]:
        topic = new_topic(partitions=2)
        for partition in (0, 1):
            write(topic, partition, [(None, b"%d" % n) for n in range(partition, 50, 2)])
        environment = {**os.environ, **spark_environment(), "SPARK_LOCAL_IP": "127.0.0.1"}
        for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "PYSPARK_GATEWAY_PORT"):
            environment.pop(name, None)
        done = subprocess.run(
            [sys.executable, "-c", SESSION + program + END, broker.bootstrap_servers, topic, str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-8000:]
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return facts

    return run


def stored(folder: Path) -> tuple[list[int], list[int], int]:
    """Return what the table holds, what the folder holds, and the number of its batches."""
    with sqlite3.connect(folder / "test.db") as database:
        table = sorted(int(n) for (n,) in database.execute("SELECT n FROM numbers"))
    lake = sorted(int(n) for n in pq.read_table(folder / "lake").column("n").to_pylist())
    return table, lake, len(list((folder / "lake").glob("penstock_batch=*")))


@pytest.mark.chaos  # it has a JVM of its own: a minute
@pytest.mark.timeout(400)
def test_the_source_and_the_sinks_take_a_connect_session(
    connect: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    facts = connect(BY_HAND)

    assert facts["session"].startswith("pyspark.sql.connect")
    assert facts["rows"] == 50
    assert stored(tmp_path) == (list(range(50)), list(range(50)), 1)  # the second time nothing was stored
