"""Totals per aircraft on a Spark cluster; penstock comes with the job: `spark-submit --py-files penstock.zip`.

    python examples/spark_cluster.py

starts a broker and a standalone cluster of one master and two workers on this machine, and submits this file to it. The
function `job` runs in the cluster; docs/spark-cluster.md says what changes on YARN, Kubernetes and Databricks.
It needs `pip install 'penstock[spark,sql,dev-broker]'`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FLIGHTS = [("N14228", 11), ("N24211", 20), ("N14228", -3), ("N619AA", 33), ("N14228", 5)]
PARTITIONS = 4
PATIENCE_S = 120.0


def job(bootstrap_servers: str, topic: str, folder: Path) -> None:
    """Read the topic on the executors, keep totals in SQLite, and print where the tasks ran."""
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql import functions as F  # noqa: N812 - Spark's customary name

    import penstock
    from penstock.spark_sink import SqlSink, register

    spark = SparkSession.builder.getOrCreate()
    register(spark)
    totals = SqlSink(
        f"sqlite:///{folder / 'totals.db'}", "totals", key=["tail"], sum_columns=["flights", "delay_minutes"]
    )

    def where(batches: Iterator[object]) -> Iterator[object]:
        import pyarrow as pa

        rows = sum(batch.num_rows for batch in batches)  # type: ignore[attr-defined] # Arrow's, which has no types
        yield pa.RecordBatch.from_pylist([{"rows": rows, "executor": str(Path.cwd()), "package": penstock.__file__}])

    def keep(batch: DataFrame, batch_id: int) -> None:
        for row in batch.mapInArrow(where, "rows LONG, executor STRING, package STRING").collect():
            print("read", row["rows"], "rows in executor", row["executor"], "with", row["package"])
        flight = F.from_json(F.col("value").cast("string"), "tail STRING, delay INT")
        rows = batch.select(flight.alias("flight"), "topic", "partition", "offset")
        totals(
            rows.selectExpr("flight.tail", "1 flights", "flight.delay delay_minutes", "topic", "partition", "offset"),
            batch_id,
        )

    query = (
        spark.readStream.format("penstock")
        .option("kafka.bootstrap.servers", bootstrap_servers)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("minPartitions", PARTITIONS)  # otherwise so few rows are one task
        .load()
        .writeStream.foreachBatch(keep)
        .queryName("totals")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    with sqlite3.connect(folder / "totals.db") as connection:
        for row in connection.execute("SELECT * FROM totals ORDER BY tail"):
            print("total", *row)
    spark.stop()


def main(bootstrap_servers: str, topic: str, folder: Path) -> None:
    """Send flights, start a cluster, and submit this file to it with the package in a zip."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap_servers, "enable.idempotence": True})
    for number, (tail, delay) in enumerate(FLIGHTS):
        producer.produce(
            topic, partition=number % PARTITIONS, key=tail, value=json.dumps({"tail": tail, "delay": delay})
        )
    producer.flush(30)
    with standalone_cluster(folder) as master:
        submit(master, packed(folder), [bootstrap_servers, topic, str(folder)])


def packed(folder: Path) -> Path:
    """Zip the package that is imported here. The executors' Python must have its dependencies."""
    import penstock

    source = Path(penstock.__file__).parent
    return Path(shutil.make_archive(str(folder / "penstock"), "zip", source.parent, source.name))


def submit(master: str, package: Path, arguments: list[str]) -> None:
    """Run this file in the cluster, as `bin/spark-submit` of the installed pyspark does."""
    command = [str(spark_home() / "bin" / "spark-submit"), "--master", master, "--py-files", str(package)]
    for setting in (
        "spark.driver.bindAddress=127.0.0.1",
        "spark.driver.host=127.0.0.1",
        "spark.executor.cores=1",  # an executor on each of the two workers
        "spark.executor.memory=512m",
        # Wait for both before reading.
        "spark.cores.max=2",
        "spark.scheduler.minRegisteredResourcesRatio=1.0",
        f"spark.scheduler.maxRegisteredResourcesWaitingTime={PATIENCE_S:g}s",
        "spark.ui.enabled=false",
    ):
        command += ["--conf", setting]
    subprocess.run([*command, __file__, *arguments], env=environment(), check=True, timeout=5 * PATIENCE_S)  # noqa: S603 - Spark's own command


@contextmanager
def standalone_cluster(folder: Path) -> Iterator[str]:
    """Run a master and two workers with one core each on this machine; yield the master's address."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        log = folder / "master.log"
        processes.append(start("master.Master", "--port", "0", log=log))
        master = seen(log, r"Starting Spark master at (spark://\S+)", processes[0])[0]
        for number in (1, 2):
            work = ["--cores", "1", "--memory", "1g", "--work-dir", str(folder / f"worker-{number}")]
            processes.append(start("worker.Worker", *work, master, log=folder / f"worker-{number}.log"))
        seen(log, r"Registering worker", processes[0], times=2)
        yield master
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(PATIENCE_S)


def start(name: str, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a daemon of Spark by its class: the wheel of pyspark has no scripts."""
    command = [str(spark_home() / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}"]
    with log.open("wb") as file:
        return subprocess.Popen(  # noqa: S603 - Spark's own command
            [*command, "--host", "127.0.0.1", "--webui-port", "0", *arguments],
            env=environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def seen(log: Path, pattern: str, process: subprocess.Popen[bytes], times: int = 1) -> list[str]:
    """Wait until a log has a pattern `times` times, and return the matches."""
    deadline = time.monotonic() + PATIENCE_S
    while len(found := re.findall(pattern, log.read_text())) < times:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{pattern!r} is not in {log}:\n{log.read_text()[-2_000:]}")
        time.sleep(0.1)
    return found


def spark_home() -> Path:
    """Return the folder of the installed Spark."""
    import pyspark

    return Path(pyspark.__file__).parent


def environment() -> dict[str, str]:
    """Return the environment of Spark's processes: a Java, and this Python, also for the executors."""
    from penstock.devbroker import spark_environment

    return {**os.environ, **spark_environment(), "SPARK_HOME": str(spark_home()), "SPARK_LOCAL_IP": "127.0.0.1"}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        job(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    else:
        from penstock.devbroker import DevBroker

        with DevBroker() as broker, tempfile.TemporaryDirectory() as temporary:
            broker.create_topic("flights", PARTITIONS)
            main(broker.bootstrap_servers, "flights", Path(temporary))
