"""The Spark part, a process of its own: totals of each aircraft, upserted into SQLite by `SqlSink`.

    python examples/demo totals BOOTSTRAP_SERVERS TOPIC FOLDER REPORT_INTERVAL

Reports `session` when Spark runs, and `rows` as batches are done. Ends at SIGTERM.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from demo.children import Reporter
from demo.fold import Totals
from penstock import App, ReportSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TABLE = "aircraft"

#: Seconds between two reports.
_REPORT_S = 0.3


def read_totals(folder: Path) -> dict[str, Totals]:
    """Return the totals that stand in Spark's table; none where Spark has stored no batch yet."""
    path = _path(folder)
    if not path.exists():
        return {}
    with closing(sqlite3.connect(path, timeout=30)) as connection:
        known = connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (TABLE,)).fetchone()
        rows = connection.execute(f"SELECT tail, flights, delay FROM {TABLE}").fetchall() if known else []  # noqa: S608 - a constant
    return {tail: (flights, delay) for tail, flights, delay in rows}


def main(arguments: Sequence[str]) -> int:
    """Run the sink until the parent wants the end."""
    from penstock import spark_sink

    bootstrap_servers, topic, folder = arguments[0], arguments[1], Path(arguments[2])
    report = ReportSettings(interval=float(arguments[3])) if arguments[3] else False
    reporter = Reporter()
    spark = _session(folder)
    reporter.report("session")
    app = App("aircraft-totals", bootstrap_servers=bootstrap_servers, report=report)
    sink = spark_sink.SqlSink(f"sqlite:///{_path(folder)}", table=TABLE, key=["tail"], sum_columns=["flights", "delay"])
    checkpoint = str(folder / "spark" / "checkpoint")
    app.sink(topic, sink=sink, trigger="1 second", name="aircraft-totals", checkpoint_location=checkpoint)(_rows)
    batch_id, busy_s = None, 0.0
    with app.start() as running:
        while not reporter.ending.wait(_REPORT_S) and not running.wait(0):
            (statistics,) = running.sinks()
            if statistics.batch_id != batch_id:
                batch_id, busy_s = statistics.batch_id, busy_s + statistics.batch_seconds
            stored = sum(flights for flights, _ in read_totals(folder).values())
            reporter.report("rows", count=stored, busy_s=busy_s)
    spark.stop()
    return 0


def _path(folder: Path) -> Path:
    return folder / "totals.sqlite"


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


def _rows(messages: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    flight = f.from_json(f.col("value").cast("string"), "tail STRING, delay BIGINT")
    return messages.select(
        "topic",
        "partition",
        "offset",
        f.coalesce(flight["tail"], f.lit("")).alias("tail"),
        f.lit(1).cast("bigint").alias("flights"),
        flight["delay"].alias("delay"),
    )
