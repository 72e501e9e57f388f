"""The tables of a SQL sink: made from the frame where they do not exist, and checked against it where they do.

Names are quoted always: a column called `order` or `a"b` is stored under that very name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.sql.elements import quoted_name

from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks.position import POSITION
from penstock.spark_sink.sinks.sql.databases.database import DIGITS, Database, Held, Type
from penstock.spark_sink.sinks.sql.ledger import ledger_table, require_ledger
from penstock.spark_sink.sinks.sql.settings import SqlSinkSettings
from penstock.spark_sink.sinks.sql.upsert import Tables


def prepare(settings: SqlSinkSettings, frame: pa.Schema, connection: sa.Connection) -> Tables:
    """Make the tables, and columns, that do not exist and check those that do, in transactions of their own.

    Raises `SinkError` where the table does not fit the frame.
    """
    database, schema = settings.database, settings.schema
    stored = [
        name for name in frame.names if name != settings.delete and (settings.keep_position or name not in POSITION)
    ]
    target = sa.Table(
        quoted_name(settings.table, quote=True),
        sa.MetaData(),
        *columns_of(database, frame, stored, settings.key, settings.sum_columns),
        *database.constraints(frame, settings.sum_columns),
        schema=None if schema is None else quoted_name(schema, quote=True),
    )
    most, names = connection.dialect.max_identifier_length, (schema or "", settings.table, settings.ledger_table)
    if long := [name for name in (*names, *stored) if len(name.encode()) > most]:
        raise SchemaMismatchError(
            f"table {target.name} cannot take the frame with {', '.join(long)}: the database would cut names at {most} "
            "bytes; give shorter names"
        )
    _make(connection, lambda: _missing_table(connection, target))
    if settings.evolve:
        _make(connection, lambda: _missing_columns(connection, target))
    ledger = prepare_ledger(settings, connection)
    with connection.begin():
        held = _held(connection, target)
        differences = _differences(settings, target, held)
        differences += database.differences(connection, target, settings.key, held)
        if differences:
            raise SchemaMismatchError(
                f"table {target.name} does not fit the frame: {'; '.join(differences)}; "
                "alter the table or the frame, or name another table"
            )
        if differences := database.differences(connection, ledger, (), {}):
            raise SchemaMismatchError(f"table {ledger.name} does not fit: {'; '.join(differences)}")
        return Tables(settings, target, ledger, database.conversions(connection, target))


def prepare_ledger(settings: SqlSinkSettings, connection: sa.Connection) -> sa.Table:
    """Make the ledger where it does not exist, and add the columns that a former version's lacks; its rows stay."""
    ledger = ledger_table(settings.ledger_table, sa.MetaData(), settings.schema)

    def missing() -> list[str]:
        if found := _missing_table(connection, ledger):
            return found
        require_ledger(ledger.name, _held(connection, ledger))
        return _missing_columns(connection, ledger)

    _make(connection, missing)
    return ledger


def _make(connection: sa.Connection, missing: Callable[[], Sequence[str]]) -> None:
    """Run the statements that make what is missing, unless another session has made it in the meantime."""
    try:
        with connection.begin():
            for statement in missing():
                connection.exec_driver_sql(statement)
    except sa.exc.DBAPIError:
        with connection.begin():
            if missing():
                raise


def _missing_table(connection: sa.Connection, table: sa.Table) -> list[str]:
    """Return the statement that makes a table, where it does not exist."""
    if sa.inspect(connection).has_table(table.name, schema=table.schema):
        return []
    return [str(sa.schema.CreateTable(table).compile(dialect=connection.dialect))]


def _missing_columns(connection: sa.Connection, table: sa.Table) -> list[str]:
    """Return the statements that add the columns that a table lacks; its rows have NULL in them.

    Not those of the key, nor where the table has one whose name differs only in case.
    """
    name, dialect = connection.dialect.identifier_preparer.format_table(table), connection.dialect
    held = {column.lower() for column in _held(connection, table)}
    return [
        f"ALTER TABLE {name} ADD COLUMN {sa.schema.CreateColumn(column).compile(dialect=dialect)}"
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

    Those of `summed` hold sums: they are numbers, of the widest type of their kind.
    """

    def type_of(name: str) -> Type:
        kind = schema.field(name).type
        if name in summed:
            return _sum_type(kind)
        return database.column_type(_sql_type(name, kind), len(key) * (name in key))

    return [
        sa.Column(quoted_name(name, quote=True), type_of(name), primary_key=name in key, autoincrement=False)
        for name in wanted
    ]


def _sql_type(column: str, kind: pa.DataType) -> Type:
    """Return the SQL type of a column, or raise `SchemaMismatchError` for an array, map or struct.

    Integers keep their width, decimals their precision, text is unbounded; a timestamp of Spark is an instant and keeps
    its time zone where the database has one.
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


def _sum_type(kind: pa.DataType) -> Type:
    """Return the type of a column that adds up what one of this type brings: a row's own would soon be full."""
    if pa.types.is_floating(kind):
        return sa.Double()
    return sa.Numeric(DIGITS, kind.scale) if pa.types.is_decimal(kind) else sa.BigInteger()


def _differences(settings: SqlSinkSettings, table: sa.Table, held: Held) -> list[str]:
    """Return every difference for which an existing table cannot take the frame's rows.

    Columns the frame does not have are left alone, provided that they may be empty or the table fills them. A column
    that holds sums may be narrower than one that is made for them, as long as they fit.
    """
    database = settings.database
    twins = {name.lower(): f", and has {name}, which differs only in case" for name in held}
    differences = []
    for column in table.columns:
        name = str(column.name)
        if name not in held:
            twin = twins.get(name.lower(), "")
            differences.append(f"the table lacks the frame's column {name}{twin}")
            continue
        stored = held[name]["type"]
        if not database.fits(stored, column.type, is_sum=name in settings.sum_columns):
            differences.append(f"column {name} is {stored} in the table and {column.type} in the frame")
    differences += [
        f"column {name} must not be empty, and the frame does not have it"
        for name, column in held.items()
        if name not in table.columns
        and not column["nullable"]
        and not any(column.get(filled) for filled in ("identity", "computed", "default"))
        and not database.is_numbered(column)
    ]
    return differences
