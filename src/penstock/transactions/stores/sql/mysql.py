"""Sessions of MariaDB and MySQL, with InnoDB: each wait has a bound that we hold, and what is of no use is dropped.

Neither returns rows from an `UPDATE`, and MySQL has no sequences: numbers are drawn from a table that counts by itself,
whose lock ends with the statement, so that nobody waits for another's transaction.
"""

from __future__ import annotations

import math
from typing import Any

import sqlalchemy as sa

#: Seconds that a connection may take, however long statements may.
_CONNECT_S = 5.0

_metadata = sa.MetaData()
_number = sa.Table("penstock_number", _metadata, sa.Column("n", sa.BigInteger, primary_key=True), mysql_engine="InnoDB")


def make_engine(url: sa.URL, limit_s: float, **options: Any) -> sa.Engine:
    """Return an engine whose statements, locks and connections take `limit_s` seconds at most."""
    whole_s = max(1, math.ceil(limit_s))
    session = (
        "SET SESSION sql_mode = 'TRADITIONAL', time_zone = '+00:00', default_storage_engine = InnoDB, "
        f"innodb_lock_wait_timeout = {whole_s}, lock_wait_timeout = {whole_s}"
    )
    return sa.create_engine(
        url,
        connect_args={
            "charset": "utf8mb4",
            "init_command": session,
            "connect_timeout": math.ceil(min(limit_s, _CONNECT_S)),
            # A lock is given up by the server, which then rolls back; a session that does not answer at all, by us.
            "read_timeout": whole_s + 1,
            "write_timeout": whole_s + 1,
        },
        isolation_level="READ COMMITTED",
        pool_pre_ping=True,
        **options,
    )


def create_numbers(connection: sa.Connection) -> None:
    """Create the table of numbers where it is absent."""
    _metadata.create_all(connection)


def draw(connection: sa.Connection, count: int) -> int:
    """Draw numbers that follow on each other, above all that were drawn before; return the first.

    `LAST_INSERT_ID()` is the first of them in this session, until it draws again.
    """
    connection.exec_driver_sql(f"INSERT INTO penstock_number VALUES {', '.join(['(NULL)'] * count)}")  # noqa: S608 - constants
    return int(connection.exec_driver_sql("SELECT LAST_INSERT_ID()").scalar_one())


def forget_numbers(connection: sa.Connection) -> None:
    """Delete the numbers that were drawn; the table goes on counting."""
    connection.exec_driver_sql("DELETE FROM penstock_number ORDER BY n LIMIT 10000")
