"""Runs queries and sinks whose options hold secrets, with Spark's event log on and all its log on standard error.

Its last line on standard output is JSON: plan, error and progress as a user sees them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from penstock.errors import SinkError
from penstock.spark_sink import DeadLetters, KafkaSink, SqlSink, register

#: Settings that carry secrets; no name here but the second is one that Spark hides by itself.
SECRET = (
    "ssl.key.pem",
    "sasl.password",
    "sasl.username",
    "sasl.oauthbearer.config",
    "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.extensions",
    "ssl.certificate.pem",
)


#: An address without a server.
UNREACHABLE = "postgresql://someone:{canary}@127.0.0.1:1/db?password={canary}&sslpassword={canary}"


def main(servers: str, topic: str, folder: Path, canary: str, *sinks: str) -> None:
    database, copy = sinks
    (folder / "events").mkdir()
    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.eventLog.enabled", "true")
        .config("spark.eventLog.dir", str(folder / "events"))
        .config("spark.eventLog.compress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("INFO")
    register(spark)
    options = {"kafka.bootstrap.servers": servers, **{f"kafka.{name}": canary for name in SECRET}}

    letters = DeadLetters(servers, config={"sasl.password": canary})
    table = SqlSink(database, "letters", ["value"], dead_letters=letters)
    copied = KafkaSink(servers, copy, name=topic, config={"sasl.password": canary})
    errors: list[str] = []

    def look(batch: DataFrame, batch_id: int) -> None:
        table(batch.select("value", "topic", "partition", "offset"), batch_id)
        copied(batch.select("value", "topic", "partition", "offset"), batch_id)
        try:
            SqlSink(UNREACHABLE.format(canary=canary), "t", tries=1)(
                batch.select("topic", "partition", "offset", "value"), batch_id
            )
        except SinkError as raised:
            errors.append(str(raised))

    query = (
        spark.readStream.format("penstock")
        .options(
            **options, subscribe=topic, startingOffsets="earliest", **{"kafka.isolation.level": "read_uncommitted"}
        )
        .load()
        .writeStream.queryName("secrets")
        .foreachBatch(look)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(100)
    frame = spark.read.format("penstock").options(**options, subscribe=topic).load()
    plan = frame._jdf.queryExecution().toString()
    frame.explain(mode="extended")
    frame.count()
    try:
        spark.read.format("penstock").options(**options, subscribe="no-such-topic").load().count()
        error = "none"
    except PySparkException as raised:
        error = str(raised)
    report = {
        "plan": plan,
        "error": error,
        "sinks": errors,
        "progress": json.dumps(dict(query.lastProgress or {}), default=str),
    }
    spark.stop()
    print(json.dumps(report))  # noqa: T201 - a child's report


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
