"""What becomes of a batch's rows before they are merged: on executors as on the driver, in Arrow.

Rows below the ledger are left out, rows that no table can hold are set aside, and of each key only what the merge
needs is kept: the newest row of each partition, with the sums of columns that are added. Arrow holds two keys for
one only where the database does too, so the merge still finds the newest of a key: what is left here is less, never
something else.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from penstock.clients.gc_pause import imports_set_aside
from penstock.spark_sink.ledger.rules import OffsetStatistics
from penstock.spark_sink.sinks.frames import POSITION, as_row, numbers, offset_spans, require_position, unapplied
from penstock.spark_sink.sinks.sql.databases.database import ROW
from penstock.spark_sink.sinks.sql.dead_letters import Rejected
from penstock.spark_sink.sinks.sql.tables import ATTEMPT, stage_table
from penstock.spark_sink.source.plan import Offsets

if TYPE_CHECKING:
    from penstock.spark_sink.sinks.sql.settings import SqlSinkSettings

#: Rows, and bytes of Arrow, that are gathered before they are reduced and handed on.
_PIECE_ROWS = 256_000
_PIECE_BYTES = 64 * 1024 * 1024

#: Days from 1970 to the first and the last day of the years 1 to 9999, and microseconds of a day.
_FIRST_DAY, _LAST_DAY = ((day - date(1970, 1, 1)).days for day in (date.min, date.max))
_DAY_US = 24 * 60 * 60 * 1_000_000


@dataclass(slots=True)
class Report:
    """What was seen of a batch, or of a task's part of it.

    Attributes:
        offsets: its offsets.
        rejected: the rows that no table can hold.
        copied: how many rows each attempt of a task has committed to the staging table.
    """

    offsets: OffsetStatistics = field(default_factory=OffsetStatistics)
    rejected: list[Rejected] = field(default_factory=list)
    copied: dict[int, int] = field(default_factory=dict)

    def add(self, other: Report) -> None:
        """Add what another task did."""
        self.copied |= other.copied
        self.rejected += other.rejected
        self.offsets.add(other.offsets)


@dataclass(frozen=True, slots=True)
class StagingTask:
    """What is done to the rows of a batch before they are merged, and what an executor runs on its part. Picklable.

    Attributes:
        schema: the frame's columns as they are staged, see `tables.staged_schema`.
        ledger: the offsets below which rows are applied already.
        exact: whether every row is kept, so that one that is refused can be left out without the ones it replaced.
        batch_id: the batch's number, for errors.
        table: the staging table, where executors fill it.
        keeps_session: whether the next task may use the connection.
    """

    settings: SqlSinkSettings
    schema: pa.Schema
    ledger: Offsets
    exact: bool
    batch_id: int
    table: str = ""
    keeps_session: bool = False

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Copy the rows and report; the form is that of `mapInArrow`.

        Each piece is copied in a transaction of its own. A `TransientSinkError` says that the database cannot take them
        now, another `SinkError` that it does not.
        """
        attempt = secrets.randbits(63)
        report = Report(copied={attempt: 0})
        names = [name for name in self.schema.names if name != ROW]
        database = self.settings.database
        stage = stage_table(database, self.table, self.settings.schema, self.schema)
        with self.settings.session(self.batch_id, is_kept=self.keeps_session) as connection:
            for piece in self.pieces((batch.rename_columns(names) for batch in batches), report):
                marks = pa.repeat(pa.scalar(attempt, pa.int64()), piece.num_rows)
                with connection.begin():
                    database.stage(connection, stage, piece.append_column(ATTEMPT, marks))
                report.copied[attempt] += piece.num_rows
        # More than may be refused end the batch anyway.
        report.rejected = sorted(report.rejected)[: self.settings.most_rejects + 1]
        yield as_row(report)
        imports_set_aside("staging")

    def pieces(self, batches: Iterable[pa.RecordBatch], report: Report) -> Iterator[pa.Table]:
        """Return a frame's rows in the form in which they are staged, in pieces of a bounded size.

        The report is complete when the pieces are at their end. A row without a position, which can neither be
        stored once nor be named, is a `SchemaMismatchError`.
        """
        pending: list[pa.Table] = []
        numbered = 0
        for batch in batches:
            rows = pa.Table.from_batches([batch])
            require_position(rows, f"table {self.settings.table}")
            left, seen = unapplied(rows, offset_spans(rows), self.ledger)
            report.offsets.add(seen)
            fresh = self._storable(left, report)
            # Where rows are equal in everything else, the one that came later is the newer.
            pending.append(fresh.append_column(ROW, numbers(numbered, fresh.num_rows)).cast(self.schema))
            numbered += fresh.num_rows
            if sum(rows.num_rows for rows in pending) >= _PIECE_ROWS or sum(r.nbytes for r in pending) >= _PIECE_BYTES:
                yield self._reduced(pending)
                pending = []
        if any(rows.num_rows for rows in pending):
            yield self._reduced(pending)

    def _storable(self, rows: pa.Table, report: Report) -> pa.Table:
        """Return the rows that a table can hold, and set the others aside."""
        reasons: dict[int, str] = {}
        for name in rows.schema.names:
            for reason, found in self._unstorable(name, rows[name].combine_chunks()):
                for index in found:
                    reasons.setdefault(index, f"column {name} {reason}")
        if not reasons:
            return rows
        places = rows.select(POSITION).take(pa.array(list(reasons), pa.int64())).to_pylist()
        report.rejected += [
            Rejected(**place, reason=reason) for place, reason in zip(places, reasons.values(), strict=True)
        ]
        return rows.filter(pa.array([index not in reasons for index in range(rows.num_rows)], pa.bool_()))

    def _unstorable(self, name: str, column: pa.Array) -> Iterator[tuple[str, list[int]]]:
        kind, unknown = column.type, self.settings.database.unknown
        if name in self.settings.key and column.null_count:
            # Databases hold any two NULL for different, so rows would pile up.
            yield "is part of the key and is NULL", _where(column.is_null())
        if pa.types.is_floating(kind):
            if "NaN" in unknown:
                yield "is NaN, which the database does not know", _where(pc.is_nan(column))
            if "infinity" in unknown:
                yield "is infinite, which the database does not know", _where(pc.is_inf(column))
        if pa.types.is_timestamp(kind) or pa.types.is_date32(kind):
            yield "is out of the years 1 to 9999", _out_of_calendar(column)
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            wrong = _not_utf8(column)
            if wrong:
                yield "is not UTF-8", wrong
            elif "NUL" in unknown:
                yield "holds a NUL character", _where(pc.match_substring(column, "\0"))

    def _reduced(self, tables: list[pa.Table]) -> pa.Table:
        """Return of each key and partition the newest row, with the sums of `sum_columns` (NULL adds nothing)."""
        rows = pa.concat_tables(tables)
        key, summed = self.settings.key, self.settings.sum_columns
        if self.exact or not key:
            return rows
        order = pc.sort_indices(rows, sort_keys=[("offset", "ascending"), (ROW, "ascending")])
        grouped = rows.select([*key, "topic", "partition", *summed])
        # By number, because a column of the user's may have any name.
        groups = [str(index) for index in range(len(key) + 2)]
        sums = [str(index) for index in range(len(groups), grouped.num_columns)]
        grouped = (
            grouped.rename_columns([*groups, *sums])
            .take(order)
            .append_column("place", numbers(0, rows.num_rows))
            # One thread: an executor has one core for this task, and sums of floating numbers stay the same.
            .group_by(groups, use_threads=False)
            .aggregate([("place", "max"), *((name, "sum") for name in sums)])
        )
        kept = rows.take(order.take(grouped["place_max"].combine_chunks()))
        for name, number in zip(summed, sums, strict=True):
            index = rows.schema.get_field_index(name)
            column = rows.schema.field(index)
            kept = kept.set_column(index, column, grouped[f"{number}_sum"].cast(column.type))
        return kept


def _where(condition: pa.Array) -> list[int]:
    found: list[int] = pc.indices_nonzero(condition).to_pylist()
    return found


def _out_of_calendar(column: pa.Array) -> list[int]:
    """Return where a time lies out of the years that Spark, and texts of Arrow, have."""
    kind, day = (pa.int32(), 1) if pa.types.is_date32(column.type) else (pa.int64(), _DAY_US)
    numbers = column.view(kind)
    return _where(pc.or_(pc.less(numbers, _FIRST_DAY * day), pc.greater_equal(numbers, (_LAST_DAY + 1) * day)))


def _not_utf8(column: pa.Array) -> list[int]:
    """Return where a text is not UTF-8: Spark makes texts of any bytes that are cast to one."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        values = column.view(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()).to_pylist()
        return [at for at, value in enumerate(values) if value and value.decode(errors="ignore").encode() != value]
    return []
