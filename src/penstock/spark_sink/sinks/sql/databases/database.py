"""The seam between databases: all that a SQL sink does differently in one and in another.

A new database is a file beside this one with a subclass, and its line in `databases`. Everything else that a sink says
is SQLAlchemy Core and the same everywhere (`upsert`, `schema`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg_dialect
from sqlalchemy.dialects import sqlite as sqlite_dialect

from penstock.spark_sink.sinks.sql.databases.rights import NeededRights

#: `INSERT` with an `ON CONFLICT` clause, of any dialect that has one.
InsertStatement = sqlite_dialect.Insert | pg_dialect.Insert


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a column's staged values get into the table.

    Attributes:
        written: the column's type in the table, as SQL has it.
        casts: types by which a value is read, one after the other.
        kept: the condition under which a staged value is stored as it is; None where each is, or is refused.
    """

    written: str
    casts: Sequence[str] = ()
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
    #: Whether NaN is a number there.
    knows_nan: ClassVar[bool] = True
    #: Whether a text may hold a NUL character.
    takes_nul: ClassVar[bool] = True
    #: Whether truth values are numbers there.
    booleans_are_numbers: ClassVar[bool] = False
    #: Digits that a number keeps; decimals of more are texts there. None: as many as its column has.
    digits: ClassVar[int | None] = None
    #: What its driver raises without a SQLSTATE, by module and class: for a row, and where a connection cannot be made
    #: or is lost.
    row_errors: ClassVar[frozenset[str]] = frozenset()
    connection_errors: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def session(self, url: sa.URL) -> AbstractContextManager[sa.Connection]:
        """Open a connection of its own; transactions are begun on it, and leaving it ends what is open."""

    @abstractmethod
    def lock_schema(self, connection: sa.Connection) -> None:
        """Keep others from creating the same tables until the transaction ends."""

    @abstractmethod
    def insert(self, table: sa.Table) -> InsertStatement:
        """Return an `INSERT` that can have an `ON CONFLICT` clause."""

    @abstractmethod
    def stage(self, connection: sa.Connection, table: sa.Table, rows: pa.Table) -> None:
        """Put rows into an existing temporary table."""

    def temporary_table(self, name: str, *items: sa.schema.SchemaItem) -> sa.Table:
        """Return a table, not made yet, that ends with the transaction or with the connection."""
        return sa.Table(name, sa.MetaData(), *items, prefixes=["TEMPORARY"])

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

    def check_constraints(self, connection: sa.Connection) -> None:
        """Have refused now what would be refused at the commit, where it can be found which row it was."""

    def require_rights(
        self, connection: sa.Connection, what: str, needed: NeededRights, *, refused: bool = False
    ) -> None:
        """Raise `MissingRightError` naming all rights that a sink lacks; where it knows none, do nothing.

        The transaction is the caller's. `what` cannot be done without, as the beginning of a sentence. Where the server
        has `refused` something, what is needed only now and then is looked at, too.
        """


def is_whole(kind: sa.types.TypeEngine[Any]) -> bool:
    """Tell whether a type of numbers has no fractions."""
    return isinstance(kind, sa.Integer) or (isinstance(kind, sa.Numeric) and kind.scale is not None and kind.scale <= 0)
