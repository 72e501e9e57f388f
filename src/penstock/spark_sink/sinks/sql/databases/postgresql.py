"""What a sink does differently on PostgreSQL: `COPY` into the staging table, from CSV that Arrow writes.

Casts, unique indexes and rights are asked of its catalogue.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.csv
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.pool import NullPool

from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks.sql.databases.database import Conversion, Database
from penstock.spark_sink.sinks.sql.databases.postgresql_types import conversions
from penstock.spark_sink.sinks.sql.databases.rights import NeededRights, require_rights

#: Rows that are CSV text at one time.
_ROWS_AT_ONCE = 20_000

#: Seconds to wait for a connection.
_CONNECT_TIMEOUT_S = 15


#: Bytes of a name.
_LONGEST_NAME = 63

#: Columns that each of its tables has already.
_SYSTEM_COLUMNS = frozenset({"ctid", "xmin", "cmin", "xmax", "cmax", "tableoid"})

#: Unique indexes that it takes for `ON CONFLICT (columns)`: of all rows, of columns, and checked at once.
_CONFLICT_TARGETS = """
SELECT array(SELECT attname::text FROM pg_attribute WHERE attrelid = indrelid AND attnum = ANY (
    (indkey::int2[])[0:indnkeyatts - 1]
))
FROM pg_index
WHERE indrelid = to_regclass(:name) AND indisunique AND indimmediate AND indisvalid
    AND indpred IS NULL AND indexprs IS NULL
"""


class PostgreSql(Database):
    """PostgreSQL, by psycopg."""

    name = "postgresql"
    title = "PostgreSQL"
    stages_on_executors = True
    takes_nul = False
    connection_errors = frozenset({"psycopg.OperationalError", "psycopg.InterfaceError"})

    @contextmanager
    def session(self, url: sa.URL) -> Iterator[sa.Connection]:
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

    def lock_schema(self, connection: sa.Connection) -> None:
        """Let one transaction at a time create tables: CREATE TABLE IF NOT EXISTS fails when two race."""
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtextextended("penstock schema", 0))))

    def insert(self, table: sa.Table) -> postgresql.Insert:
        """Return PostgreSQL's `INSERT`."""
        return postgresql.insert(table)

    def stage(self, connection: sa.Connection, table: sa.Table, rows: pa.Table) -> None:
        """Copy rows into the table. Only Arrow and the server look at the values, so nothing in them is SQL."""
        names = [str(column.name) for column in table.columns]
        columns = ", ".join(map(_quoted, names))
        statement = f"COPY {name_of(table)} ({columns}) FROM STDIN (FORMAT csv)"
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

    def temporary_table(self, name: str, *items: sa.schema.SchemaItem) -> sa.Table:
        """Return a table that ends with the transaction: a pooler may give the session to others."""
        return sa.Table(name, sa.MetaData(), *items, prefixes=["TEMPORARY"], postgresql_on_commit="DROP")

    def require_storable(self, frame: pa.Schema, table: str, names: Sequence[str], _summed: Collection[str]) -> None:
        """Refuse names that it would cut or that each table has already."""
        taken = sorted(_SYSTEM_COLUMNS.intersection(frame.names))
        if taken:
            raise SchemaMismatchError(
                f"the frame for table {table} has {', '.join(taken)}, a column that PostgreSQL itself gives each "
                "table; rename it"
            )
        long = [name for name in (*names, *frame.names) if len(name.encode()) > _LONGEST_NAME]
        if long:
            raise SchemaMismatchError(
                f"PostgreSQL cuts names at {_LONGEST_NAME} bytes, so table {table} cannot take the frame with "
                f"{', '.join(long)}; give shorter names"
            )

    def conversions(self, connection: sa.Connection, table: sa.Table) -> dict[str, Conversion]:
        """Return how values of the frame get into the columns of a table."""
        return conversions(connection, name_of(table), table)

    def keeps(self, stored: sa.types.TypeEngine[Any], arriving: sa.types.TypeEngine[Any], *, is_sum: bool) -> bool:
        """Tell whether a number may be kept; of single values that would be rounded, a CHECK tells.

        A sum of whole numbers or decimals would lose digits in floats, and one of floats in decimals.
        """
        if is_sum:
            return isinstance(stored, sa.Float) == isinstance(arriving, sa.Float) and super().keeps(
                stored, arriving, is_sum=True
            )
        if isinstance(stored, sa.REAL) and isinstance(arriving, sa.Double):
            return False
        return super().keeps(stored, arriving, is_sum=False)

    def unique_columns(
        self, connection: sa.Connection, _inspector: sa.Inspector, table: sa.Table
    ) -> list[set[str | None]]:
        """Return the columns of the indexes that `ON CONFLICT` takes."""
        found = connection.execute(sa.text(_CONFLICT_TARGETS), {"name": name_of(table)})
        return [set(columns) for (columns,) in found]

    def check_constraints(self, connection: sa.Connection) -> None:
        """Check constraints that are deferred to the commit."""
        connection.exec_driver_sql("SET CONSTRAINTS ALL IMMEDIATE")

    def require_rights(
        self, connection: sa.Connection, what: str, needed: NeededRights, *, refused: bool = False
    ) -> None:
        """Ask the server for all rights that a sink needs, and raise `MissingRightError` naming those that it lacks."""
        require_rights(connection, what, needed, refused=refused)


def name_of(table: sa.Table) -> str:
    """Return the name of a table as `to_regclass` and COPY read it; SQLAlchemy would double `%`."""
    return ".".join(_quoted(name) for name in (table.schema, table.name) if name is not None)


def _in_utc(connection: sa.Connection) -> None:
    # For the transaction only: a pooler may give the next one another session.
    connection.exec_driver_sql("SET LOCAL TIME ZONE 'UTC'")


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
