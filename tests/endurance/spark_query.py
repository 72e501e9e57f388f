"""The Spark query of the endurance campaign: published messages of the store in Kafka into a table of PostgreSQL."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pyspark
from child import begin, options, stopping
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from penstock.devbroker import spark_environment
from penstock.spark_sink import SqlSink, start_sink

_LOOK_S = 0.5
_log = logging.getLogger("spark_query")


def session() -> SparkSession:
    """Return a session of two threads."""
    # Spark has its workers import PySpark from a zip, which keeps nothing compiled: three times the CPU for each.
    python = Path(options["folder"]) / "python"
    packages = Path(pyspark.__file__).parents[1]
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    os.environ.update(spark_environment())
    os.environ |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": str(python)}
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": f"{options['folder']}/spark",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.python.authenticate.socketTimeout": "300s",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    }
    builder = SparkSession.builder.master("local[2]").appName("endurance")
    for name, value in settings.items():
        builder = builder.config(name, value)
    made = builder.getOrCreate()
    made.sparkContext.setLogLevel("ERROR")
    return made


def rows(messages: DataFrame) -> DataFrame:
    """Return a row for each message; a row that is stored twice counts twice."""
    name = "concat(get_json_object(string(value), '$.id'), '/', get_json_object(string(value), '$.part')) AS name"
    return messages.selectExpr(name, "1 AS times", "topic", "partition", "offset")


def start(spark: SparkSession) -> StreamingQuery:
    """Start the query, which goes on where its ledger and its checkpoint say."""
    return start_sink(
        spark,
        ["kafka-target", "kafka-second"],
        SqlSink(options["sqlalchemy"], "stored", key=["name"], sum_columns=["times"]),
        rows=rows,
        bootstrap_servers=options["bootstrap_servers"],
        trigger="2 seconds",
        name="stored",
        checkpoint_location=f"{options['folder']}/checkpoint",
    )


begin()
made = session()
query = start(made)
while not stopping.is_set():
    try:
        query.awaitTermination(_LOOK_S)
    except StreamingQueryException as error:
        # As a supervisor would, and as the queries of an app are: Spark ends one whose planner is 10 s late.
        _log.warning("the query ended and starts again: %s", error)
        query = start(made)
query.stop()
