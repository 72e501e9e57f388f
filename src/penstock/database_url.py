"""Parses database addresses of SQL stores and SQL sinks. It needs `penstock[sql]`."""

from __future__ import annotations

from contextlib import suppress

import sqlalchemy as sa

from penstock.errors import ConfigurationError


def parse_database_url(text: str) -> sa.URL:
    """Return the address of an SQLite file or of a server, with its driver; otherwise raise `ConfigurationError`.

    MySQL and MariaDB share one name: SQLAlchemy distinguishes the servers when it connects.
    """
    url = None
    with suppress(sa.exc.ArgumentError, ValueError):  # their texts repeat parts of it, which may hold a password
        url = sa.make_url(text)
    # Behind an `@` in a password, the library takes the rest of it for host and database, which errors show.
    if url is None or (url.host is not None and "@" in f"{url.host}/{url.database}"):
        raise ConfigurationError(
            "url is not a database address; write sqlite:///file.db, postgresql+psycopg://user@host/database or "
            "mysql+pymysql://user@host/database, with %40 for an @ in a password"
        )
    if url.drivername in ("sqlite", "sqlite+pysqlite"):
        if url.database in (None, "", ":memory:"):
            raise ConfigurationError(
                "url names an SQLite database in memory, which ends with each connection; name a file"
            )
    elif url.drivername in ("postgresql", "postgresql+psycopg"):
        url = url.set(drivername="postgresql+psycopg")
    elif url.drivername in ("mysql", "mysql+pymysql", "mariadb", "mariadb+pymysql"):
        if not url.database:
            raise ConfigurationError("url names no database of the server; write mysql+pymysql://user@host/database")
        url = url.set(drivername="mysql+pymysql")
    else:
        raise ConfigurationError(
            f"url names {url.drivername}, which penstock does not know; use sqlite with a file, postgresql+psycopg, or "
            "mysql+pymysql"
        )
    try:
        url.get_dialect()().create_connect_args(url)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise ConfigurationError(f"an option in the query of url has a wrong value: {error}") from error
    return url
