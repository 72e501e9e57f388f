"""A Spark program whose handlers live in `__main__`, as with spark-submit: one task's process dies once in the middle.

Called with a folder for the handlers' logs; prints the batch's report as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from penstock.consumer import WorkerResource, handler
from penstock.devbroker import spark_environment
from penstock.message import Message
from penstock.spark_sink.sinks.handlers.sink import HandlerSink

FOLDER = Path(sys.argv[1])
ROWS = 2000
#: The task that has this message dies of it, once.
FATAL = ROWS * 3 // 4


def open_log() -> Iterator[TextIO]:
    """A file for each process, closed at the end of each task."""
    with (FOLDER / f"{os.getpid()}.log").open("a") as file:
        yield file
    (FOLDER / f"{os.getpid()}.closed").touch()


log = WorkerResource(open_log)  # type: ignore[arg-type] # a generator function, as the decorator takes it


def work(message: Message) -> None:
    """Write the message down; die at one, the first time it comes."""
    begun = time.time()
    if message.offset == FATAL and not (FOLDER / "died").exists():
        (FOLDER / "died").write_text(str(os.getpid()))
        log.get().flush()
        os._exit(3)
    key = (message.key or b"").decode()
    log.get().write(json.dumps([key, message.partition, message.offset, os.getpid(), begun, time.time()]) + "\n")


def main() -> None:
    """Run one batch."""
    os.environ.update(spark_environment())
    spark = (
        # A task may fail three times.
        SparkSession.builder.master("local[2,4]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    number = f.col("id")
    key = f.when(number % 5 == 0, "hot").otherwise(f.concat(f.lit("k"), (number % 83).cast("string")))
    frame = spark.range(0, ROWS, 1, 2).select(
        key.cast("binary").alias("key"),
        f.lit("x").cast("binary").alias("value"),
        f.lit("orders").alias("topic"),
        f.lit(0).alias("partition"),
        number.alias("offset"),
    )
    sink = HandlerSink({"orders": handler(work)}, group="dies", parallelism=3, resources=(log,), headers=False)
    sink(frame, 7)
    report = sink.last_report
    assert report is not None
    expected: dict[str, list[int]] = {}
    for one in frame.select("key", "offset").collect():
        expected.setdefault(bytes(one.key).decode(), []).append(one.offset)
    print(json.dumps({"tasks": [asdict(task) for task in report.tasks], "expected": expected}))  # noqa: T201 - its answer
    spark.stop()


if __name__ == "__main__":
    main()
