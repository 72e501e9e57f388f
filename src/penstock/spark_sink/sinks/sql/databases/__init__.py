"""The databases that a SQL sink knows. A new one gets its line here."""

from __future__ import annotations

from functools import lru_cache

from penstock.database_url import parse_database_url
from penstock.spark_sink.sinks.sql.databases.database import Database
from penstock.spark_sink.sinks.sql.databases.mysql import MySql
from penstock.spark_sink.sinks.sql.databases.postgresql import PostgreSql
from penstock.spark_sink.sinks.sql.databases.sqlite import Sqlite

#: By the name that SQLAlchemy has for each. Their addresses are read by `penstock.database_url`.
DATABASES: dict[str, Database] = {kind.name: kind for kind in (Sqlite(), PostgreSql(), MySql())}


@lru_cache(maxsize=16)
def database_of(url: str) -> Database:
    """Return the database an address belongs to."""
    return DATABASES[parse_database_url(url).get_backend_name()]
