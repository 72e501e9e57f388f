"""The source and the sinks from a Spark Connect session: a client that has no JVM, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lakes import DeltaLake, IcebergLake

from databases import TestDatabase, new_database
from kafka_tools import read_all
from penstock.devbroker import DevBroker, spark_environment

#: What a user writes. A session of Connect cannot share a process with one that is not.
SESSION = """
import json, sys, time
from pyspark.sql import SparkSession, functions as F
from penstock.spark_sink import SqlSink, register
servers, topic, folder, *more = sys.argv[1:]
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
words = [F.col("value").cast("string").alias("n"), "topic", "partition", "offset"]
"""

#: A stream into every sink there is.
STREAMS = """
from penstock.consumer import handler
from penstock.spark_sink import DeltaSink, HandlerSink, IcebergSink, KafkaSink, start_sink
url, copy, catalog = more
def rows(messages):
    return messages.selectExpr("cast(value as string) n", "topic", "partition", "offset")
def write_down(message):
    with open(f"{folder}/handled", "a") as file:
        file.write(message.value.decode() + chr(10))
sinks = {
    "sqlite": (table, rows),
    "postgresql": (SqlSink(url, "numbers", ["n"]), rows),
    "iceberg": (IcebergSink("db.events", json.loads(catalog), ["n"], name="copy"), rows),
    "delta": (DeltaSink(f"{folder}/table", ["n"], name="copy"), rows),
    "kafka": (KafkaSink(servers, copy, name="copy"), None),
    "handler": (HandlerSink({topic: handler(write_down)}, group="g", parallelism=2), None),
}
for name, (sink, shape) in sinks.items():
    query = start_sink(
        spark, topic, sink, rows=shape, bootstrap_servers=servers, trigger="available now", name=name,
        checkpoint_location=f"{folder}/checkpoint-{name}", options={"includeHeaders": "true"},
    )
    facts[name] = [query.awaitTermination(150), str(query.exception())]
    say(name)
"""

END = """
print(json.dumps(facts))
spark.stop()
"""


@pytest.fixture
def connect(
    broker: DevBroker, new_topic: Callable[..., str], write: Callable[..., None], tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """Return a function that runs a program over a topic of 50 messages and returns the facts it reports."""

    def run(program: str, *more: str) -> dict[str, Any]:
        topic = new_topic(partitions=2)
        for partition in (0, 1):
            write(topic, partition, [(None, b"%d" % n) for n in range(partition, 50, 2)])
        environment = {**os.environ, **spark_environment(), "SPARK_LOCAL_IP": "127.0.0.1"}
        for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "PYSPARK_GATEWAY_PORT"):
            environment.pop(name, None)
        done = subprocess.run(
            [sys.executable, "-c", SESSION + program + END, broker.bootstrap_servers, topic, str(tmp_path), *more],
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


@pytest.mark.chaos  # the same, and six queries
@pytest.mark.timeout(900)
def test_streams_of_a_connect_session_fill_every_sink(
    connect: Callable[..., dict[str, Any]],
    broker: DevBroker,
    new_topic: Callable[..., str],
    postgresql_url: str,
    tmp_path: Path,
) -> None:
    database, copy, all_of_them = new_database(postgresql_url), new_topic(), list(range(50))
    delta, iceberg = DeltaLake(tmp_path), IcebergLake(tmp_path)

    facts = connect(STREAMS, database.url, copy, json.dumps(iceberg.catalog))

    assert facts["session"].startswith("pyspark.sql.connect")
    for name in ("sqlite", "postgresql", "iceberg", "delta", "kafka", "handler"):
        assert facts[name] == [True, "None"], name
    for found in (
        TestDatabase("sqlite", f"sqlite:///{tmp_path / 'test.db'}").rows("SELECT n FROM numbers"),
        database.rows("SELECT n FROM numbers"),
        delta.found("n"),
        iceberg.found("n"),
    ):
        assert sorted(int(n) for (n,) in found) == all_of_them
    copied = read_all(broker.bootstrap_servers, copy)
    assert sorted(int(message.value() or b"") for message in copied) == all_of_them
    assert sorted(map(int, (tmp_path / "handled").read_text().split())) == all_of_them
