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

from penstock.errors import SinkError
from penstock.spark_sink.ledger.sql_ledger import Span
from penstock.spark_sink.sinks.sql.row_validator import Rejected, Screen
from penstock.spark_sink.sinks.sql.schema import POSITION, ROW
from penstock.spark_sink.source.planning import Offsets, TopicPartition

#: Rows, and bytes of Arrow, that are gathered before they are reduced and handed on.
_PIECE_ROWS = 256_000
_PIECE_BYTES = 64 * 1024 * 1024

#: Digits of the widest decimal.
_DIGITS = 38


@dataclass(frozen=True, slots=True)
class Reduction:
    """What is done to rows of a sink. Picklable.

    Attributes:
        schema: the frame's columns as they are staged, see `staged_schema`.
        screen: what no table can hold.
        key: columns that identify a row; empty to append.
        add: columns that are summed.
        standing: next offset of each partition by the ledger.
        exact: whether every row is kept, so that one that is refused can be left out without the ones it replaced.
    """

    schema: pa.Schema
    screen: Screen
    key: Sequence[str]
    add: Sequence[str]
    standing: Offsets
    exact: bool


@dataclass(slots=True)
class Taken:
    """What was seen of a batch: its rows, the offsets of each partition, rows applied before, rows set aside."""

    rows: int = 0
    spans: dict[TopicPartition, Span] = field(default_factory=dict)
    replayed: dict[TopicPartition, int] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)

    def see(self, part: TopicPartition, first: int, last: int, again: int) -> None:
        """Count offsets of one partition, and how many rows among them were applied before."""
        span = self.spans.get(part, Span(first, last))
        self.spans[part] = Span(min(span.first, first), max(span.last, last))
        if again:
            self.replayed[part] = self.replayed.get(part, 0) + again


def staged_schema(schema: pa.Schema, add: Sequence[str]) -> pa.Schema:
    """Return a frame's columns as they are staged: those that are summed in a type that holds the sum."""
    fields = [pa.field(one.name, _of_sums(one.type) if one.name in add else one.type, nullable=True) for one in schema]
    return pa.schema([*fields, pa.field(ROW, pa.int64())])


def _of_sums(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_floating(kind):
        return pa.float64()
    if pa.types.is_decimal(kind):
        return pa.decimal128(_DIGITS, kind.scale)
    # A sum of 64 bits would wrap around in silence.
    return pa.decimal128(_DIGITS, 0) if pa.types.is_int64(kind) else pa.int64()


def reduced(reduction: Reduction, batches: Iterator[pa.RecordBatch], taken: Taken) -> Iterator[pa.Table]:
    """Return a frame's rows in the form in which they are staged, in pieces of a bounded size.

    Args:
        reduction: what to do.
        batches: the frame's rows; several may come from one message.
        taken: counts what was seen; complete when the pieces are at their end.

    Raises:
        SinkError: a row has no place, so it can neither be stored once nor be named.
    """
    pending: list[pa.Table] = []
    size = rows = numbered = 0
    keep_all = reduction.exact or not reduction.key
    for batch in batches:
        taken.rows += batch.num_rows
        fresh = _fresh(reduction, pa.Table.from_batches([batch]), taken)
        fresh, rejected = reduction.screen.split(fresh)
        taken.rejected += rejected
        if not fresh.num_rows:
            continue
        # Where rows are equal in everything else, the one that came later is the newer.
        numbers = pa.array(range(numbered, numbered + fresh.num_rows), pa.int64())
        numbered += fresh.num_rows
        pending.append(fresh.append_column(ROW, numbers).cast(reduction.schema))
        size, rows = size + fresh.nbytes, rows + fresh.num_rows
        if rows >= _PIECE_ROWS or size >= _PIECE_BYTES:
            piece = pa.concat_tables(pending)
            if not keep_all:
                piece = newest(piece, reduction.key, reduction.add)
            # Few keys: what is left of them takes in the next rows as well.
            if keep_all or piece.num_rows > _PIECE_ROWS // 2 or piece.nbytes > _PIECE_BYTES // 2:
                yield piece
                pending, size, rows = [], 0, 0
            else:
                pending, size, rows = [piece], piece.nbytes, piece.num_rows
    if pending:
        piece = pa.concat_tables(pending)
        yield piece if keep_all else newest(piece, reduction.key, reduction.add)


def _fresh(reduction: Reduction, rows: pa.Table, taken: Taken) -> pa.Table:
    """Count the offsets and return the rows at or above the ledger."""
    for name in POSITION:
        if rows[name].null_count:
            raise SinkError(
                f"column {name} is NULL in {rows[name].null_count} rows; it must come from the source as it is"
            )
    spans = rows.group_by(["topic", "partition"]).aggregate([("offset", "min"), ("offset", "max")]).to_pylist()
    for one in spans:
        part = one["topic"], one["partition"]
        again = 0
        if one["offset_min"] < reduction.standing.get(part, 0):
            applied = pc.and_(
                pc.and_(pc.equal(rows["topic"], part[0]), pc.equal(rows["partition"], part[1])),
                pc.less(rows["offset"], reduction.standing[part]),
            )
            again = pc.sum(applied).as_py()
            rows = rows.filter(pc.invert(applied))
        taken.see(part, one["offset_min"], one["offset_max"], again)
    return rows


def newest(rows: pa.Table, key: Sequence[str], add: Sequence[str]) -> pa.Table:
    """Return of each key and partition the newest row, with the sums of the columns of `add` (NULL adds nothing)."""
    order = pc.sort_indices(rows, sort_keys=[("offset", "ascending"), (ROW, "ascending")])
    grouped = rows.select([*key, "topic", "partition", *add])
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
    for name, number in zip(add, sums, strict=True):
        index = rows.schema.get_field_index(name)
        kept = kept.set_column(
            index, rows.schema.field(index), grouped[f"{number}_sum"].cast(rows.schema.field(index).type)
        )
    return kept


__all__ = ["Reduction", "Taken", "newest", "reduced", "staged_schema"]
