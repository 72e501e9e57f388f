"""What a sink does differently on SQLite: `BEGIN IMMEDIATE`, and values in the forms SQLite can hold.

Instants are stored as text in UTC and dates as text, in SQLAlchemy's form, so that its types read them back; decimals
too where they have more digits than a number of SQLite keeps. NaN is no value of SQLite, which would store NULL: such
rows are refused before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from penstock.spark_sink.sinks.sql.databases.database import WIDER, Database, ErrorKind, Type

#: Digits that a number keeps, which is a float. Decimals of more are texts.
_DIGITS = 15


class _Digits(sa.Text):
    """What a decimal becomes that has more digits than a number keeps."""

    def __str__(self) -> str:
        return f"TEXT (a number of SQLite keeps {_DIGITS} digits)"


class Sqlite(Database):
    """A file of SQLite, by Python's own driver."""

    name = "sqlite"
    is_server = False
    unknown = frozenset({"NaN"})
    #: Each float is one of 8 bytes, and many tables have whole numbers for truth values, as it has no such type.
    wider = WIDER | {("double", "real"), ("boolean", "whole")}
    adds_decimals = False
    #: Among others a column that is not there or that the table computes, and a key without a unique index.
    codes: ClassVar[Mapping[ErrorKind, frozenset[str]]] = {ErrorKind.MISFIT: frozenset({"SQLITE_ERROR"})}
    #: Seconds to wait for another writer's transaction to end; and the driver is not to begin any by its own rules.
    connect_args: ClassVar[Mapping[str, Any]] = {"timeout": 60.0, "isolation_level": None}
    #: Takes the write lock at once: a transaction that reads first and writes later can be refused its lock at the
    #: first write, when another has written in between.
    begin = "BEGIN IMMEDIATE"
    insert = staticmethod(sqlite.insert)

    def values(self, column: pa.Array) -> list[Any]:
        """Return numbers, and times and decimals of many digits as texts."""
        kind = column.type
        if pa.types.is_timestamp(kind):
            # Without a zone the text is the time in UTC; with microseconds always, so that texts sort as times.
            column = column.cast(pa.timestamp("us", kind.tz)).cast(pa.timestamp("us")).cast(pa.string())
        elif pa.types.is_date(kind):
            column = column.cast(pa.string())
        elif pa.types.is_decimal(kind):
            # Never with an exponent, as Arrow writes small ones: one number has one text.
            return [None if value is None else format(value, "f") for value in column.to_pylist()]
        return list(column.to_pylist())

    def column_type(self, kind: Type, _key_columns: int = 0) -> Type:
        """Return a text for decimals of many digits."""
        return _Digits() if type(kind) is sa.Numeric and (kind.precision or 0) > _DIGITS else kind

    def constraints(self, frame: pa.Schema, summed: Collection[str]) -> list[sa.CheckConstraint]:
        """Return what keeps it from turning whole sums that have become too large into floats."""
        whole = [name for name in summed if pa.types.is_integer(frame.field(name).type)]
        return [sa.CheckConstraint(sa.func.typeof(sa.column(name)).in_(["integer", "null"])) for name in whole]
