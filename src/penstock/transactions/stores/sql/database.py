"""The seam between the databases: connections, the begin of a transaction, and the database's clock.

On MariaDB and MySQL, with InnoDB, each wait is bounded on the client side. MySQL has no sequences: numbers are drawn
from a table with a counter. Its lock ends with the statement, so no session waits for the transaction of another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql as mysql_dialect
from sqlalchemy.dialects import postgresql as pg_dialect
from sqlalchemy.dialects import sqlite as sqlite_dialect

from penstock.database_url import parse_database_url

#: Seconds that a statement, a lock or a connection may take: a send (15 s) has time for a second session.
STATEMENT_TIMEOUT_S = 5.0
#: Seconds that a connection may take, whatever the limit of statements.
_CONNECT_S = 5.0
#: The time of the statement: a clock that is compared with an index must not change from row to row.
_CLOCK = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "CAST(extract(epoch FROM statement_timestamp()) AS DOUBLE PRECISION)",
    "mysql": "(UNIX_TIMESTAMP(NOW(6)) + 0E0)",
}
#: The same in whole milliseconds.
_CLOCK_MS = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000.0 AS INTEGER)",
    "postgresql": "CAST(floor(extract(epoch FROM statement_timestamp()) * 1000) AS BIGINT)",
    "mysql": "CAST(FLOOR(UNIX_TIMESTAMP(NOW(6)) * 1000) AS SIGNED)",
}
#: The next number: the highest of any row plus one (SQLite has one writer at a time), from a sequence, or drawn before.
_NEXT = {
    "sqlite": (
        "(MAX((SELECT COALESCE(MAX(seq), 0) FROM penstock_tx), "
        "(SELECT COALESCE(MAX(decided_seq), 0) FROM penstock_tx)) + 1)"
    ),
    "postgresql": "nextval('penstock_seq')",
    "mysql": "LAST_INSERT_ID()",
}
#: The hint for MySQL that finds rows by their primary keys, without a scan.
BY_KEY = "FORCE INDEX (PRIMARY)"
#: Error codes of a session that can no longer write: the server is read-only since a failover, or shuts down.
_UNUSABLE_SESSION = frozenset({"25006", "57P01", "57P02", "57P03", 1053, 1290, 1792, 1836})


class Database:
    """An engine of SQLAlchemy, and the differences between SQLite, PostgreSQL, MariaDB and MySQL. Thread-safe.

    A statement, a lock and a connection take at most `limit_s` seconds. Raises `ConfigurationError` if the address is
    of another database.
    """

    def __init__(self, url: str, limit_s: float = STATEMENT_TIMEOUT_S) -> None:
        parsed = parse_database_url(url)
        self.kind = parsed.get_backend_name()
        # Error texts without parameters contain no payload.
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
            options |= {"isolation_level": "READ COMMITTED", "pool_pre_ping": True}
            connect = {"connect_timeout": math.ceil(min(limit_s, _CONNECT_S))}
            if self.kind == "postgresql":
                from penstock.transactions.stores.sql import postgresql

                self.engine = postgresql.make_engine(parsed, limit_s, connect, **options)
            else:
                connect_args = connect | _mysql_settings(math.ceil(limit_s))
                self.engine = sa.create_engine(parsed, connect_args=connect_args, **options)
                sa.event.listen(self.engine, "do_connect", _connect_mysql)
        sa.event.listen(self.engine, "handle_error", _drop_unusable_session)
        self._statements: dict[str, sa.Executable] = {}
        #: Seconds since 1970, by the database's clock.
        self.now: sa.ColumnElement[float] = sa.literal_column(_CLOCK[self.kind], sa.Double)
        #: The same in whole milliseconds.
        self.now_ms: sa.ColumnElement[int] = sa.literal_column(_CLOCK_MS[self.kind], sa.BigInteger)
        self.next_number: sa.ColumnElement[int] = sa.literal_column(_NEXT[self.kind], sa.BigInteger)

    def insert_absent(self, table: sa.Table, values: Mapping[str, Any]) -> sa.Insert:
        """Return an `INSERT` that leaves an existing row with the same key unchanged."""
        if self.kind == "mysql":
            (key,) = table.primary_key
            # Setting the key to itself changes nothing.
            return mysql_dialect.insert(table).values(**values).on_duplicate_key_update({key.name: key})
        insert = sqlite_dialect.insert(table) if self.kind == "sqlite" else pg_dialect.insert(table)
        return insert.values(**values).on_conflict_do_nothing()

    def draw_numbers(self, connection: sa.Connection, count: int = 1) -> int:
        """Draw consecutive numbers on MySQL, and return the first. Elsewhere `next_number` needs no draw."""
        if self.kind != "mysql":
            return 0
        connection.exec_driver_sql(f"INSERT INTO penstock_number VALUES {', '.join(['(NULL)'] * count)}")  # noqa: S608 - constants
        # The first of them, until this session draws again.
        return int(connection.exec_driver_sql("SELECT LAST_INSERT_ID()").scalar_one())

    def cached_statement(self, name: str, make: Callable[[], sa.Executable]) -> sa.Executable:
        """Return a statement that is made once: making it costs more than running it."""
        statement = self._statements.get(name)
        if statement is None:
            # Two threads may both make it; either one works.
            statement = self._statements[name] = make()
        return statement

    def delete(self, connection: sa.Connection, table: sa.TableClause, key: str, keys: Sequence[Any]) -> None:
        """Delete the rows with these primary keys. On MySQL it locks no other rows."""
        if self.kind != "mysql":
            connection.execute(table.delete().where(table.c[key].in_(keys)))
            return
        # The join looks up each key. `IN` could scan the table, and wait for rows of a user's open transaction.
        value = "CONVERT(%s USING ascii) COLLATE ascii_bin" if isinstance(keys[0], str) else "%s"
        wanted = " UNION ALL ".join([f"SELECT {value} AS k"] * len(keys))
        statement = f"DELETE t FROM ({wanted}) AS old STRAIGHT_JOIN {table.name} AS t ON t.{key} = old.k"
        connection.exec_driver_sql(statement, tuple(keys))

    def begin(self) -> AbstractContextManager[sa.Connection]:
        """Open a transaction that may write. Leaving it commits, an exception rolls back."""
        return self.engine.begin()

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Open a transaction that only reads, and waits for no lock."""
        with self.engine.connect() as connection:
            yield connection.execution_options(penstock_reads=True)

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def _drop_unusable_session(context: sa.ExceptionContext) -> None:
    """Treat a session whose server refuses writes as lost, and all older sessions with it."""
    error = context.original_exception
    code = getattr(error, "sqlstate", None) or next(iter(getattr(error, "args", ())), None)
    if code in _UNUSABLE_SESSION:
        context.is_disconnect = True


