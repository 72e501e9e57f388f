"""What a sink does differently on SQLite: `BEGIN IMMEDIATE`, and values in the forms SQLite can hold.

Instants are stored as text in UTC and dates as text, in SQLAlchemy's form, so that its types read them back; decimals
too where they have more digits than a number of SQLite keeps. NaN is no value of SQLite, which would store NULL: such
rows are refused before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks.sql.databases.database import Database, Type, new_engine

#: Seconds to wait for another writer's transaction to end.
LOCK_TIMEOUT_S = 60.0

#: Rows that are Python objects at one time.
_ROWS_AT_ONCE = 10_000

#: Digits that a number keeps, which is a float. Decimals of more are texts.
_DIGITS = 15


class Sqlite(Database):
    """A file of SQLite, by Python's own driver."""

    name = "sqlite"
    title = "SQLite"
    has_schemas = False
    unknown = frozenset({"NaN"})
    booleans_are_numbers = True
    digits = _DIGITS

    def engine(self, url: sa.URL) -> sa.Engine:
        """Return an engine whose transactions take the write lock at once.

        A transaction that reads first and writes later can be refused its lock at the first write, when another
        has written in between; one that begins IMMEDIATE waits for the lock before it reads the ledger.
        """
        # isolation_level None keeps the driver from opening transactions by its own rules.
        engine = new_engine(url, {"timeout": LOCK_TIMEOUT_S, "isolation_level": None})
        sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        return engine

    def schema_lock(self, _connection: sa.Connection) -> AbstractContextManager[None]:
        """Do nothing: the write lock is the whole file's, and tables are part of the transaction."""
        return nullcontext()

    def insert(self, table: sa.Table) -> sqlite.Insert:
        """Return an `INSERT` that may have `ON CONFLICT`."""
        return sqlite.insert(table)

    def stage(self, connection: sa.Connection, table: sa.Table, rows: pa.Table) -> None:
        """Insert rows through the driver's `executemany`, a bounded number of them at a time."""
        statement = str(table.insert().compile(dialect=connection.dialect))
        for chunk in rows.select([str(column.name) for column in table.columns]).to_batches(_ROWS_AT_ONCE):
            values = [_storable(column) for column in chunk.columns]
            connection.exec_driver_sql(statement, list(zip(*values, strict=True)))

    def require_storable(self, frame: pa.Schema, _table: str, _names: Sequence[str], summed: Collection[str]) -> None:
        """Refuse sums of decimals."""
        decimals = [name for name in summed if pa.types.is_decimal(frame.field(name).type)]
        if decimals:
            raise SchemaMismatchError(
                f"sum_columns names {', '.join(decimals)}, a decimal of the frame, and SQLite adds decimals as floats "
                f"of {_DIGITS} digits; cast it to a whole number of its smallest unit, or to a double"
            )

    def constraints(self, frame: pa.Schema, summed: Collection[str]) -> list[sa.CheckConstraint]:
        """Return what keeps it from turning whole sums that have become too large into floats."""
        whole = [name for name in summed if pa.types.is_integer(frame.field(name).type)]
        return [sa.CheckConstraint(sa.func.typeof(sa.column(name)).in_(["integer", "null"])) for name in whole]

    def keeps(self, stored: Type, arriving: Type, *, is_sum: bool) -> bool:
        """Tell whether a number is kept: any is, a fraction in an integer column too, save in a column of floats.

        That would keep 53 bits of a whole number, and say nothing.
        """
        return is_sum or not (isinstance(stored, sa.Float) and isinstance(arriving, sa.BigInteger))

    def numbered_column(self, connection: sa.Connection, inspector: sa.Inspector, table: sa.Table) -> str | None:
        """Return the column that it numbers by itself: an INTEGER primary key, which stands for the row's own id."""
        if "sqlite_with_rowid" in inspector.get_table_options(table.name):
            return None
        found = connection.execute(
            sa.text("SELECT name, type FROM pragma_table_info(:name) WHERE pk > 0"), {"name": table.name}
        ).all()
        return found[0][0] if len(found) == 1 and found[0][1].upper() == "INTEGER" else None


def _storable(column: pa.Array) -> list[Any]:
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
