"""Rows of the source's columns, made by hand, and a task's work on them without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.consumer import DeadLetterLimit, Handler, retry
from penstock.message import Message
from penstock.spark_sink.sinks.handlers.execution.dead_letters import DeadLetterSettings
from penstock.spark_sink.sinks.handlers.execution.report import TaskReport
from penstock.spark_sink.sinks.handlers.execution.rows import LANE
from penstock.spark_sink.sinks.handlers.publishing.result_rows import ORDER, ResultRows, published_rows, report_of
from penstock.spark_sink.sinks.handlers.task import TaskWork
from penstock.spark_sink.sinks.kafka_publisher import Row as Published

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("timestampType", pa.int32()),
        ("headers", HEADERS),
        (LANE, pa.int32()),
    ]
)


@dataclass(frozen=True)
class Row:
    """One row."""

    key: bytes | None
    offset: int
    topic: str = "orders"
    partition: int = 0
    value: bytes | None = b"v"
    headers: Sequence[tuple[str, bytes]] | None = None
    timestamp_us: int = 1_700_000_000_123_000
    append_time: bool = False
    lane: int = 0

    def columns(self) -> dict[str, Any]:
        """Return it by column."""
        return {
            "topic": self.topic,
            "partition": self.partition,
            "offset": self.offset,
            "key": self.key,
            "value": self.value,
            "timestamp": self.timestamp_us,
            "timestampType": int(self.append_time),
            "headers": None
            if self.headers is None
            else [{"key": name, "value": value} for name, value in self.headers],
            LANE: self.lane,
        }


def batches_of(rows: Sequence[Row], size: int = 3) -> Iterator[pa.RecordBatch]:
    """Return rows as record batches of a few."""
    for begin in range(0, len(rows), size):
        part = rows[begin : begin + size]
        yield pa.RecordBatch.from_pylist([one.columns() for one in part], schema=SCHEMA)


def run_task(
    rows: Sequence[Row],
    handlers: Mapping[str, Handler],
    *,
    producer: Mapping[str, Any] | None = None,
    limit: DeadLetterLimit | None = None,
    results: ResultRows | None = None,
    **options: Any,
) -> TaskReport:
    """Run a task over rows in this thread."""
    work = {
        "middlewares": (),
        "lifespans": (),
        "resources": (),
        "max_parked": 1000,
        "max_parked_bytes": 1 << 25,
        "max_concurrency": 100,
        **options,
    }
    letters = DeadLetterSettings("billing", dict(producer or {}), limit)
    made = TaskWork(handlers=handlers, dead_letters=letters, **work)
    return made.run(batches_of(rows), task=2, attempt=1, results=results)


def publish_task(
    rows: Sequence[Row], handlers: Mapping[str, Handler], *, whole: bool = False, **options: Any
) -> tuple[list[Published], TaskReport]:
    """Run a task whose sink publishes; return what it gives, in the order in which that is published."""
    reports: list[str] = []
    with closing(ResultRows(whole=whole)) as results:
        report = run_task(rows, handlers, results=results, **options)
        table = pa.Table.from_batches(list(results.batches(report)))
    table = table.sort_by([(name, "ascending") for name in ORDER])
    found = list(published_rows(iter(table.to_batches()), reports))
    assert [report_of(one) for one in reports] == [report]
    return found, report


ONCE = retry(1)


def quickly(attempts: int = 3) -> Any:
    return retry(attempts, wait=lambda _: 0.001)


def failing(message: Message) -> None:
    raise ValueError(f"no use for {message.offset}")
