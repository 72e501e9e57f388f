"""Reads frames for sinks: positions of rows, and rows on the driver.

Every frame has the position of each row's message: `topic`, `partition` and `offset`. It is read in Arrow, on the
driver and on executors.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - the name under which everybody knows it
from pyspark.sql.types import BinaryType, StructType

from penstock.clients.rights import MissingRightError
from penstock.errors import ConfigurationError, SinkError
from penstock.spark_sink.errors import SchemaMismatchError, error_of, errors_in
from penstock.spark_sink.ledger.rules import BATCHES, OffsetStatistics, Span
from penstock.spark_sink.source.plan import Offsets, TopicPartition

#: The columns with the position of a row's message.
POSITION = ("topic", "partition", "offset")

#: Most rows, and approximate bytes of rows, that are Python objects at a time.
STEP_ROWS = 4096
STEP_BYTES = 8 * 1024 * 1024

#: Default of the most bytes of Arrow in a batch on the driver. Spark's own limit for collected results,
#: `spark.driver.maxResultSize`, is twice as much by default.
MAX_BATCH_BYTES: Final = 512 * 1024 * 1024
#: The schema of results that tasks send to the driver.
PICKLED: Final = StructType().add("pickled", BinaryType())
#: Errors that tasks raise.
_RAISED = (SinkError, MissingRightError, ConfigurationError)


def require_columns(present: Iterable[str], target: str, more: Iterable[str] = ()) -> None:
    """Raise `SchemaMismatchError` if the frame for a target lacks a position column or one of `more`.

    Also if two columns differ only in case: many readers would take them for one.
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
    """Raise `SchemaMismatchError` if topic, partition or offset of a frame has another type than the source's."""
    for name in POSITION:
        kind, found = "text" if name == "topic" else "an integer", schema.field(name).type
        is_text = pa.types.is_string(found) or pa.types.is_large_string(found)
        if not (is_text if name == "topic" else pa.types.is_integer(found)):
            raise SchemaMismatchError(
                f"column {name} of the frame for {target} is {found}, and the source's is {kind}; select it as it is"
            )


def require_position(rows: pa.Table | pa.RecordBatch | Mapping[str, pa.Array], target: str) -> None:
    """Raise `SchemaMismatchError` if rows have no position: they could be neither deduplicated nor named."""
    for name in POSITION:
        if nulls := rows[name].null_count:
            raise SchemaMismatchError(
                f"column {name} of the frame for {target} is NULL in {nulls} rows; it must come from the source "
                "as it is"
            )


def not_utf8(column: pa.Array | pa.ChunkedArray) -> list[int]:
    """Return the indexes of values that have text which is not UTF-8: Spark casts any bytes to a text."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        # Not slices: of nested values, those outside of the slice would be checked too.
        return [at for at, value in enumerate(column) if len(column) == 1 or not_utf8(pa.repeat(value, 1))]
    return []


def steps(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch into pieces that may be Python objects at a time.

    Otherwise a batch of thousands of messages of 1 MB would take twice its memory.
    """
    step = max(1, min(STEP_ROWS, STEP_BYTES * batch.num_rows // max(1, batch.nbytes)))
    for begin in range(0, batch.num_rows, step):
        yield batch.slice(begin, step)


def spans_of(rows: pa.Table) -> dict[TopicPartition, Span]:
    """Return the lowest and the highest offset of each partition."""
    found = rows.group_by(["topic", "partition"]).aggregate([("offset", "min"), ("offset", "max")])
    return {(row["topic"], row["partition"]): Span(row["offset_min"], row["offset_max"]) for row in found.to_pylist()}


def unapplied(rows: pa.Table, spans: dict[TopicPartition, Span], ledger: Offsets) -> tuple[pa.Table, OffsetStatistics]:
    """Return the rows at or above the ledger's offsets, and the statistics of all rows, which have these spans."""
    seen = OffsetStatistics(rows.num_rows, spans)
    for part, span in spans.items():
        if span.first < ledger.get(part, 0):
            own = pc.and_(pc.equal(rows["topic"], part[0]), pc.equal(rows["partition"], part[1]))
            below = pc.and_(own, pc.less(rows["offset"], ledger[part]))
            seen.applied[part] = pc.sum(below).as_py()
            rows = rows.filter(pc.invert(below))
    return rows, seen


def numbers(first: int, count: int) -> pa.Array:
    """Return consecutive whole numbers. From a `range`, each would first be a Python object."""
    return pc.cumulative_sum(pa.repeat(pa.scalar(1, pa.int64()), count), start=first - 1)


def as_row(what: object) -> pa.RecordBatch:
    """Return a result of a task as a row of `PICKLED`, for the driver."""
    return pa.RecordBatch.from_pydict({"pickled": pa.array([pickle.dumps(what)], pa.binary())})


def from_row(row: Row) -> Any:
    """Return the result that a task gave to `as_row`."""
    return pickle.loads(bytes(row["pickled"]))  # noqa: S301 - see above


def run_job(job: DataFrame, before: str = "") -> list[Row]:
    """Return the rows of a Spark job; an error of its tasks is raised as one sentence, with `before` as prefix."""
    try:
        return job.collect()
    except Exception as error:
        found = [named for named in errors_in(str(error)) if isinstance(named, _RAISED)]
        if not found:
            raise
        # Not chained: Spark's text repeats it within two stacks, and a handler's error may contain the message.
        raise error_of(type(found[-1]), f"{before}{found[-1]}") from None


def collected(batch: DataFrame, most_bytes: int, batch_id: int, target: str) -> pa.Table:
    """Return a batch's rows on the driver; `SinkError` if they exceed `most_bytes` of Arrow."""
    rows = batch.toArrow()
    if rows.nbytes > most_bytes:
        raise SinkError(
            f"batch {batch_id} has {rows.nbytes} bytes in {rows.num_rows} rows, and {target} takes a batch through the "
            f"driver of at most max_batch_bytes={most_bytes}; nothing of it was stored; set the source's "
            "maxOffsetsPerTrigger lower, or raise max_batch_bytes where the driver has the memory"
        )
    return rows


def numbered(batch: DataFrame, batch_id: int) -> DataFrame:
    """Add the batch number as position to a frame whose rows come from no messages; see `BATCHES`."""
    topic, partition = BATCHES
    position = (F.lit(topic), F.lit(partition), F.lit(batch_id).cast("bigint"))
    return batch.withColumns(dict(zip(POSITION, position, strict=True)))
