"""The Spark part, a process of its own: totals of each aircraft, upserted into SQLite by `SqlSink`.

    python -m penstock.demo totals BOOTSTRAP_SERVERS TOPIC FOLDER

Reports `session` when Spark runs, `ready` when its query has its sources, and `rows` as batches are done.
It ends when its standard input does.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.demo.checks.fold import Totals
from penstock.demo.children import Reporter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

TABLE = "aircraft"

#: What Spark says when the machine is too busy to start a Python worker within 10 seconds, a limit that has no option
#: (`PythonWorkerFactory.createSimpleWorker`, apache/spark#43023), and how often the query is started for that.
_WORKER_TOO_SLOW = "Python worker failed to connect back"
_STARTS = 4

#: How the message of a query's status begins before its sources are there.
_STARTING = "Initializing"

#: Seconds between two reports.
_REPORT_S = 0.3


def totals_path(folder: Path) -> Path:
    """Return the SQLite file that holds the totals."""
    return folder / "totals.sqlite"


def read_totals(folder: Path) -> dict[str, Totals]:
    """Return the totals that stand in Spark's table; none where Spark has stored no batch yet."""
    path = totals_path(folder)
    if not path.exists():
        return {}
    with closing(sqlite3.connect(path, timeout=30)) as connection:
        known = connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (TABLE,)).fetchone()
        rows = connection.execute(f"SELECT tail, flights, delay FROM {TABLE}").fetchall() if known else []  # noqa: S608 - a constant
    return {tail: Totals(flights, delay) for tail, flights, delay in rows}


def main(arguments: Sequence[str]) -> int:
    """Run the query until the parent wants the end."""
    bootstrap_servers, topic, folder = arguments[0], arguments[1], Path(arguments[2])
    reporter = Reporter()
    reporter.watch_parent()
    spark = _session(folder)
    reporter.report("session")
    try:
        _run(spark, bootstrap_servers, topic, folder, reporter)
    finally:
        spark.stop()
    return 0


def _run(spark: SparkSession, bootstrap_servers: str, topic: str, folder: Path, reporter: Reporter) -> None:
    """Run the query, and report, until the parent wants the end; raise what stops the query."""
    query = _start(spark, bootstrap_servers, topic, folder)
    starts_left = _STARTS - 1
    busy_s: dict[int, float] = {}
    while not reporter.ending.wait(_REPORT_S):
        failure = query.exception()
        if failure is not None:
            if _WORKER_TOO_SLOW not in str(failure) or not starts_left:
                raise failure
            # Starting again is safe: checkpoint and ledger know what was stored.
            starts_left -= 1
            print(f"{_WORKER_TOO_SLOW}: the query starts again", file=sys.stderr)  # noqa: T201 - the child's log
            query = _start(spark, bootstrap_servers, topic, folder)
            continue
        if not query.status["message"].startswith(_STARTING):
            reporter.report("ready")
        for progress in query.recentProgress:
            if progress.numInputRows:
                busy_s[progress.batchId] = progress.durationMs["triggerExecution"] / 1000
        stored = sum(total.flights for total in read_totals(folder).values())
        last_s = busy_s[max(busy_s)] if busy_s else None
        reporter.report("rows", count=stored, busy_s=sum(busy_s.values()), batches=len(busy_s), last_s=last_s)
    query.stop()


def _session(folder: Path) -> SparkSession:
    from pyspark.sql import SparkSession

    return (
        SparkSession.builder.master("local[2]")
        .appName("penstock-demo")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.sql.warehouse.dir", str(folder / "spark" / "warehouse"))
        .config("spark.local.dir", str(folder / "spark" / "local"))
        .getOrCreate()
    )


def _start(spark: SparkSession, bootstrap_servers: str, topic: str, folder: Path) -> StreamingQuery:
    from pyspark.sql import functions as f

    from penstock import spark_sink

    spark_sink.register(spark)
    messages = (
        spark.readStream.format("penstock")
        .option("kafka.bootstrap.servers", bootstrap_servers)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    flight = f.from_json(f.col("value").cast("string"), "tail STRING, delay BIGINT")
    flights: DataFrame = messages.select(
        "topic",
        "partition",
        "offset",
        f.coalesce(flight["tail"], f.lit("")).alias("tail"),
        f.lit(1).cast("bigint").alias("flights"),
        flight["delay"].alias("delay"),
    )
    sink = spark_sink.SqlSink(
        f"sqlite:///{totals_path(folder)}", table=TABLE, key=["tail"], sum_columns=["flights", "delay"]
    )
    return (
        flights.writeStream.foreachBatch(sink)
        .queryName("aircraft-totals")
        .option("checkpointLocation", str(folder / "spark" / "checkpoint"))
        .trigger(processingTime="1 second")
        .start()
    )
