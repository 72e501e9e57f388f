"""Staging tables for a batch's rows: filled by the driver, or by executors.

Each task on an executor copies its rows, marked with a random id, and reports their number. Only reports in Spark's
result count, so rows of a lost or repeated task are never merged. A Python worker keeps its session for the next task,
because opening one takes longer than copying a small batch. After an idle minute, Spark ends the worker.

Each batch has its own staging table for executors. The driver makes and removes it. If a driver dies, the next driver
that checks its tables a day later removes the table: the name tells when it was made. Session and checked tables are
kept for the next micro-batch of a query, which first looks whether the target has changed.

Before the merge, the rows in the table are compared with the tasks' reports. PostgreSQL's table is UNLOGGED and is
empty after a crash of the server.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import sqlalchemy as sa

from penstock.errors import SinkError
from penstock.spark_sink.sinks.frames import PICKLED, from_row, run_job
from penstock.spark_sink.sinks.sql.databases.database import Database, ErrorKind
from penstock.spark_sink.sinks.sql.databases.errors import error_kind
from penstock.spark_sink.sinks.sql.ledger import Owner
from penstock.spark_sink.sinks.sql.rows import Report, StagingTask
from penstock.spark_sink.sinks.sql.settings import STAGING, SqlSinkSettings
from penstock.spark_sink.sinks.sql.tables import ATTEMPT, Tables, columns_of, prepare, stage_table, staged_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("penstock.spark_sink")

#: Prefix of the names of staging tables. The number of the half day in which they were made follows.
PREFIX = "penstock_stage_"
_NAME = re.compile(PREFIX + "([0-9]+)_[0-9a-f]{16}")
HALF_DAY_S = 12 * 60 * 60

#: The rows of a batch in a staging table, and the report on the batch.
Staged = tuple[sa.FromClause, Report]


def run_tasks(batch: DataFrame, task: StagingTask, max_connections: int) -> Report:
    """Run a staging task on every part of a frame, at most `max_connections` at once, and add up the reports.

    Raises the error of a task, without the executor's stack.
    """
    # `coalesce` does not need to know the plan before it runs. Sessions are kept if they stay within the bound. A core
    # has two Python workers, of the source and of the sink, and either may have run the sink before.
    task = replace(task, keeps_session=2 * batch.sparkSession.sparkContext.defaultParallelism <= max_connections)
    if any({".", "`"}.intersection(column.name) for column in batch.schema.fields):
        batch = batch.toDF(*map(str, range(len(batch.columns))))  # Spark does not find columns with such names
    report = Report()
    for row in run_job(batch.coalesce(max_connections).mapInArrow(task, PICKLED)):
        report.add(from_row(row))
    return report


#: The checked tables of this process, with the half day, the run and the state of the database at the check; by sink
#: and query. A query has one batch at a time. SQLAlchemy recognises statements by their table objects, so that those
#: of a query's batches are compiled once.
_checked: dict[Hashable, tuple[Hashable, Tables]] = {}


def checked(
    settings: SqlSinkSettings, frame: pa.Schema, connection: sa.Connection, owner: Owner, run: str | None
) -> Tables:
    """Return the tables of a sink. They are made and checked, unless nothing changed since a batch of this run."""
    database = settings.database
    if not settings.stages_on_executors:
        return prepare(settings, frame, connection)
    half_day = int(time.time()) // HALF_DAY_S  # so that no table of a running query looks abandoned
    key = (owner, settings.url, repr(settings), str(frame))  # everything that the check depends on
    state, found = _checked.get(key, (None, None))
    if run is not None and found is not None:
        with suppress(sa.exc.ProgrammingError), connection.begin():  # if a table was removed
            if state == (half_day, run, found.fingerprint(connection)):
                return found
    tables = prepare(settings, frame, connection)
    _remove_abandoned(connection, settings.schema, half_day)
    columns = staged_schema(frame, settings.sum_columns)
    stage = stage_table(database, f"{PREFIX}{half_day}_{secrets.token_hex(8)}", settings.schema, columns)
    # As tasks will do: a missing permission shows before the first task.
    with _created(connection, database, stage), connection.begin():
        connection.execute(sa.insert(stage).from_select(list(stage.c), sa.select(stage).where(sa.false())))
    with connection.begin():
        state = (half_day, run, tables.fingerprint(connection))
    tables = replace(tables, stage=stage)
    _checked[key] = state, tables
    return tables


@contextmanager
def staged_batch(connection: sa.Connection, tables: Tables, rows: Any, task: StagingTask) -> Iterator[Staged]:
    """Stage a batch's rows, and run the block in the transaction that applies them.

    The rows are a Spark frame for executors, an Arrow table for the driver, and None if there are no rows.
    """
    settings, database, report = tables.settings, tables.settings.database, Report()
    if (stage := tables.stage) is not None:
        with _created(connection, database, stage):
            if rows is not None:
                report = run_tasks(rows, replace(task, table=str(stage.name)), settings.max_connections)
            with connection.begin():
                yield copied_rows(connection, stage, report.copied), report
        return
    batches = [] if rows is None else rows.to_batches()
    with connection.begin():
        columns = columns_of(database, task.schema, task.schema.names)
        table = database.create_temporary(connection, STAGING, *columns)
        for piece in task.pieces(batches, report):
            database.stage(connection, table, piece)
        yield table, report


@contextmanager
def _created(connection: sa.Connection, database: Database, stage: sa.Table) -> Iterator[None]:
    """Create a staging table for the block, and drop it afterwards."""
    with connection.begin():
        stage.create(connection, checkfirst=False)
    try:
        yield
    finally:
        try:
            with connection.begin():
                stage.drop(connection, checkfirst=False)
        except sa.exc.SQLAlchemyError as error:
            if error_kind(database, error) is ErrorKind.RIGHT:
                raise
            # A lost task still copies into it, or the session was lost.
            _log.info("the staging table %s is left behind for a day (%s)", stage.name, type(error).__name__)
            _checked.clear()


def _remove_abandoned(connection: sa.Connection, schema: str | None, half_day: int) -> None:
    """Remove the staging tables of drivers that died."""
    with connection.begin():
        found = sa.inspect(connection).get_table_names(schema=schema)
    for name in found:
        name_match = _NAME.fullmatch(name)
        if name_match is not None and int(name_match[1]) < half_day - 1:
            _log.warning("the staging table %s was left by a driver that is gone; it is removed", name)
            with suppress(sa.exc.SQLAlchemyError), connection.begin():
                sa.Table(name, sa.MetaData(), schema=schema).drop(connection, checkfirst=True)


def copied_rows(connection: sa.Connection, stage: sa.Table, copied: Mapping[int, int]) -> sa.Subquery:
    """Return the rows of these attempts; `copied` has the number of each.

    Raises `SinkError` if the table holds other numbers: the server has crashed, or another program wrote to it.
    """
    of_attempts = stage.c[ATTEMPT].in_(copied)
    counted = sa.select(stage.c[ATTEMPT], sa.func.count()).where(of_attempts).group_by(stage.c[ATTEMPT])
    found: dict[int, int] = {row[0]: row[1] for row in connection.execute(counted)}
    if any(found.get(number, 0) != rows for number, rows in copied.items()):
        raise SinkError(
            f"the staging table {stage.name} holds {sum(found.values())} rows, but its tasks copied "
            f"{sum(copied.values())}; another program changed it, or PostgreSQL crashed, which empties it; nothing "
            "was stored, and Spark repeats the batch at the next start of the query"
        )
    return sa.select(*(column for column in stage.c if column.name != ATTEMPT)).where(of_attempts).subquery()
