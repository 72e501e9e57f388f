"""A replica of an app with one sink, as a process: `fleet_child.py SERVERS TOPIC FOLDER FILE`.

It writes what its sink says into the file, again and again, until it is killed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from penstock.app import App
from penstock.devbroker import spark_environment
from penstock.spark_sink import SqlSink


def main(servers: str, topic: str, folder: str, state_file: str) -> None:
    """Run it until it is killed."""
    os.environ.update(spark_environment(), SPARK_LOCAL_IP="127.0.0.1")
    SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    app = App(topic, bootstrap_servers=servers, config={"session.timeout.ms": 6000})

    @app.sink(
        topic,
        sink=SqlSink(f"sqlite:///{folder}/rows.db", table="rows"),
        trigger="200 milliseconds",
        checkpoint_location=f"{folder}/checkpoint",
        options={"maxOffsetsPerTrigger": "200"},
    )
    def rows(messages: DataFrame) -> DataFrame:
        return messages.selectExpr("cast(cast(value as string) as int) number", "topic", "partition", "offset")

    with app.start() as running:
        while not running.wait(0.2):
            (sink,) = running.sinks()
            new = Path(f"{state_file}.new")
            new.write_text(json.dumps({"state": sink.state.value, "text": str(sink)}))
            new.replace(state_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
