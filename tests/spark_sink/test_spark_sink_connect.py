"""The source from a Spark Connect session: a client process without a JVM; sinks are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from penstock.devbroker import DevBroker, spark_environment

#: What a user writes. A session of Connect cannot share a process with one that is not.
PROGRAM = """
import json, sys
from pyspark.sql import SparkSession
from penstock.errors import ConfigurationError
from penstock.spark_sink import SqlSink, register, start_sink
servers, topic = sys.argv[1:]
builder = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
spark = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
register(spark)
options = {"kafka.bootstrap.servers": servers, "subscribe": topic}
frame = spark.read.format("penstock").options(**options).load()
facts = {"session": type(spark).__module__, "rows": frame.count()}
try:
    start_sink(spark, topic, SqlSink("sqlite:///shop.db", "orders"), bootstrap_servers=servers, name="orders")
except ConfigurationError as error:
    facts["refused"] = str(error)
print(json.dumps(facts))
spark.stop()
"""


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_a_connect_session_reads_the_source_and_is_refused_as_that_of_sinks(
    broker: DevBroker, new_topic: Callable[..., str], write: Callable[..., None]
) -> None:
    topic = new_topic(partitions=2)
    for partition in (0, 1):
        write(topic, partition, [(None, b"%d" % n) for n in range(25)])
    environment = {**os.environ, **spark_environment(), "SPARK_LOCAL_IP": "127.0.0.1"}
    for name in ("SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "PYSPARK_GATEWAY_PORT"):
        environment.pop(name, None)

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, broker.bootstrap_servers, topic],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-8000:]
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert facts["session"].startswith("pyspark.sql.connect")
    assert facts["rows"] == 50
    assert "this one is of Spark Connect: run the program where the driver runs" in facts["refused"]
