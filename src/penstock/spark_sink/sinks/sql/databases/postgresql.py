"""What a sink does differently on PostgreSQL: `COPY` into the staging table, from CSV that Arrow writes.

PostgreSQL rounds numbers and times, and cuts and pads texts, to what a column holds, and says nothing. So a value is
kept if it comes back as it was when it is cast to the column's type and back. Types below keep what a text says in any
spelling; for others a text must read as PostgreSQL writes the value.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.csv
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from penstock.spark_sink.sinks.sql.databases.database import Conversion, Database, ErrorKind, Held, is_whole

#: Rows that are CSV text at one time.
_ROWS_AT_ONCE = 20_000

#: What the catalogue has of a table's columns and indexes.
_FINGERPRINT = """
SELECT (SELECT string_agg(held::text, ' ' ORDER BY attnum) FROM pg_attribute AS held WHERE attrelid = found.oid),
    (SELECT string_agg(held::text, ' ' ORDER BY indexrelid) FROM pg_index AS held WHERE indrelid = found.oid)
FROM to_regclass(:name) AS found(oid)
"""

#: The columns of a table: its type as it is written, the name of it if it is PostgreSQL's own, its length or precision,
#: -1 for none, and whether it is an enum or of an extension.
_COLUMNS = """
SELECT attname, format_type(atttypid, atttypmod), CASE WHEN is_own THEN typname ELSE '' END, atttypmod,
    NOT is_own AND typtype IN ('b', 'e') AND typcategory <> 'A'
FROM pg_attribute
JOIN (SELECT *, typnamespace = 'pg_catalog'::regnamespace AS is_own FROM pg_type) AS kind ON kind.oid = atttypid
WHERE attrelid = to_regclass(:name) AND attnum > 0 AND NOT attisdropped
"""


#: Whole numbers, of which one that does not fit is an error.
_WHOLE = frozenset({"int2", "int4", "int8"})

#: Types that take a text as it is; into others it must be cast, which reads it.
_TEXTS = frozenset({"text", "varchar", "bpchar", "name", "char"})

#: Types that keep what they read, whatever its spelling, unless the column has a length or precision. Those of numbers
#: are here for their arrays, which begin with an underscore: into the others no text goes.
_EXACT = _WHOLE | {
    "text", "varchar", "uuid", "json", "jsonb", "xml", "inet", "cidr", "macaddr", "macaddr8", "int4range", "int8range",
    "numrange", "bool", "numeric",
}  # fmt: skip


class PostgreSql(Database):
    """PostgreSQL, by psycopg."""

    name = "postgresql"
    #: An UNLOGGED table is empty after a crash of the server; the rows are counted before they are merged.
    stage_prefixes = ("UNLOGGED",)
    unknown = frozenset({"NUL"})
    codes: ClassVar[Mapping[ErrorKind, frozenset[str]]] = {
        # A view's check, a trigger's RAISE, two rows that the table holds for one key though the frame does not, which
        # pass one by one, and a row that is too long for the table or for an index.
        ErrorKind.ROW: frozenset({"44", "P0001", "21000", "54000"}),
        # Connections, serialization failure, deadlock, a lock not to be had, too many connections, a server that goes,
        # fell or is not ready yet, and one that takes no changes, as it is in the middle of a failover.
        ErrorKind.TRANSIENT: frozenset({"08", "40001", "40P01", "55P03", "53300", "57P01", "57P02", "57P03", "25006"}),
        ErrorKind.RIGHT: frozenset({"42501"}),
        # A column of another type, a key without a unique constraint or with one that is checked at the commit, a
        # column that the table computes, and one that each table has already, such as ctid.
        ErrorKind.MISFIT: frozenset({"42804", "42P10", "55000", "428C9", "42701"}),
    }
    #: Also what an address with a `statement_timeout` bounds.
    plain_codes = codes[ErrorKind.RIGHT] | codes[ErrorKind.MISFIT] | {"57014"}
    connect_args: ClassVar[Mapping[str, Any]] = {"connect_timeout": 15}  # seconds
    #: Keeps the driver from beginning transactions by its own rules.
    isolation = "AUTOCOMMIT"
    #: In one round trip; a pooler may give the next transaction another session, so all is said each time. The ledger's
    #: rows are locked before they are read: a stricter level would show them as they were before the lock and refuse
    #: the change instead of letting the second writer go on behind the first. By the time zone PostgreSQL turns
    #: instants into times without a zone, and back. Constraints that are deferred are checked at once, where it can be
    #: found which row it was, and not at the commit.
    begin = (
        "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL TIME ZONE 'UTC'; SET LOCAL lock_timeout = '60s'; "
        "SET CONSTRAINTS ALL IMMEDIATE"
    )
    insert = staticmethod(postgresql.insert)

    def stage(self, connection: sa.Connection, table: sa.Table, rows: pa.Table) -> None:
        """Copy rows into the table. Only Arrow and the server look at the values, so nothing in them is SQL."""
        names = [str(column.name) for column in table.columns]
        columns = ", ".join(map(_quoted, names))
        statement = f"COPY {_name_of(table)} ({columns}) FROM STDIN (FORMAT csv)"
        cursor: Any = connection.connection.cursor()
        options = pyarrow.csv.WriteOptions(include_header=False)
        try:
            with cursor, cursor.copy(statement) as copy:
                for chunk in rows.select(names).to_batches(_ROWS_AT_ONCE):
                    text = io.BytesIO()
                    pyarrow.csv.write_csv(_as_text(chunk), text, options)
                    copy.write(text.getbuffer())
        except connection.dialect.loaded_dbapi.Error as error:
            # COPY goes past SQLAlchemy, so its errors are put in SQLAlchemy's form here.
            raise sa.exc.DBAPIError("COPY", None, error, hide_parameters=True) from error

    def conversions(self, connection: sa.Connection, table: sa.Table, _held: Held) -> dict[str, Conversion]:
        """Return how values of the frame get into the columns of a table."""
        found, dialect = connection.execute(sa.text(_COLUMNS), {"name": _name_of(table)}), connection.dialect
        return {row[0]: _conversion(dialect, table.c[row[0]], row) for row in found if row[0] in table.c}

    def fingerprint(self, connection: sa.Connection, table: sa.Table) -> str:
        """Ask the catalogue, in one question."""
        return str(connection.execute(sa.text(_FINGERPRINT), {"name": _name_of(table)}).one())


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


def _conversion(dialect: sa.Dialect, column: sa.Column[Any], held: Sequence[Any]) -> Conversion:
    """Return how values get into a column, which is a row of `_COLUMNS`."""
    value: sa.ColumnElement[Any] = sa.column(str(column.name), column.type)
    _, written, name, modifier, is_made = held
    read = partial(_as, written=written)
    if isinstance(column.type, sa.Text):
        is_kept = is_made or (name.removeprefix("_") in _EXACT and modifier == -1)
        kept = None if is_kept else sa.cast(read(value), sa.Text()) == value
        return Conversion(written, None if name in _TEXTS else read, kept)
    own = str(column.type.compile(dialect=dialect)).lower().replace(", ", ",")
    is_kept = own == written or (is_whole(column.type) and name in _WHOLE)
    return Conversion(written, None, None if is_kept else sa.cast(read(value), column.type) == value)


def _as(value: sa.ColumnElement[Any], written: str) -> sa.ColumnElement[Any]:
    return value.op("::", precedence=100)(sa.literal_column(written))
