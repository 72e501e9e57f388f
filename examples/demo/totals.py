"""Totals of each aircraft, in a table that Spark writes: a separate process with Spark inside.

    python -m demo.totals BOOTSTRAP_SERVERS

`SqlSink` stores the rows of a batch and its position in one SQL transaction, so each flight counts once.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from demo.airline import TOPIC
from demo.flights import Flight
from penstock import App
from penstock.devbroker import spark_environment
from penstock.spark_sink import SqlSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_DATABASE, _TABLE, _CHECKPOINT = "totals.sqlite", "aircraft", "checkpoint"

#: A small Spark, because the machine also runs everything else.
_SPARK = (
    "--master local[2] --driver-memory 1g --conf spark.ui.enabled=false --conf spark.sql.shuffle.partitions=2 "
    "--conf spark.driver.host=127.0.0.1 --conf spark.driver.bindAddress=127.0.0.1 --conf spark.local.dir=spark "
    "--conf spark.python.unix.domain.socket.enabled=true pyspark-shell"
)

#: The table's values of one aircraft: number of departed flights, and sum of their minutes of delay.
Totals = tuple[int, int]


def plain_totals(flights: Iterable[Flight]) -> dict[str, Totals]:
    """Return the totals of each aircraft. Flights without an aircraft are summed under the empty name."""
    totals: dict[str, Totals] = {}
    for flight in flights:
        if flight.departed:
            count, delay = totals.get(flight.tail or "", (0, 0))
            totals[flight.tail or ""] = count + 1, delay + flight.delay
    return totals


def read_totals(folder: Path) -> dict[str, Totals]:
    """Return the totals in Spark's table; empty if Spark has stored no batch yet."""
    with closing(sqlite3.connect(folder / _DATABASE, timeout=30)) as connection:
        known = connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (_TABLE,)).fetchone()
        rows = connection.execute(f"SELECT tail, flights, delay FROM {_TABLE}").fetchall() if known else []  # noqa: S608 - a constant
    return {tail: (flights, delay) for tail, flights, delay in rows}


def query_runs(folder: Path) -> bool:
    """Return whether Spark's query has started: then there is a checkpoint."""
    return (folder / _CHECKPOINT / "metadata").exists()


def _rows(messages: DataFrame) -> DataFrame:
    """Make a row of each message. The sink uses topic, partition and offset to count each row once."""
    from pyspark.sql import functions as F  # noqa: N812 - the usual name

    flight = F.from_json(F.col("value").cast("string"), "tail STRING, delay BIGINT")
    tail = F.coalesce(flight["tail"], F.lit("")).alias("tail")
    flights = F.lit(1).cast("bigint").alias("flights")
    return messages.select("topic", "partition", "offset", tail, flights, flight["delay"].alias("delay"))


if __name__ == "__main__":
    os.environ.update(spark_environment(), PYSPARK_SUBMIT_ARGS=_SPARK)
    app = App("aircraft-totals", bootstrap_servers=sys.argv[1], report=True)
    sink = SqlSink(f"sqlite:///{_DATABASE}", table=_TABLE, key=["tail"], sum_columns=["flights", "delay"])
    app.sink(TOPIC, sink=sink, trigger="1 second", name="aircraft-totals", checkpoint_location=_CHECKPOINT)(_rows)
    app.run()
