"""One interface to the database connections of users: of sqlite3, psycopg, PyMySQL or SQLAlchemy.

A statement becomes part of the open transaction of the user; only `commit` and `create_table` commit. Libraries other
than sqlite3 are recognised only if the program has imported them itself, so a program needs none of them.
"""

from __future__ import annotations

import re
import sqlite3
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

from penstock.errors import ConfigurationError
from penstock.options import positive

if TYPE_CHECKING:
    import psycopg
    import pymysql  # type: ignore[import-untyped] # the library has no types
    import sqlalchemy as sa

#: SQLite's primary result codes of a refused lock (https://sqlite.org/rescode.html).
_SQLITE_LOCKED = frozenset({5, 6})
#: The same of PostgreSQL: lock not available, cancelled by a timeout, serialization failure, deadlock.
_POSTGRESQL_LOCKED = frozenset({"55P03", "57014", "40001", "40P01"})
#: The same of MariaDB and MySQL: lock wait timeout, deadlock.
_MYSQL_LOCKED = frozenset({1205, 1213})
#: The codes of an undefined table.
_POSTGRESQL_NO_TABLE = "42P01"
_MYSQL_NO_TABLE = 1146
_PARAMETER = re.compile(r":([a-z_][a-z_0-9]*)")
_AUTOCOMMIT = (
    "the connection is in autocommit mode and no transaction is open on it: each statement would commit by itself; "
    "begin a transaction first, or open the connection without autocommit"
)
_NOT_NEW = "a transaction is open on a connection that should be new; open one for each check"


class Kind(Enum):
    """A kind of database."""

    SQLITE = "sqlite"
    POSTGRESQL = "postgresql"
    #: MySQL or MariaDB.
    MYSQL = "mysql"


