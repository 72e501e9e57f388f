"""A Spark program whose handlers lose an executor while a task on another one is at work.

Called with a folder for the handlers' notes and the stage attempts that Spark may make. A key's handler goes on for as
long as nobody handles the key a second time, so that Spark has all the time to do so.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from penstock.consumer import handler
from penstock.devbroker import spark_environment
from penstock.message import Message
from penstock.spark_sink.sinks.handlers import sink as handler_sink

FOLDER, ATTEMPTS = Path(sys.argv[1]), sys.argv[2]
#: Seconds that a handler waits for another one of its key; Spark starts a new executor within them.
WAIT_S = 90.0


def is_alive(pid: int) -> bool:
    """Tell whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def executor() -> int:
    """Return the process of this task's executor."""
    process = os.getpid()
    while "CoarseGrainedExecutorBackend" not in Path(f"/proc/{process}/cmdline").read_text():
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process


def only_one(name: str, pid: int) -> bool:
    """Tell whether nobody was here before; the file of that name then holds the process, whole from the beginning."""
    mine = FOLDER / f"{name}-{os.getpid()}"
    mine.write_text(str(pid))
    try:
        (FOLDER / name).hardlink_to(mine)
    except FileExistsError:
        return False
    return True


def work(message: Message) -> None:
    """Note who handles the key beside whom; the first of two to come last kills its executor."""
    folder = FOLDER / (message.key or b"").decode()
    others = [int(path.name) for path in folder.iterdir()]
    (folder / str(os.getpid())).touch()
    for pid in others:
        with (FOLDER / "second").open("a") as file:
            file.write(json.dumps([folder.name, is_alive(pid)]) + "\n")
    deadline = time.monotonic() + WAIT_S
    if others:
        return
    if only_one("first", executor()):
        while len(list(folder.iterdir())) == 1 and time.monotonic() < deadline:
            time.sleep(0.1)
    elif executor() != int((FOLDER / "first").read_text()) and only_one("killed", executor()):
        os.kill(executor(), signal.SIGKILL)


def main() -> None:
    """Run one batch, again and again until it is done."""
    os.environ.update(spark_environment())
    settings = {
        "executor.memory": "600m", "ui.enabled": "false", "driver.bindAddress": "127.0.0.1",
        "driver.host": "127.0.0.1", "stage.maxConsecutiveAttempts": ATTEMPTS,
    }  # fmt: skip
    builder = SparkSession.builder.master("local-cluster[2,1,700]")
    for name, value in settings.items():
        builder = builder.config(f"spark.{name}", value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    keys = [f"k{n}" for n in range(8)]
    for key in keys:
        (FOLDER / key).mkdir()
    frame = spark.range(0, len(keys), 1, 2).select(
        f.concat(f.lit("k"), f.col("id").cast("string")).cast("binary").alias("key"),
        f.lit(b"x").alias("value"),
        f.lit("orders").alias("topic"),
        f.lit(0).alias("partition"),
        f.col("id").alias("offset"),
    )
    sink = handler_sink.HandlerSink({"orders": handler(work)}, group="lost", parallelism=2, headers=False)
    failures = []
    # The fault is shown with the setting that is refused.
    with mock.patch.object(handler_sink, "refuse_double_runs"):
        for _ in range(3):
            try:
                sink(frame, 0)
            except Exception as error:  # noqa: BLE001 - told to the test
                failures.append(str(error))
            else:
                break
    print(json.dumps(failures))  # noqa: T201 - its answer
    spark.stop()


if __name__ == "__main__":
    main()
