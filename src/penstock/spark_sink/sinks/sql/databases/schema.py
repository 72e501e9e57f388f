"""How a frame's columns become a database table, and whether an existing table can take them.

Names are quoted always: a column called `order` or `a"b` is stored under that very name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.elements import quoted_name

from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks.sql.databases.database import Database

#: A staged row's number among those of its task.
ROW = "penstock_row"

#: Digits of the widest decimal.
DIGITS = 38


def sql_type(database: Database, column: str, kind: pa.DataType) -> sa.types.TypeEngine[Any]:
    """Return the database type of a column, or raise `SchemaMismatchError` for an array, map or struct.

    Integers keep their width, decimals their precision, text is unbounded; a timestamp of Spark is an instant and keeps
    its time zone where the database has one. Decimals of more digits than a number keeps are texts.
    """
    if pa.types.is_decimal(kind):
        number = sa.Numeric(kind.precision, kind.scale)
        return number if _keeps_digits(database, kind.precision) else number.with_variant(sa.Text(), database.name)
    if pa.types.is_timestamp(kind):
        return sa.DateTime(timezone=kind.tz is not None)
    for matches, found in _SIMPLE_TYPES:
        if matches(kind):
            return found
    raise SchemaMismatchError(
        f"column {column} has the type {kind}, which no column of a database can hold; "
        "turn it into text with to_json(...), or leave it out of the frame"
    )


_SIMPLE_TYPES: tuple[tuple[Any, sa.types.TypeEngine[Any]], ...] = (
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
    return [
        sa.Column(
            quoted_name(name, quote=True),
            _sum_type(schema.field(name).type)
            if name in summed
            else database.column_type(sql_type(database, name, schema.field(name).type), len(key) * (name in key)),
            primary_key=name in key,
            autoincrement=False,
        )
        for name in wanted
    ]


def _sum_type(kind: pa.DataType) -> sa.types.TypeEngine[Any]:
    """Return the type of a column that adds up what one of this type brings: a row's own would soon be full."""
    if pa.types.is_floating(kind):
        return sa.Double()
    return sa.Numeric(DIGITS, kind.scale) if pa.types.is_decimal(kind) else sa.BigInteger()


class _AddColumn(sa.schema.ExecutableDDLElement):
    """`ALTER TABLE ... ADD COLUMN`, which SQLAlchemy has no words for."""

    inherit_cache = False

    def __init__(self, column: sa.Column[Any]) -> None:
        self.column = column


@compiles(_AddColumn)
def _compiled(element: _AddColumn, compiler: Any, **_options: Any) -> str:
    table = compiler.preparer.format_table(element.column.table)
    return f"ALTER TABLE {table} ADD COLUMN {compiler.process(sa.schema.CreateColumn(element.column))}"


def lacks_columns(connection: sa.Connection, table: sa.Table) -> bool:
    """Tell whether an existing table lacks columns of the frame."""
    return bool(_lacking(connection, table))


def add_columns(connection: sa.Connection, table: sa.Table) -> None:
    """Add the columns of the frame that an existing table lacks; its rows have NULL in them. Not those of the key."""
    for column in _lacking(connection, table):
        if not column.primary_key:
            connection.execute(_AddColumn(column))


def _lacking(connection: sa.Connection, table: sa.Table) -> list[sa.Column[Any]]:
    """Return columns that may be added: not where the table has one whose name differs only in case."""
    found = sa.inspect(connection).get_columns(table.name, schema=table.schema)
    held = {column["name"].lower() for column in found}
    return [column for column in table.columns if str(column.name).lower() not in held]


