"""What becomes of a batch's rows before they reach the database: on executors as on the driver, in Arrow.

Rows below the ledger are left out, rows that no table can hold are set aside, and of each key only what the merge
needs is kept: the newest row of each partition, with the sums of columns that are added. Arrow holds two keys for
one only where the database does too, so the merge still finds the newest of a key: what is left here is less, never
something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark_sink.ledger.rules import OffsetStatistics
from penstock.spark_sink.sinks.position import null_counts, offset_spans, require_position, unapplied
from penstock.spark_sink.sinks.sql.databases.schema import DIGITS, ROW
from penstock.spark_sink.sinks.sql.rows.row_validator import Rejected, RowValidator
from penstock.spark_sink.source.plan import Offsets

#: Rows, and bytes of Arrow, that are gathered before they are reduced and handed on.
_PIECE_ROWS = 256_000
_PIECE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Deduplication:
    """What is done to the rows of a batch before they reach the database. Picklable.

    Attributes:
        target: name of the table, for errors.
        schema: the frame's columns as they are staged, see `staged_schema`.
        key: columns that identify a row; empty to append.
        exact: whether every row is kept, so that one that is refused can be left out without the ones it replaced.
    """

    target: str
    schema: pa.Schema
    validator: RowValidator
    key: Sequence[str]
    sum_columns: Sequence[str]
    ledger: Offsets
    exact: bool


@dataclass(slots=True)
class BatchStatistics:
    """What was seen of a batch: its offsets, and the rows that no table can hold."""

    offsets: OffsetStatistics = field(default_factory=OffsetStatistics)
    rejected: list[Rejected] = field(default_factory=list)


def staged_schema(schema: pa.Schema, sum_columns: Sequence[str]) -> pa.Schema:
    """Return a frame's columns as they are staged: those that are summed in a type that holds the sum."""
    fields = [
        pa.field(one.name, _of_sums(one.type) if one.name in sum_columns else one.type, nullable=True) for one in schema
    ]
    return pa.schema([*fields, pa.field(ROW, pa.int64())])


def _of_sums(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_floating(kind):
        return pa.float64()
    if pa.types.is_decimal(kind):
        return pa.decimal128(DIGITS, kind.scale)
    # A sum of 64 bits would wrap around in silence.
    return pa.decimal128(DIGITS, 0) if pa.types.is_int64(kind) else pa.int64()


def deduplicated(
    deduplication: Deduplication, batches: Iterator[pa.RecordBatch], statistics: BatchStatistics
) -> Iterator[pa.Table]:
    """Return a frame's rows in the form in which they are staged, in pieces of a bounded size.

    The statistics are complete when the pieces are at their end. A row without a position, which can neither be stored
    once nor be named, is a `SchemaMismatchError`.
    """
    pending: list[pa.Table] = []
    size = rows = numbered = 0
    keep_all = deduplication.exact or not deduplication.key
    for batch in batches:
        left = _unapplied(deduplication, pa.Table.from_batches([batch]), statistics.offsets)
        fresh, rejected = deduplication.validator.split(left)
        statistics.rejected += rejected
        if not fresh.num_rows:
            continue
        # Where rows are equal in everything else, the one that came later is the newer.
        numbers = pa.array(range(numbered, numbered + fresh.num_rows), pa.int64())
        numbered += fresh.num_rows
        pending.append(fresh.append_column(ROW, numbers).cast(deduplication.schema))
        size, rows = size + fresh.nbytes, rows + fresh.num_rows
        if rows >= _PIECE_ROWS or size >= _PIECE_BYTES:
            piece = pa.concat_tables(pending)
            if not keep_all:
                piece = newest(piece, deduplication.key, deduplication.sum_columns)
            # Few keys: what is left of them takes in the next rows as well.
            if keep_all or piece.num_rows > _PIECE_ROWS // 2 or piece.nbytes > _PIECE_BYTES // 2:
                yield piece
                pending, size, rows = [], 0, 0
            else:
                pending, size, rows = [piece], piece.nbytes, piece.num_rows
    if pending:
        piece = pa.concat_tables(pending)
        yield piece if keep_all else newest(piece, deduplication.key, deduplication.sum_columns)


def _unapplied(deduplication: Deduplication, rows: pa.Table, statistics: OffsetStatistics) -> pa.Table:
    """Count the offsets and return the rows at or above the ledger."""
    require_position(null_counts(rows), f"table {deduplication.target}")
    spans = offset_spans(rows)
    left, applied = unapplied(rows, spans, deduplication.ledger)
    statistics.rows += rows.num_rows
    for part, span in spans.items():
        statistics.add(part, span, applied.get(part, 0))
    return left


def newest(rows: pa.Table, key: Sequence[str], sum_columns: Sequence[str]) -> pa.Table:
    """Return of each key and partition the newest row, with the sums of `sum_columns` (NULL adds nothing)."""
    order = pc.sort_indices(rows, sort_keys=[("offset", "ascending"), (ROW, "ascending")])
    grouped = rows.select([*key, "topic", "partition", *sum_columns])
    # By number, because a column of the user's may have any name.
    groups = [str(index) for index in range(len(key) + 2)]
    sums = [str(index) for index in range(len(groups), grouped.num_columns)]
    grouped = (
        grouped.rename_columns([*groups, *sums])
        .take(order)
        .append_column("place", pa.array(range(rows.num_rows), pa.int64()))
        # One thread: an executor has one core for this task, and sums of floating numbers stay the same.
        .group_by(groups, use_threads=False)
        .aggregate([("place", "max"), *((name, "sum") for name in sums)])
    )
    kept = rows.take(order.take(grouped["place_max"].combine_chunks()))
    for name, number in zip(sum_columns, sums, strict=True):
        index = rows.schema.get_field_index(name)
        kept = kept.set_column(
            index, rows.schema.field(index), grouped[f"{number}_sum"].cast(rows.schema.field(index).type)
        )
    return kept
