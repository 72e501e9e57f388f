"""Streaming queries that end when they have read all messages, on a machine that may be busy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from penstock.spark_sink import start_sink

#: Seconds for a query to read some hundred rows, and how often Spark may fail to start the source's process.
SPARK_S, TRIES = 300.0, 20


def read_to_end(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Start a query, wait for its end and return it.

    Spark gives the process of a streaming source ten seconds to start, a fixed number
    (`PythonWorkerFactory.createSimpleWorker`); PySpark's imports alone may take longer. Nothing was read then, and the
    query is started again.
    """
    for _ in range(TRIES):
        query = start()
        try:
            assert query.awaitTermination(int(SPARK_S)), "the query has not read the log within its time"
        except StreamingQueryException as error:
            if "failed to connect back" not in str(error):
                raise
        else:
            return query
    raise AssertionError(f"Spark could not start the source's process {TRIES} times")


def run_sink(
    spark: SparkSession, servers: str, topic: str, function: Any, checkpoint: Path, **settings: Any
) -> StreamingQuery:
    """Let a sink, or a function, store the messages of a topic; the query has the topic's name."""
    given: dict[str, Any] = {
        "bootstrap_servers": servers,
        "trigger": "available now",
        "name": topic,
        "checkpoint_location": str(checkpoint),
        **settings,
    }
    return read_to_end(lambda: start_sink(spark, topic, function, **given))


def lose_commit(checkpoint: Path, batch_id: int) -> None:
    """Remove Spark's own note that a batch was done: it hands that batch over again."""
    newest = checkpoint / "commits" / str(batch_id)
    newest.unlink()
    newest.with_name(f".{batch_id}.crc").unlink()
