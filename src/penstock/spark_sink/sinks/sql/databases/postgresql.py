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
from penstock.spark_sink.sinks.sql.databases.database import Changes, Conversion, Database, on_conflict
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

#: All that was looked at when the tables were checked: columns and indexes, by what PostgreSQL knows each relation by.
_FINGERPRINT = """
SELECT md5(string_agg(said, ',' ORDER BY said)) FROM (
    SELECT concat_ws(' ', attrelid, attnum, attname, atttypid, atttypmod, attnotnull, atthasdef, attidentity,
        attgenerated, attisdropped) AS said
    FROM pg_attribute WHERE attnum > 0 AND attrelid IN (to_regclass(:target), to_regclass(:ledger), to_regclass(:stage))
    UNION ALL
    SELECT concat_ws(' ', indrelid, indexrelid, indisunique, indimmediate, indisvalid, indnkeyatts, indkey,
        indpred IS NULL, indexprs IS NULL)
    FROM pg_index WHERE indrelid IN (to_regclass(:target), to_regclass(:ledger))
) AS looked_at
"""

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
    #: An UNLOGGED table is empty after a crash of the server; the rows are counted before they are merged.
    stage_prefixes = ("UNLOGGED",)
    takes_nul = False
    #: Data, constraints, a view's check, a trigger's RAISE, two rows that the table holds for one key though the frame
    #: does not, which pass one by one, and a row that is too long for the table or for an index.
    row_codes = frozenset({"22", "23", "44", "P0001", "21000", "54000"})
    #: Connections, serialization failure, deadlock, a lock not to be had, too many connections, a server that goes,
    #: fell or is not ready yet, and one that takes no changes, as it is in the middle of a failover.
    transient_codes = frozenset({"08", "40001", "40P01", "55P03", "53300", "57P01", "57P02", "57P03", "25006"})
    forbidden_codes = frozenset({"42501"})
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

    @contextmanager
    def schema_lock(self, connection: sa.Connection) -> Iterator[None]:
        """Let one transaction at a time create tables: CREATE TABLE IF NOT EXISTS fails when two race."""
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtextextended("penstock schema", 0))))
        yield

    def insert_new(self, table: sa.Table) -> sa.Insert:
        """Return an `INSERT ... ON CONFLICT DO NOTHING`."""
        return postgresql.insert(table).on_conflict_do_nothing()

    def insert_or_update(
        self, table: sa.Table, names: Sequence[str], rows: sa.Select[Any], key: Sequence[str], changes: Changes
    ) -> sa.Insert:
        """Return an `INSERT ... ON CONFLICT`."""
        return on_conflict(postgresql.insert(table).from_select(names, rows), key, changes)

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

    def take_lock(self, connection: sa.Connection, name: str) -> bool:
        """Take an advisory lock."""
        return bool(connection.execute(sa.select(sa.func.pg_try_advisory_lock(_lock_number(name)))).scalar_one())

    def release_lock(self, connection: sa.Connection, name: str) -> None:
        """Give back an advisory lock."""
        connection.execute(sa.select(sa.func.pg_advisory_unlock(_lock_number(name))))

    @contextmanager
    def lock_waits(self, connection: sa.Connection, seconds: int) -> Iterator[None]:
        """Set the bound for the transaction."""
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{seconds}s'")
        yield

    def fingerprint(
        self, connection: sa.Connection, target: sa.Table, ledger: sa.Table, stage: sa.Table | None
    ) -> str | None:
        """Ask the catalogue, in one question."""
        names = {"target": name_of(target), "ledger": name_of(ledger), "stage": "" if stage is None else name_of(stage)}
        found: str | None = connection.execute(sa.text(_FINGERPRINT), names).scalar_one()
        return found


def _lock_number(name: str) -> sa.ColumnElement[int]:
    return sa.func.hashtextextended(name, 0)


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