def require_fitting(
    database: Database, connection: sa.Connection, table: sa.Table, key: Sequence[str], summed: Collection[str] = ()
) -> None:
    """Raise `SchemaMismatchError` naming every difference where an existing table cannot take the frame's rows.

    Columns the frame does not have are left alone, provided that they may be empty or the table fills them. A column
    that holds sums, of `summed`, may be narrower than one that is made for them, as long as they fit.
    """
    inspector = sa.inspect(connection)
    existing = {column["name"]: column for column in inspector.get_columns(table.name, schema=table.schema)}
    held = [column for column in table.columns if column.name in existing]
    twins = {name.lower(): f", and has {name}, which differs only in case" for name in existing}
    differences = [
        f"the table lacks the frame's column {column.name}{twins.get(str(column.name).lower(), '')}"
        for column in table.columns
        if column.name not in existing
    ]
    differences += [
        _difference(database, column, existing[column.name]["type"])
        for column in held
        if not _takes(database, existing[column.name]["type"], column.type, is_sum=column.name in summed)
    ]
    differences += [
        f"column {column.name} is generated by the table, and the frame has it"
        for column in held
        if _is_generated(existing[column.name])
    ]
    numbered = database.numbered_column(connection, inspector, table)
    differences += [
        f"column {name} must not be empty, and the frame does not have it"
        for name, column in existing.items()
        if name not in table.columns
        and name != numbered
        and not column["nullable"]
        and not any(column.get(way) for way in ("identity", "computed"))
        and column.get("default") is None
    ]
    if key and not differences and set(key) not in database.unique_columns(connection, inspector, table):
        differences.append(f"the table has no primary key or unique index on ({', '.join(key)})")
    differences += database.differences(connection, inspector, table, key)
    if differences:
        raise SchemaMismatchError(
            f"table {table.name} does not fit the frame: {'; '.join(differences)}; "
            "alter the table or the frame, or name another table"
        )


def _difference(database: Database, column: sa.Column[Any], found: sa.types.TypeEngine[Any]) -> str:
    """Say why a column of the table does not take the frame's values."""
    said = f"column {column.name} is {found} in the table and {column.type} in the frame"
    if _is_text_there(database, column.type):
        return f"{said}: a number of {database.title} keeps {database.digits} digits, make the column TEXT"
    return said


def _is_text_there(database: Database, kind: sa.types.TypeEngine[Any]) -> bool:
    """Tell whether a number is a text in this database."""
    digits = kind.precision if isinstance(kind, sa.Numeric) else None
    return digits is not None and not _keeps_digits(database, digits)


def _keeps_digits(database: Database, digits: int) -> bool:
    return database.digits is None or digits <= database.digits


def _is_generated(column: Any) -> bool:
    """Tell whether the table makes the values of a column and takes no others."""
    identity = column.get("identity")
    return bool(column.get("computed") or (identity and identity["always"]))


class Named(sa.types.UserDefinedType[Any]):
    """A type of the database by the name that the database gives it."""

    cache_ok = True

    def __init__(self, name: str) -> None:
        self.name = name

    def get_col_spec(self, **_options: Any) -> str:
        """Return the name, for SQLAlchemy."""
        return self.name


def _takes(
    database: Database, stored: sa.types.TypeEngine[Any], arriving: sa.types.TypeEngine[Any], *, is_sum: bool
) -> bool:
    """Tell whether a column of one type can take values of another, and keeps them."""
    arriving = sa.Text() if _is_text_there(database, arriving) else arriving
    if (known := database.takes(stored, arriving)) is not None:
        return known
    found, given = _family(stored), _family(arriving)
    if database.booleans_are_numbers:
        found, given = ("number" if one == "boolean" else one for one in (found, given))
    if found == given == "number":
        return database.keeps(stored, arriving, is_sum=is_sum)
    # What is neither number nor time nor bytes, such as JSON, a UUID or an address, is read from a text.
    return found == given or (isinstance(arriving, sa.Text) and found == "read from text")


def _family(kind: sa.types.TypeEngine[Any]) -> str:
    """Return what kind of values a type holds: within a family the database converts, across it must not."""
    try:
        python_type = kind.python_type
    except NotImplementedError:  # SQLAlchemy's word for a type without a Python type of its own
        return "read from text"
    if python_type is bool:
        return "boolean"
    if issubclass(python_type, int | float | Decimal):
        return "number"
    return python_type.__name__ if python_type in (str, bytes, date, datetime) else "read from text"
