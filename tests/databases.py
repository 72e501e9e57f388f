"""Databases of a test's own: SQLite in a file, PostgreSQL and MariaDB on the servers of the run."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg
import pymysql
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import NullPool

#: Opens a connection.
Connect = Callable[[], Any]

#: What the drivers of servers say where a connection is lost.
LOST = {
    "postgresql": psycopg.OperationalError("the connection is lost"),
    "mariadb": pymysql.err.OperationalError(2013, "Lost connection to MySQL server during query"),
}


@dataclass(frozen=True)
class TestDatabase:
    """A database of one test, looked at over connections of the test's own."""

    __test__ = False

    kind: str
    url: str

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        with self._engine().connect() as connection:
            return [tuple(row) for row in connection.exec_driver_sql(statement)]

    def execute(self, *statements: str) -> None:
        """Run statements in one transaction."""
        with self._engine().begin() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    def _engine(self) -> sa.Engine:
        # One way to quote names for all of them.
        quotes = {"init_command": "SET SESSION sql_mode = 'ANSI_QUOTES,TRADITIONAL'"} if self.kind == "mariadb" else {}
        return sa.create_engine(self.url, poolclass=NullPool, connect_args=quotes)


def driver_connect(database: TestDatabase, **more: Any) -> Connect:
    """Return what opens a connection of the database's own driver."""
    url = sa.make_url(database.url)
    if database.kind == "sqlite":
        # Five seconds for a lock may pass on a busy machine.
        return lambda: sqlite3.connect(url.database or "", **{"timeout": 60.0, **more})
    if database.kind == "postgresql":
        return lambda: psycopg.connect(database.url.replace("postgresql+psycopg", "postgresql"), **more)
    place: dict[str, Any] = {"host": url.host, "port": url.port, "user": url.username, "database": url.database}
    return lambda: pymysql.connect(**place, **more)


def connect_by(way: str, database: TestDatabase, **options: Any) -> Connect:
    """Return what opens a connection by the "driver", or a "connection" or "session" of SQLAlchemy."""
    if way == "driver":
        return driver_connect(database)
    engine = sa.create_engine(database.url, **{"poolclass": NullPool, **options})
    return engine.connect if way == "connection" else sessionmaker(engine)


def path_of(database: TestDatabase) -> str:
    """Return the file of a SQLite database."""
    return sa.make_url(database.url).database or ""


def new_database(server: str) -> TestDatabase:
    """Make a separate database on a server; MariaDB compares texts by each character there, as PostgreSQL does."""
    name, url = f"test_{uuid.uuid4().hex}", sa.make_url(server)
    is_mysql = url.get_backend_name() == "mysql"
    with sa.create_engine(server, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as connection:
        options = "CHARACTER SET utf8mb4 COLLATE utf8mb4_bin" if is_mysql else ""
        connection.exec_driver_sql(f"CREATE DATABASE {name} {options}")
    return TestDatabase(
        "mariadb" if is_mysql else "postgresql", url.set(database=name).render_as_string(hide_password=False)
    )
