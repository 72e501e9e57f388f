"""The tables of a SQL sink: created from the frame or checked against it, and filled.

Staged rows are appended, or the newest row of each key is stored, by SQLAlchemy Core. Names are always quoted: a
column called `order` or `a"b` keeps that name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.sql.elements import quoted_name

from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks.frames import POSITION
from penstock.spark_sink.sinks.sql.databases.database import (
    ROW,
    Conversion,
    Database,
    ErrorKind,
    Held,
    Type,
    named_table,
)
from penstock.spark_sink.sinks.sql.databases.errors import RefusedRowError, error_kind, facts_of
from penstock.spark_sink.sinks.sql.ledger import ledger_exists, ledger_table
from penstock.spark_sink.sinks.sql.settings import ORDERED, SqlSinkSettings

_SIMPLE_TYPES: Mapping[pa.DataType, Type] = {
    pa.bool_(): sa.Boolean(),
    pa.int8(): sa.SmallInteger(),
    pa.int16(): sa.SmallInteger(),
    pa.int32(): sa.Integer(),
    pa.int64(): sa.BigInteger(),
    pa.float32(): sa.REAL(),
    pa.float64(): sa.Double(),
    pa.string(): sa.Text(),
    pa.large_string(): sa.Text(),
    pa.binary(): sa.LargeBinary(),
    pa.large_binary(): sa.LargeBinary(),
    pa.date32(): sa.Date(),
}
#: Column with the attempt of a task that copied the row.
ATTEMPT = "penstock_attempt"

#: Columns with the number of a message, and of each of its rows, in the order in which a plain loop would apply them.
NUMBER, _PLACE = "penstock_number", "penstock_place"
_RANK = "penstock_rank"

#: Digits of the widest decimal.
_DIGITS = 38


def prepare(settings: SqlSinkSettings, frame: pa.Schema, connection: sa.Connection) -> Tables:
    """Create missing tables and columns and check the existing ones, in transactions of their own.

    Raises `SinkError` if the table does not fit the frame.
    """
    database, schema = settings.database, settings.schema
    unstored = () if settings.keep_position else set(POSITION) - {*settings.key, *settings.sum_columns}
    stored = [name for name in frame.names if name != settings.delete and name not in unstored]
    columns = columns_of(database, frame, stored, settings.key, settings.sum_columns)
    target = named_table(settings.table, schema, *columns, *database.constraints(frame, settings.sum_columns))
    limit, names = connection.dialect.max_identifier_length, (schema or "", settings.table, settings.ledger_table)
    if too_long := [name for name in (*names, *stored) if len(name.encode()) > limit]:
        raise SchemaMismatchError(
            f"table {target.name} cannot take the frame with {', '.join(too_long)}: the database would cut names at "
            f"{limit} bytes; give shorter names"
        )
    _make(connection, target, adds_columns=settings.evolve)
    ledger = prepare_ledger(settings, connection)
    with connection.begin():
        held = _held(connection, target)
        differences = _differences(database, target, held)
        differences += database.differences(connection, target, settings.key, held)
        unfit = database.differences(connection, ledger, (), {})
        differences += [f"its ledger {ledger.name} does not fit: {why}" for why in unfit]
        if differences:
            raise SchemaMismatchError(
                f"table {target.name} does not fit the frame: {'; '.join(differences)}; "
                "alter the table or the frame, or name another table"
            )
        return Tables(settings, target, ledger, database.conversions(connection, target, held))


def prepare_ledger(settings: SqlSinkSettings, connection: sa.Connection) -> sa.Table:
    """Create the ledger if it does not exist. Add columns that a former version did not have; its rows stay."""
    ledger = ledger_table(settings.ledger_table, settings.schema)
    with connection.begin():
        ledger_exists(connection, ledger)
    _make(connection, ledger, adds_columns=True)
    return ledger


def _make(connection: sa.Connection, table: sa.Table, *, adds_columns: bool) -> None:
    """Create a table, or its missing columns, unless another session has just done so."""
    try:
        with connection.begin():
            for statement in _missing(connection, table, adds_columns=adds_columns):
                connection.exec_driver_sql(statement)
    except sa.exc.DBAPIError:
        with connection.begin():
            if _missing(connection, table, adds_columns=adds_columns):
                raise


def _missing(connection: sa.Connection, table: sa.Table, *, adds_columns: bool) -> list[str]:
    """Return the statement that creates a table, or those that add its missing columns, with NULL in existing rows.

    Columns of the key are not added, nor columns whose name differs only in case from an existing one.
    """
    dialect = connection.dialect
    if not sa.inspect(connection).has_table(table.name, schema=table.schema):
        return [str(sa.schema.CreateTable(table).compile(dialect=dialect))]
    if not adds_columns:
        return []
    held = {column.lower() for column in _held(connection, table)}
    return [
        f"ALTER TABLE {dialect.identifier_preparer.format_table(table)} ADD COLUMN "
        f"{sa.schema.CreateColumn(column).compile(dialect=dialect)}"
        for column in table.columns
        if str(column.name).lower() not in held and not column.primary_key
    ]


def _held(connection: sa.Connection, table: sa.Table) -> Held:
    """Return the columns of an existing table."""
    found = sa.inspect(connection).get_columns(table.name, schema=table.schema)
    return {column["name"]: dict(column) for column in found}


def columns_of(
    database: Database,
    schema: pa.Schema,
    wanted: Iterable[str],
    key: Sequence[str] = (),
    summed: Collection[str] = (),
) -> list[sa.Column[Any]]:
    """Return database columns for the wanted columns of a frame.

    Columns in `summed` hold sums, in the widest type of their kind of number.
    """

    def type_of(name: str) -> Type:
        kind = schema.field(name).type
        if name in summed:
            return sa.BigInteger() if pa.types.is_integer(kind) else _sql_type(name, _sum_type(kind))
        return database.column_type(_sql_type(name, kind), len(key) * (name in key))

    return [
        sa.Column(quoted_name(name, quote=True), type_of(name), primary_key=name in key, autoincrement=False)
        for name in wanted
    ]


def _sql_type(column: str, kind: pa.DataType) -> Type:
    """Return the SQL type of a column, or raise `SchemaMismatchError` for an array, map or struct.

    Integers keep their width, decimals their precision, and text is unbounded. A timestamp of Spark is an instant and
    keeps its time zone if the database has time zones.
    """
    if pa.types.is_decimal(kind):
        return sa.Numeric(kind.precision, kind.scale)
    if pa.types.is_timestamp(kind):
        return sa.DateTime(timezone=kind.tz is not None)
    if kind not in _SIMPLE_TYPES:
        raise SchemaMismatchError(
            f"column {column} has the type {kind}, which no column of a database can hold; "
            "turn it into text with to_json(...), or leave it out of the frame"
        )
    return _SIMPLE_TYPES[kind]


def staged_schema(schema: pa.Schema, sum_columns: Sequence[str]) -> pa.Schema:
    """Return the columns of the staging table. Summed columns have a type that can hold the sum."""
    fields = [
        pa.field(column.name, _sum_type(column.type) if column.name in sum_columns else column.type, nullable=True)
        for column in schema
    ]
    return pa.schema([*fields, pa.field(ROW, pa.int64())])


def _sum_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_floating(kind):
        return pa.float64()
    if pa.types.is_decimal(kind):
        return pa.decimal128(_DIGITS, kind.scale)
    # A sum of 64-bit integers would overflow without an error.
    return pa.decimal128(_DIGITS, 0) if pa.types.is_int64(kind) else pa.int64()


def _differences(database: Database, table: sa.Table, held: Held) -> list[str]:
    """Return all differences that keep an existing table from storing the frame's rows.

    Columns that the frame does not have are allowed if they may be empty or the table fills them. A column of sums
    may be narrower than a created one, as long as the sums fit.
    """
    twins = {name.lower(): f", and has {name}, which differs only in case" for name in held}
    differences = []
    for column in table.columns:
        name = str(column.name)
        if name not in held:
            differences.append(f"the table lacks the frame's column {name}{twins.get(name.lower(), '')}")
        elif not database.fits(stored := held[name]["type"], column.type):
            differences.append(f"column {name} is {stored} in the table and {column.type} in the frame")
    return differences + [
        f"column {name} must not be empty, and the frame does not have it"
        for name, column in held.items()
        if name not in table.columns and not column["nullable"] and not _is_filled(column)
    ]


def _is_filled(column: Mapping[str, Any]) -> bool:
    """Return whether the table fills a column itself."""
    is_row_id = bool(column.get("primary_key")) and isinstance(column["type"], sa.Integer)  # of SQLite
    return is_row_id or any(column.get(by) for by in ("identity", "computed", "default", "autoincrement"))


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of a sink: the target with its written columns, the ledger, and their settings.

    Attributes:
        conversions: conversions of staged values to the target's columns.
        stage: the staging table of executors, if they fill one.
    """

    settings: SqlSinkSettings
    target: sa.Table
    ledger: sa.Table
    conversions: Mapping[str, Conversion]
    stage: sa.Table | None = None

    def fingerprint(self, connection: sa.Connection) -> str:
        """Return a text that changes if columns or indexes of the tables change."""
        return "\n".join(self.settings.database.fingerprint(connection, table) for table in (self.target, self.ledger))

    def apply(self, connection: sa.Connection, staged: sa.FromClause) -> None:
        """Apply staged rows: append them, or store the newest row of each key.

        Raises `RefusedRowError` if the table refuses a row or would change a value in it; other errors of the database
        pass through.
        """
        database = self.settings.database
        try:
            self._require_kept(connection, staged)
            if self.settings.key:
                self._upsert(connection, staged)
            else:
                names = _names(self.target)
                rows = sa.select(*(self.value(staged, name) for name in names))
                connection.execute(sa.insert(self.target).from_select(names, rows))
        except sa.exc.SQLAlchemyError as error:
            if error_kind(database, error) is not ErrorKind.ROW:
                raise
            raise RefusedRowError(", ".join(facts_of(database, error))) from None

    def _require_kept(self, connection: sa.Connection, staged: sa.FromClause) -> None:
        changes = [
            (sa.not_(conversion.kept), f"column {name} would not be kept as {conversion.written}")
            for name, conversion in self.conversions.items()
            if conversion.kept is not None
        ]
        if changes:
            reason = sa.case(*changes)
            first = sa.select(reason).select_from(staged).where(reason.is_not(None)).limit(1)
            if (found := connection.execute(first).scalar()) is not None:
                raise RefusedRowError(found)

    def _upsert(self, connection: sa.Connection, staged: sa.FromClause) -> None:
        """Insert, update or delete one row per key.

        The newest staged row of a key wins, by offset. Rows of one offset, or of several partitions, are ordered by
        topic, partition and arrival, so that the result is deterministic. Columns of `sum_columns` are summed over the
        staged rows of a key and added to the stored value; a NULL adds nothing.
        """
        names, key, database = _names(self.target), self.settings.key, self.settings.database
        newest = self._newest(staged)
        kept = sa.select(*(newest.c[name] for name in names)).where(newest.c[_RANK] == 1)
        if self.settings.delete is not None:
            is_deleted = sa.func.coalesce(newest.c[self.settings.delete], sa.false())
            deleted_keys = sa.select(*(newest.c[name] for name in key)).where(newest.c[_RANK] == 1, is_deleted)
            connection.execute(database.delete_keys(self.target, key, deleted_keys))
            kept = kept.where(sa.not_(is_deleted))
        # Sorted by key, so that two queries with common keys do not deadlock.
        kept = kept.order_by(*(newest.c[name] for name in key))
        held, summed = self.target.c, self.settings.sum_columns

        def changes(arriving: Callable[[str], sa.ColumnElement[Any]]) -> dict[str, sa.ColumnElement[Any]]:
            new = {name: arriving(name) for name in names if name not in key}
            return new | {name: sa.func.coalesce(held[name] + new[name], held[name], new[name]) for name in summed}

        insert = database.insert(self.target).from_select(names, kept)
        connection.execute(database.changing(insert, self.target, key, changes))

    def _newest(self, staged: sa.FromClause) -> sa.Subquery:
        """Return the staged rows with their sums and their rank within the key, 1 for the newest."""
        keys = [self.value(staged, name) for name in self.settings.key]
        order = [staged.c[name].desc() for name in ("offset", "partition", "topic", ROW)]
        values = [
            sa.func.sum(staged.c[name]).over(partition_by=keys).label(name)
            if name in self.settings.sum_columns
            else self.value(staged, name).label(name)
            for name in [*_names(self.target), *filter(None, [self.settings.delete])]
        ]
        rank = sa.func.row_number().over(partition_by=keys, order_by=order).label(_RANK)
        return sa.select(*values, rank).subquery()

    def value(self, staged: sa.FromClause, name: str) -> sa.ColumnElement[Any]:
        """Return a staged value as the table holds and compares it."""
        value: sa.ColumnElement[Any] = staged.c[name]
        read = self.conversions[name].read if name in self.conversions else None
        return value if read is None else read(value)


