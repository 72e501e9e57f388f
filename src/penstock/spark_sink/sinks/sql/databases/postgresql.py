"""What a sink does differently on PostgreSQL: `COPY` into the staging table, from CSV that Arrow writes.

Casts and unique indexes are asked of its catalogue.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.csv
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks.sql.databases.database import Conversion, Needs, Server, Type, new_engine
from penstock.spark_sink.sinks.sql.databases.postgresql_types import conversions

#: Rows that are CSV text at one time.
_ROWS_AT_ONCE = 20_000

#: Seconds to wait for a connection, unless the address sets others, and for another transaction's lock.
_CONNECT_TIMEOUT_S = 15
_LOCK_WAIT_S = 60

#: Of each transaction: a pooler may give the next one another session.
_TRANSACTION = f"SET LOCAL TIME ZONE 'UTC'; SET LOCAL lock_timeout = '{_LOCK_WAIT_S}s'"

#: Bytes of a name.
_LONGEST_NAME = 63

#: Which rows of the catalogue tell of the columns and indexes of tables, and which version of each.
_FINGERPRINT = """
SELECT string_agg(concat_ws(' ', relation, part, version), ',' ORDER BY relation, part) FROM (
    SELECT attrelid AS relation, attnum::bigint AS part, xmin::text AS version FROM pg_attribute WHERE attnum > 0
    UNION ALL
    SELECT indrelid, indexrelid::bigint, xmin::text FROM pg_index
) AS looked_at WHERE relation = ANY (ARRAY(SELECT to_regclass(name)::oid FROM unnest(CAST(:names AS text[])) AS name))
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


class PostgreSql(Server):
    """PostgreSQL, by psycopg."""

    name = "postgresql"
    title = "PostgreSQL"
    #: An UNLOGGED table is empty after a crash of the server; the rows are counted before they are merged.
    stage_prefixes = ("UNLOGGED",)
    unknown = frozenset({"NUL"})
    #: A view's check, a trigger's RAISE, two rows that the table holds for one key though the frame does not, which
    #: pass one by one, and a row that is too long for the table or for an index.
    row_codes = frozenset({"44", "P0001", "21000", "54000"})
    #: Connections, serialization failure, deadlock, a lock not to be had, too many connections, a server that goes,
    #: fell or is not ready yet, and one that takes no changes, as it is in the middle of a failover.
    transient_codes = frozenset({"08", "40001", "40P01", "55P03", "53300", "57P01", "57P02", "57P03", "25006"})
    forbidden_codes = frozenset({"42501"})
    #: A column of another type, and a key without a constraint, where a table was altered since it was looked at; and
    #: a column that each table has already, such as ctid.
    misfit_codes = frozenset({"42804", "42P10", "42701"})
    #: Also what an address with a `statement_timeout` bounds.
    plain_codes = forbidden_codes | misfit_codes | {"57014"}
    connection_errors_have_no_code = True

    def engine(self, url: sa.URL) -> sa.Engine:
        """Return an engine whose transactions are at READ COMMITTED and in UTC, and wait for no lock for ever.

        The ledger's rows are locked before they are read; a stricter level would show them as they were before
        the lock and refuse the change instead of letting the second writer go on behind the first. By the time zone
        PostgreSQL turns instants into times without a zone, and back.
        """
        bounds = {} if "connect_timeout" in url.query else {"connect_timeout": _CONNECT_TIMEOUT_S}
        engine = new_engine(url, bounds, isolation_level="READ COMMITTED")
        sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(_TRANSACTION))
        return engine

    @contextmanager
    def schema_lock(self, connection: sa.Connection) -> Iterator[None]:
        """Let one transaction at a time create tables: CREATE TABLE IF NOT EXISTS fails when two race."""
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_lock_number("penstock schema"))))
        yield

    def insert(self, table: sa.Table) -> postgresql.Insert:
        """Return an `INSERT` that may have `ON CONFLICT`."""
        return postgresql.insert(table)

    def stage(self, connection: sa.Connection, table: sa.Table, rows: pa.Table) -> None:
        """Copy rows into the table. Only Arrow and the server look at the values, so nothing in them is SQL."""
        names = [str(column.name) for column in table.columns]
        columns = ", ".join(map(_quoted, names))
        statement = f"COPY {_name_of(table)} ({columns}) FROM STDIN (FORMAT csv)"
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
        """Refuse names that it would cut."""
        long = [name for name in (*names, *frame.names) if len(name.encode()) > _LONGEST_NAME]
        if long:
            raise SchemaMismatchError(
                f"PostgreSQL cuts names at {_LONGEST_NAME} bytes, so table {table} cannot take the frame with "
                f"{', '.join(long)}; give shorter names"
            )

    def conversions(self, connection: sa.Connection, table: sa.Table) -> dict[str, Conversion]:
        """Return how values of the frame get into the columns of a table."""
        return conversions(connection, _name_of(table), table)

    def keeps(self, stored: Type, arriving: Type, *, is_sum: bool) -> bool:
        """Tell whether a number may be kept: a double in REAL hardly ever is.

        A sum of whole numbers or decimals would lose digits in floats, and one of floats in decimals.
        """
        if is_sum and isinstance(stored, sa.Float) != isinstance(arriving, sa.Float):
            return False
        is_narrower = isinstance(stored, sa.REAL) and isinstance(arriving, sa.Double) and not is_sum
        return not is_narrower and super().keeps(stored, arriving, is_sum=is_sum)

    def unique_columns(
        self, connection: sa.Connection, _inspector: sa.Inspector, table: sa.Table
    ) -> list[set[str | None]]:
        """Return the columns of the indexes that `ON CONFLICT` takes."""
        found = connection.execute(sa.text(_CONFLICT_TARGETS), {"name": _name_of(table)})
        return [set(columns) for (columns,) in found]

    def check_constraints(self, connection: sa.Connection) -> None:
        """Check constraints that are deferred to the commit."""
        connection.exec_driver_sql("SET CONSTRAINTS ALL IMMEDIATE")

    def grants(self, connection: sa.Connection, needs: Needs) -> list[str]:
        """Return the statements; on tables those that there are, since the sink owns what it makes."""
        role = _quoted(connection.execute(sa.select(sa.func.current_user())).scalar_one())
        schema = needs.schema or connection.dialect.default_schema_name or "public"
        tables = [
            (f"{_quoted(schema)}.{_quoted(name)}", operations)
            for name, operations in needs.tables.items()
            if sa.inspect(connection).has_table(name, schema=schema)
        ]
        found = [f"GRANT USAGE, CREATE ON SCHEMA {_quoted(schema)} TO {role}"]
        if needs.temporary:
            found.append(f"GRANT TEMPORARY ON DATABASE {_quoted(connection.engine.url.database or '')} TO {role}")
        found += [f"GRANT {', '.join(operations)} ON TABLE {name} TO {role}" for name, operations in tables]
        if needs.adds_columns:
            found += [f"ALTER TABLE {name} OWNER TO {role}" for name, _ in tables]
        return found

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

    def fingerprint(self, connection: sa.Connection, tables: Sequence[sa.Table]) -> str:
        """Ask the catalogue, in one question."""
        return str(connection.execute(sa.text(_FINGERPRINT), {"names": [*map(_name_of, tables)]}).scalar_one())


def _lock_number(name: str) -> sa.ColumnElement[int]:
    return sa.func.hashtextextended(name, 0)


def _name_of(table: sa.Table) -> str:
    """Return the name of a table as `to_regclass` and COPY read it; SQLAlchemy would double `%`."""
    return ".".join(_quoted(name) for name in (table.schema, table.name) if name is not None)


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