def _mysql_settings(limit_s: int) -> dict[str, Any]:
    """Return settings that bound statements and locks by `limit_s` seconds, and make checks of values strict."""
    session = (
        "SET SESSION sql_mode = 'TRADITIONAL', time_zone = '+00:00', default_storage_engine = InnoDB, "
        f"innodb_lock_wait_timeout = {limit_s}, lock_wait_timeout = {limit_s}"
    )
    # The server ends a wait for a lock, and rolls back. The client ends the wait for a server that does not answer.
    answer_s = limit_s + 1
    return {"charset": "utf8mb4", "init_command": session, "read_timeout": answer_s, "write_timeout": answer_s}


def _connect_mysql(dialect: sa.Dialect, _record: object, args: list[Any], settings: dict[str, Any]) -> Any:
    """Open a session. An option of the address that the driver refuses is an error of the database, too."""
    try:
        return dialect.connect(*args, **settings)
    except (TypeError, ValueError, OSError) as error:
        raise dialect.loaded_dbapi.OperationalError(f"an option of its address is wrong: {error}") from error


def _set_up_sqlite(connection: Any, _record: object) -> None:
    # Readers do not wait for the writer, and a commit is on the disk when it returns.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")


def _begin_sqlite(connection: sa.Connection) -> None:
    # A transaction that reads first could be refused the write lock, if another one has written since.
    reads = connection.get_execution_options().get("penstock_reads", False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")
