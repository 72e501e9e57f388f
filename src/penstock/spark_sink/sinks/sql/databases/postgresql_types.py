"""How values of a frame get into a column of PostgreSQL, and which of them it would change.

PostgreSQL rounds numbers and times, and cuts and pads texts, to what a column holds, and says nothing. So a value is
kept if it comes back as it was when it is cast to the column's type and back. Types below keep what a text says in any
spelling, times and intervals in some; for others a text must read as PostgreSQL writes the value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from penstock.spark_sink.sinks.sql.databases.database import Conversion, is_whole

#: The columns of a table: type as it is written, and of what that is made where it is a domain.
_COLUMNS = """
WITH RECURSIVE held AS (
    SELECT attname, format_type(atttypid, atttypmod) AS written, atttypid AS kind, atttypmod AS modifier
    FROM pg_attribute WHERE attrelid = to_regclass(:name) AND attnum > 0 AND NOT attisdropped
    UNION ALL
    SELECT attname, written, typbasetype, typtypmod FROM held JOIN pg_type ON oid = kind WHERE typtype = 'd'
)
SELECT attname, written, typname, modifier, format_type(kind, modifier) = written AS is_plain,
    typtype = 'e' OR (typtype = 'b' AND typcategory <> 'A' AND typnamespace <> 'pg_catalog'::regnamespace) AS is_named
FROM held JOIN pg_type ON oid = kind WHERE typtype <> 'd'
"""

#: Whole numbers, of which one that does not fit is an error.
_WHOLE = frozenset({"int2", "int4", "int8"})

#: Types that take a text as it is; into others it must be cast, which reads it.
_TEXTS = frozenset({"text", "varchar", "bpchar", "name", "char"})

#: Types that keep what they read, whatever its spelling, unless the column has a length or precision. Those of numbers
#: are here for their arrays, which begin with an underscore: into the others no text goes.
_EXACT = _WHOLE | {
    "text", "varchar", "uuid", "json", "jsonb", "xml", "inet", "cidr", "macaddr", "macaddr8", "int4range", "int8range",
    "numrange", "bool", "numeric",
}  # fmt: skip

#: Spellings of which nothing is lost but by a column's precision. Others would be read as well: without a time's date
#: or zone, say, or with a fraction of a month in whole days.
_CLOCK = "[0-9]{2}:[0-9]{2}(:[0-5][0-9]([.][0-9]{1,6}0*)?)?"
_SPELLINGS = {
    "time": f"^{_CLOCK}$",
    "timetz": f"^{_CLOCK}([+-][0-9]{{2}}(:?[0-9]{{2}})?|z)$",
    "interval": "^[^.]*([.][0-9]{1,6}0*)? ?(s|secs?|seconds?)?$",
}


@dataclass(frozen=True, slots=True)
class _Held:
    """A column of the table.

    `written` is its type as SQL has it, `name` PostgreSQL's name of that, or of what a domain is made of, and
    `modifier` its length or precision, -1 for none. `is_plain` says that it is no domain, and `is_named` that its
    values are those of an enum or of an extension.
    """

    written: str
    name: str
    modifier: int
    is_plain: bool
    is_named: bool


class _Named(sa.types.UserDefinedType[Any]):
    """A type of the database by the name that the database gives it."""

    cache_ok = True

    def __init__(self, name: str) -> None:
        self.name = name

    def get_col_spec(self, **_options: Any) -> str:
        """Return the name, for SQLAlchemy."""
        return self.name


def conversions(connection: sa.Connection, name: str, table: sa.Table) -> dict[str, Conversion]:
    """Return how values get into the columns of a table, which `to_regclass` finds by a name."""
    found = connection.execute(sa.text(_COLUMNS), {"name": name}).all()
    return {
        row[0]: _conversion(connection.dialect, table.c[row[0]], _Held(*row[1:])) for row in found if row[0] in table.c
    }


def _conversion(dialect: sa.Dialect, column: sa.Column[Any], held: _Held) -> Conversion:
    value: sa.ColumnElement[Any] = sa.column(str(column.name), column.type)
    if isinstance(column.type, sa.Text):
        is_read = not held.is_plain or held.name not in _TEXTS
        return Conversion(held.written, _by_cast(held.written) if is_read else None, _keeps_text(value, held))
    own = str(column.type.compile(dialect=dialect)).lower().replace(", ", ",")
    if own == held.written or (is_whole(column.type) and held.name in _WHOLE):
        return Conversion(held.written)
    is_float = isinstance(column.type, sa.Float)
    # By way of a text, which has all digits: as a numeric a float has 15 of them, or 6.
    read = _by_cast("text", held.written) if is_float and held.name == "numeric" else None
    stored = (read or _by_cast(held.written))(value)
    if held.name in {"float4", "float8"} and isinstance(column.type, sa.Numeric) and not is_float:
        stored = sa.cast(stored, sa.Text())
    return Conversion(held.written, read, sa.cast(stored, column.type) == value)


def _by_cast(*types: str) -> Callable[[sa.ColumnElement[Any]], sa.ColumnElement[Any]]:
    """Return the reading of a value by some types, one after the other."""

    def read(value: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        for written in types:
            value = sa.cast(value, _Named(written))
        return value

    return read


def _keeps_text(value: sa.ColumnElement[Any], held: _Held) -> sa.ColumnElement[bool] | None:
    """Return the condition under which what a text says is what is stored; None where each text is refused or kept."""
    if held.is_named or (held.name.removeprefix("_") in _EXACT and held.modifier == -1):
        return None
    stored = sa.cast(value, _Named(held.written))
    if held.name in _SPELLINGS:
        return sa.and_(value.op("~*")(_SPELLINGS[held.name]), stored == sa.cast(value, _Named(held.name)))
    return sa.cast(stored, sa.Text()) == value
