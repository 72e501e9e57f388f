"""How a frame's columns become a database table, and whether an existing table can take them.

Names are quoted always: a column called `order` or `a"b` is stored under that very name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.sql.elements import quoted_name

from penstock.errors import SinkError

#: The columns that say where a row comes from.
POSITION = ("topic", "partition", "offset")

#: A staged row's number among those of its task.
ROW = "penstock_row"

#: Types of PostgreSQL that take a text as it is; into others it must be cast, which reads it.
_TEXTS = ("text", "character", '"char"', "name")


def sql_type(column: str, kind: pa.DataType) -> sa.types.TypeEngine[Any]:
    """Return the database type of a column.

    Integers keep their width, decimals their precision, text is unbounded; a timestamp of Spark is an instant
    and keeps its time zone where the database has one.

    Raises:
        SinkError: the column is an array, map or struct; the message names it.
    """
    if pa.types.is_decimal(kind):
        return sa.Numeric(kind.precision, kind.scale)
    if pa.types.is_timestamp(kind):
        return sa.DateTime(timezone=kind.tz is not None)
    for matches, found in _SIMPLE_TYPES:
        if matches(kind):
            return found
    raise SinkError(
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


def columns_of(schema: pa.Schema, wanted: Iterable[str], key: Sequence[str] = ()) -> list[sa.Column[Any]]:
    """Return database columns for the wanted columns of a frame; those of `key` are the primary key."""
    return [
        sa.Column(
            quoted_name(name, quote=True),
            sql_type(name, schema.field(name).type),
            primary_key=name in key,
            autoincrement=False,
        )
        for name in wanted
    ]


def require_fitting(connection: sa.Connection, table: sa.Table, key: Sequence[str]) -> None:
    """Check that an existing table can take the frame's rows.

    Columns the frame does not have are left alone, provided that they may be empty or have a default.

    Raises:
        SinkError: the message names every difference.
    """
    inspector = sa.inspect(connection)
    existing = {column["name"]: column for column in inspector.get_columns(table.name, schema=table.schema)}
    differences = [
        f"the table lacks the frame's column {column.name}" for column in table.columns if column.name not in existing
    ]
    differences += [
        f"column {column.name} is {existing[column.name]['type']} in the table and {column.type} in the frame"
        for column in table.columns
        if column.name in existing and not _takes(existing[column.name]["type"], column.type)
    ]
    differences += [
        f"column {name} must not be empty, and the frame does not have it"
        for name, column in existing.items()
        if name not in table.columns and not column["nullable"] and column.get("default") is None
    ]
    if key and not differences and set(key) not in _unique_columns(inspector, table):
        differences.append(f"the table has no primary key or unique index on ({', '.join(key)})")
    if differences:
        raise SinkError(
            f"table {table.name} does not fit the frame: {'; '.join(differences)}; "
            "alter the table or the frame, or name another table"
        )


def casts_of(connection: sa.Connection, table: sa.Table) -> dict[str, str]:
    """Return the columns whose texts PostgreSQL must be told to read as another type, such as jsonb, with that type.

    Other databases, and types that PostgreSQL turns into each other by itself, need none.
    """
    texts = [str(column.name) for column in table.columns if isinstance(column.type, sa.Text)]
    if connection.dialect.name != "postgresql" or not texts:
        return {}
    found = connection.execute(
        sa.text(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = to_regclass(:name) AND attnum > 0 AND NOT attisdropped"
        ),
        {"name": connection.dialect.identifier_preparer.format_table(table)},
    )
    return {name: kind for name, kind in found if name in texts and not kind.startswith(_TEXTS)}


class Named(sa.types.UserDefinedType[Any]):
    """A type of the database by the name that the database gives it."""

    cache_ok = True

    def __init__(self, name: str) -> None:
        self.name = name

    def get_col_spec(self, **_options: Any) -> str:
        """Return the name, for SQLAlchemy."""
        return self.name


def _unique_columns(inspector: sa.Inspector, table: sa.Table) -> list[set[str | None]]:
    unique: list[set[str | None]] = [
        set(inspector.get_pk_constraint(table.name, schema=table.schema)["constrained_columns"])
    ]
    # A unique index on a part of the rows does not tell rows of one key apart.
    unique += [
        set(index["column_names"])
        for index in inspector.get_indexes(table.name, schema=table.schema)
        if index["unique"] and not index.get("dialect_options", {}).get("postgresql_where")
    ]
    unique += [
        set(constraint["column_names"])
        for constraint in inspector.get_unique_constraints(table.name, schema=table.schema)
    ]
    return unique


def _takes(stored: sa.types.TypeEngine[Any], arriving: sa.types.TypeEngine[Any]) -> bool:
    """Tell whether a column of one type can take values of another."""
    found = _family(stored)
    # What is neither number nor time nor bytes, such as JSON, a UUID or an address, is read from a text.
    return found == _family(arriving) or (isinstance(arriving, sa.Text) and found == "read from text")


def _family(kind: sa.types.TypeEngine[Any]) -> str:
    """Return what kind of values a type holds: within a family the database converts, across it must not."""
    try:
        python_type = kind.python_type
    except NotImplementedError:
        return "read from text"
    if issubclass(python_type, int | float | Decimal):
        # Some keep truth values in integer columns, and databases convert between the types of numbers.
        return "number"
    return python_type.__name__ if python_type in (str, bytes, date, datetime) else "read from text"


def ledger_table(name: str, metadata: sa.MetaData, schema: str | None = None) -> sa.Table:
    """Return the ledger's table: one row per target table, topic and partition."""
    return sa.Table(
        quoted_name(name, quote=True),
        metadata,
        sa.Column("target", sa.Text, primary_key=True),
        sa.Column("topic", sa.Text, primary_key=True),
        sa.Column("partition", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("next_offset", sa.BigInteger, nullable=False),
        # Which batch moved it last; empty where the run of the query is not known.
        sa.Column("batch", sa.Text),
        schema=None if schema is None else quoted_name(schema, quote=True),
    )


__all__ = [
    "POSITION",
    "ROW",
    "Named",
    "casts_of",
    "columns_of",
    "ledger_table",
    "require_fitting",
    "sql_type",
]
