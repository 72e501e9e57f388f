"""Rows of the source's columns as records for handlers, and the lane of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.consumer.handlers.options.ordering import Ordering
from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks.position import POSITION, require_position

#: The column that names a row's lane.
LANE = "penstock_lane"
#: Columns that a frame must have, and those that it may have beside them.
REQUIRED = (*POSITION, "key", "value")
OPTIONAL = ("timestamp", "timestampType", "headers")
COLUMNS = (*REQUIRED, *OPTIONAL)

#: Rows, and about the bytes of rows, that are made Python objects at a time.
_STEP_ROWS = 4096
_STEP_BYTES = 8 * 1024 * 1024

_US_PER_MS = 1000
_NO_TIMESTAMP = (0, -1)
#: What Spark's `timestampType` says (0 create time, 1 append time), in the client's numbers, where 0 is none.
_KINDS = {0: 1, 1: 2}


@dataclass(slots=True, eq=False, repr=False)
class RowRecord:
    """A row as a `Record`. Its fields are in the order of the columns, by which it is made once for each row."""

    _topic: str
    _partition: int
    _offset: int
    _key: bytes | None
    _value: bytes | None
    _milliseconds: int | None
    _kind: int | None
    _headers: list[dict[str, Any]] | None

    def topic(self) -> str:
        """Name of the topic."""
        return self._topic

    def partition(self) -> int:
        """Number of the partition."""
        return self._partition

    def offset(self) -> int:
        """Offset of the record."""
        return self._offset

    def key(self) -> bytes | None:
        """Key, or None."""
        return self._key

    def value(self) -> bytes | None:
        """Value, or None."""
        return self._value

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        """Headers in wire order, or None when there are none."""
        return [(one["key"], one["value"]) for one in self._headers] if self._headers else None

    def __len__(self) -> int:
        """Bytes of the value."""
        return len(self._value or b"")

    def timestamp(self) -> tuple[int, int]:
        """Timestamp type in the client's numbers, and milliseconds since the epoch."""
        if self._milliseconds is None:
            return _NO_TIMESTAMP
        return _KINDS.get(self._kind or 0, 1), self._milliseconds


def records(batches: Iterator[pa.RecordBatch], lanes: Counter[int], topics: Collection[str]) -> Iterator[RowRecord]:
    """Return the rows one by one, in their order; adds the rows of each lane to `lanes`.

    `SchemaMismatchError` where one has no position, or is of none of the topics.
    """
    for batch in batches:
        names = batch.schema.names
        require_handled({name: batch.column(name) for name in names}, topics)
        for found in pc.value_counts(batch.column(LANE)).to_pylist():
            lanes[found["values"]] += found["counts"]
        for part in steps(batch):
            yield from _records({name: part.column(name) for name in names})


def require_handled(columns: Mapping[str, pa.Array], topics: Collection[str]) -> None:
    """Raise `SchemaMismatchError` where a row has no position, or is of a topic without a handler."""
    require_position(columns, "handlers")
    for topic in pc.unique(columns["topic"]).to_pylist():
        if topic not in topics:
            raise SchemaMismatchError(
                f"the frame has rows of topic {topic}, which has no handler in this sink; give it one, or leave the "
                "topic out of the query"
            )


def steps(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch into as many rows as may be Python objects at a time.

    Of messages of 1 MB, a batch of thousands is enough in Arrow.
    """
    step = max(1, min(_STEP_ROWS, _STEP_BYTES * batch.num_rows // max(1, batch.nbytes)))
    for begin in range(0, batch.num_rows, step):
        yield batch.slice(begin, step)


def lane_numbers(orderings: Mapping[str, Ordering], columns: Mapping[str, pa.Array]) -> pa.Array:
    """Return the lane of each row; `SchemaMismatchError` where one has no position, or its topic no handler."""
    require_handled(columns, orderings)
    found: list[int] = []
    topics, partitions = columns["topic"].to_pylist(), columns["partition"].to_pylist()
    rows = list(_records(columns))
    begin = 0
    # Rows of a partition come together from the source, so that the runs are long.
    for (topic, partition), same in groupby(zip(topics, partitions, strict=True), key=itemgetter(0, 1)):
        end = begin + sum(1 for _ in same)
        found += orderings[topic].lane_numbers(topic, partition, rows[begin:end])
        begin = end
    return pa.array(found, type=pa.int32())


def _records(columns: Mapping[str, pa.Array]) -> Iterator[RowRecord]:
    def values(name: str) -> Sequence[Any] | repeat[None]:
        return columns[name].to_pylist() if name in columns else repeat(None)

    milliseconds: Sequence[int | None] | repeat[None] = repeat(None)
    if "timestamp" in columns:
        milliseconds = pc.divide(columns["timestamp"].cast(pa.int64()), _US_PER_MS).to_pylist()
    return map(
        RowRecord,
        values("topic"),
        values("partition"),
        values("offset"),
        values("key"),
        values("value"),
        milliseconds,
        values("timestampType"),
        values("headers"),
    )
