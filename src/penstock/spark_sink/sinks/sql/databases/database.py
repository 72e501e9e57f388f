"""The seam between databases: all that a SQL sink does differently in one and in another.

A new database is a file beside this one with a subclass, and its line in this package. Everything else that a sink says
is SQLAlchemy Core and the same everywhere (`tables`).
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

#: Returns new values of the row that stands, by column; it is given what finds a value of the arriving row by column.
Changes = Callable[[Callable[[str], sa.ColumnElement[Any]]], Mapping[str, sa.ColumnElement[Any]]]

#: What a column of the frame, or of the table, holds.
Type = sa.types.TypeEngine[Any]

#: The columns of an existing table by name, as SQLAlchemy's inspector finds them.
Held = Mapping[str, Mapping[str, Any]]

#: A staged row's number among those of its task.
ROW = "penstock_row"

#: Rows that are Python objects at one time.
_ROWS_AT_ONCE = 10_000

#: Sessions of a database that a process keeps at most, and for how many seconds.
_MOST_KEPT, _KEPT_S = 32, 300

#: Two kinds, of the frame's column and of the table's, that differ though values are kept. Otherwise both must be of
#: one kind: hardly any value of another would be kept. Kinds are those of `kind_of`.
WIDER = frozenset({("whole", "decimal"), ("real", "double")})


def kind_of(column: Type) -> str:
    """Return what a type holds; "text" for all that is read from a text, such as JSON, a UUID or an address."""
    if isinstance(column, sa.Float):
        return "double" if isinstance(column, sa.Double) else "real"
    if is_whole(column):
        return "whole"
    try:
        kind = column.python_type
    except NotImplementedError:  # SQLAlchemy's word for a type without a Python type of its own
        return "text"
    return {bool: "boolean", Decimal: "decimal", bytes: "bytes", date: "date", datetime: "time"}.get(kind, "text")


def is_whole(column: Type) -> bool:
    """Tell whether a type of numbers has no fractions."""
    is_numeric = isinstance(column, sa.Numeric) and column.scale is not None and column.scale <= 0
    return isinstance(column, sa.Integer) or is_numeric


class ExactText(sa.Text):
    """A text of which each character counts, in MySQL case and trailing spaces too; with a size it may be in a key."""

    def __init__(self, size: int | None = None) -> None:
        super().__init__()
        self.size = size


def named_table(name: str, schema: str | None, *items: sa.schema.SchemaItem, prefixes: Sequence[str] = ()) -> sa.Table:
    """Return a table whose name and schema are quoted always."""
    place = None if schema is None else quoted_name(schema, quote=True)
    return sa.Table(quoted_name(name, quote=True), sa.MetaData(), *items, schema=place, prefixes=list(prefixes))


class ErrorKind(Enum):
    """What an error of a database is about."""

    #: The values of a row.
    ROW = auto()
    #: The database cannot do it now: another try may help.
    TRANSIENT = auto()
    #: The user lacks a permission.
    RIGHT = auto()
    #: The table does not fit the frame.
    MISFIT = auto()
    OTHER = auto()


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a column's staged values get into the table.

    Attributes:
        written: the column's type in the table, as SQL has it.
        read: returns the expression by which a staged value is read; None where it is taken as it is.
        kept: the condition under which a staged value is stored as it is; None where each is, or is refused.
    """

    written: str
    read: Callable[[sa.ColumnElement[Any]], sa.ColumnElement[Any]] | None = None
    kept: sa.ColumnElement[bool] | None = None


