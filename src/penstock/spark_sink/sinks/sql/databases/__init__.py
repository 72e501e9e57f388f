"""The databases that a SQL sink supports."""

from __future__ import annotations

from functools import lru_cache

from penstock.database_url import parse_database_url
from penstock.spark_sink.sinks.sql.databases.database import Database
from penstock.spark_sink.sinks.sql.databases.mysql import MySql
from penstock.spark_sink.sinks.sql.databases.postgresql import PostgreSql
from penstock.spark_sink.sinks.sql.databases.sqlite import Sqlite

#: By SQLAlchemy's name. A new database needs a line here. `penstock.database_url` reads their addresses.
DATABASES: dict[str, Database] = {kind.name: kind for kind in (Sqlite(), PostgreSql(), MySql())}


@lru_cache(maxsize=16)
def database_of(url: str) -> Database:
    """Return the database of an address."""
    return DATABASES[parse_database_url(url).get_backend_name()]
