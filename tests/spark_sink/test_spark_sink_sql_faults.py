"""`SqlSink` and a driver that is killed (I9): a Spark of its own, twice for each database.

The file is its own child: started as a program it runs one query until it has read what is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from databases import TestDatabase
from penstock.devbroker import DevBroker, spark_environment
from waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Messages of ten keys, each key in one partition.
PARTITIONS, ROWS = 2, 600
#: Seconds a child may take on a loaded machine.
CHILD_S = 280


def child(plan: dict[str, Any]) -> None:
    """Run one query in a session of its own; die when the batch is stored that the plan names."""
    from pyspark.sql import SparkSession
    from streams import run_sink

    from penstock.spark_sink import SqlSink

    os.environ.update(spark_environment())
    settings = {"ui.enabled": "false", "driver.host": "127.0.0.1", "driver.bindAddress": "127.0.0.1"}
    builder = SparkSession.builder.master("local[2]")
    for name, value in settings.items():
        builder = builder.config(f"spark.{name}", value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    gateway: Any = spark.sparkContext._gateway
    Path(plan["jvm"]).write_text(str(gateway.proc.pid), encoding="utf-8")
    sink = SqlSink(plan["url"], "totals", ["id"], sum_columns=["n"])

    def store(batch: DataFrame, batch_id: int) -> None:
        columns = ("cast(key AS STRING) id", "1 n", "cast(value AS STRING) last", "topic", "partition", "offset")
        sink(batch.selectExpr(*columns), batch_id)
        if batch_id == plan["dies_after"]:
            os.kill(os.getpid(), signal.SIGKILL)

    most = {"maxOffsetsPerTrigger": "200"}
    run_sink(spark, plan["bootstrap"], plan["topic"], store, Path(plan["checkpoint"]), options=most)
    spark.stop()


def run(plan: dict[str, Any], dies_after: int | None) -> subprocess.CompletedProcess[str]:
    """Run a child to its end, and wait until its JVM has gone."""
    jvm = Path(plan["jvm"])
    jvm.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            [sys.executable, __file__, json.dumps(plan | {"dies_after": dies_after})],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=CHILD_S,
            check=False,
        )
        wait_until(lambda: not Path(f"/proc/{jvm.read_text(encoding='utf-8')}").exists(), CHILD_S)
    finally:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int(jvm.read_text(encoding="utf-8")), signal.SIGKILL)
    return done


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_driver_killed_after_the_sink_s_commit_and_before_spark_s(
    broker: DevBroker,
    new_topic: Callable[..., str],
    write: Callable[..., None],
    database: TestDatabase,
    tmp_path: Path,
) -> None:
    topic, checkpoint, totals = new_topic(partitions=PARTITIONS), tmp_path / "checkpoint", dict[str, tuple[int, str]]()
    for n in range(ROWS):
        totals[f"key-{n % 10}"] = (totals.get(f"key-{n % 10}", (0, ""))[0] + 1, str(n))
    for partition in range(PARTITIONS):
        write(topic, partition, [(b"key-%d" % (n % 10), b"%d" % n) for n in range(partition, ROWS, PARTITIONS)])
    plan = {"bootstrap": broker.bootstrap_servers, "topic": topic, "url": database.url, "jvm": str(tmp_path / "jvm"),
            "checkpoint": str(checkpoint)}  # fmt: skip

    dying = run(plan, dies_after=1)
    stored = database.rows("SELECT sum(n) FROM totals")[0][0]
    begun = {name: (checkpoint / name / "1").exists() for name in ("offsets", "commits")}
    again = run(plan, dies_after=None)

    assert dying.returncode == -signal.SIGKILL, dying.stderr
    assert begun == {"offsets": True, "commits": False}
    assert 200 < stored <= 400  # the second batch is in the table
    assert again.returncode == 0, again.stderr
    assert "batch 1: 200 of 200 rows for table totals were applied before" in again.stderr
    found = database.rows("SELECT id, n, last FROM totals ORDER BY id")
    assert found == [(key, *total) for key, total in sorted(totals.items())]


if __name__ == "__main__":
    child(json.loads(sys.argv[1]))