def stage_table(database: Database, name: str, schema: str | None, columns: pa.Schema) -> sa.Table:
    """Return SQLAlchemy's object for the staging table of executors."""
    items = [*columns_of(database, columns, columns.names), sa.Column(ATTEMPT, sa.BigInteger)]
    return named_table(name, schema, *items, prefixes=database.stage_prefixes)


def numbered(
    database: Database, connection: sa.Connection, staged: sa.FromClause, without: Collection[tuple[str, int, int]] = ()
) -> tuple[sa.Table, int]:
    """Copy staged rows into a temporary table, in the order in which a plain loop would apply them.

    Rows of the messages in `without` are left out. Returns the table and the last number of a message. The column
    `NUMBER` has the numbers, from 1.
    """
    ordered = database.create_temporary(
        connection,
        ORDERED,
        *(sa.Column(own, sa.BigInteger, primary_key=True, autoincrement=False) for own in (NUMBER, _PLACE)),
        *(sa.Column(column.name, column.type) for column in staged.c),
    )
    message = [staged.c[part] for part in ("offset", "partition", "topic")]
    number = sa.func.dense_rank().over(order_by=message)
    place = sa.func.row_number().over(order_by=[*message, staged.c[ROW]])
    rows = sa.select(number, place, *staged.c)
    if without:
        rows = rows.where(sa.tuple_(*(staged.c[name] for name in POSITION)).not_in(list(without)))
    connection.execute(sa.insert(ordered).from_select(_names(ordered), rows))
    return ordered, connection.execute(sa.select(sa.func.coalesce(sa.func.max(ordered.c[NUMBER]), 0))).scalar_one()


def _names(table: sa.Table) -> list[str]:
    return [str(column.name) for column in table.columns]
