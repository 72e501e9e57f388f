"""Prepares a batch's rows for the merge, in Arrow: on executors and on the driver.

Rows below the ledger are skipped. Rows that no table can hold are rejected. Of each key, only the rows for the merge
are kept: the newest row of each partition, with the sums of summed columns. Arrow regards two keys as equal only if
the database does too. So the merge still finds the newest row of a key: this step removes rows and changes no result.
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
from penstock.spark_sink.sinks.frames import POSITION, as_row, not_utf8, numbers, require_position, spans_of, unapplied
from penstock.spark_sink.sinks.sql.databases.database import ROW
from penstock.spark_sink.sinks.sql.dead_letters import Rejected
from penstock.spark_sink.sinks.sql.tables import ATTEMPT, stage_table
from penstock.spark_sink.source.plan import Offsets

if TYPE_CHECKING:
    from penstock.spark_sink.sinks.sql.settings import SqlSinkSettings

#: Rows, and bytes of Arrow, that are collected before they are reduced and staged.
_PIECE_ROWS = 256_000
_PIECE_BYTES = 64 * 1024 * 1024

#: Days from 1970 to the first and to the last day of the years 1 to 9999, and microseconds of a day.
_FIRST_DAY, _LAST_DAY = ((day - date(1970, 1, 1)).days for day in (date.min, date.max))
_DAY_US = 24 * 60 * 60 * 1_000_000


@dataclass(slots=True)
class Report:
    """The report on a batch, or on a task's part of it.

    Attributes:
        offsets: the offsets in it.
        rejected: the rows that no table can hold.
        copied: number of rows that each attempt of a task has committed to the staging table.
    """

    offsets: OffsetStatistics = field(default_factory=OffsetStatistics)
    rejected: list[Rejected] = field(default_factory=list)
    copied: dict[int, int] = field(default_factory=dict)

    def add(self, other: Report) -> None:
        """Add the report of another task."""
        self.copied |= other.copied
        self.rejected += other.rejected
        self.offsets.add(other.offsets)


@dataclass(frozen=True, slots=True)
class StagingTask:
    """Prepares the rows of a batch for the merge. An executor runs it on its part of the batch. Picklable.

    Attributes:
        schema: the columns of the staging table, see `tables.staged_schema`.
        ledger: the offsets below which rows are already applied.
        exact: whether every row is kept. Then a refused row can be left out, and the rows that it replaced remain.
        batch_id: the batch's number, for errors.
        table: the staging table, if executors fill it.
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
        """Copy the rows and yield the report; called by `mapInArrow`.

        Each piece is copied in a transaction of its own. A `TransientSinkError` means that the database cannot accept
        the rows now, another `SinkError` that it refuses them.
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
        # If more rows are refused than allowed, the batch fails anyway.
        report.rejected = sorted(report.rejected)[: self.settings.most_rejects + 1]
        yield as_row(report)
        imports_set_aside("staging")

    def pieces(self, batches: Iterable[pa.RecordBatch], report: Report) -> Iterator[pa.Table]:
        """Yield a frame's rows for the staging table, in pieces of bounded size.

        The report is complete after the last piece. A row without a position is a `SchemaMismatchError`: it can neither
        be stored once nor be named.
        """
        pending: list[pa.Table] = []
        numbered = 0
        for batch in batches:
            rows = pa.Table.from_batches([batch])
            require_position(rows, f"table {self.settings.table}")
            left, seen = unapplied(rows, spans_of(rows), self.ledger)
            report.offsets.add(seen)
            fresh = self._storable(left, report)
            if not fresh.num_rows:  # drivers take no statement for no rows
                continue
            # If rows are equal in everything else, the later row is the newer.
            pending.append(fresh.append_column(ROW, numbers(numbered, fresh.num_rows)).cast(self.schema))
            numbered += fresh.num_rows
            if sum(rows.num_rows for rows in pending) >= _PIECE_ROWS or sum(r.nbytes for r in pending) >= _PIECE_BYTES:
                yield self._reduced(pending)
                pending = []
        if pending:
            yield self._reduced(pending)

    def _storable(self, rows: pa.Table, report: Report) -> pa.Table:
        """Return the rows that a table can hold, and add the others to the report as rejected."""
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
            # Databases regard any two NULL as different, so rows would pile up.
            yield "is part of the key and is NULL", _indexes(column.is_null())
        if pa.types.is_floating(kind):
            if "NaN" in unknown:
                yield "is NaN, which the database cannot store", _indexes(pc.is_nan(column))
            if "infinity" in unknown:
                yield "is infinite, which the database cannot store", _indexes(pc.is_inf(column))
        if pa.types.is_timestamp(kind) or pa.types.is_date32(kind):
            yield "is outside the years 1 to 9999", _out_of_calendar(column)
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            if wrong := not_utf8(column):
                yield "is not UTF-8", wrong
            elif "NUL" in unknown:
                yield "holds a NUL character", _indexes(pc.match_substring(column, "\0"))

    def _reduced(self, tables: list[pa.Table]) -> pa.Table:
        """Return the newest row of each key and partition, with the sums of `sum_columns` (NULL adds nothing)."""
        rows = pa.concat_tables(tables)
        key, summed = self.settings.key, self.settings.sum_columns
        if self.exact or not key:
            return rows
        order = pc.sort_indices(rows, sort_keys=[("offset", "ascending"), (ROW, "ascending")])
        grouped = rows.select([*key, "topic", "partition", *summed])
        # Names are numbers, because a user's column may have any name.
        groups = [str(index) for index in range(len(key) + 2)]
        sums = [str(index) for index in range(len(groups), grouped.num_columns)]
        # Arrow's sums of decimals overflow without an error.
        kinds = [pa.decimal256(76, kind.scale) if pa.types.is_decimal(kind) else kind for kind in grouped.schema.types]
        grouped = (
            grouped.rename_columns([*groups, *sums])
            .cast(pa.schema(zip([*groups, *sums], kinds, strict=True)))
            .take(order)
            .append_column("place", numbers(0, rows.num_rows))
            # One thread: an executor has one core for this task, and sums of floats stay reproducible.
            .group_by(groups, use_threads=False)
            .aggregate([("place", "max"), *((name, "sum") for name in sums)])
        )
        kept = rows.take(order.take(grouped["place_max"].combine_chunks()))
        for name, number in zip(summed, sums, strict=True):
            index = rows.schema.get_field_index(name)
            column = rows.schema.field(index)
            try:
                total = grouped[f"{number}_sum"].cast(column.type)
            except pa.ArrowInvalid:  # the sum has too many digits: the database adds the rows, or refuses one
                return rows
            if "NaN" not in self.settings.database.unknown and not pc.all(pc.is_finite(total), min_count=0).as_py():
                return rows  # PostgreSQL adds infinities too, and refuses a row whose sum becomes infinite
            kept = kept.set_column(index, column, total)
        return kept


def _indexes(condition: pa.Array) -> list[int]:
    found: list[int] = pc.indices_nonzero(condition).to_pylist()
    return found


def _out_of_calendar(column: pa.Array) -> list[int]:
    """Return the indexes of times outside of the years that Spark and Arrow's texts support."""
    kind, day = (pa.int32(), 1) if pa.types.is_date32(column.type) else (pa.int64(), _DAY_US)
    numbers = column.view(kind)
    return _indexes(pc.or_(pc.less(numbers, _FIRST_DAY * day), pc.greater_equal(numbers, (_LAST_DAY + 1) * day)))
