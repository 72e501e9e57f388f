"""What a sink does differently on PostgreSQL: `COPY` into the staging table, from CSV that Arrow writes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.csv
import sqlalchemy as sa
from sqlalchemy.pool import NullPool

#: Rows that are CSV text at one time.
_ROWS_AT_ONCE = 20_000

#: Seconds to wait for a connection.
_CONNECT_TIMEOUT_S = 15


@contextmanager
def session(url: sa.URL) -> Iterator[sa.Connection]:
    """Open a connection whose transactions are at READ COMMITTED and in UTC, whatever the server's defaults.

    The ledger's rows are locked before they are read; a stricter level would show them as they were before
    the lock and refuse the change instead of letting the second writer go on behind the first. By the time zone
    PostgreSQL turns instants into times without a zone, and back.
    """
    engine = sa.create_engine(
        url,
        poolclass=NullPool,
        hide_parameters=True,
        isolation_level="READ COMMITTED",
        connect_args={"connect_timeout": _CONNECT_TIMEOUT_S},
    )
    sa.event.listen(engine, "begin", _in_utc)
    with engine.connect() as connection:
        yield connection


def _in_utc(connection: sa.Connection) -> None:
    # For the transaction only: a pooler may give the next one another session.
    connection.exec_driver_sql("SET LOCAL TIME ZONE 'UTC'")


def lock_schema(connection: sa.Connection) -> None:
    """Let one transaction at a time create tables: CREATE TABLE IF NOT EXISTS fails when two race."""
    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtextextended("penstock schema", 0))))


def stage(connection: sa.Connection, table: sa.Table, rows: pa.Table) -> None:
    """Copy rows into the table. Only Arrow and the server look at the values, so nothing in them is SQL."""
    names = [str(column.name) for column in table.columns]
    columns = ", ".join(map(_quoted, names))
    into = ".".join(_quoted(name) for name in (table.schema, table.name) if name is not None)
    statement = f"COPY {into} ({columns}) FROM STDIN (FORMAT csv)"
    driver = connection.connection.driver_connection
    if driver is None:
        raise sa.exc.ResourceClosedError("the connection was closed before COPY")
    options = pyarrow.csv.WriteOptions(include_header=False)
    try:
        with driver.cursor() as cursor, cursor.copy(statement) as copy:
            for chunk in rows.select(names).to_batches(_ROWS_AT_ONCE):
                text = io.BytesIO()
                pyarrow.csv.write_csv(_as_text(chunk), text, options)
                copy.write(text.getbuffer())
    except connection.dialect.loaded_dbapi.Error as error:
        # COPY goes past SQLAlchemy, so its errors are put in SQLAlchemy's form here.
        raise sa.exc.DBAPIError("COPY", None, error, hide_parameters=True) from error


def _quoted(name: str) -> str:
    """Quote by the SQL standard; SQLAlchemy would also double `%`, which COPY takes as it stands."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


def _as_text(chunk: pa.RecordBatch) -> pa.RecordBatch:
    """Turn what CSV cannot carry into PostgreSQL's text form: bytes into hexadecimal digits."""
    columns = [
        pa.array([None if value is None else "\\x" + value.hex() for value in column.to_pylist()], pa.string())
        if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)
        else column
        for column in chunk.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=chunk.schema.names)
