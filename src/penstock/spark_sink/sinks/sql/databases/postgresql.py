"""SQL sinks on PostgreSQL: `COPY` into the staging table, from CSV that Arrow writes.

PostgreSQL rounds numbers and times, and cuts and pads texts, to fit the column's type, without an error. So a value
counts as kept if it is unchanged after a cast to the column's type and back. The types below keep the meaning of a text
in any spelling. For other types the text must be in PostgreSQL's own spelling.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.csv
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from penstock.spark_sink.sinks.sql.databases.database import Conversion, Database, ErrorKind, Held, is_whole

#: Rows that are CSV text at the same time.
_ROWS_AT_ONCE = 20_000

#: The catalogue's entries of a table's columns and indexes.
_FINGERPRINT = """
SELECT (SELECT string_agg(held::text, ' ' ORDER BY attnum) FROM pg_attribute AS held WHERE attrelid = found.oid),
    (SELECT string_agg(held::text, ' ' ORDER BY indexrelid) FROM pg_index AS held WHERE indrelid = found.oid)
FROM to_regclass(:name) AS found(oid)
"""

#: The columns of a table: name, type in SQL, name of the type if it is built in, length or precision (-1 for none), and
#: whether the type is an enum or from an extension.
_COLUMNS = """
SELECT attname, format_type(atttypid, atttypmod), CASE WHEN is_own THEN typname ELSE '' END, atttypmod,
    NOT is_own AND typtype IN ('b', 'e') AND typcategory <> 'A'
FROM pg_attribute
JOIN (SELECT *, typnamespace = 'pg_catalog'::regnamespace AS is_own FROM pg_type) AS kind ON kind.oid = atttypid
WHERE attrelid = to_regclass(:name) AND attnum > 0 AND NOT attisdropped
"""


#: Types of whole numbers: a value that does not fit is an error.
_WHOLE = frozenset({"int2", "int4", "int8"})

#: Types that store a text unchanged; for other types it must be cast.
_TEXTS = frozenset({"text", "varchar", "bpchar", "name", "char"})

#: Types that keep the value of a text in any spelling, unless the column has a length or precision. Types of numbers
#: are included for their arrays, whose names begin with an underscore: plain numbers accept no texts.
_EXACT = _WHOLE | {
    "text", "varchar", "uuid", "json", "jsonb", "xml", "inet", "cidr", "macaddr", "macaddr8", "int4range", "int8range",
    "numrange", "bool", "numeric",
}  # fmt: skip


class PostgreSql(Database):
    """PostgreSQL, by psycopg."""

    name = "postgresql"
    #: An UNLOGGED table is empty after a crash of the server; rows are counted before the merge.
    stage_prefixes = ("UNLOGGED",)
    unknown = frozenset({"NUL"})
    codes: ClassVar[Mapping[ErrorKind, frozenset[str]]] = {
        # A view's check, a trigger's RAISE, two rows whose keys are equal for the table but not for the frame (they
        # pass one by one), and a row that is too long for the table or for an index.
        ErrorKind.ROW: frozenset({"44", "P0001", "21000", "54000"}),
        # Connections, serialization failure, deadlock, lock time-out, too many connections, a server that shuts down,
        # has crashed or is not ready yet, and a read-only server, as during a failover.
        ErrorKind.TRANSIENT: frozenset({"08", "40001", "40P01", "55P03", "53300", "57P01", "57P02", "57P03", "25006"}),
        ErrorKind.RIGHT: frozenset({"42501"}),
        # A column of another type, a key without a unique constraint or with a deferrable one, a column that the table
        # computes, and a system column such as ctid.
        ErrorKind.MISFIT: frozenset({"42804", "42P10", "55000", "428C9", "42701"}),
    }
    #: 57014: a `statement_timeout` in the address has passed.
    plain_codes = codes[ErrorKind.RIGHT] | codes[ErrorKind.MISFIT] | {"57014"}
    connect_args: ClassVar[Mapping[str, Any]] = {"connect_timeout": 15}  # seconds
    #: So that the driver does not begin transactions by its own rules.
    isolation = "AUTOCOMMIT"
    #: All settings are sent each time, in one round trip: a pooler may give the next transaction another session. The
    #: ledger's rows are locked before they are read. A stricter isolation level would show their values from before
    #: the lock, and refuse the second writer's change instead of running it after the first. PostgreSQL uses the time
    #: zone to convert between instants and times without a zone. Deferred constraints are checked at once: at the
    #: commit, the wrong row could not be found.
    begin = (
        "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL TIME ZONE 'UTC'; SET LOCAL lock_timeout = '60s'; "
        "SET CONSTRAINTS ALL IMMEDIATE"
    )
    insert = staticmethod(postgresql.insert)

    def stage(self, connection: sa.Connection, table: sa.Table, rows: pa.Table) -> None:
        """Copy rows into the table. Only Arrow and the server read the values, so they cannot inject SQL."""
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
            # COPY bypasses SQLAlchemy, so its errors are wrapped as SQLAlchemy's here.
            raise sa.exc.DBAPIError("COPY", None, error, hide_parameters=True) from error

    def conversions(self, connection: sa.Connection, table: sa.Table, _held: Held) -> dict[str, Conversion]:
        """Return the conversions of the frame's values to the columns of a table."""
        found, dialect = connection.execute(sa.text(_COLUMNS), {"name": _name_of(table)}), connection.dialect
        return {row[0]: _conversion(dialect, table.c[row[0]], row) for row in found if row[0] in table.c}

    def fingerprint(self, connection: sa.Connection, table: sa.Table) -> str:
        """Return the catalogue's entries, by one query."""
        return str(connection.execute(sa.text(_FINGERPRINT), {"name": _name_of(table)}).one())


def _name_of(table: sa.Table) -> str:
    """Return the name of a table for `to_regclass` and COPY; SQLAlchemy would double `%`."""
    return ".".join(_quoted(name) for name in (table.schema, table.name) if name is not None)


def _quoted(name: str) -> str:
    """Quote by the SQL standard. SQLAlchemy would also double `%`, which COPY reads literally."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


def _as_text(chunk: pa.RecordBatch) -> pa.RecordBatch:
    """Convert values that CSV cannot hold to PostgreSQL's text form: bytes to hexadecimal digits."""
    columns = [
        pa.array([None if value is None else "\\x" + value.hex() for value in column.to_pylist()], pa.string())
        if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)
        else column
        for column in chunk.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=chunk.schema.names)


def _conversion(dialect: sa.Dialect, column: sa.Column[Any], held: Sequence[Any]) -> Conversion:
    """Return the conversion of values to a column; `held` is its row of `_COLUMNS`."""
    value: sa.ColumnElement[Any] = sa.column(str(column.name), column.type)
    _, written, name, modifier, is_made = held

    def read(value: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        return value.op("::", precedence=100)(sa.literal_column(written))

    if isinstance(column.type, sa.Text):
        is_kept = is_made or (name.removeprefix("_") in _EXACT and modifier == -1)
        kept = None if is_kept else sa.cast(read(value), sa.Text()) == value
        return Conversion(written, None if name in _TEXTS else read, kept)
    own = str(column.type.compile(dialect=dialect)).lower().replace(", ", ",")
    is_kept = own == written or (is_whole(column.type) and name in _WHOLE)
    return Conversion(written, None, None if is_kept else sa.cast(read(value), column.type) == value)
