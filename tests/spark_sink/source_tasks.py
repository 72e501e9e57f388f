"""The source without Spark around it: options of a query, the ranges of its tasks, and what reading them gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException
from pyspark.sql.datasource import InputPartition

from penstock.devbroker import DevBroker
from penstock.spark_sink.source import source
from penstock.spark_sink.source.brokers import View
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.plan import Log, OffsetRange, Offsets, TopicPartition
from penstock.spark_sink.source.pool import WorkerPool
from penstock.spark_sink.source.reading import KeptConsumer, read_ranges
from penstock.spark_sink.source.source import BatchReader, StreamReader


class Clock:
    """Seconds moved by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeBrokers:
    """An `OffsetReader` over topics of one partition, or as many as in `counts`, with the logs of a test."""

    def __init__(self, *, counts: Mapping[str, int] | None = None, **logs: Log) -> None:
        self.log_of = dict(logs)
        self.counts = dict.fromkeys(logs, 1) | dict(counts or {})
        self.ids = {topic: f"{topic} now" for topic in logs}
        #: Topics that are not shown, each with the brokers' answer.
        self.hidden: dict[str, int] = {}
        self.expected: list[set[str]] = []

    def first_view(self) -> View:
        assert not self.hidden
        return self._view()

    def view(self, expected: Collection[str] = ()) -> View:
        self.expected.append(set(expected))
        return self._view()

    def _view(self) -> View:
        seen = {topic: log for topic, log in self.log_of.items() if topic not in self.hidden}
        logs = {(topic, number): log for topic, log in seen.items() for number in range(self.counts[topic])}
        refused = {topic: KafkaException(KafkaError(code)) for topic, code in self.hidden.items()}
        return View(logs, {topic: self.ids[topic] for topic in seen}, refused)

    def at_time(self, _time_ms: int, parts: Iterable[TopicPartition]) -> Offsets:
        return {part: self.log_of[part[0]].end for part in parts}


def stream_over(brokers: FakeBrokers, clock: Callable[[], float] = time.monotonic, **options: str) -> StreamReader:
    """Return a stream's reader that asks these brokers."""
    reader = StreamReader(_options_over(brokers, options), clock)
    asked: Any = brokers
    reader._kafka = asked
    return reader


def batch_over(monkeypatch: pytest.MonkeyPatch, brokers: FakeBrokers, **options: str) -> BatchReader:
    """Return a batch query's reader that asks these brokers."""
    monkeypatch.setattr(source, "OffsetReader", lambda _: brokers)
    return BatchReader(_options_over(brokers, options))


def _options_over(brokers: FakeBrokers, options: Mapping[str, str]) -> SourceOptions:
    topics = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": ",".join(brokers.counts)}
    return SourceOptions.parse({**topics, **options})


def options_for(broker: DevBroker, topic: str | None = None, **options: str) -> SourceOptions:
    """Return the options of a query, over one topic or as the options say."""
    chosen = {} if topic is None else {"subscribe": topic}
    return SourceOptions.parse({"kafka.bootstrap.servers": broker.bootstrap_servers, **chosen, **options})


def ranges(tasks: Iterable[InputPartition]) -> list[OffsetRange]:
    """Return what tasks read."""
    return [part for task in tasks for part in task.value]


def batches_read(options: SourceOptions, *wanted: OffsetRange) -> list[pa.RecordBatch]:
    """Read a task."""
    pool = WorkerPool[KeptConsumer]()
    try:
        return list(read_ranges(options, wanted, pool))
    finally:
        pool.close()


def rows_of(batches: Iterable[pa.RecordBatch]) -> dict[TopicPartition, dict[int, bytes | None]]:
    """Return the values of each partition by their offsets, in their order."""
    found: dict[TopicPartition, dict[int, bytes | None]] = {}
    for read in batches:
        for row in read.to_pylist():
            found.setdefault((row["topic"], row["partition"]), {})[row["offset"]] = row["value"]
    return found


def offsets_read(options: SourceOptions, wanted: OffsetRange) -> list[int]:
    """Read a range; return the offsets of its rows."""
    return [offset for read in batches_read(options, wanted) for offset in read["offset"].to_pylist()]
