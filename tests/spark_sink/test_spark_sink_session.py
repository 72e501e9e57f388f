"""What a session gets from penstock: its Python, an environment that stands still, a log that shows the sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from kafka_tools import produce
from penstock.devbroker import DevBroker, spark_environment
from penstock.spark_sink import register, session
from penstock.spark_sink.session import environment_of, use_this_python
from waiting import wait_until

CHILD = Path(__file__).with_name("python_child.py")


@pytest.mark.parametrize(
    ("master", "named", "executable"),
    [
        ("local[2]", "", sys.executable),
        ("local-cluster[2,1,700]", "", sys.executable),
        ("local[2]", "/opt/python", "python3"),
        ("spark://host:7077", "", "python3"),
    ],
)
def test_on_a_local_master_workers_run_the_python_of_this_process(
    monkeypatch: pytest.MonkeyPatch, master: str, named: str, executable: str
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", named)
    monkeypatch.setattr(session, "is_classic", lambda _: True)
    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(master=master, pythonExec="python3"))

    use_this_python(spark)

    assert spark.sparkContext.pythonExec == executable


def bare_environment(folder: Path) -> dict[str, str]:
    """Return an environment in which `python3` is one that has no package at all."""
    bare = folder / "bin" / "python3"
    bare.parent.mkdir()
    # Without site-packages, as a system's Python that nobody has installed anything into.
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYSPARK", "SPARK"))}
    java = {key: value for key, value in spark_environment().items() if key != "PYSPARK_PYTHON"}
    return {**kept, **java, "PATH": f"{bare.parent}:{os.environ['PATH']}", "SPARK_LOCAL_IP": "127.0.0.1"}


@pytest.mark.timeout(400)
def test_a_plain_job_reads_without_pyspark_python(
    broker: DevBroker, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    """Take a Spark of its own: some 15 s on a quiet machine."""
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"read")])

    done = subprocess.run(
        [sys.executable, str(CHILD), broker.bootstrap_servers, topic],
        env=bare_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-4_000:]
    assert done.stdout.splitlines()[-1] == "[b'read']"


def test_the_start_of_a_query_leaves_the_environment_that_all_queries_share_as_it_is(
    spark: SparkSession,
    broker: DevBroker,
    new_topic: Callable[..., str],
    read: Callable[..., DataFrame],
    tmp_path: Path,
) -> None:
    """While Spark adds to it, tasks of another query are serialized with it: they cannot be read then."""
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"v")])
    register(spark)
    before = set(environment_of(spark, "penstock").keySet())
    read_rows: list[int] = []

    frame = read(stream=True, subscribe=topic, startingOffsets="earliest")
    query = (
        frame.writeStream.foreachBatch(lambda batch, _: read_rows.append(batch.count()))
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(150)

    environment: Mapping[str, str] = dict(environment_of(spark, "penstock"))
    assert read_rows == [1]
    assert environment.keys() == before
    assert environment["SPARK_LOCAL_DIRS"], "Spark has put its own values there"
    assert wait_until(lambda: not query.isActive)