class Database:
    """One kind of database. It has no state but its engines: connections are the caller's."""

    #: Its name, as SQLAlchemy has it.
    name: ClassVar[str]
    #: Whether it is a server, whose tables stand in schemas, and into which executors put rows.
    is_server: ClassVar[bool] = True
    #: What stands before TABLE in the statement that makes a staging table.
    stage_prefixes: ClassVar[Sequence[str]] = ()
    #: Of "NaN", "infinity" and "NUL", a character of texts, those that it does not know.
    unknown: ClassVar[frozenset[str]] = frozenset()
    #: Kinds that differ though values are kept, see `WIDER`.
    wider: ClassVar[frozenset[tuple[str, str]]] = WIDER
    #: Whether decimals are added as such.
    adds_decimals: ClassVar[bool] = True
    #: Codes of its errors, or the first two characters of a SQLSTATE, by kind. What DB-API calls data and integrity
    #: errors is of a row without a code.
    codes: ClassVar[Mapping[ErrorKind, frozenset[str]]] = {}
    #: Codes of errors whose texts never quote a value.
    plain_codes: ClassVar[frozenset[str]] = frozenset()
    #: What its driver is given to connect; time limits in the address count before these.
    connect_args: ClassVar[Mapping[str, Any]] = {}
    #: How its transactions see each other, as SQLAlchemy calls it; None for the driver's own way.
    isolation: ClassVar[str | None] = None
    #: Begins a transaction, where the driver does not.
    begin: ClassVar[str] = ""
    #: Returns an `INSERT` of its dialect.
    insert: ClassVar[staticmethod[..., Any]]

    def changing(self, insert: Any, table: sa.Table, key: Sequence[str], changes: Changes) -> sa.Insert:
        """Return an `INSERT` that changes a row instead whose key is there, and leaves it alone without changes."""
        conflict = [table.c[name] for name in key]
        found: sa.Insert = insert.on_conflict_do_nothing(index_elements=conflict)
        if changed := changes(insert.excluded.__getitem__):
            found = insert.on_conflict_do_update(index_elements=conflict, set_=changed)
        return found

    def delete_keys(self, table: sa.Table, key: Sequence[str], keys: sa.Select[Any]) -> sa.Delete:
        """Return a `DELETE` of the rows that have one of some keys."""
        return sa.delete(table).where(sa.tuple_(*(table.c[name] for name in key)).in_(keys))

    def stage(self, connection: sa.Connection, table: sa.Table, rows: pa.Table) -> None:
        """Put rows into an existing staging table, whose columns take every value of the frame's types.

        It goes by the driver's `executemany`, a bounded number of rows at a time.
        """
        quoted, mark = connection.dialect.identifier_preparer, "?" if connection.dialect.positional else "%s"
        names, marks = ", ".join(map(quoted.format_column, table.columns)), ", ".join([mark] * len(table.columns))
        statement = f"INSERT INTO {quoted.format_table(table)} ({names}) VALUES ({marks})"  # noqa: S608 - names
        for chunk in rows.select([str(column.name) for column in table.columns]).to_batches(_ROWS_AT_ONCE):
            values = [self.values(column) for column in chunk.columns]
            connection.exec_driver_sql(statement, list(zip(*values, strict=True)))

    def values(self, column: pa.Array) -> list[Any]:
        """Return the values of a column as the driver takes them: instants as they are in UTC."""
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.timestamp("us"))
        return list(column.to_pylist())

    def create_temporary(self, connection: sa.Connection, name: str, *items: sa.schema.SchemaItem) -> sa.Table:
        """Make a table that ends with the transaction, or with the connection."""
        # In PostgreSQL a pooler may give the session to others.
        table = sa.Table(name, sa.MetaData(), *items, prefixes=["TEMPORARY"], postgresql_on_commit="DROP")
        table.create(connection, checkfirst=False)
        return table

    def column_type(self, kind: Type, _key_columns: int = 0) -> Type:
        """Return the type of a column that is made, of a key with so many columns if any."""
        return kind

    def constraints(self, frame: pa.Schema, summed: Collection[str]) -> Sequence[sa.CheckConstraint]:
        """Return what a table that is made needs beside its columns, of which `summed` are added up."""
        return ()

    def fits(self, stored: Type, arriving: Type) -> bool:
        """Tell whether a column of one type takes values of another; single ones may be refused by a `Conversion`."""
        kinds = kind_of(arriving), kind_of(stored)
        return kinds[0] == kinds[1] or kinds in self.wider

    def conversions(self, connection: sa.Connection, table: sa.Table, held: Held) -> Mapping[str, Conversion]:
        """Return how values of the frame get into the columns of an existing table, where that is not plain."""
        return {}

    def differences(self, connection: sa.Connection, table: sa.Table, key: Sequence[str], held: Held) -> list[str]:
        """Return what of an existing table does not fit though a batch would pass; `key` is empty where rows are added.

        A key without a unique index is not among it: the `INSERT` of any batch is refused, of one without rows too.
        """
        return []

    def fingerprint(self, connection: sa.Connection, table: sa.Table) -> str:
        """Return another text when a table's columns or indexes have changed."""
        return ""


@lru_cache(maxsize=16)
def engine_of(database: Database, url: sa.URL, is_kept: bool) -> sa.Engine:
    """Return the engine of an address, which knows the server and the statements that it has compiled.

    Sessions that are kept are there for the next use in this process, which opens another where one is lost. Unless
    they are, the engine has no connections, so that a forked process may use it, too.
    """
    kept = {"pool_size": _MOST_KEPT, "pool_pre_ping": True, "pool_recycle": _KEPT_S}
    options: dict[str, Any] = kept if is_kept else {"poolclass": NullPool}
    is_set = {name for name in url.query if name.endswith("timeout")}
    given = {name: value for name, value in database.connect_args.items() if name not in is_set}
    # Errors are not to quote parameters.
    engine = sa.create_engine(
        url, hide_parameters=True, connect_args=given, isolation_level=database.isolation, **options
    )
    if database.begin:
        sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(database.begin))
    return engine
