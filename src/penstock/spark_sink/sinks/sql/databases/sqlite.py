"""What a sink does differently on SQLite: `BEGIN IMMEDIATE`, and values in the forms SQLite can hold.

Instants are stored as text in UTC and dates as text, in SQLAlchemy's form, so that its types read them back; decimals
too where they have more digits than a number of SQLite keeps. NaN is no value of SQLite, which would store NULL: such
rows are refused before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.pool import NullPool

#: Seconds to wait for another writer's transaction to end.
LOCK_TIMEOUT_S = 60.0

#: Rows that are Python objects at one time.
_ROWS_AT_ONCE = 10_000


@contextmanager
def session(url: sa.URL) -> Iterator[sa.Connection]:
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


def _begin_immediate(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def lock_schema(_connection: sa.Connection) -> None:
    """Do nothing: the write lock is the whole file's, and tables are part of the transaction."""


def stage(connection: sa.Connection, table: sa.Table, rows: pa.Table) -> None:
    """Insert rows through the driver's `executemany`, a bounded number of them at a time."""
    statement = str(table.insert().compile(dialect=connection.dialect))
    for chunk in rows.select([str(column.name) for column in table.columns]).to_batches(_ROWS_AT_ONCE):
        values = [_storable(column) for column in chunk.columns]
        connection.exec_driver_sql(statement, list(zip(*values, strict=True)))


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
