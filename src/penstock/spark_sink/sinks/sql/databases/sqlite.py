"""SQL sinks on SQLite: `BEGIN IMMEDIATE`, and values in forms that SQLite can store.

Instants are stored as text in UTC and dates as text, in SQLAlchemy's form, so that its types can read them. Decimals
with more digits than SQLite's numbers keep are texts too. SQLite would store NULL for NaN: such rows are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, ClassVar

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from penstock.spark_sink.sinks.sql.databases.database import WIDER, Conversion, Database, ErrorKind, Held, Type

#: Digits that SQLite's numbers keep, which are floats. Decimals with more digits are texts.
_DIGITS = 15

#: The columns of the unique index of a key that compare texts by another collation, with its name.
_COLLATIONS = """
SELECT held.name, held.coll FROM pragma_index_list(:name) AS found, pragma_index_xinfo(found.name) AS held
WHERE found."unique" AND held.key AND held.coll <> 'BINARY' AND :key = (SELECT group_concat(coalesce(name, ''))
FROM (SELECT name FROM pragma_index_info(found.name) ORDER BY name))
"""


class _Digits(sa.Text):
    """The type of a decimal with more digits than a number keeps."""

    def __str__(self) -> str:
        return f"TEXT (a number of SQLite keeps {_DIGITS} digits)"


class Sqlite(Database):
    """An SQLite file, by Python's own driver."""

    name = "sqlite"
    is_server = False
    unknown = frozenset({"NaN"})
    #: All floats have 8 bytes. SQLite has no boolean type, so many tables use whole numbers.
    wider = WIDER | {("double", "real"), ("boolean", "whole")}
    adds_decimals = False
    #: Among others a missing or computed column, and a key without a unique index.
    codes: ClassVar[Mapping[ErrorKind, frozenset[str]]] = {ErrorKind.MISFIT: frozenset({"SQLITE_ERROR"})}
    #: Seconds to wait for another writer's transaction; and the driver must not begin transactions by its own rules.
    connect_args: ClassVar[Mapping[str, Any]] = {"timeout": 60.0, "isolation_level": None}
    #: Takes the write lock at once. If a transaction reads first and another one writes then, its first write can fail.
    begin = "BEGIN IMMEDIATE"
    insert = staticmethod(sqlite.insert)

    def values(self, column: pa.Array) -> list[Any]:
        """Return the values of a column for the driver: times, dates and decimals as texts."""
        kind = column.type
        if pa.types.is_timestamp(kind):
            # Without a zone the text is the time in UTC. It always has microseconds, so that texts sort as times.
            column = column.cast(pa.timestamp("us", kind.tz)).cast(pa.timestamp("us")).cast(pa.string())
        elif pa.types.is_date(kind):
            column = column.cast(pa.string())
        elif pa.types.is_decimal(kind):
            # Never with an exponent, which Arrow writes for small ones: a number has exactly one text.
            return [None if value is None else format(value, "f") for value in column.to_pylist()]
        return list(column.to_pylist())

    def column_type(self, kind: Type, _key_columns: int = 0) -> Type:
        """Return a text type for decimals with many digits."""
        return _Digits() if type(kind) is sa.Numeric and (kind.precision or 0) > _DIGITS else kind

    def conversions(self, connection: sa.Connection, table: sa.Table, _held: Held) -> dict[str, Conversion]:
        """Return conversions by which texts of the key are compared as the table does, such as without case."""
        key = ",".join(sorted(column.name for column in table.primary_key))
        found = connection.execute(sa.text(_COLLATIONS), {"name": table.name, "key": key})
        return {name: Conversion("", partial(sa.collate, collation=by)) for name, by in found}

    def constraints(self, frame: pa.Schema, summed: Collection[str]) -> list[sa.CheckConstraint]:
        """Return checks that refuse whole sums which SQLite would turn into floats because they are too large."""
        whole = [name for name in summed if pa.types.is_integer(frame.field(name).type)]
        return [sa.CheckConstraint(sa.func.typeof(sa.column(name)).in_(["integer", "null"])) for name in whole]
