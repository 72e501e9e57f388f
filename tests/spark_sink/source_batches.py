"""What the source reads on real Spark, and what a plain consumer reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery
from streams import read_to_end

#: The fixture that loads the source.
Read = Callable[..., DataFrame]
Row = tuple[str, int, int, bytes | None, bytes | None]


def plain(frame: DataFrame) -> list[Row]:
    """Collect a frame of the source in the form of `consumed`."""
    rows = frame.select("topic", "partition", "offset", "key", "value").collect()
    return sorted(
        ((r.topic, r.partition, r.offset, _bytes(r.key), _bytes(r.value)) for r in rows), key=lambda row: row[:3]
    )


def _bytes(value: bytearray | None) -> bytes | None:
    return None if value is None else bytes(value)


class Batches:
    """A foreachBatch function that remembers the rows of every batch."""

    def __init__(self) -> None:
        self.rows: list[list[Row]] = []

    def __call__(self, frame: DataFrame, _batch_id: int) -> None:
        self.rows.append(plain(frame))

    @property
    def all(self) -> list[Row]:
        return sorted((row for batch in self.rows for row in batch), key=lambda row: row[:3])


def run(frame: DataFrame, batches: Batches, checkpoint: Path) -> StreamingQuery:
    """Run a query over a streaming frame until it has read what is there."""
    writer = frame.writeStream.foreachBatch(batches).option("checkpointLocation", str(checkpoint))
    return read_to_end(lambda: writer.trigger(availableNow=True).start())
