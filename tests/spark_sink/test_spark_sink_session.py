"""What a session gets from penstock: its Python, and a log that shows the sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_tools import produce
from penstock.devbroker import DevBroker, spark_environment
from penstock.spark_sink.source import session
from penstock.spark_sink.source.session import use_this_python


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
    # Without site-packages, as a system's Python without installed packages.
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYSPARK", "SPARK"))}
    java = {key: value for key, value in spark_environment().items() if key != "PYSPARK_PYTHON"}
    return {**kept, **java, "PATH": f"{bare.parent}:{os.environ['PATH']}", "SPARK_LOCAL_IP": "127.0.0.1"}


RUN = """
import pathlib
import penstock.app

here = pathlib.Path.cwd()
app = penstock.app.App("{topic}", bootstrap_servers="{servers}")

@app.sink("{topic}", trigger="100 milliseconds", name="store", restarts=0, checkpoint_location=str(here / "checkpoint"))
def store(batch, batch_id):
    (here / "rows").write_text(str([bytes(row.value) for row in batch.collect()]))
    # Fails on a worker, as a bad row would: Spark writes a stack for each of its parts.
    batch.selectExpr("raise_error('no room')").collect()
"""


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_penstock_run_finds_its_python_and_says_in_a_sentence_why_a_sink_ended(
    broker: DevBroker, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    """Take a Spark of its own: some 15 s on a quiet machine."""
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"read")])
    (tmp_path / "shop.py").write_text(RUN.format(topic=topic, servers=broker.bootstrap_servers))

    done = subprocess.run(
        [sys.executable, "-m", "penstock", "run", "shop:app"],
        cwd=tmp_path,
        env=bare_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )

    assert (tmp_path / "rows").read_text() == "[b'read']", done.stderr[-4_000:]
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("penstock: the query store ended: ")
    assert "no room" in last
    assert "Stage 0:" not in done.stderr, "progress bars are for terminals"
    assert "ERROR MicroBatchExecution" not in done.stderr
    assert "ERROR Executor" not in done.stderr
    assert "at org.apache.spark" not in done.stderr
    assert "INFO py4j" not in done.stderr
    assert "replaced a previously registered" not in done.stderr
