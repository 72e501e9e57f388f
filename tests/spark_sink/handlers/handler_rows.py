"""Rows of the source's columns, made by hand, and a task's work on them without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import pyarrow as pa

from penstock.consumer import Handler, retry
from penstock.message import Message
from penstock.spark_sink import HandlerSink
from penstock.spark_sink.sinks.handlers.engine import handle
from penstock.spark_sink.sinks.handlers.results import BatchReport
from penstock.spark_sink.sinks.handlers.rows import LANE
from penstock.spark_sink.sinks.kafka_publisher import Row as Published
from penstock.spark_sink.sinks.kafka_sink import ORDER, rows_of

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
    timestamp: int = 1_700_000_000_123_000
    timestampType: int = 0  # noqa: N815 - the column's name
    lane: int = 0

    def columns(self) -> dict[str, Any]:
        """Return it by column."""
        headers = self.headers and [{"key": name, "value": value} for name, value in self.headers]
        return {**asdict(self), "headers": headers, LANE: self.lane}


def batches_of(rows: Sequence[Row], size: int = 3) -> Iterator[pa.RecordBatch]:
    """Return rows as record batches of a few."""
    for begin in range(0, len(rows), size):
        part = rows[begin : begin + size]
        yield pa.RecordBatch.from_pylist([one.columns() for one in part], schema=SCHEMA)


def run_task(rows: Sequence[Row], handlers: Mapping[str, Handler], **options: Any) -> BatchReport:
    """Run a task over rows in this thread."""
    return publish_task(rows, handlers, publishes=False, **options)[1]


def publish_task(
    rows: Sequence[Row], handlers: Mapping[str, Handler], *, publishes: bool = True, **options: Any
) -> tuple[list[Published], BatchReport]:
    """Run a task whose sink publishes; return its results in their publishing order."""
    reports: list[bytes] = []
    if publishes:
        options |= {"name": "billing", "bootstrap_servers": "nowhere:1"}
    with mock.patch.object(HandlerSink, "_require_picklable"):
        sink = HandlerSink(handlers, group="billing", parallelism=1, **options)
    table = pa.Table.from_batches(list(handle(sink, publishes, batches_of(rows))))
    table = table.sort_by([(name, "ascending") for name in ORDER])
    found = list(rows_of(table.to_batches(), "billing", reports))
    return found, BatchReport.of_tasks(reports)


ONCE = retry(1)


def quickly(attempts: int = 3) -> Any:
    return retry(attempts, wait=lambda _: 0.001)


def failing(message: Message) -> None:
    raise ValueError(f"no use for {message.offset}")
