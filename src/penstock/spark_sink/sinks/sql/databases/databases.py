"""The seam between databases: how a session begins, how rows get into a staging table, how one locks.

Everything else a sink says is SQLAlchemy Core and the same everywhere (`upsert`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg_dialect
from sqlalchemy.dialects import sqlite as sqlite_dialect

from penstock.spark_sink.sinks.sql.databases import postgresql, sqlite

#: `INSERT` with an `ON CONFLICT` clause, of either dialect.
InsertStatement = sqlite_dialect.Insert | pg_dialect.Insert


@dataclass(frozen=True, slots=True)
class Database:
    """What a sink needs of one kind of database.

    Attributes:
        session: opens a connection of its own; transactions are begun on it, and leaving it ends what is open.
        lock_schema: keeps others from creating the same tables until the transaction ends.
        insert: makes an `INSERT` that can have an `ON CONFLICT` clause.
        stage: puts rows into an existing temporary table.
    """

    session: Callable[[sa.URL], AbstractContextManager[sa.Connection]]
    lock_schema: Callable[[sa.Connection], None]
    insert: Callable[[sa.Table], InsertStatement]
    stage: Callable[[sa.Connection, sa.Table, pa.Table], None]


def database_of(url: sa.URL) -> Database:
    """Return the database an address belongs to, or raise `ConfigurationError`."""
    if url.get_backend_name() == "sqlite":
        return Database(sqlite.session, sqlite.lock_schema, sqlite_dialect.insert, sqlite.stage)
    return Database(postgresql.session, postgresql.lock_schema, pg_dialect.insert, postgresql.stage)
