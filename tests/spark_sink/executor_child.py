"""Runs a query on executors that are processes of their own, of which one is killed by its own task.

Its last line on standard output is JSON: the process that was killed, for each name given.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from penstock.spark_sink import SqlSink, start_sink

Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def deadly(marker: Path) -> Task:
    """Return a task that kills its executor, the first time, when it has handed rows on."""

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            if not marker.exists():
                process = os.getpid()
                while "CoarseGrainedExecutorBackend" not in Path(f"/proc/{process}/cmdline").read_text():
                    process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
                marker.write_text(str(process))
                os.kill(process, signal.SIGKILL)

    return task


def main(servers: str, topic: str, folder: Path, urls: dict[str, str]) -> None:
    spark = (
        SparkSession.builder.master("local-cluster[2,1,700]")
        .config("spark.executor.memory", "600m")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    killed = {}
    for name, url in urls.items():
        marker = folder / f"killed-{name}"

        def rows(messages: DataFrame, marker: Path = marker) -> DataFrame:
            made = messages.selectExpr(
                "cast(key as string) id", "1 n", "cast(value as string) last", "topic", "partition", "offset"
            )
            return made.mapInArrow(deadly(marker), made.schema)

        query = start_sink(
            spark,
            topic,
            SqlSink(url, "totals", ["id"], sum_columns=["n"]),
            rows=rows,
            bootstrap_servers=servers,
            trigger="available now",
            name=name,
            checkpoint_location=str(folder / f"checkpoint-{name}"),
            options={"maxOffsetsPerTrigger": "1500"},
        )
        query.awaitTermination(200)
        killed[name] = int(marker.read_text())
    spark.stop()
    print(json.dumps(killed))  # noqa: T201 - a child's report


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]))
