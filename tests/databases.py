"""Databases of a test's own: SQLite in a file, PostgreSQL on the server of the run."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.pool import NullPool


@dataclass(frozen=True)
class TestDatabase:
    """A database of one test, looked at over connections of the test's own."""

    __test__ = False

    kind: str
    url: str

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        with sa.create_engine(self.url, poolclass=NullPool).connect() as connection:
            return [tuple(row) for row in connection.exec_driver_sql(statement)]

    def execute(self, *statements: str) -> None:
        """Run statements in one transaction."""
        with sa.create_engine(self.url, poolclass=NullPool).begin() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)


def new_database(server: str) -> TestDatabase:
    """Make a database of its own on a PostgreSQL server."""
    name = f"test_{uuid.uuid4().hex}"
    with sa.create_engine(server, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    return TestDatabase("postgresql", sa.make_url(server).set(database=name).render_as_string(hide_password=False))
