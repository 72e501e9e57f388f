"""The position of rows: `topic`, `partition` and `offset` of the messages they come from, which every frame carries.

For Arrow tables, on the driver as on executors; `frames` does the same to frames of Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.ledger.rules import Span
from penstock.spark_sink.source.plan import Offsets, TopicPartition

#: The columns that say where a row comes from.
POSITION = ("topic", "partition", "offset")

#: Rows, and about the bytes of rows, that are Python objects at a time.
STEP_ROWS = 4096
STEP_BYTES = 8 * 1024 * 1024


def require_columns(present: Iterable[str], target: str, more: Iterable[str] = ()) -> None:
    """Raise `SchemaMismatchError` where the frame for a target lacks its position or one of `more`.

    Or where two of its columns differ only in case: many readers would take them for one.
    """
    held = set(present)
    by_name: dict[str, set[str]] = {}
    for name in held:
        by_name.setdefault(name.lower(), set()).add(name)
    twins = [" and ".join(sorted(some)) for some in by_name.values() if len(some) > 1]
    if twins:
        raise SchemaMismatchError(
            f"the frame for {target} has {', '.join(sorted(twins))}, which differ only in case; rename all but one"
        )
    missing = [name for name in (*POSITION, *more) if name not in held]
    if missing:
        raise SchemaMismatchError(
            f"the frame for {target} lacks {', '.join(missing)}; keep topic, partition and offset of the source in "
            "the query's select, and every column that the sink's settings name"
        )


def require_position_types(schema: pa.Schema, target: str) -> None:
    """Raise `SchemaMismatchError` where topic, partition or offset of a frame is not of the source's kind."""

    def is_text(kind: pa.DataType) -> bool:
        return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))

    wanted = (("topic", "text", is_text), ("partition", "an integer", pa.types.is_integer),
              ("offset", "an integer", pa.types.is_integer))  # fmt: skip
    for name, kind, fits in wanted:
        found = schema.field(name).type
        if not fits(found):
            raise SchemaMismatchError(
                f"column {name} of the frame for {target} is {found}, and the source's is {kind}; select it as it is"
            )


def require_position(rows: pa.Table | pa.RecordBatch | Mapping[str, pa.Array], target: str) -> None:
    """Raise `SchemaMismatchError` where rows have no position: they could neither be stored once nor be named."""
    for name in POSITION:
        if nulls := rows[name].null_count:
            raise SchemaMismatchError(
                f"column {name} of the frame for {target} is NULL in {nulls} rows; it must come from the source "
                "as it is"
            )


def steps(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch into as many rows as may be Python objects at a time.

    Of messages of 1 MB, a batch of thousands is enough in Arrow.
    """
    step = max(1, min(STEP_ROWS, STEP_BYTES * batch.num_rows // max(1, batch.nbytes)))
    for begin in range(0, batch.num_rows, step):
        yield batch.slice(begin, step)


def offset_spans(rows: pa.Table) -> dict[TopicPartition, Span]:
    """Return the lowest and the highest offset of each partition."""
    found = rows.group_by(["topic", "partition"]).aggregate([("offset", "min"), ("offset", "max")])
    return {(row["topic"], row["partition"]): Span(row["offset_min"], row["offset_max"]) for row in found.to_pylist()}


def unapplied(
    rows: pa.Table, spans: Mapping[TopicPartition, Span], ledger: Offsets
) -> tuple[pa.Table, dict[TopicPartition, int]]:
    """Return the rows at or above the ledger, and of each partition how many are below it."""
    applied: dict[TopicPartition, int] = {}
    for part, span in spans.items():
        if span.first < ledger.get(part, 0):
            own = pc.and_(pc.equal(rows["topic"], part[0]), pc.equal(rows["partition"], part[1]))
            below = pc.and_(own, pc.less(rows["offset"], ledger[part]))
            applied[part] = pc.sum(below).as_py()
            rows = rows.filter(pc.invert(below))
    return rows, applied


def numbers(first: int, count: int) -> pa.Array:
    """Return so many whole numbers from the first on; made of a `range`, each would be an object of Python first."""
    return pc.cumulative_sum(pa.repeat(pa.scalar(1, pa.int64()), count), start=first - 1)
