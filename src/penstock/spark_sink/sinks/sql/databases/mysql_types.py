"""How values of a frame get into a column of MySQL or MariaDB, and which of them it would change.

Also in strict mode they round fractions, drop spaces at the end, take texts for times, and say nothing. Where a
type of the frame has values that a type of the column changes, the staging table gets a CHECK: such a row is refused
there. What is written below is all that is kept; other pairs of types are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from penstock.spark_sink.sinks.sql.databases.database import Conversion, Type, is_whole

_COLUMNS = """
SELECT column_name, data_type, column_type, character_maximum_length, character_set_name, collation_name,
    numeric_precision, numeric_scale, datetime_precision
FROM information_schema.columns WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name = :name
"""

#: Digits that a decimal, and bits that a whole number, is sure to keep in a column of floats.
_FLOAT_DIGITS, _FLOAT_BITS = {"float": 6, "double": 15}, {"float": 24, "double": 53}

#: Digits of a second that a time has.
_MICROSECONDS = 6

#: Numbers that JSON of MySQL would round to a float, outside of quotes.
_QUOTED_IN_JSON = r'"([^"\\]|\\.)*"'
_LONG_IN_JSON = "(?=[0-9.]{17})[0-9]+[.]|[0-9]{16,}[eE]|[0-9]{19}"


@dataclass(frozen=True, slots=True)
class _Held:
    """A column of the table, as the catalogue has it."""

    kind: str
    written: str
    size: int
    charset: str | None
    collation: str | None
    precision: int
    scale: int
    fraction: int

    @property
    def pads(self) -> bool:
        """Whether texts are equal that differ in spaces at their end."""
        return self.collation is not None and not re.search("nopad|_0900_", self.collation)


def keeps(stored: Type, arriving: Type, *, is_sum: bool) -> bool:
    """Tell whether a column of numbers may keep those of a type; of single values a CHECK tells."""
    if isinstance(arriving, sa.Boolean):
        return isinstance(stored, sa.Integer)
    if not isinstance(stored, sa.Float):
        return (is_whole(arriving) or not is_whole(stored)) and not (is_sum and isinstance(arriving, sa.Float))
    if getattr(stored, "scale", None) is not None:
        return False  # FLOAT(7, 2), which cuts in its own way
    if isinstance(arriving, sa.Float):
        return is_sum or isinstance(arriving, sa.REAL) or not isinstance(stored, mysql.FLOAT)
    digits = _FLOAT_DIGITS["float" if isinstance(stored, mysql.FLOAT) else "double"]
    return not is_sum and not (isinstance(arriving, sa.Numeric) and (arriving.precision or digits + 1) > digits)


def conversions(connection: sa.Connection, table: sa.Table) -> dict[str, Conversion]:
    """Return how values get into the columns of a table."""
    found = connection.execute(sa.text(_COLUMNS), {"schema": table.schema, "name": table.name}).all()
    return {row[0]: _conversion(table.c[row[0]], _Held(row[1].lower(), *row[2:])) for row in found if row[0] in table.c}


def _conversion(column: sa.Column[Any], held: _Held) -> Conversion:
    value: sa.ColumnElement[Any] = sa.column(str(column.name), column.type)
    written = held.kind if held.kind == "enum" else held.written
    if not isinstance(column.type, sa.Text):
        return Conversion(written, None, _keeps(column.type, value, held))
    conditions = _keeps_text(value, held, is_key=column.primary_key)
    # As the table tells keys apart.
    read = partial(sa.collate, collation=held.collation) if column.primary_key and held.collation is not None else None
    return Conversion(written, read, sa.and_(*conditions) if conditions else None)


def _keeps(kind: Type, value: sa.ColumnElement[Any], held: _Held) -> sa.ColumnElement[bool] | None:
    """Return the condition under which a number, a time or bytes stay as they are; None where each does."""
    if held.kind == "decimal" and isinstance(kind, sa.Float):
        return sa.cast(value, sa.Numeric(held.precision, held.scale)) == value
    if held.kind == "decimal" and isinstance(kind, sa.Numeric) and held.scale < (kind.scale or 0):
        return sa.func.truncate(value, held.scale) == value
    if held.kind in _FLOAT_BITS and isinstance(kind, sa.Integer) and _bits(kind) > _FLOAT_BITS[held.kind]:
        return value.between(-(2 ** _FLOAT_BITS[held.kind]), 2 ** _FLOAT_BITS[held.kind])
    if held.kind in {"datetime", "timestamp"} and held.fraction < _MICROSECONDS:
        return sa.func.mod(sa.func.microsecond(value), 10 ** (_MICROSECONDS - held.fraction)) == 0
    return sa.func.length(value) == held.size if held.kind == "binary" else None


def _bits(kind: sa.Integer) -> int:
    return 15 if isinstance(kind, sa.SmallInteger) else 63 if isinstance(kind, sa.BigInteger) else 31


def _keeps_text(value: sa.ColumnElement[Any], held: _Held, *, is_key: bool) -> list[sa.ColumnElement[bool]]:
    """Return the conditions under which a text stays as it is; what is not said here is an error of the server."""
    found: list[sa.ColumnElement[bool]] = []
    if held.kind in {"char", "varchar"}:
        found.append(sa.func.char_length(value) <= held.size)
    if held.kind in {"tinytext", "text", "mediumtext"}:
        text = value if held.charset == "utf8mb4" else sa.cast(value, mysql.CHAR(charset=held.charset))
        found.append(sa.func.octet_length(text) <= held.size)
    if held.kind == "char" or (is_key and held.pads):
        found.append(sa.func.char_length(sa.func.rtrim(value)) == sa.func.char_length(value))
    if held.kind == "enum":
        members = [member.replace("''", "'") for member in re.findall("'((?:[^']|'')*)'", held.written)]
        found.append(sa.func.hex(value).in_([member.encode().hex().upper() for member in members]))
    if held.kind == "time":
        clock = f"^-?[0-9]{{2,3}}:[0-5][0-9](:[0-5][0-9]([.][0-9]{{0,{held.fraction}}}0*)?)?$"
        found.append(value.regexp_match(clock))
    if held.kind == "year":
        found.append(value.regexp_match("^[0-9]{4}$"))
    if held.kind == "json":
        unquoted = sa.func.regexp_replace(value, _QUOTED_IN_JSON, "")
        found.append(sa.not_(unquoted.regexp_match(_LONG_IN_JSON)))
    return found
