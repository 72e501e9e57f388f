"""`SqlSink` under real faults (I9): drivers and servers killed, two copies of a query. Three minutes: marked chaos.

The file is its own child: started as a program it runs one query until it has read what is there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from databases import TestDatabase
from penstock.devbroker import DevBroker, spark_environment
from waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.chaos

#: Messages of ten keys, each key in one partition.
PARTITIONS, ROWS = 2, 600
#: Seconds a child may take on a loaded machine.
CHILD_S = 280


def run_query(
    spark: SparkSession, plan: dict[str, Any], gate: Callable[[int], None], after: Callable[[int], None]
) -> None:
    """Run the query of a plan; `gate` is called before each batch is stored, `after` when it is."""
    from pyspark.sql import functions as F  # noqa: N812 - Spark's customary name

    from penstock.spark_sink import SqlSink, start_sink

    sink = SqlSink(plan["url"], "totals", ["id"], sum_columns=["n"])

    def store(batch: DataFrame, batch_id: int) -> None:
        gate(batch_id)
        key, value = (F.col(name).cast("string") for name in ("key", "value"))
        columns = [key.alias("id"), F.lit(1).alias("n"), value.alias("last"), "topic", "partition", "offset"]
        sink(batch.select(*columns), batch_id)
        after(batch_id)

    query = start_sink(
        spark,
        plan["topic"],
        store,
        bootstrap_servers=plan["bootstrap"],
        trigger="available now",
        name="totals",
        checkpoint_location=plan["checkpoint"],
        options={"maxOffsetsPerTrigger": str(plan["most"])},
    )
    assert query.awaitTermination(CHILD_S), "the query has not read the log within its time"


def child(plan: dict[str, Any]) -> None:
    """Run one query in a session of its own; die, or wait for the other copy, where the plan says so."""
    from pyspark.sql import SparkSession

    logging.basicConfig(level=logging.WARNING)
    os.environ.update(spark_environment())
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    settings = {"ui.enabled": "false", "driver.host": "127.0.0.1", "driver.bindAddress": "127.0.0.1"}
    builder = SparkSession.builder.master("local[2]")
    for name, value in settings.items():
        builder = builder.config(f"spark.{name}", value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    gateway: Any = spark.sparkContext._gateway
    Path(plan["jvm"]).write_text(str(gateway.proc.pid), encoding="utf-8")

    def gate(batch_id: int) -> None:
        if batch_id == 0 and plan["ready"] is not None:
            Path(plan["ready"]).touch()
            wait_until(Path(plan["go"]).exists, CHILD_S)

    def after(batch_id: int) -> None:
        if batch_id == plan["dies_after"]:
            os.kill(os.getpid(), signal.SIGKILL)

    run_query(spark, plan, gate, after)
    spark.stop()


class Children:
    """Starts children and sees to it that nothing of them is left."""

    def __init__(self, broker: DevBroker, topic: str, database: TestDatabase, folder: Path) -> None:
        self.database, self.folder = database, folder
        self.plan = {"bootstrap": broker.bootstrap_servers, "topic": topic, "url": database.url, "ready": None}
        self.started: list[tuple[subprocess.Popen[str], Path]] = []

    def start(self, name: str, **options: Any) -> subprocess.Popen[str]:
        """Start a child with a checkpoint of that name."""
        jvm = self.folder / f"jvm-{len(self.started)}"
        plan = {**self.plan, "checkpoint": str(self.folder / name), "jvm": str(jvm), "dies_after": None, "most": 200}
        arguments = [sys.executable, __file__, json.dumps(plan | options)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment)
        self.started.append((process, jvm))
        return process

    def end(self, process: subprocess.Popen[str]) -> str:
        """Wait for a child and its JVM, and return what it said."""
        _, said = process.communicate(timeout=CHILD_S)
        jvm = dict(self.started)[process]
        wait_until(lambda: not Path(f"/proc/{jvm.read_text(encoding='utf-8')}").exists(), CHILD_S)
        return said

    def table(self) -> list[tuple[Any, ...]]:
        """Return the table."""
        return self.database.rows("SELECT id, n, last FROM totals ORDER BY id")

    def stop(self) -> None:
        """Kill what still runs."""
        for process, jvm in self.started:
            process.kill()
            process.wait()
            if jvm.exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(jvm.read_text(encoding="utf-8")), signal.SIGKILL)


@pytest.fixture
def topic(new_topic: Callable[..., str], write: Callable[..., None]) -> str:
    """A topic that holds the log."""
    name = new_topic(partitions=PARTITIONS)
    for partition in range(PARTITIONS):
        rows = [(b"key-%d" % (n % 10), b"%d" % n) for n in range(ROWS) if n % 10 % PARTITIONS == partition]
        write(name, partition, rows)
    return name


@pytest.fixture
def children(broker: DevBroker, topic: str, database: TestDatabase, tmp_path: Path) -> Iterator[Children]:
    """Children over the log, on each kind of database."""
    made = Children(broker, topic, database, tmp_path)
    yield made
    made.stop()


def expected() -> list[tuple[str, int, str]]:
    """Fold the log by a plain loop."""
    totals: dict[str, tuple[int, str]] = {}
    for n in range(ROWS):
        key = f"key-{n % 10}"
        totals[key] = (totals.get(key, (0, ""))[0] + 1, str(n))
    return [(key, *total) for key, total in sorted(totals.items())]


@pytest.mark.timeout(900)
def test_a_driver_killed_after_the_sink_s_commit_and_before_spark_s(children: Children) -> None:
    dying = children.start("checkpoint", dies_after=1)
    said = children.end(dying)

    assert dying.returncode == -signal.SIGKILL, said
    assert (children.folder / "checkpoint" / "commits" / "0").exists()
    assert (children.folder / "checkpoint" / "offsets" / "1").exists()
    assert not (children.folder / "checkpoint" / "commits" / "1").exists()
    stored = sum(row[1] for row in children.table())
    assert 200 < stored <= 400  # the second batch is in the table

    again = children.start("checkpoint")
    said = children.end(again)

    assert again.returncode == 0, said
    assert "batch 1: 200 of 200 rows for table totals were applied before" in said
    assert children.table() == expected()


if __name__ == "__main__":
    child(json.loads(sys.argv[1]))
