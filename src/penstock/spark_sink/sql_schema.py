"""How a frame's columns become a database table, and whether an existing table can take them.

Names are quoted always: a column called `order` or `a"b` is stored under that very name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.sql.elements import quoted_name

from penstock.errors import SinkError

#: The columns that say where a row comes from.
POSITION = ("topic", "partition", "offset")


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
    existing = {column["name"]: column for column in inspector.get_columns(table.name)}
    differences = [
        f"the table lacks the frame's column {column.name}" for column in table.columns if column.name not in existing
    ]
    differences += [
        f"column {column.name} is {existing[column.name]['type']} in the table and {column.type} in the frame"
        for column in table.columns
        if column.name in existing and _family(existing[column.name]["type"]) != _family(column.type)
    ]
    differences += [
        f"column {name} must not be empty, and the frame does not have it"
        for name, column in existing.items()
        if name not in table.columns and not column["nullable"] and column.get("default") is None
    ]
    if key and not differences and set(key) not in _unique_columns(inspector, table.name):
        differences.append(f"the table has no primary key or unique index on ({', '.join(key)})")
    if differences:
        raise SinkError(
            f"table {table.name} does not fit the frame: {'; '.join(differences)}; "
            "alter the table or the frame, or name another table"
        )


def _unique_columns(inspector: sa.Inspector, table: str) -> list[set[str | None]]:
    unique: list[set[str | None]] = [set(inspector.get_pk_constraint(table)["constrained_columns"])]
    unique += [set(index["column_names"]) for index in inspector.get_indexes(table) if index["unique"]]
    unique += [set(constraint["column_names"]) for constraint in inspector.get_unique_constraints(table)]
    return unique


def _family(kind: sa.types.TypeEngine[Any]) -> str:
    """Return what kind of values a type holds: within a family the database converts, across it must not."""
    if isinstance(kind, sa.types.NullType):
        return str(kind)
    # Some keep truth values in integer columns, and databases convert between the types of numbers.
    return "number" if issubclass(kind.python_type, int | float | Decimal) else kind.python_type.__name__


__all__ = ["POSITION", "columns_of", "require_fitting", "sql_type"]
