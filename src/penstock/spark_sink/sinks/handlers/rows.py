"""The rows of a frame as records of the Kafka client, in the stretches in which they are put on lanes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Message

from penstock.consumer.handlers.options.ordering import Ordering
from penstock.message import Record
from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks.position import POSITION, offset_spans, require_position, steps
from penstock.spark_sink.source.plan import Offsets

#: The column that names a row's lane.
LANE = "penstock_lane"
#: Columns that rows have; the last three may be missing.
COLUMNS = (*POSITION, "key", "value", "timestamp", "timestampType", "headers")

_US_PER_MS = 1000
#: A timestamp in the client's form, a type and milliseconds, where there is none.
_NO_TIMESTAMP = (0, -1)


class TaskRows:
    """The rows of a task, and what is noted of them as they are taken.

    Attributes:
        last: the last offset of each source partition, where the sink publishes.
    """

    def __init__(self, batches: Iterable[pa.RecordBatch], topics: Collection[str], *, publishes: bool) -> None:
        self._batches = batches
        self._topics = topics
        self._publishes = publishes
        self.last: Offsets = {}

    def stretches(self) -> Iterator[list[Record]]:
        """Return the rows in their order, each stretch of one source partition with rising offsets.

        `SchemaMismatchError` where a row has no position, or its topic no handler.
        """
        for batch in self._batches:
            _require_handled({name: batch.column(name) for name in POSITION}, self._topics)
            for part, span in offset_spans(pa.Table.from_batches([batch])).items() if self._publishes else ():
                self.last[part] = max(span.last, self.last.get(part, span.last))
            for part_of_batch in steps(batch):
                yield from _by_partition({name: part_of_batch.column(name) for name in batch.schema.names})


def lane_numbers(orderings: Mapping[str, Ordering], columns: Mapping[str, pa.Array]) -> pa.Array:
    """Return the lane of each row; `SchemaMismatchError` where one has no position, or its topic no handler."""
    _require_handled(columns, orderings)
    found: list[int] = []
    for records in _by_partition(columns):
        topic = records[0].topic()
        found += orderings[topic].lane_numbers(topic, records[0].partition(), records)
    return pa.array(found, type=pa.int32())


def _require_handled(columns: Mapping[str, pa.Array], topics: Collection[str]) -> None:
    require_position(columns, "handlers")
    for topic in pc.unique(columns["topic"]).to_pylist():
        if topic not in topics:
            raise SchemaMismatchError(
                f"the frame has rows of topic {topic}, which has no handler in this sink; give it one, or leave the "
                "topic out of the query"
            )


def _by_partition(columns: Mapping[str, pa.Array]) -> Iterator[list[Record]]:
    """Return the rows in stretches of one source partition with offsets that do not fall."""
    records, offsets = list(_records(columns)), columns["offset"]
    falls = pc.less(offsets.slice(1), offsets.slice(0, max(0, len(offsets) - 1)))
    ends = {place + 1 for place in pc.indices_nonzero(falls).to_pylist()}
    for name in ("topic", "partition"):
        ends.update(pc.run_end_encode(columns[name]).run_ends.to_pylist())
    begin = 0
    for end in sorted(ends):
        yield records[begin:end]
        begin = end


def _records(columns: Mapping[str, pa.Array]) -> Iterator[Record]:
    def values(name: str) -> Iterable[Any]:
        return columns[name].to_pylist() if name in columns else repeat(None)

    timestamps: Iterable[tuple[int, int]] = repeat(_NO_TIMESTAMP)
    if "timestamp" in columns:
        milliseconds = pc.divide(columns["timestamp"].cast(pa.int64()), _US_PER_MS)
        kinds = columns["timestampType"] if "timestampType" in columns else pa.nulls(len(milliseconds), pa.int32())
        # The client's numbers: 0 none, 1 by the sender, 2 by the broker; Spark's are one lower.
        kinds = pc.if_else(pc.is_null(milliseconds), 0, pc.add(pc.fill_null(kinds, 0), 1))
        timestamps = zip(kinds.to_pylist(), pc.fill_null(milliseconds, -1).to_pylist(), strict=True)
    headers: Iterable[Any] = repeat(None)
    if "headers" in columns:
        headers = [
            [(header["key"], header["value"]) for header in found] if found else None for found in values("headers")
        ]
    places = (values(name) for name in (*POSITION, "key", "value"))
    return cast("Iterator[Record]", map(Message, *places, headers, repeat(None), timestamps))
