"""`Database`: the interface for everything that a SQL sink does differently in different databases.

A new database is a subclass in a file of this folder, and a line in this package. All other SQL of a sink is SQLAlchemy
Core and the same everywhere (`tables`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Enum, auto
from functools import lru_cache
from typing import Any, ClassVar

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.pool import NullPool
from sqlalchemy.sql.elements import quoted_name

#: Returns the new values of an existing row, by column. Its argument returns the arriving row's value of a column.
Changes = Callable[[Callable[[str], sa.ColumnElement[Any]]], Mapping[str, sa.ColumnElement[Any]]]

#: The type of a column, of the frame or of the table.
Type = sa.types.TypeEngine[Any]

#: The columns of an existing table by name, from SQLAlchemy's inspector.
Held = Mapping[str, Mapping[str, Any]]

#: Column with the number of a staged row within its task.
ROW = "penstock_row"

#: Rows that are Python objects at the same time.
_ROWS_AT_ONCE = 10_000

#: Maximum number of sessions that a process keeps open, and for how many seconds.
_MAX_SESSIONS, _SESSION_AGE_S = 32, 300

#: Pairs of kinds, of the frame's column and of the table's, that differ and still keep all values. Other pairs must be
#: equal, because hardly any value would be kept. Kinds are those of `kind_of`.
WIDER = frozenset({("whole", "decimal"), ("real", "double")})


def kind_of(column: Type) -> str:
    """Return the kind of values of a type; "text" for all types that read texts, such as JSON, UUIDs or addresses."""
    if isinstance(column, sa.Float):
        return "double" if isinstance(column, sa.Double) else "real"
    if is_whole(column):
        return "whole"
    try:
        kind = column.python_type
    except NotImplementedError:  # raised by SQLAlchemy for a type without a Python type
        return "text"
    return {bool: "boolean", Decimal: "decimal", bytes: "bytes", date: "date", datetime: "time"}.get(kind, "text")


def is_whole(column: Type) -> bool:
    """Return whether a type holds only whole numbers."""
    is_numeric = isinstance(column, sa.Numeric) and column.scale is not None and column.scale <= 0
    return isinstance(column, sa.Integer) or is_numeric


class ExactText(sa.Text):
    """A text compared character by character, in MySQL with case and end spaces too. With a size it may be in a key."""

    def __init__(self, size: int | None = None) -> None:
        super().__init__()
        self.size = size


def named_table(name: str, schema: str | None, *items: sa.schema.SchemaItem, prefixes: Sequence[str] = ()) -> sa.Table:
    """Return a table whose name and schema are always quoted."""
    place = None if schema is None else quoted_name(schema, quote=True)
    return sa.Table(quoted_name(name, quote=True), sa.MetaData(), *items, schema=place, prefixes=list(prefixes))


class ErrorKind(Enum):
    """Kinds of errors of a database."""

    #: The values of a row.
    ROW = auto()
    #: The database cannot do it now: a retry may help.
    TRANSIENT = auto()
    #: The user lacks a permission.
    RIGHT = auto()
    #: The table does not fit the frame.
    MISFIT = auto()
    OTHER = auto()


@dataclass(frozen=True, slots=True)
class Conversion:
    """The conversion of a column's staged values to the table's type.

    Attributes:
        written: the column's type in the table, in SQL.
        read: returns the expression that converts a staged value; None if it needs no conversion.
        kept: the condition that a staged value is stored unchanged; None if the table keeps or refuses every value.
    """

    written: str
    read: Callable[[sa.ColumnElement[Any]], sa.ColumnElement[Any]] | None = None
    kept: sa.ColumnElement[bool] | None = None


class Database:
    """A kind of database. It has no state: connections belong to the caller."""

    #: Its name in SQLAlchemy.
    name: ClassVar[str]
    #: Whether it is a server. Its tables are in schemas, and executors can write to it.
    is_server: ClassVar[bool] = True
    #: Words before TABLE in the statement that creates a staging table.
    stage_prefixes: ClassVar[Sequence[str]] = ()
    #: The values that it cannot store: "NaN", "infinity", or "NUL", which is a character of texts.
    unknown: ClassVar[frozenset[str]] = frozenset()
    #: Pairs of kinds that differ and still keep all values, see `WIDER`.
    wider: ClassVar[frozenset[tuple[str, str]]] = WIDER
    #: Whether it adds decimals exactly.
    adds_decimals: ClassVar[bool] = True
    #: Codes of its errors, or the first two characters of a SQLSTATE, by kind. DB-API's data and integrity errors are
    #: `ROW` without an entry here.
    codes: ClassVar[Mapping[ErrorKind, frozenset[str]]] = {}
    #: Codes of errors whose texts never quote a value.
    plain_codes: ClassVar[frozenset[str]] = frozenset()
    #: Arguments of its driver's `connect`; time limits in the address override them.
    connect_args: ClassVar[Mapping[str, Any]] = {}
    #: SQLAlchemy's name of the isolation level; None for the driver's default.
    isolation: ClassVar[str | None] = None
    #: The statement that begins a transaction, if the driver does not.
    begin: ClassVar[str] = ""
    #: Returns an `INSERT` in its dialect.
    insert: ClassVar[staticmethod[..., Any]]

    def changing(self, insert: Any, table: sa.Table, key: Sequence[str], changes: Changes) -> sa.Insert:
        """Return an `INSERT` that updates an existing row with the same key, or keeps it if there are no changes."""
        conflict = [table.c[name] for name in key]
        found: sa.Insert = insert.on_conflict_do_nothing(index_elements=conflict)
        if changed := changes(insert.excluded.__getitem__):
            found = insert.on_conflict_do_update(index_elements=conflict, set_=changed)
        return found

    def delete_keys(self, table: sa.Table, key: Sequence[str], keys: sa.Select[Any]) -> sa.Delete:
        """Return a `DELETE` of the rows with these keys."""
        return sa.delete(table).where(sa.tuple_(*(table.c[name] for name in key)).in_(keys))

    def stage(self, connection: sa.Connection, table: sa.Table, rows: pa.Table) -> None:
        """Insert rows into an existing staging table. Its columns can store every value of the frame's types.

        It uses the driver's `executemany`, with a bounded number of rows at a time.
        """
        quoted, mark = connection.dialect.identifier_preparer, "?" if connection.dialect.positional else "%s"
        names, marks = ", ".join(map(quoted.format_column, table.columns)), ", ".join([mark] * len(table.columns))
        statement = f"INSERT INTO {quoted.format_table(table)} ({names}) VALUES ({marks})"  # noqa: S608 - names
        for chunk in rows.select([str(column.name) for column in table.columns]).to_batches(_ROWS_AT_ONCE):
            values = [self.values(column) for column in chunk.columns]
            connection.exec_driver_sql(statement, list(zip(*values, strict=True)))

    def values(self, column: pa.Array) -> list[Any]:
        """Return the values of a column for the driver, instants as times in UTC."""
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.timestamp("us"))
        return list(column.to_pylist())

    def create_temporary(self, connection: sa.Connection, name: str, *items: sa.schema.SchemaItem) -> sa.Table:
        """Create a temporary table that ends with the transaction, or with the connection."""
        # In PostgreSQL a connection pooler may give the session to other programs.
        table = sa.Table(name, sa.MetaData(), *items, prefixes=["TEMPORARY"], postgresql_on_commit="DROP")
        table.create(connection, checkfirst=False)
        return table

    def column_type(self, kind: Type, _key_columns: int = 0) -> Type:
        """Return the type for a new column. `_key_columns` is the size of the key if the column is in it, else 0."""
        return kind

    def constraints(self, frame: pa.Schema, summed: Collection[str]) -> Sequence[sa.CheckConstraint]:
        """Return the constraints of a new table whose columns `summed` hold sums."""
        return ()

    def fits(self, stored: Type, arriving: Type) -> bool:
        """Return whether a column of one type stores values of another. A `Conversion` may refuse single values."""
        kinds = kind_of(arriving), kind_of(stored)
        return kinds[0] == kinds[1] or kinds in self.wider

    def conversions(self, connection: sa.Connection, table: sa.Table, held: Held) -> Mapping[str, Conversion]:
        """Return conversions of the frame's values for an existing table, for the columns that need one."""
        return {}

    def differences(self, connection: sa.Connection, table: sa.Table, key: Sequence[str], held: Held) -> list[str]:
        """Return defects of an existing table that no failing batch would reveal. `key` is empty if rows are appended.

        A key without a unique index is not included: the `INSERT` of every batch is refused, even without rows.
        """
        return []

    def fingerprint(self, connection: sa.Connection, table: sa.Table) -> str:
        """Return a text that changes if a table's columns or indexes change."""
        return ""


@lru_cache(maxsize=16)
def engine_of(database: Database, url: sa.URL, is_kept: bool) -> sa.Engine:
    """Return the engine of an address. It caches facts about the server and compiled statements.

    With `is_kept`, it keeps sessions for the next use in this process, and replaces lost ones. Otherwise it keeps no
    connections, so that a forked process may use it too.
    """
    pooled = {"pool_size": _MAX_SESSIONS, "pool_pre_ping": True, "pool_recycle": _SESSION_AGE_S}
    options: dict[str, Any] = pooled if is_kept else {"poolclass": NullPool}
    limited = {name for name in url.query if name.endswith("timeout")}
    arguments = {name: value for name, value in database.connect_args.items() if name not in limited}
    # Errors must not quote parameters.
    engine = sa.create_engine(
        url, hide_parameters=True, connect_args=arguments, isolation_level=database.isolation, **options
    )
    if database.begin:
        sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(database.begin))
    return engine
