"""The tables of a SQL sink: made from the frame where they do not exist, and checked against it where they do.

Names are quoted always: a column called `order` or `a"b` is stored under that very name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.sql.elements import quoted_name

from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks.position import POSITION
from penstock.spark_sink.sinks.sql.databases.database import DIGITS, Database, Type
from penstock.spark_sink.sinks.sql.ledger import is_former, ledger_table
from penstock.spark_sink.sinks.sql.settings import SqlSinkSettings
from penstock.spark_sink.sinks.sql.upsert import Upsert


@dataclass(frozen=True, slots=True)
class Tables:
    """Where a batch goes: the way into the target table, and the ledger."""

    upsert: Upsert
    ledger: sa.Table


def prepare(settings: SqlSinkSettings, frame: pa.Schema, connection: sa.Connection) -> Tables:
    """Make the tables, and columns, that do not exist and check those that do; the transaction is the caller's.

    Raises `SinkError` where the table does not fit the frame.
    """
    database, metadata = settings.database, sa.MetaData()
    stored = [
        name for name in frame.names if name != settings.delete and (settings.keep_position or name not in POSITION)
    ]
    target = sa.Table(
        quoted_name(settings.table, quote=True),
        metadata,
        *columns_of(database, frame, stored, settings.key, settings.sum_columns),
        *database.constraints(frame, settings.sum_columns),
        schema=None if settings.schema is None else quoted_name(settings.schema, quote=True),
    )
    ledger = ledger_table(settings.ledger_table, metadata, settings.schema)
    inspector = sa.inspect(connection)
    if not all(inspector.has_table(name, schema=settings.schema) for name in (settings.table, settings.ledger_table)):
        with database.schema_lock(connection):
            metadata.create_all(connection)
    for table in (target, ledger):
        database.require_transactions(connection, table)
    carry_over(database, connection, ledger)
    if settings.evolve and _lacking(connection, target):
        _add_columns(database, connection, target)
    _require_fitting(database, connection, target, settings.key, settings.sum_columns)
    found = database.conversions(connection, target)
    return Tables(Upsert(database, target, settings.key, settings.sum_columns, settings.delete, found), ledger)


def carry_over(database: Database, connection: sa.Connection, ledger: sa.Table) -> None:
    """Add the columns that a former version's ledger lacks: its rows keep working."""
    if is_former(connection, ledger):
        _add_columns(database, connection, ledger)


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
        return database.column_type(_sql_type(database, name, kind), len(key) * (name in key))

    return [
        sa.Column(quoted_name(name, quote=True), type_of(name), primary_key=name in key, autoincrement=False)
        for name in wanted
    ]


def _sql_type(database: Database, column: str, kind: pa.DataType) -> Type:
    """Return the database type of a column, or raise `SchemaMismatchError` for an array, map or struct.

    Integers keep their width, decimals their precision, text is unbounded; a timestamp of Spark is an instant and keeps
    its time zone where the database has one. Decimals of more digits than a number keeps are texts.
    """
    if pa.types.is_decimal(kind):
        number = sa.Numeric(kind.precision, kind.scale)
        return number.with_variant(sa.Text(), database.name) if _is_text_there(database, number) else number
    if pa.types.is_timestamp(kind):
        return sa.DateTime(timezone=kind.tz is not None)
    for matches, found in _SIMPLE_TYPES:
        if matches(kind):
            return found
    raise SchemaMismatchError(
        f"column {column} has the type {kind}, which no column of a database can hold; "
        "turn it into text with to_json(...), or leave it out of the frame"
    )


_SIMPLE_TYPES: tuple[tuple[Any, Type], ...] = (
    (pa.types.is_boolean, sa.Boolean()),
    (pa.types.is_int8, sa.SmallInteger()),
    (pa.types.is_int16, sa.SmallInteger()),
    (pa.types.is_int32, sa.Integer()),
    (pa.types.is_int64, sa.BigInteger()),
    (pa.types.is_float32, sa.REAL()),
    (pa.types.is_float64, sa.Double()),
    (pa.types.is_string, sa.Text()),
    (pa.types.is_large_string, sa.Text()),
    (pa.types.is_binary, sa.LargeBinary()),
    (pa.types.is_large_binary, sa.LargeBinary()),
    (pa.types.is_date32, sa.Date()),
)


