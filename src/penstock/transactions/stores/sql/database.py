"""The seam between the databases: how to connect, how a transaction begins, what the database's clock says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg_dialect
from sqlalchemy.dialects import sqlite as sqlite_dialect

from penstock.database_url import parse_database_url
from penstock.errors import ConfigurationError, DecisionNotStoredError
from penstock.transactions.connections import cause_of

#: Seconds that a statement, a lock or a connection may take: a send, of 15 s, has time for a second session.
STATEMENT_TIMEOUT_S = 5.0
_CLOCK = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)",
}
#: The next number: above all that any row has (SQLite has one writer at a time), or from a sequence.
_NEXT = {
    "sqlite": (
        "(MAX((SELECT COALESCE(MAX(seq), 0) FROM penstock_tx), "
        "(SELECT COALESCE(MAX(decided_seq), 0) FROM penstock_tx)) + 1)"
    ),
    "postgresql": "nextval('penstock_seq')",
}


class Database:
    """An engine of SQLAlchemy, and what differs between SQLite and PostgreSQL. Thread-safe.

    A statement, a lock and a connection take `limit_s` seconds at most. Raises `ConfigurationError` where the address
    leads to neither of the two.
    """

    def __init__(self, url: str, limit_s: float = STATEMENT_TIMEOUT_S) -> None:
        parsed = parse_database_url(url)
        self.kind = parsed.get_backend_name()
        if self.kind not in _CLOCK:
            raise ConfigurationError(f"url names {self.kind}; a store is in SQLite or PostgreSQL")
        # Without parameters, no payload is in an error's text.
        options: dict[str, Any] = {
            "hide_parameters": True,
            "pool_size": 10,
            "max_overflow": 20,
            "pool_timeout": limit_s,
        }
        if self.kind == "sqlite":
            connect = {"timeout": limit_s, "isolation_level": None, "check_same_thread": False}
            self.engine = sa.create_engine(parsed, connect_args=connect, poolclass=sa.QueuePool, **options)
            sa.event.listen(self.engine, "connect", _set_up_sqlite)
            sa.event.listen(self.engine, "begin", _begin_sqlite)
        else:
            from penstock.transactions.stores.sql.postgresql import make_engine

            self.engine = make_engine(parsed, limit_s, **options)
        self._statements: dict[str, sa.Executable] = {}
        #: Seconds since 1970, by the database's clock.
        self.now: sa.ColumnElement[float] = sa.literal_column(_CLOCK[self.kind], sa.Double)
        self.next: sa.ColumnElement[int] = sa.literal_column(_NEXT[self.kind], sa.BigInteger)

    def insert(self, table: sa.Table) -> sqlite_dialect.Insert | pg_dialect.Insert:
        """Return an `INSERT` that can have an `ON CONFLICT` clause."""
        return sqlite_dialect.insert(table) if self.kind == "sqlite" else pg_dialect.insert(table)

    def once(self, name: str, make: Callable[[], sa.Executable]) -> sa.Executable:
        """Return a statement that is made once: to make it costs more than to run it."""
        statement = self._statements.get(name)
        if statement is None:
            # Two threads may both make it; either is good.
            statement = self._statements[name] = make()
        return statement

    @contextmanager
    def begin(self) -> Iterator[sa.Connection]:
        """Open a transaction that may write; leaving it commits, an exception rolls back."""
        with self.engine.begin() as connection:
            yield connection

    @contextmanager
    def storing(self, what: str, then: str) -> Iterator[sa.Connection]:
        """Open a transaction as `begin`, or raise `DecisionNotStoredError`: what is not stored, and what to do then."""
        try:
            with self.begin() as connection:
                yield connection
        except sa.exc.SQLAlchemyError as error:
            raise DecisionNotStoredError(
                f"{what} is not known to be stored in the database: {cause_of(error)}; {then}"
            ) from error

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Open a transaction that only reads, and waits for nobody."""
        with self.engine.connect() as connection:
            yield connection.execution_options(penstock_reads=True)

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def _set_up_sqlite(connection: Any, _record: object) -> None:
    # Readers do not wait for the writer, and a commit is on the disk when it returns.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")


def _begin_sqlite(connection: sa.Connection) -> None:
    # One that reads first and writes later could be refused its lock when another has written in between.
    reads = connection.get_execution_options().get("penstock_reads", False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")
