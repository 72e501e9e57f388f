"""Queries over the source answer as over a plain table of the same messages, in a batch and in a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from kafka_tools import transactional, wait_for_markers
from penstock.devbroker import DevBroker

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
COLUMNS = "key BINARY, value BINARY, timestamp TIMESTAMP"


@dataclass(frozen=True, slots=True)
class Sale:
    """A message: who bought, for how much, at which minute."""

    buyer: bytes | None
    amount: int
    minute: int

    @property
    def row(self) -> tuple[bytes | None, bytes, datetime]:
        return self.buyer, b"%d" % self.amount, BEGIN + timedelta(minutes=self.minute)


BUYERS = (b"anna", b"ben", b"carl", None)
#: An hour of messages, and the next with one that comes an hour late.
FIRST = [Sale(BUYERS[n % 4], n, n) for n in range(60)]
SECOND = [Sale(BUYERS[n % 4], n, n) for n in range(60, 120)] + [Sale(b"late", 1, 1)]
#: What nobody may see.
ABORTED = [Sale(b"anna", 1_000_000, 30), Sale(b"nobody", 1, 200)]


def totals(messages: DataFrame) -> DataFrame:
    return sales(messages).groupBy("buyer").agg(f.count("*").alias("count"), f.sum("amount").alias("sum"))


def joined(messages: DataFrame) -> DataFrame:
    cities = messages.sparkSession.createDataFrame(
        [("anna", "Oslo"), ("carl", "Rome"), ("carl", "Bonn")], "buyer STRING, city STRING"
    )
    return sales(messages).join(cities, "buyer").select("buyer", "city", "amount", "timestamp")


def windows(messages: DataFrame) -> DataFrame:
    timed = sales(messages).withWatermark("timestamp", "10 minutes")
    counted = timed.groupBy(f.window("timestamp", "15 minutes"), "buyer").agg(f.count("*").alias("count"))
    return counted.select("window.start", "window.end", "buyer", "count")


def sales(messages: DataFrame) -> DataFrame:
    return messages.selectExpr("cast(key AS STRING) buyer", "cast(cast(value AS STRING) AS LONG) amount", "timestamp")


class Shop:
    """The same messages in a topic and in a folder."""

    def __init__(self, spark: SparkSession, broker: DevBroker, topic: str, folder: Path) -> None:
        self._spark = spark
        self._servers = broker.bootstrap_servers
        self._topic = topic
        self._folder = folder
        self._producer = transactional(self._servers)

    def sell(self, some: Sequence[Sale]) -> None:
        self._transaction(some[::2])
        self._transaction(ABORTED, commit=False)
        self._transaction(some[1::2])
        table = self._spark.createDataFrame([sale.row for sale in some], COLUMNS)
        table.coalesce(1).write.mode("append").parquet(str(self._folder))

    def _transaction(self, some: Sequence[Sale], *, commit: bool = True) -> None:
        self._producer.begin_transaction()
        for number, sale in enumerate(some):
            key, value, time = sale.row
            at_ms = int(time.timestamp() * 1000)
            self._producer.produce(self._topic, key=key, value=value, partition=number % 2, timestamp=at_ms)
        assert self._producer.flush(30) == 0
        if commit:
            self._producer.commit_transaction(30)
        else:
            self._producer.abort_transaction(30)
        wait_for_markers(self._servers, self._topic)

    def source(self, *, stream: bool) -> DataFrame:
        reader = self._spark.readStream if stream else self._spark.read
        settings = {"kafka.bootstrap.servers": self._servers, "subscribe": self._topic, "startingOffsets": "earliest"}
        return reader.format("penstock").options(**settings).load()

    def table(self, *, stream: bool) -> DataFrame:
        reader = self._spark.readStream if stream else self._spark.read
        return reader.schema(COLUMNS).parquet(str(self._folder))


class Answers:
    """A streaming query, and what it has said: all rows, or where it tells everything each time, the last."""

    def __init__(self, frame: DataFrame, mode: str, checkpoint: Path) -> None:
        self._frame = frame
        self._mode = mode
        self._checkpoint = checkpoint
        self.rows: list[tuple[object, ...]] = []

    def go_on(self) -> None:
        writer = self._frame.writeStream.foreachBatch(self._take).outputMode(self._mode)
        query = writer.option("checkpointLocation", str(self._checkpoint)).trigger(availableNow=True).start()
        assert query.awaitTermination(150)

    def _take(self, frame: DataFrame, _batch_id: int) -> None:
        rows = answers(frame)
        self.rows = rows if self._mode == "complete" else sorted(self.rows + rows, key=repr)


def answers(frame: DataFrame) -> list[tuple[object, ...]]:
    return sorted(map(tuple, frame.collect()), key=repr)


@pytest.mark.parametrize(
    ("query", "mode", "in_batch", "in_stream"),
    [
        pytest.param(totals, "complete", 5, 5, marks=pytest.mark.chaos),
        pytest.param(joined, "append", 90, 90, marks=pytest.mark.chaos),
        # In a stream the late one is left out, and so is the last window, which may not be over.
        (windows, "append", 8 * 4 + 1, 7 * 4),
    ],
)
def test_the_answers_are_those_over_a_plain_table(  # noqa: PLR0917 - fixtures
    spark: SparkSession,
    broker: DevBroker,
    new_topic: Callable[..., str],
    tmp_path: Path,
    query: Callable[[DataFrame], DataFrame],
    mode: str,
    in_batch: int,
    in_stream: int,
) -> None:
    topic = new_topic(partitions=2, config={"retention.ms": "-1"})  # its messages are old
    shop = Shop(spark, broker, topic, tmp_path / "table")
    shop.sell(FIRST)
    streams = [
        Answers(query(frame), mode, tmp_path / name)
        for name, frame in (("source", shop.source(stream=True)), ("plain", shop.table(stream=True)))
    ]

    for stream in streams:
        stream.go_on()
    after_first = [stream.rows for stream in streams]
    shop.sell(SECOND)
    for stream in streams:
        stream.go_on()

    assert answers(query(shop.source(stream=False))) == answers(query(shop.table(stream=False)))
    assert after_first[0] == after_first[1] != []
    assert streams[0].rows == streams[1].rows != after_first[0]
    # The queries asked for something.
    assert (len(answers(query(shop.source(stream=False)))), len(streams[0].rows)) == (in_batch, in_stream)
