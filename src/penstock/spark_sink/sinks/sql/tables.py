"""The tables of a SQL sink: made where they do not exist, and checked against the frame where they do."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.sql.elements import quoted_name

from penstock.spark_sink.sinks.position import POSITION
from penstock.spark_sink.sinks.sql.databases.database import Database
from penstock.spark_sink.sinks.sql.databases.schema import add_columns, columns_of, lacks_columns, require_fitting
from penstock.spark_sink.sinks.sql.databases.upsert import Upsert
from penstock.spark_sink.sinks.sql.ledger import is_former, ledger_table
from penstock.spark_sink.sinks.sql.settings import SqlSinkSettings


@dataclass(frozen=True, slots=True)
class Tables:
    """Where a batch goes: the way into the target table, and the ledger."""

    upsert: Upsert
    ledger: sa.Table


def carry_over(database: Database, connection: sa.Connection, ledger: sa.Table) -> None:
    """Add the columns that a former version's ledger lacks: its rows keep working."""
    if is_former(connection, ledger):
        with database.schema_lock(connection):
            add_columns(connection, ledger)


def prepare(settings: SqlSinkSettings, frame: pa.Schema, connection: sa.Connection) -> Tables:
    """Make the tables, and columns, that do not exist and check those that do; the transaction is the caller's.

    Raises `SinkError` where the table does not fit the frame.
    """
    database = settings.database
    metadata = sa.MetaData()
    stored = [
        name for name in frame.names if name != settings.delete and (settings.keep_position or name not in POSITION)
    ]
    target = sa.Table(
        quoted_name(settings.table, quote=True),
        metadata,
        *columns_of(database, frame, stored, settings.key, settings.sum_columns),
        *database.constraints(frame, settings.sum_columns),
        schema=None if settings.schema is None else quoted_name(settings.schema, quote=True),
    )
    ledger = ledger_table(settings.ledger_table, metadata, settings.schema)
    inspector = sa.inspect(connection)
    if not all(inspector.has_table(name, schema=settings.schema) for name in (settings.table, settings.ledger_table)):
        with database.schema_lock(connection):
            metadata.create_all(connection)
    for table in (target, ledger):
        database.require_transactions(connection, table)
    carry_over(database, connection, ledger)
    if settings.evolve and lacks_columns(connection, target):
        # The one who had the lock before may have added them: they are looked for again.
        with database.schema_lock(connection):
            add_columns(connection, target)
    require_fitting(database, connection, target, settings.key, settings.sum_columns)
    found = database.conversions(connection, target)
    return Tables(Upsert(database, target, settings.key, settings.sum_columns, settings.delete, found), ledger)
