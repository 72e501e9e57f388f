"""The seam between databases: all that a SQL sink does differently in one and in another.

A new database is a file beside this one with a subclass, and its line in `databases`. Everything else that a sink says
is SQLAlchemy Core and the same everywhere (`upsert`, `schema`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg_dialect
from sqlalchemy.dialects import sqlite as sqlite_dialect

from penstock.spark_sink.sinks.sql.databases.rights import NeededRights

#: Returns new values of the row that stands, by column; it is given what finds a value of the arriving row by column.
Changes = Callable[[Callable[[str], sa.ColumnElement[Any]]], Mapping[str, sa.ColumnElement[Any]]]


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


class Database(ABC):
    """One kind of database. It has no state: connections are the caller's."""

    #: Its name, as SQLAlchemy has it.
    name: ClassVar[str]
    #: Its name in a sentence.
    title: ClassVar[str]
    #: What has no schemas, in a sentence; None where tables stand in schemas.
    without_schemas: ClassVar[str | None] = None
    #: Whether tasks on executors fill a staging table: `rows.staging` says what that asks of it.
    stages_on_executors: ClassVar[bool] = False
    #: What stands before TABLE in the statement that makes that staging table.
    stage_prefixes: ClassVar[Sequence[str]] = ()
    #: Whether NaN, and whether infinity, is a number there.
    knows_nan: ClassVar[bool] = True
    knows_infinity: ClassVar[bool] = True
    #: Whether a text may hold a NUL character.
    takes_nul: ClassVar[bool] = True
    #: Whether truth values are numbers there.
    booleans_are_numbers: ClassVar[bool] = False
    #: Digits that a number keeps; decimals of more are texts there. None: as many as its column has.
    digits: ClassVar[int | None] = None
    #: Codes of its errors, or the first two characters of a SQLSTATE: those of a row, those of which another try may
    #: help, those of a missing right, and those whose texts never quote a value.
    row_codes: ClassVar[frozenset[str]] = frozenset()
    transient_codes: ClassVar[frozenset[str]] = frozenset()
    forbidden_codes: ClassVar[frozenset[str]] = frozenset()
    plain_codes: ClassVar[frozenset[str]] = frozenset()
    #: What its driver raises without a code, by module and class: for a row, and where a connection cannot be made or
    #: is lost.
    row_errors: ClassVar[frozenset[str]] = frozenset()
    connection_errors: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def session(self, url: sa.URL) -> AbstractContextManager[sa.Connection]:
        """Open a connection of its own; transactions are begun on it, and leaving it ends what is open."""

    @abstractmethod
    def schema_lock(self, connection: sa.Connection) -> AbstractContextManager[None]:
        """Keep others from creating the same tables meanwhile. After an error the session must end."""

    @abstractmethod
    def insert_new(self, table: sa.Table) -> sa.Insert:
        """Return an `INSERT` that leaves a row alone whose primary key is there already."""

    @abstractmethod
    def insert_or_update(
        self, table: sa.Table, names: Sequence[str], rows: sa.Select[Any], key: Sequence[str], changes: Changes
    ) -> sa.Insert:
        """Return an `INSERT` of the named columns of `rows` that changes a row instead whose key is there already."""

    @abstractmethod
    def stage(self, connection: sa.Connection, table: sa.Table, rows: pa.Table) -> None:
        """Put rows into an existing staging table."""

    def delete_keys(self, table: sa.Table, key: Sequence[str], keys: sa.Select[Any]) -> sa.Delete:
        """Return a `DELETE` of the rows that have one of some keys."""
        return sa.delete(table).where(sa.tuple_(*(table.c[name] for name in key)).in_(keys))

    def create_temporary(self, connection: sa.Connection, name: str, *items: sa.schema.SchemaItem) -> sa.Table:
        """Make a table that ends with the transaction, or with the connection."""
        # In PostgreSQL a pooler may give the session to others.
        table = sa.Table(name, sa.MetaData(), *items, prefixes=["TEMPORARY"], postgresql_on_commit="DROP")
        table.create(connection, checkfirst=False)
        return table

    def column_type(self, kind: sa.types.TypeEngine[Any], _key_columns: int = 0) -> sa.types.TypeEngine[Any]:
        """Return the type of a column that is made, of a key with so many columns if any."""
        return kind

    def check_name(self, said: str) -> str:
        """Return the name of a CHECK of a staging table."""
        return said.encode()[:63].decode(errors="ignore")

    def require_storable(self, frame: pa.Schema, table: str, names: Sequence[str], summed: Collection[str]) -> None:
        """Raise `SchemaMismatchError` where it cannot store such frames whatever the table is.

        `names` are those of the tables and of their schema, and `summed` columns that are added up.
        """

    def constraints(self, frame: pa.Schema, summed: Collection[str]) -> Sequence[sa.CheckConstraint]:
        """Return what a table that is made needs beside its columns, of which `summed` are added up."""
        return ()

    def conversions(self, connection: sa.Connection, table: sa.Table) -> Mapping[str, Conversion]:
        """Return how values of the frame get into the columns of an existing table, where that is not plain."""
        return {}

    def takes(self, _stored: sa.types.TypeEngine[Any], _arriving: sa.types.TypeEngine[Any]) -> bool | None:
        """Tell whether a column of one type takes values of another; None where the kinds of their values tell."""
        return None

    def keeps(self, stored: sa.types.TypeEngine[Any], arriving: sa.types.TypeEngine[Any], *, is_sum: bool) -> bool:
        """Tell whether a number of one type is kept as it is in a column of another."""
        return is_whole(arriving) or not is_whole(stored)  # others would be rounded, and nothing said

    def numbered_column(self, connection: sa.Connection, inspector: sa.Inspector, table: sa.Table) -> str | None:
        """Return a column that it fills by itself though the table does not say so."""
        return None

    def unique_columns(
        self, connection: sa.Connection, inspector: sa.Inspector, table: sa.Table
    ) -> list[set[str | None]]:
        """Return the sets of columns of which the table holds each combination once, at any moment."""
        unique: list[set[str | None]] = [set(inspector.get_pk_constraint(table.name)["constrained_columns"])]
        # A unique index on a part of the rows does not tell rows of one key apart.
        unique += [
            set(index["column_names"])
            for index in inspector.get_indexes(table.name)
            if index["unique"] and f"{self.name}_where" not in index.get("dialect_options", {})
        ]
        unique += [set(constraint["column_names"]) for constraint in inspector.get_unique_constraints(table.name)]
        return unique

    def differences(
        self, connection: sa.Connection, inspector: sa.Inspector, table: sa.Table, key: Sequence[str]
    ) -> Sequence[str]:
        """Return what else of an existing table does not fit; `key` is empty where rows are appended."""
        return ()

    def require_transactions(self, connection: sa.Connection, table: sa.Table) -> None:
        """Raise `SchemaMismatchError` where a table has no transactions."""

    def check_constraints(self, connection: sa.Connection) -> None:
        """Have refused now what would be refused at the commit, where it can be found which row it was."""

    def require_rights(
        self, connection: sa.Connection, what: str, needed: NeededRights, *, refused: bool = False
    ) -> None:
        """Raise `MissingRightError` naming all rights that a sink lacks; where it knows none, do nothing.

        The transaction is the caller's. `what` cannot be done without, as the beginning of a sentence. Where the server
        has `refused` something, what is needed only now and then is looked at, too.
        """

    # What follows is asked where tasks on executors stage.

    def take_lock(self, connection: sa.Connection, name: str) -> bool:
        """Take a lock by name that the session holds until it ends or `release_lock`; False where another has it."""
        raise NotImplementedError

    def release_lock(self, connection: sa.Connection, name: str) -> None:
        """Give back a lock of this session."""
        raise NotImplementedError

    def lock_waits(self, connection: sa.Connection, seconds: int) -> AbstractContextManager[None]:
        """Wait for a table's lock no longer than that, within a transaction."""
        raise NotImplementedError

    def fingerprint(
        self, connection: sa.Connection, target: sa.Table, ledger: sa.Table, stage: sa.Table | None
    ) -> str | None:
        """Return all that was looked at when the tables were checked: columns and indexes, as they are now."""
        raise NotImplementedError


def is_whole(kind: sa.types.TypeEngine[Any]) -> bool:
    """Tell whether a type of numbers has no fractions."""
    return isinstance(kind, sa.Integer) or (isinstance(kind, sa.Numeric) and kind.scale is not None and kind.scale <= 0)


def on_conflict(
    statement: sqlite_dialect.Insert | pg_dialect.Insert, key: Sequence[str], changes: Changes
) -> sqlite_dialect.Insert | pg_dialect.Insert:
    """Return an `INSERT` that changes the row of the same key, or leaves it where there are no changes."""
    conflict = [statement.table.c[name] for name in key]
    if found := changes(statement.excluded.__getitem__):
        return statement.on_conflict_do_update(index_elements=conflict, set_=found)
    return statement.on_conflict_do_nothing(index_elements=conflict)
