"""How values of a frame get into a column of PostgreSQL, and which of them it would change.

PostgreSQL rounds numbers and times, and cuts and pads texts, to what a column holds, and says nothing. Where a type of
the frame has values that a type of the column changes, the staging table gets a CHECK: such a row is refused there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from penstock.spark_sink.sinks.sql.databases.database import Conversion
from penstock.spark_sink.sinks.sql.databases.schema import DIGITS, Named

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

#: Types that take a text as it is; into others it must be cast, which reads it.
_TEXTS = frozenset({"text", "varchar", "bpchar", "name", "char"})

#: Types that keep what they read, whatever its spelling, and those of which arrays do.
_EXACT = frozenset({
    "text", "varchar", "uuid", "json", "jsonb", "xml", "inet", "cidr", "macaddr", "macaddr8", "int4range", "int8range",
    "numrange",
})  # fmt: skip
_EXACT_ARRAYS = frozenset(f"_{name}" for name in (*_EXACT, "int2", "int4", "int8", "bool", "numeric"))

#: Spellings of which nothing is lost but by a column's precision. Others would be read as well: without a time's date
#: or zone, say, or with a fraction of a month in whole days.
_CLOCK = "[0-9]{2}:[0-9]{2}(:[0-5][0-9]([.][0-9]{1,6}0*)?)?"
_SPELLINGS = {
    "time": f"^{_CLOCK}$",
    "timetz": f"^{_CLOCK}([+-][0-9]{{2}}(:?[0-9]{{2}})?|z)$",
    "interval": "^[^.]*([.][0-9]{1,6}0*)? ?(s|secs?|seconds?)?$",
    "daterange": "^([[(][0-9-]*,[0-9-]*[])]|empty)$",
}

#: Digits that a number is sure to keep in a column of floats.
_FLOAT_DIGITS = {"float4": 6, "float8": 15}

#: Digits of a second that a time has.
_MICROSECONDS = 6

_SCALE = re.compile(r"numeric\(\d+,(-?\d+)\)")


@dataclass(frozen=True, slots=True)
class _Held:
    """A column of the table.

    `written` is its type as SQL has it, `name` PostgreSQL's name of that, or of what a domain is made of. `is_plain`
    says that it is no domain, and `is_named` that its values are those of an enum or of an extension.
    """

    written: str
    name: str
    modifier: int
    is_plain: bool
    is_named: bool


def conversions(connection: sa.Connection, name: str, table: sa.Table) -> dict[str, Conversion]:
    """Return how values get into the columns of a table, which `to_regclass` finds by a name."""
    found = connection.execute(sa.text(_COLUMNS), {"name": name}).all()
    return {row[0]: _conversion(table.c[row[0]], _Held(*row[1:])) for row in found if row[0] in table.c}


def _conversion(column: sa.Column[Any], held: _Held) -> Conversion:
    value: sa.ColumnElement[Any] = sa.column(str(column.name), column.type)
    if isinstance(column.type, sa.Text):
        is_read = not held.is_plain or held.name not in _TEXTS
        return Conversion(held.written, _by_cast(held.written) if is_read else None, _keeps_text(value, held))
    if isinstance(column.type, sa.Float) and held.name == "numeric":
        # By way of a text, which has all digits: PostgreSQL itself gives a numeric 15 of them.
        value = sa.cast(value, sa.Text())
        kept = sa.cast(value, Named(held.written)) == sa.cast(value, sa.Numeric())
        return Conversion(held.written, _by_cast("text", held.written), None if held.modifier == -1 else kept)
    return Conversion(held.written, None, _keeps(column.type, value, held))


def _by_cast(*types: str) -> Callable[[sa.ColumnElement[Any]], sa.ColumnElement[Any]]:
    """Return the reading of a value by some types, one after the other."""

    def read(value: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        for written in types:
            value = sa.cast(value, Named(written))
        return value

    return read


def _keeps(kind: sa.types.TypeEngine[Any], value: sa.ColumnElement[Any], held: _Held) -> sa.ColumnElement[bool] | None:
    """Return the condition under which a number or a time stays as it is; None where each does."""
    stored = sa.cast(value, Named(held.written))
    if held.name == "numeric" and (found := _SCALE.fullmatch(held.written)):
        scale = kind.scale or 0 if isinstance(kind, sa.Numeric) else 0
        return stored == value if int(found[1]) < scale else None
    if held.name in _FLOAT_DIGITS and isinstance(kind, sa.Integer):
        return sa.cast(stored, sa.BigInteger()) == value if _digits(kind) > _FLOAT_DIGITS[held.name] else None
    if held.name in _FLOAT_DIGITS and isinstance(kind, sa.Numeric) and not isinstance(kind, sa.Float):
        is_wider = (kind.precision or DIGITS) > _FLOAT_DIGITS[held.name]
        return sa.cast(sa.cast(stored, sa.Text()), sa.Numeric()) == value if is_wider else None
    if held.name in {"timestamp", "timestamptz"} and 0 <= held.modifier < _MICROSECONDS:
        return stored == value
    return None


def _digits(kind: sa.Integer) -> int:
    return 5 if isinstance(kind, sa.SmallInteger) else 19 if isinstance(kind, sa.BigInteger) else 10


def _keeps_text(value: sa.ColumnElement[Any], held: _Held) -> sa.ColumnElement[bool] | None:
    """Return the condition under which what a text says is what is stored; None where each text is refused or kept."""
    is_exact = held.name in _EXACT or held.name in _EXACT_ARRAYS
    if held.is_named or (is_exact and held.modifier == -1):
        return None
    stored, whole = sa.cast(value, Named(held.written)), sa.cast(value, Named(held.name))
    if held.name in _SPELLINGS:
        return sa.and_(value.op("~*")(_SPELLINGS[held.name]), stored == whole)
    if held.name in _EXACT_ARRAYS:
        return stored == whole
    if held.name == "money":
        return sa.cast(stored, sa.Numeric()) == sa.cast(value, sa.Numeric())
    if held.name in {"_float4", "_float8"}:
        numbers = Named("numeric[]")
        return sa.cast(sa.cast(stored, sa.Text()), numbers) == sa.cast(value, numbers)
    return sa.cast(stored, sa.Text()) == value
