"""The seam between databases: all that a SQL sink does differently in one and in another.

A new database is a file beside this one with a subclass, and its line in this package. Everything else that a sink says
is SQLAlchemy Core and the same everywhere (`tables`, `upsert`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any, ClassVar

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.pool import NullPool

#: Returns new values of the row that stands, by column; it is given what finds a value of the arriving row by column.
Changes = Callable[[Callable[[str], sa.ColumnElement[Any]]], Mapping[str, sa.ColumnElement[Any]]]

#: What a column of the frame, or of the table, holds.
Type = sa.types.TypeEngine[Any]

#: A staged row's number among those of its task.
ROW = "penstock_row"

#: Digits of the widest decimal.
DIGITS = 38


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


@dataclass(frozen=True, slots=True)
class Needs:
    """What a sink does in a database.

    Attributes:
        schema: schema of its tables; None for the connection's own.
        tables: what it does with each table.
        staging: whether it makes staging tables in the schema.
        temporary: whether it makes temporary tables.
        adds_columns: whether it adds columns to the first of the tables.
    """

    schema: str | None
    tables: Mapping[str, Sequence[str]]
    staging: bool
    temporary: bool
    adds_columns: bool


class Database(ABC):
    """One kind of database. It has no state but its engines: connections are the caller's."""

    #: Its name, as SQLAlchemy has it.
    name: ClassVar[str]
    #: Its name in a sentence.
    title: ClassVar[str]
    #: Whether tables stand in schemas.
    has_schemas: ClassVar[bool] = True
    #: Of "NaN", "infinity" and "NUL", a character of texts, those that it does not know.
    unknown: ClassVar[frozenset[str]] = frozenset()
    #: Whether truth values are numbers there.
    booleans_are_numbers: ClassVar[bool] = False
    #: Digits that a number keeps; decimals of more are texts there. None: as many as its column has.
    digits: ClassVar[int | None] = None
    #: Codes of its errors, or the first two characters of a SQLSTATE: those of a row beside what DB-API calls data and
    #: integrity errors, those of which another try may help, those of a missing right, those of a table that does not
    #: fit the frame, and those whose texts never quote a value.
    row_codes: ClassVar[frozenset[str]] = frozenset()
    transient_codes: ClassVar[frozenset[str]] = frozenset()
    forbidden_codes: ClassVar[frozenset[str]] = frozenset()
    misfit_codes: ClassVar[frozenset[str]] = frozenset()
    plain_codes: ClassVar[frozenset[str]] = frozenset()
    #: Whether an error of its driver without a code is a connection that cannot be made or is lost.
    connection_errors_have_no_code: ClassVar[bool] = False

    @abstractmethod
    def engine(self, url: sa.URL) -> sa.Engine:
        """Return an engine whose connections keep what a sink relies on, whatever the server's defaults."""

    @contextmanager
    def session(self, url: sa.URL) -> Iterator[sa.Connection]:
        """Open a connection of its own; transactions are begun on it, and leaving it ends what is open."""
        with _engine_of(self, url).connect() as connection:
            yield connection

    @abstractmethod
    def schema_lock(self, connection: sa.Connection) -> AbstractContextManager[None]:
        """Keep others from creating the same tables meanwhile. After an error the session must end."""

    @abstractmethod
    def insert(self, table: sa.Table) -> Any:
        """Return an `INSERT` of its dialect."""

    def insert_new(self, table: sa.Table) -> sa.Insert:
        """Return an `INSERT` that leaves a row alone whose primary key is there already."""
        statement: sa.Insert = self.insert(table).on_conflict_do_nothing()
        return statement

    def insert_or_update(
        self, table: sa.Table, names: Sequence[str], rows: sa.Select[Any], key: Sequence[str], changes: Changes
    ) -> sa.Insert:
        """Return an `INSERT` of the named columns of `rows` that changes a row instead whose key is there already."""
        statement: Any = self.insert(table).from_select(names, rows)
        conflict = [table.c[name] for name in key]
        found: sa.Insert
        if changed := changes(statement.excluded.__getitem__):
            found = statement.on_conflict_do_update(index_elements=conflict, set_=changed)
        else:
            found = statement.on_conflict_do_nothing(index_elements=conflict)
        return found

    def delete_keys(self, table: sa.Table, key: Sequence[str], keys: sa.Select[Any]) -> sa.Delete:
        """Return a `DELETE` of the rows that have one of some keys."""
        return sa.delete(table).where(sa.tuple_(*(table.c[name] for name in key)).in_(keys))

    @abstractmethod
    def stage(self, connection: sa.Connection, table: sa.Table, rows: pa.Table) -> None:
        """Put rows into an existing staging table, whose columns take every value of the frame's types."""

    def create_temporary(self, connection: sa.Connection, name: str, *items: sa.schema.SchemaItem) -> sa.Table:
        """Make a table that ends with the transaction, or with the connection."""
        # In PostgreSQL a pooler may give the session to others.
        table = sa.Table(name, sa.MetaData(), *items, prefixes=["TEMPORARY"], postgresql_on_commit="DROP")
        table.create(connection, checkfirst=False)
        return table

    def column_type(self, kind: Type, _key_columns: int = 0) -> Type:
        """Return the type of a column that is made, of a key with so many columns if any."""
        return kind

    def require_storable(self, frame: pa.Schema, table: str, names: Sequence[str], summed: Collection[str]) -> None:
        """Raise `SchemaMismatchError` where it cannot store such frames whatever the table is.

        `names` are those of the tables and of their schema, and `summed` columns that are added up.
        """

    def constraints(self, frame: pa.Schema, summed: Collection[str]) -> Sequence[sa.CheckConstraint]:
        """Return what a table that is made needs beside its columns, of which `summed` are added up."""
        return ()

    def fits(self, stored: Type, arriving: Type, *, is_sum: bool) -> bool:
        """Tell whether a column of one type takes values of another; single ones may be refused by a `Conversion`.

        Within a family of types the database converts, across it must not. What is neither number nor time nor bytes,
        such as JSON, a UUID or an address, is read from a text.
        """
        found, given = self._family(stored), self._family(arriving)
        if found == given == "number":
            return self.keeps(stored, arriving, is_sum=is_sum)
        return found == given or (given == "str" and found == "read from text")

    def keeps(self, stored: Type, arriving: Type, *, is_sum: bool) -> bool:
        """Tell whether a column of numbers may keep those of another type."""
        return is_whole(arriving) or not is_whole(stored)  # others would be rounded, and nothing said

    def _family(self, kind: Type) -> str:
        try:
            python_type = kind.python_type
        except NotImplementedError:  # SQLAlchemy's word for a type without a Python type of its own
            return "read from text"
        if python_type is bool and not self.booleans_are_numbers:
            return "boolean"
        if issubclass(python_type, int | float | Decimal):
            return "number"
        return python_type.__name__ if python_type in (str, bytes, date, datetime) else "read from text"

    def conversions(self, connection: sa.Connection, table: sa.Table) -> Mapping[str, Conversion]:
        """Return how values of the frame get into the columns of an existing table, where that is not plain."""
        return {}

    def numbered_column(self, connection: sa.Connection, inspector: sa.Inspector, table: sa.Table) -> str | None:
        """Return a column that it fills by itself though the table does not say so."""
        return None

    def unique_columns(
        self, connection: sa.Connection, inspector: sa.Inspector, table: sa.Table
    ) -> list[set[str | None]]:
        """Return the sets of columns of which the table holds each combination once, at any moment."""
        primary: list[str | None] = list(
            inspector.get_pk_constraint(table.name, schema=table.schema)["constrained_columns"]
        )
        # A unique index on a part of the rows, or of a text, does not tell rows of one key apart.
        partial = {f"{self.name}_where", f"{self.name}_length"}
        unique = [
            set() if partial & set(index.get("dialect_options", {})) else set(index["column_names"])
            for index in inspector.get_indexes(table.name, schema=table.schema)
            if index["unique"]
        ]
        constraints = inspector.get_unique_constraints(table.name, schema=table.schema)
        unique += [set(one["column_names"]) for one in constraints if "duplicates_index" not in one]
        return [set(primary), *unique] if primary else unique

    def differences(
        self, connection: sa.Connection, inspector: sa.Inspector, table: sa.Table, key: Sequence[str]
    ) -> Sequence[str]:
        """Return what else of an existing table does not fit; `key` is empty where rows are appended."""
        return ()

    def require_transactions(self, connection: sa.Connection, table: sa.Table) -> None:
        """Raise `SchemaMismatchError` where a table has no transactions."""

    def check_constraints(self, connection: sa.Connection) -> None:
        """Have refused now what would be refused at the commit, where it can be found which row it was."""

    def grants(self, connection: sa.Connection, needs: Needs) -> Sequence[str]:
        """Return the statements that give the user of a session all that a sink needs."""
        return ()


