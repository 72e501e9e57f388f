"""The databases that a SQL sink knows. A new one gets its line here."""

from __future__ import annotations

import sqlalchemy as sa

from penstock.spark_sink.sinks.sql.databases.database import Database
from penstock.spark_sink.sinks.sql.databases.mysql import MySql
from penstock.spark_sink.sinks.sql.databases.postgresql import PostgreSql
from penstock.spark_sink.sinks.sql.databases.sqlite import Sqlite

#: By the name that SQLAlchemy has for each. Their addresses are read by `penstock.database_url`.
DATABASES: dict[str, Database] = {kind.name: kind for kind in (Sqlite(), PostgreSql(), MySql())}


def database_of(url: sa.URL) -> Database:
    """Return the database an address belongs to."""
    return DATABASES[url.get_backend_name()]
