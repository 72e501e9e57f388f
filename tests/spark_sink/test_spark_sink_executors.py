"""`SqlSink` where an executor dies in the middle of a task: real processes, really killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyspark
import pytest

from databases import TestDatabase, new_database
from penstock.devbroker import DevBroker, spark_environment

CHILD = Path(__file__).with_name("executor_child.py")

MESSAGES = [(n % 4, b"key-%d" % (n % 36), b"value-%d" % n) for n in range(4_000)]


@pytest.mark.chaos  # a JVM for the driver and each executor
@pytest.mark.timeout(500)
def test_an_executor_killed_in_its_task_changes_nothing_of_the_totals(
    broker: DevBroker, new_topic: Callable[..., str], write: Callable[..., None], postgresql_url: str, tmp_path: Path
) -> None:
    """Rows that the lost task has copied do not count, and its second try stores each row once (I9)."""
    topic = new_topic(partitions=4)
    for partition in range(4):
        write(topic, partition, [(key, value) for at, key, value in MESSAGES if at == partition])
    databases = [new_database(postgresql_url), TestDatabase("sqlite", f"sqlite:///{tmp_path / 'test.db'}")]
    # Spark's workers write into its own folder: here, into one of links to what is there.
    home = tmp_path / "spark"
    home.mkdir()
    for part in Path(pyspark.__file__).parent.iterdir():
        if part.name != "work":
            (home / part.name).symlink_to(part)
    urls = json.dumps({database.kind: database.url for database in databases})

    child = subprocess.run(
        [sys.executable, str(CHILD), broker.bootstrap_servers, topic, str(tmp_path), urls],
        # Executors begin in folders of their own, and must find the package there.
        env={**os.environ, **spark_environment(), "SPARK_LOCAL_IP": "127.0.0.1",
             "SPARK_HOME": str(home), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )  # fmt: skip

    assert child.returncode == 0, child.stderr[-4_000:]
    killed = json.loads(child.stdout.splitlines()[-1])
    assert set(killed) == {"postgresql", "sqlite"}
    assert child.stderr.count("Command exited with code 137") >= len(killed)  # Spark saw them die by SIGKILL
    totals: dict[str, tuple[int, str]] = {}
    for _, key, value in MESSAGES:
        totals[key.decode()] = (totals.get(key.decode(), (0, ""))[0] + 1, value.decode())
    for database in databases:
        found = database.rows("SELECT id, n, last FROM totals ORDER BY id")
        assert found == [(key, *total) for key, total in sorted(totals.items())]