class Server(Database):
    """A database in which tasks on executors fill a staging table, which a session of the driver holds."""

    #: What stands before TABLE in the statement that makes it.
    stage_prefixes: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def take_lock(self, connection: sa.Connection, name: str) -> bool:
        """Take a lock by name that the session holds until it ends or `release_lock`; False where another has it."""

    @abstractmethod
    def release_lock(self, connection: sa.Connection, name: str) -> None:
        """Give back a lock of this session."""

    @abstractmethod
    def lock_waits(self, connection: sa.Connection, seconds: int) -> AbstractContextManager[None]:
        """Wait for a table's lock no longer than that, within a transaction."""

    @abstractmethod
    def fingerprint(self, connection: sa.Connection, tables: Sequence[sa.Table]) -> str:
        """Return the versions of all that was looked at when tables were checked: their columns and indexes."""


@lru_cache(maxsize=16)
def _engine_of(database: Database, url: sa.URL) -> sa.Engine:
    """Return the engine of an address, which knows the server and the statements that it has compiled.

    It has no connections: each session is its own. So it may be used by a forked process, too.
    """
    return database.engine(url)


def new_engine(url: sa.URL, connect_args: Mapping[str, Any], **options: Any) -> sa.Engine:
    """Return an engine whose sessions end with their blocks, and whose errors do not quote parameters."""
    return sa.create_engine(url, poolclass=NullPool, hide_parameters=True, connect_args=dict(connect_args), **options)


def is_whole(kind: Type) -> bool:
    """Tell whether a type of numbers has no fractions."""
    return isinstance(kind, sa.Integer) or (isinstance(kind, sa.Numeric) and kind.scale is not None and kind.scale <= 0)