def _sum_type(kind: pa.DataType) -> Type:
    """Return the type of a column that adds up what one of this type brings: a row's own would soon be full."""
    if pa.types.is_floating(kind):
        return sa.Double()
    return sa.Numeric(DIGITS, kind.scale) if pa.types.is_decimal(kind) else sa.BigInteger()


def _is_text_there(database: Database, kind: Type) -> bool:
    """Tell whether a decimal is a text in this database."""
    digits = kind.precision if isinstance(kind, sa.Numeric) else None
    return digits is not None and database.digits is not None and digits > database.digits


def _add_columns(database: Database, connection: sa.Connection, table: sa.Table) -> None:
    """Add the columns that an existing table lacks; its rows have NULL in them. Not those of the key."""
    name = connection.dialect.identifier_preparer.format_table(table)
    with database.schema_lock(connection):
        # The one who had the lock before may have added them.
        for column in _lacking(connection, table):
            if not column.primary_key:
                added = sa.schema.CreateColumn(column).compile(dialect=connection.dialect)
                connection.exec_driver_sql(f"ALTER TABLE {name} ADD COLUMN {added}")


def _lacking(connection: sa.Connection, table: sa.Table) -> list[sa.Column[Any]]:
    """Return columns that may be added: not where the table has one whose name differs only in case."""
    found = sa.inspect(connection).get_columns(table.name, schema=table.schema)
    held = {column["name"].lower() for column in found}
    return [column for column in table.columns if str(column.name).lower() not in held]


def _require_fitting(
    database: Database, connection: sa.Connection, table: sa.Table, key: Sequence[str], summed: Collection[str]
) -> None:
    """Raise `SchemaMismatchError` naming every difference where an existing table cannot take the frame's rows.

    Columns the frame does not have are left alone, provided that they may be empty or the table fills them. A column
    that holds sums, of `summed`, may be narrower than one that is made for them, as long as they fit.
    """
    inspector = sa.inspect(connection)
    existing = {column["name"]: column for column in inspector.get_columns(table.name, schema=table.schema)}
    twins = {name.lower(): f", and has {name}, which differs only in case" for name in existing}
    differences = []
    for column in table.columns:
        held: Any = existing.get(str(column.name))
        if held is None:
            twin = twins.get(str(column.name).lower(), "")
            differences.append(f"the table lacks the frame's column {column.name}{twin}")
            continue
        is_text = _is_text_there(database, column.type)
        arriving = sa.Text() if is_text else column.type
        if not database.fits(held["type"], arriving, is_sum=column.name in summed):
            remedy = f": a number of {database.title} keeps {database.digits} digits, make the column TEXT"
            differences.append(
                f"column {column.name} is {held['type']} in the table and {column.type} in the frame"
                f"{remedy if is_text else ''}"
            )
        if held.get("computed") or (held.get("identity") or {}).get("always"):
            differences.append(f"column {column.name} is generated by the table, and the frame has it")
    numbered = database.numbered_column(connection, inspector, table)
    differences += [
        f"column {name} must not be empty, and the frame does not have it"
        for name, held in existing.items()
        if name not in table.columns
        and name != numbered
        and not held["nullable"]
        and not any(held.get(way) for way in ("identity", "computed"))
        and held.get("default") is None
    ]
    if key and not differences and set(key) not in database.unique_columns(connection, inspector, table):
        differences.append(f"the table has no primary key or unique index on ({', '.join(key)})")
    differences += database.differences(connection, inspector, table, key)
    if differences:
        raise SchemaMismatchError(
            f"table {table.name} does not fit the frame: {'; '.join(differences)}; "
            "alter the table or the frame, or name another table"
        )
