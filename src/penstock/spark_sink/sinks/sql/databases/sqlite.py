"""What a sink does differently on SQLite: `BEGIN IMMEDIATE`, and values in the forms SQLite can hold.

Instants are stored as text in UTC and dates as text, in SQLAlchemy's form, so that its types read them back; decimals
too where they have more digits than a number of SQLite keeps. NaN is no value of SQLite, which would store NULL: such
rows are refused before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.pool import NullPool

from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks.sql.databases.database import Changes, Database, on_conflict

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
    without_schemas = "an SQLite file"
    knows_nan = False
    booleans_are_numbers = True
    digits = _DIGITS
    row_errors = frozenset({"sqlite3.IntegrityError", "sqlite3.DataError"})

    @contextmanager
    def session(self, url: sa.URL) -> Iterator[sa.Connection]:
        """Open a connection whose transactions take the write lock at once.

        A transaction that reads first and writes later can be refused its lock at the first write, when another
        has written in between; one that begins IMMEDIATE waits for the lock before it reads the ledger.
        """
        # isolation_level None keeps the driver from opening transactions by its own rules.
        engine = sa.create_engine(
            url,
            poolclass=NullPool,
            hide_parameters=True,
            connect_args={"timeout": LOCK_TIMEOUT_S, "isolation_level": None},
        )
        sa.event.listen(engine, "begin", _begin_immediate)
        with engine.connect() as connection:
            yield connection

    def schema_lock(self, _connection: sa.Connection) -> AbstractContextManager[None]:
        """Do nothing: the write lock is the whole file's, and tables are part of the transaction."""
        return nullcontext()

    def insert_new(self, table: sa.Table) -> sa.Insert:
        """Return an `INSERT ... ON CONFLICT DO NOTHING`."""
        return sqlite.insert(table).on_conflict_do_nothing()

    def insert_or_update(
        self, table: sa.Table, names: Sequence[str], rows: sa.Select[Any], key: Sequence[str], changes: Changes
    ) -> sa.Insert:
        """Return an `INSERT ... ON CONFLICT`."""
        return on_conflict(sqlite.insert(table).from_select(names, rows), key, changes)

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

    def keeps(self, stored: sa.types.TypeEngine[Any], arriving: sa.types.TypeEngine[Any], *, is_sum: bool) -> bool:
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


def _begin_immediate(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


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