#: Seconds since 1970, by the database's clock.
NOW = {
    Kind.SQLITE: "CAST(strftime('%s', 'now') AS INTEGER)",
    Kind.POSTGRESQL: "CAST(extract(epoch FROM clock_timestamp()) AS BIGINT)",
    Kind.MYSQL: "UNIX_TIMESTAMP()",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a statement: the rows that it returned, and the number of rows that it changed."""

    rows: list[tuple[Any, ...]] = field(repr=False)
    count: int


@dataclass(frozen=True, slots=True)
class UserConnection(ABC):
    """A connection of a user. For one thread at a time, like the connection itself."""

    connection: Any
    kind: Kind

    @abstractmethod
    def run(self, statement: str, **values: object) -> Answer:
        """Run a statement with parameters `:name`, in the open transaction or in one that begins with it."""

    @abstractmethod
    def require_transaction(self) -> None:
        """Raise `ConfigurationError` if the next statement would commit by itself."""

    @abstractmethod
    def isolate(self) -> None:
        """Set a new connection to read committed, in transactions that `commit` ends.

        Raises `ConfigurationError` if a transaction is open.
        """

    def commit(self) -> None:
        """Commit the transaction."""
        self.connection.commit()


@dataclass(frozen=True, slots=True)
class _Sqlite(UserConnection):
    connection: sqlite3.Connection

    def run(self, statement: str, **values: object) -> Answer:
        cursor = self.connection.cursor()
        # Plain tuples, also if the user's connection has its own row factory.
        cursor.row_factory = None
        cursor.execute(statement, values)
        return Answer(cursor.fetchall(), cursor.rowcount)

    def require_transaction(self) -> None:
        # A statement that writes begins a transaction, unless isolation_level is None (or, from Python 3.12 on,
        # autocommit is True).
        if not self.connection.in_transaction and _commits_by_itself(self.connection):
            raise ConfigurationError(_AUTOCOMMIT)

    def isolate(self) -> None:
        # SQLite has only one isolation level.
        if self.connection.in_transaction and getattr(self.connection, "autocommit", -1) is not False:
            raise ConfigurationError(_NOT_NEW)


@dataclass(frozen=True, slots=True)
class _Psycopg(UserConnection):
    connection: psycopg.Connection[Any]

    def run(self, statement: str, **values: object) -> Answer:
        import psycopg

        cursor = psycopg.Cursor(self.connection, row_factory=psycopg.rows.tuple_row)
        # The statements are constants of this package; the type asks for a literal.
        cursor.execute(cast("Any", _PARAMETER.sub(r"%(\1)s", statement)), values)
        return Answer(cursor.fetchall() if cursor.description else [], cursor.rowcount)

    def require_transaction(self) -> None:
        import psycopg

        idle = self.connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        if self.connection.autocommit and idle:
            raise ConfigurationError(_AUTOCOMMIT)

    def isolate(self) -> None:
        import psycopg

        if self.connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            raise ConfigurationError(_NOT_NEW)
        self.connection.autocommit = False
        self.connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED


@dataclass(frozen=True, slots=True)
class _PyMysql(UserConnection):
    connection: pymysql.connections.Connection[Any]

    def run(self, statement: str, **values: object) -> Answer:
        from pymysql.cursors import Cursor  # type: ignore[import-untyped] # the library has no types

        with self.connection.cursor(Cursor) as cursor:
            cursor.execute(_PARAMETER.sub(r"%(\1)s", statement), values)
            return Answer([tuple(row) for row in cursor.fetchall()], cursor.rowcount)

    def require_transaction(self) -> None:
        if self.connection.get_autocommit() and not self._is_in_transaction():
            raise ConfigurationError(_AUTOCOMMIT)

    def isolate(self) -> None:
        if self._is_in_transaction():
            raise ConfigurationError(_NOT_NEW)
        self.connection.autocommit(value=False)
        self.run("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")

    def _is_in_transaction(self) -> bool:
        from pymysql.constants.SERVER_STATUS import SERVER_STATUS_IN_TRANS  # type: ignore[import-untyped] # the library has no types

        return bool(self.connection.server_status & SERVER_STATUS_IN_TRANS)


@dataclass(frozen=True, slots=True)
class _SqlAlchemy(UserConnection):
    connection: sa.Connection | sa.orm.Session

    def run(self, statement: str, **values: object) -> Answer:
        import sqlalchemy as sa

        result = self._connection().execute(sa.text(statement), values)
        rows = [tuple(row) for row in result] if result.returns_rows else []
        return Answer(rows, cast("sa.CursorResult[Any]", result).rowcount)

    def require_transaction(self) -> None:
        raw: Any = self._connection().connection.dbapi_connection
        if self.kind is Kind.SQLITE and _commits_by_itself(raw):
            # SQLAlchemy's recipe of a BEGIN in the begin event takes effect with the first statement.
            self.run("SELECT 1")
            if not raw.in_transaction:
                raise ConfigurationError(_AUTOCOMMIT)
        if self.kind is Kind.POSTGRESQL and getattr(raw, "autocommit", False) is True:
            raise ConfigurationError(_AUTOCOMMIT)
        if self.kind is Kind.MYSQL:
            _PyMysql(raw, self.kind).require_transaction()

    def isolate(self) -> None:
        import sqlalchemy as sa

        if self.connection.in_transaction():
            raise ConfigurationError(_NOT_NEW)
        if self.kind is not Kind.SQLITE:
            options: Any = {"isolation_level": "READ COMMITTED"}
            if isinstance(self.connection, sa.Connection):
                self.connection.execution_options(**options)
            else:
                self.connection.connection(execution_options=options)

    def _connection(self) -> sa.Connection:
        import sqlalchemy as sa

        return self.connection if isinstance(self.connection, sa.Connection) else self.connection.connection()


def adopt(connection: object) -> UserConnection:
    """Wrap a connection of a user as a `UserConnection`.

    It is a connection of sqlite3, psycopg or PyMySQL, or a `Connection` or `Session` of SQLAlchemy that leads to
    SQLite, PostgreSQL, MariaDB or MySQL; anything else raises `ConfigurationError`.
    """
    if isinstance(connection, sqlite3.Connection):
        return _Sqlite(connection, Kind.SQLITE)
    if "psycopg" in sys.modules:
        import psycopg

        if isinstance(connection, psycopg.Connection):
            return _Psycopg(connection, Kind.POSTGRESQL)
    if "pymysql" in sys.modules:
        import pymysql

        if isinstance(connection, pymysql.connections.Connection):
            return _PyMysql(connection, Kind.MYSQL)
    if "sqlalchemy" in sys.modules:
        import sqlalchemy as sa
        import sqlalchemy.orm

        if isinstance(connection, sqlalchemy.orm.scoped_session):
            connection = connection()
        if isinstance(connection, (sa.Connection, sqlalchemy.orm.Session)):
            # `get_bind` instead of `Session.connection()`: that would fix the isolation level.
            name = (connection if isinstance(connection, sa.Connection) else connection.get_bind()).dialect.name
            name = "mysql" if name == "mariadb" else name
            if name in {kind.value for kind in Kind}:
                return _SqlAlchemy(connection, Kind(name))
            raise ConfigurationError(f"the connection leads to {name}; use SQLite, PostgreSQL, MariaDB or MySQL")
    raise ConfigurationError(
        f"connection is a {type(connection).__module__}.{type(connection).__name__}; give a connection of sqlite3, "
        "psycopg or PyMySQL, or a Connection or Session of SQLAlchemy (inside run_sync, if it is an asynchronous one)"
    )


def quoted(name: str, kind: Kind) -> str:
    """Return the quoted name of a table or schema; an invalid name raises `ConfigurationError`."""
    mark = "`" if kind is Kind.MYSQL else '"'
    # A colon would begin a parameter.
    if not name or "\0" in name or ":" in name or "%" in name:
        raise ConfigurationError(f"a table's or schema's name must be text without ':', '%' and NUL, but is {name!r}")
    return f"{mark}{name.replace(mark, 2 * mark)}{mark}"


def table_name(kind: Kind, table: str, schema: str | None) -> str:
    """Return the quoted name of a table, with its schema if there is one."""
    return quoted(table, kind) if schema is None else f"{quoted(schema, kind)}.{quoted(table, kind)}"


def with_table(connection: object, table: str, schema: str | None) -> tuple[UserConnection, str]:
    """Wrap a connection of a user, and return it with the quoted name of a table."""
    user = adopt(connection)
    return user, table_name(user.kind, table, schema)


def create_table(connection: object, statements: Mapping[Kind, str], table: str, schema: str | None) -> None:
    """Run the database's `CREATE TABLE IF NOT EXISTS {}`, with the table's name, and commit."""
    user, name = with_table(connection, table, schema)
    if user.kind is Kind.POSTGRESQL:
        # Two of them at once would fail.
        user.run("SELECT pg_advisory_xact_lock(hashtextextended('penstock', 0))")
    user.run(statements[user.kind].format(name).strip())
    user.commit()


def insert_absent(user: UserConnection, name: str, columns: str, rows: str, made_by: str, **values: object) -> int:
    """Insert the rows with absent keys, and return how many. Waits for another transaction that inserts the same key.

    `rows` are lists in parentheses, with parameters for `values`. If the table is absent, the `ConfigurationError`
    names the function `made_by`, which creates it.
    """
    ignore, unless = ("IGNORE", "") if user.kind is Kind.MYSQL else ("", "ON CONFLICT DO NOTHING")
    try:
        return user.run(f"INSERT {ignore} INTO {name} ({columns}) VALUES {rows} {unless}", **values).count  # noqa: S608 - the name is quoted
    except Exception as error:
        if not is_no_table_error(error):
            raise
        raise ConfigurationError(f"table {name} does not exist; create it once with {made_by}(connection)") from error


def age_s(option: str, age: timedelta) -> int:
    """Return an age in whole seconds; `ConfigurationError` unless it is a `timedelta` above zero."""
    if not isinstance(age, timedelta):
        raise ConfigurationError(
            f"{option} must be a timedelta, as timedelta(days=7), but is {age!r}, which has no unit"
        )
    positive(option, age.total_seconds())
    return int(age.total_seconds())


def is_lock_error(error: BaseException) -> bool:
    """Tell whether a database error means that another transaction held a lock, so that a retry helps."""
    cause: object = getattr(error, "orig", None) or error
    if isinstance(cause, sqlite3.Error):
        return (getattr(cause, "sqlite_errorcode", 0) & 0xFF) in _SQLITE_LOCKED
    return getattr(cause, "sqlstate", None) in _POSTGRESQL_LOCKED or _mysql_code(cause) in _MYSQL_LOCKED


def is_no_table_error(error: BaseException) -> bool:
    """Tell whether a database error means that a table is absent."""
    cause: object = getattr(error, "orig", None) or error
    if isinstance(cause, sqlite3.Error):
        return str(cause).startswith("no such table")
    return getattr(cause, "sqlstate", None) == _POSTGRESQL_NO_TABLE or _mysql_code(cause) == _MYSQL_NO_TABLE


def _mysql_code(error: object) -> object:
    args = getattr(error, "args", ())
    return args[0] if args and type(error).__module__.startswith("pymysql") else None


def cause_of(error: Exception) -> str:
    """Return the first line of a database error, without the statement and its parameters."""
    cause: object = getattr(error, "orig", None) or error
    lines = str(cause).splitlines()
    return f"{type(cause).__name__}: {lines[0] if lines else 'no reason given'}"


def _commits_by_itself(connection: sqlite3.Connection) -> bool:
    mode = getattr(connection, "autocommit", -1)
    # -1 is sqlite3.LEGACY_TRANSACTION_CONTROL: isolation_level decides.
    return mode is True or (mode == -1 and connection.isolation_level is None)
