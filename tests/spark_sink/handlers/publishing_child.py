"""A Spark program whose handlers publish; once, just after a transaction was committed, a part of it is killed.

Called with a `Plan` as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from penstock import Outgoing
from penstock.clients import factory
from penstock.consumer import handler
from penstock.devbroker import spark_environment
from penstock.message import Message
from penstock.spark_sink import HandlerSink, start_sink
from penstock.spark_sink.ledger.rules import Batch
from penstock.spark_sink.sinks import kafka_sink
from penstock.spark_sink.sinks.kafka_ledger import Target

#: Results of each message, and the offset at which a handler dies.
RESULTS, FATAL = 3, 50


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        servers: addresses of the brokers.
        source: topic that is read.
        target: topic of the results, and name of the sink.
        folder: for the checkpoint, and notes of what happened.
        run: stands in every result.
        kill: what dies: the task that handles a message ("handler"), the "task" that publishes, the "driver", the
            "executor"; or nothing.
    """

    servers: str
    source: str
    target: str
    folder: str
    run: str
    kill: str


def executor() -> int:
    """Return the process of this task's executor."""
    process = os.getpid()
    while "CoarseGrainedExecutorBackend" not in Path(f"/proc/{process}/cmdline").read_text():
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process


def arm(plan: Plan) -> None:
    """Have the first commit of this process, or of another that is armed, be its last."""
    if factory.Producer.__name__ == "Deadly":
        return
    folder = Path(plan.folder)

    class Deadly(factory.Producer):
        def commit_transaction(self, timeout: float = -1) -> None:
            super().commit_transaction(timeout)
            try:
                (folder / "killed").open("x").close()
            except FileExistsError:
                return
            dying = {
                "task": list,
                "driver": lambda: [int(part) for part in (folder / "driver").read_text().split()],
                "executor": lambda: [executor()],
            }[plan.kill]()
            for process in (*dying, os.getpid()):
                os.kill(process, signal.SIGKILL)

    factory.Producer = Deadly


def arm_tasks(plan: Plan) -> None:
    """Arm the processes of the tasks that publish."""

    def armed(target: Target, batch: Batch, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        arm(plan)
        return kafka_sink.publish_task(target, batch, batches)

    # Of this program, it travels by value.
    kafka_sink.publish_task = armed


def publishing(plan: Plan) -> Callable[[Message], list[Outgoing]]:
    """Return a handler whose results say which call of it they are of."""

    def work(message: Message) -> list[Outgoing]:
        call = os.urandom(8).hex()
        with (Path(plan.folder) / f"calls-{plan.run}").open("a") as file:
            file.write(f"{message.partition}/{message.offset}\n")
        if plan.kill == "handler" and message.offset == FATAL and not (Path(plan.folder) / "killed").exists():
            (Path(plan.folder) / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        said = {"run": plan.run, "call": call, "partition": message.partition, "offset": message.offset}
        return [Outgoing(plan.target, json.dumps({**said, "place": n}), key=message.key) for n in range(RESULTS)]

    return work


def session(plan: Plan) -> SparkSession:
    """Return a session in which tasks may fail, and executors are processes where one is to die."""
    os.environ.update(spark_environment())
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    settings = {
        "ui.enabled": "false", "driver.bindAddress": "127.0.0.1", "driver.host": "127.0.0.1",
        "stage.maxConsecutiveAttempts": "1", "executor.memory": "600m",
    }  # fmt: skip
    builder = SparkSession.builder.master("local-cluster[2,1,700]" if plan.kill == "executor" else "local[2,4]")
    for name, value in settings.items():
        builder = builder.config(f"spark.{name}", value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    gateway: Any = spark.sparkContext._gateway
    (Path(plan.folder) / "driver").write_text(f"{gateway.proc.pid} {os.getpid()}")
    return spark


def main(plan: Plan) -> None:
    """Run the query until it has read all; once more where it failed."""
    spark = session(plan)
    if plan.kill not in {"", "handler"}:
        arm_tasks(plan)
    sink = HandlerSink(
        {plan.source: handler(publishing(plan))},
        group="dies",
        # Where the driver dies, what one transaction holds is published, and nothing else.
        parallelism=1 if plan.kill == "driver" else 2,
        bootstrap_servers=plan.servers,
        name=plan.target,
        headers=False,
    )

    def store(batch: DataFrame, batch_id: int) -> None:
        sink(batch, batch_id)

    failures = []
    for _ in range(9):
        query = start_sink(
            spark,
            plan.source,
            store,
            bootstrap_servers=plan.servers,
            trigger="available now",
            name=plan.target,
            checkpoint_location=f"{plan.folder}/checkpoint",
        )
        try:
            assert query.awaitTermination(200)
        except Exception as error:  # noqa: BLE001 - reported to the test
            if "failed to connect back" not in str(error):  # of the source's process: see `streams.read_to_end`
                failures.append(str(error))
        else:
            break
    report = sink.last_report
    print(json.dumps({"failures": failures, "results": 0 if report is None else report.results}))  # noqa: T201 - its answer
    spark.stop()


if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])))
