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

#: A staged row's number among those of its task.
ROW = "penstock_row"

#: Digits that a number of SQLite keeps, which is a float. Decimals of more are texts there.
SQLITE_DIGITS = 15

#: Digits of the widest decimal.
DIGITS = 38

#: Types of PostgreSQL that take a text as it is; into others it must be cast, which reads it.
_TEXTS = ("text", "character", '"char"', "name")


def sql_type(column: str, kind: pa.DataType) -> sa.types.TypeEngine[Any]:
    """Return the database type of a column, or raise `SchemaMismatchError` for an array, map or struct.

    Integers keep their width, decimals their precision, text is unbounded; a timestamp of Spark is an instant and keeps
    its time zone where the database has one. Decimals that no number of SQLite holds are texts there.
    """
    if pa.types.is_decimal(kind):
        number = sa.Numeric(kind.precision, kind.scale)
        return number if kind.precision <= SQLITE_DIGITS else number.with_variant(sa.Text(), "sqlite")
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
    schema: pa.Schema, wanted: Iterable[str], key: Sequence[str] = (), summed: Collection[str] = ()
) -> list[sa.Column[Any]]:
    """Return database columns for the wanted columns of a frame.

    Those of `summed` hold sums: they are numbers, of the widest type of their kind.
    """
    return [
        sa.Column(
            quoted_name(name, quote=True),
            _sum_type(schema.field(name).type) if name in summed else sql_type(name, schema.field(name).type),
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


def whole_sums(schema: pa.Schema, summed: Iterable[str]) -> list[sa.CheckConstraint]:
    """Return what keeps SQLite from turning whole sums that have become too large into floats."""
    whole = [name for name in summed if pa.types.is_integer(schema.field(name).type)]
    return [sa.CheckConstraint(sa.func.typeof(sa.column(name)).in_(["integer", "null"])) for name in whole]


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
    held = {column["name"] for column in sa.inspect(connection).get_columns(table.name, schema=table.schema)}
    return [column for column in table.columns if column.name not in held]


def require_fitting(
    connection: sa.Connection, table: sa.Table, key: Sequence[str], summed: Collection[str] = ()
) -> None:
    """Raise `SchemaMismatchError` naming every difference where an existing table cannot take the frame's rows.

    Columns the frame does not have are left alone, provided that they may be empty or the table fills them. A column
    that holds sums, of `summed`, may be narrower than one that is made for them, as long as they fit.
    """
    inspector = sa.inspect(connection)
    existing = {column["name"]: column for column in inspector.get_columns(table.name, schema=table.schema)}
    held = [column for column in table.columns if column.name in existing]
    differences = [
        f"the table lacks the frame's column {column.name}" for column in table.columns if column.name not in existing
    ]
    differences += [
        _difference(connection.dialect, column, existing[column.name]["type"])
        for column in held
        if not _takes(connection.dialect, existing[column.name]["type"], column.type, is_sum=column.name in summed)
    ]
    differences += [
        f"column {column.name} is generated by the table, and the frame has it"
        for column in held
        if _is_generated(existing[column.name])
    ]
    numbered = _numbered_by_sqlite(connection, inspector, table)
    differences += [
        f"column {name} must not be empty, and the frame does not have it"
        for name, column in existing.items()
        if name not in table.columns
        and name != numbered
        and not column["nullable"]
        and not any(column.get(way) for way in ("identity", "computed"))
        and column.get("default") is None
    ]
    if key and not differences and set(key) not in _unique_columns(connection, inspector, table):
        differences.append(f"the table has no primary key or unique index on ({', '.join(key)})")
    if differences:
        raise SchemaMismatchError(
            f"table {table.name} does not fit the frame: {'; '.join(differences)}; "
            "alter the table or the frame, or name another table"
        )


def _difference(dialect: sa.Dialect, column: sa.Column[Any], found: sa.types.TypeEngine[Any]) -> str:
    """Say why a column of the table does not take the frame's values."""
    said = f"column {column.name} is {found} in the table and {column.type} in the frame"
    if _is_text_there(dialect, column.type):
        return f"{said}: a number of SQLite keeps {SQLITE_DIGITS} digits, make the column TEXT"
    return said


def _is_text_there(dialect: sa.Dialect, kind: sa.types.TypeEngine[Any]) -> bool:
    """Tell whether a number is a text in this database."""
    return isinstance(kind, sa.Numeric) and isinstance(kind.dialect_impl(dialect), sa.Text)


def _is_generated(column: Any) -> bool:
    """Tell whether the table makes the values of a column and takes no others."""
    identity = column.get("identity")
    return bool(column.get("computed") or (identity and identity["always"]))


def _numbered_by_sqlite(connection: sa.Connection, inspector: sa.Inspector, table: sa.Table) -> str | None:
    """Return the column that SQLite numbers by itself: an INTEGER primary key, which stands for the row's own id."""
    if connection.dialect.name != "sqlite" or "sqlite_with_rowid" in inspector.get_table_options(table.name):
        return None
    found = connection.execute(
        sa.text("SELECT name, type FROM pragma_table_info(:name) WHERE pk > 0"), {"name": table.name}
    ).all()
    return found[0][0] if len(found) == 1 and found[0][1].upper() == "INTEGER" else None


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


#: Unique indexes that PostgreSQL takes for `ON CONFLICT (columns)`: of all rows, of columns, and checked at once.
_CONFLICT_TARGETS = """
SELECT array(SELECT attname::text FROM pg_attribute WHERE attrelid = indrelid AND attnum = ANY (
    (indkey::int2[])[0:indnkeyatts - 1]
))
FROM pg_index
WHERE indrelid = to_regclass(:name) AND indisunique AND indimmediate AND indisvalid
    AND indpred IS NULL AND indexprs IS NULL
"""


def _unique_columns(connection: sa.Connection, inspector: sa.Inspector, table: sa.Table) -> list[set[str | None]]:
    """Return the sets of columns of which the table holds each combination once, at any moment."""
    if connection.dialect.name == "postgresql":
        name = connection.dialect.identifier_preparer.format_table(table)
        return [set(columns) for (columns,) in connection.execute(sa.text(_CONFLICT_TARGETS), {"name": name})]
    unique: list[set[str | None]] = [set(inspector.get_pk_constraint(table.name)["constrained_columns"])]
    # A unique index on a part of the rows does not tell rows of one key apart.
    unique += [
        set(index["column_names"])
        for index in inspector.get_indexes(table.name)
        if index["unique"] and "sqlite_where" not in index.get("dialect_options", {})
    ]
    unique += [set(constraint["column_names"]) for constraint in inspector.get_unique_constraints(table.name)]
    return unique


def _takes(
    dialect: sa.Dialect, stored: sa.types.TypeEngine[Any], arriving: sa.types.TypeEngine[Any], *, is_sum: bool
) -> bool:
    """Tell whether a column of one type can take values of another, and keeps them."""
    arriving = sa.Text() if _is_text_there(dialect, arriving) else arriving
    found, given = _family(stored), _family(arriving)
    if dialect.name == "sqlite":
        if isinstance(stored, sa.Float) and isinstance(arriving, sa.BigInteger) and not is_sum:
            return False  # it would keep 53 bits, and say nothing
        # Others keep any number as it is, a fraction in an integer column too, and truth values are numbers.
        found, given = ("number" if one == "boolean" else one for one in (found, given))
    elif found == given == "number" and _is_whole(stored) and not _is_whole(arriving):
        return False  # PostgreSQL would round, and say nothing
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


def _is_whole(kind: sa.types.TypeEngine[Any]) -> bool:
    return isinstance(kind, sa.Integer) or (isinstance(kind, sa.Numeric) and kind.scale == 0)
