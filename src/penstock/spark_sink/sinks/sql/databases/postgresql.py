"""What a sink does differently on PostgreSQL: `COPY` into the staging table, from CSV that Arrow writes.

PostgreSQL rounds numbers and times, and cuts and pads texts, to what a column holds, and says nothing. So a value is
kept if it comes back as it was when it is cast to the column's type and back. Types below keep what a text says in any
spelling, times and intervals in some; for others a text must read as PostgreSQL writes the value.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from penstock.spark_sink.sinks.sql.databases.database import Conversion, Database, is_whole, new_engine

#: Rows that are CSV text at one time.
_ROWS_AT_ONCE = 20_000

#: Seconds to wait for a connection, unless the address sets others, and for another transaction's lock.
_CONNECT_TIMEOUT_S = 15
_LOCK_WAIT_S = 60

#: Begins a transaction in one round trip. A pooler may give the next one another session, so all is said each time.
_BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL TIME ZONE 'UTC'; SET LOCAL lock_timeout = '{}s'"

#: What the catalogue has of a table's columns and indexes.
_FINGERPRINT = """
SELECT (SELECT string_agg(held::text, ' ' ORDER BY attnum) FROM pg_attribute AS held WHERE attrelid = found.oid),
    (SELECT string_agg(held::text, ' ' ORDER BY indexrelid) FROM pg_index AS held WHERE indrelid = found.oid)
FROM to_regclass(:name) AS found(oid)
"""


#: The columns of a table: type as it is written, and of what that is made where it is a domain.
_COLUMNS = """
WITH RECURSIVE held AS (
    SELECT attname, format_type(atttypid, atttypmod) AS written, atttypid AS kind, atttypmod AS modifier
    FROM pg_attribute WHERE attrelid = to_regclass(:name) AND attnum > 0 AND NOT attisdropped
    UNION ALL
    SELECT attname, written, typbasetype, typtypmod FROM held JOIN pg_type ON oid = kind WHERE typtype = 'd'
)
SELECT attname, written, typname, modifier, format_type(kind, modifier) = written AS is_plain,
    typtype = 'e' OR (typtype = 'b' AND typcategory <> 'A' AND typnamespace <> 'pg_catalog'::regnamespace) AS is_named
FROM held JOIN pg_type ON oid = kind WHERE typtype <> 'd'
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

#: Spellings of which nothing is lost but by a column's precision. Others would be read as well: without a time's date
#: or zone, say, or with a fraction of a month in whole days.
_CLOCK = "[0-9]{2}:[0-9]{2}(:[0-5][0-9]([.][0-9]{1,6}0*)?)?"
_SPELLINGS = {
    "time": f"^{_CLOCK}$",
    "timetz": f"^{_CLOCK}([+-][0-9]{{2}}(:?[0-9]{{2}})?|z)$",
    "interval": "^[^.]*([.][0-9]{1,6}0*)? ?(s|secs?|seconds?)?$",
}


class _Held(NamedTuple):
    """A column of the table.

    `written` is its type as SQL has it, `name` PostgreSQL's name of that, or of what a domain is made of, and
    `modifier` its length or precision, -1 for none. `is_plain` says that it is no domain, and `is_named` that its
    values are those of an enum or of an extension.
    """

    column: str
    written: str
    name: str
    modifier: int
    is_plain: bool
    is_named: bool


class PostgreSql(Database):
    """PostgreSQL, by psycopg."""

    name = "postgresql"
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
    #: A column of another type, a key without a unique constraint or with one that is checked at the commit, a column
    #: that the table computes, and one that each table has already, such as ctid.
    misfit_codes = frozenset({"42804", "42P10", "55000", "428C9", "42701"})
    #: Also what an address with a `statement_timeout` bounds.
    plain_codes = forbidden_codes | misfit_codes | {"57014"}
    insert = staticmethod(postgresql.insert)

    def engine(self, url: sa.URL, pooling: Mapping[str, Any]) -> sa.Engine:
        """Return an engine whose transactions are at READ COMMITTED and in UTC, and wait for no lock for ever.

        The ledger's rows are locked before they are read; a stricter level would show them as they were before
        the lock and refuse the change instead of letting the second writer go on behind the first. By the time zone
        PostgreSQL turns instants into times without a zone, and back.
        """
        bounds = {} if "connect_timeout" in url.query else {"connect_timeout": _CONNECT_TIMEOUT_S}
        # AUTOCOMMIT keeps the driver from beginning transactions by its own rules.
        engine = new_engine(url, bounds, pooling, isolation_level="AUTOCOMMIT")
        begin = _BEGIN.format(_LOCK_WAIT_S)
        sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
        return engine

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

    def conversions(self, connection: sa.Connection, table: sa.Table) -> dict[str, Conversion]:
        """Return how values of the frame get into the columns of a table."""
        found = [_Held(*row) for row in connection.execute(sa.text(_COLUMNS), {"name": _name_of(table)})]
        held = {column.column: column for column in found if column.column in table.c}
        return {name: _conversion(connection.dialect, table.c[name], column) for name, column in held.items()}

    def check_constraints(self, connection: sa.Connection) -> None:
        """Check constraints that are deferred to the commit."""
        connection.exec_driver_sql("SET CONSTRAINTS ALL IMMEDIATE")

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


def _conversion(dialect: sa.Dialect, column: sa.Column[Any], held: _Held) -> Conversion:
    value: sa.ColumnElement[Any] = sa.column(str(column.name), column.type)
    if isinstance(column.type, sa.Text):
        is_read = not held.is_plain or held.name not in _TEXTS
        return Conversion(held.written, _as(held.written) if is_read else None, _keeps_text(value, held))
    own = str(column.type.compile(dialect=dialect)).lower().replace(", ", ",")
    if own == held.written or (is_whole(column.type) and held.name in _WHOLE):
        return Conversion(held.written)
    is_float = isinstance(column.type, sa.Float)
    # By way of a text, which has all digits: as a numeric a float has 15 of them, or 6.
    read = _as("text", held.written) if is_float and held.name == "numeric" else None
    stored = (read or _as(held.written))(value)
    if held.name in {"float4", "float8"} and isinstance(column.type, sa.Numeric) and not is_float:
        stored = sa.cast(stored, sa.Text())
    return Conversion(held.written, read, sa.cast(stored, column.type) == value)


def _as(*types: str) -> Callable[[sa.ColumnElement[Any]], sa.ColumnElement[Any]]:
    """Return the reading of a value by some types, one after the other."""

    def read(value: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        for written in types:
            value = value.op("::", precedence=100)(sa.literal_column(written))
        return value

    return read


def _keeps_text(value: sa.ColumnElement[Any], held: _Held) -> sa.ColumnElement[bool] | None:
    """Return the condition under which what a text says is what is stored; None where each text is refused or kept."""
    if held.is_named or (held.name.removeprefix("_") in _EXACT and held.modifier == -1):
        return None
    stored = _as(held.written)(value)
    if held.name in _SPELLINGS:
        return sa.and_(value.op("~*")(_SPELLINGS[held.name]), stored == _as(held.name)(value))
    return sa.cast(stored, sa.Text()) == value
