"""The two ways of a batch's rows into a staging table: through the driver, or from executors.

Each task on an executor copies its rows and reports what it copied, under an id of its own. Spark's answer
has the reports that count, so what a lost or repeated task has copied is never merged. A Python worker keeps its
session for the next task: to open one takes longer than to copy the rows of a small batch. Spark ends a worker, and so
the session, that has had no task for a minute.

The staging table of executors is the batch's own. The driver makes it and removes it. Those of drivers that are gone
are removed by the next that checks its tables, a day later: their names say when they were made. Session and checked
tables are kept for the next micro-batch of a query, which begins by a look whether the target is still as it was.

What tasks copied is counted against their reports before it is merged: PostgreSQL's table, which is UNLOGGED, is
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

#: How the names of staging tables begin; the number of the half day follows in which they were made.
PREFIX = "penstock_stage_"
_NAME = re.compile(PREFIX + "([0-9]+)_[0-9a-f]{16}")
HALF_DAY_S = 12 * 60 * 60

#: The rows of a batch in a staging table, and what was seen of the batch.
Staged = tuple[sa.FromClause, Report]


def run_tasks(batch: DataFrame, task: StagingTask, max_connections: int) -> Report:
    """Run a staging task on every part of a frame, at most `max_connections` at once, and gather the reports.

    Raises what a task raised, without the stack of the executor around it.
    """
    # By `coalesce` the plan need not be known before it runs. Sessions are kept where they stay within the bound: a
    # core has two Python workers, of the source and of the sink, and each of them may have been the sink's.
    cores = batch.sparkSession.sparkContext.defaultParallelism
    task = replace(task, keeps_session=2 * cores <= max_connections)
    if any({".", "`"}.intersection(column.name) for column in batch.schema.fields):
        batch = batch.toDF(*map(str, range(len(batch.columns))))  # by those names Spark does not find columns
    report = Report()
    for row in run_job(batch.coalesce(max_connections).mapInArrow(task, PICKLED)):
        report.add(from_row(row))
    return report


#: What this process has checked, by sink and query, and half day, run and state then. A query has one batch at a time.
#: SQLAlchemy knows a statement again by its tables, so that those of a query's batches are compiled once.
_checked: dict[Hashable, tuple[Hashable, Tables]] = {}


def checked(
    settings: SqlSinkSettings, frame: pa.Schema, connection: sa.Connection, owner: Owner, run: str | None
) -> Tables:
    """Return the tables of a sink, made and checked, unless all is as it was for an earlier batch of the run."""
    database = settings.database
    if not settings.stages_on_executors:
        return prepare(settings, frame, connection)
    half_day = int(time.time()) // HALF_DAY_S  # so that no batch of a living query has a table that seems left over
    key = (owner, settings.url, repr(settings), str(frame))  # all that they are checked for
    state, found = _checked.get(key, (None, None))
    if run is not None and found is not None:
        with suppress(sa.exc.ProgrammingError), connection.begin():  # where a table is gone
            if state == (half_day, run, found.look(connection)):
                return found
    tables = prepare(settings, frame, connection)
    _remove_left_over(connection, settings.schema, half_day)
    columns = staged_schema(frame, settings.sum_columns)
    stage = stage_table(database, f"{PREFIX}{half_day}_{secrets.token_hex(8)}", settings.schema, columns)
    # What tasks do with it: a permission that is missing shows before the first.
    with _made(connection, database, stage), connection.begin():
        connection.execute(sa.insert(stage).from_select(list(stage.c), sa.select(stage).where(sa.false())))
    with connection.begin():
        state = (half_day, run, tables.look(connection))
    tables = replace(tables, stage=stage)
    _checked[key] = state, tables
    return tables


@contextmanager
def staged_batch(connection: sa.Connection, tables: Tables, rows: Any, task: StagingTask) -> Iterator[Staged]:
    """Stage a batch's rows, None for no rows, and begin the transaction that applies them, which ends with it.

    The rows are a frame of Spark's for executors, and a table of Arrow's for the driver.
    """
    settings, database, report = tables.settings, tables.settings.database, Report()
    if (stage := tables.stage) is not None:
        with _made(connection, database, stage):
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
def _made(connection: sa.Connection, database: Database, stage: sa.Table) -> Iterator[None]:
    """Have a staging table in the block."""
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
            # A lost task still copies into it, or the session is lost.
            _log.info("the staging table %s is left behind for a day (%s)", stage.name, type(error).__name__)
            _checked.clear()


def _remove_left_over(connection: sa.Connection, schema: str | None, half_day: int) -> None:
    """Remove the staging tables that drivers have left behind."""
    with connection.begin():
        found = sa.inspect(connection).get_table_names(schema=schema)
    for name in found:
        made = _NAME.fullmatch(name)
        if made is not None and int(made[1]) < half_day - 1:
            _log.warning("the staging table %s was left by a driver that is gone; it is removed", name)
            with suppress(sa.exc.SQLAlchemyError), connection.begin():
                sa.Table(name, sa.MetaData(), schema=schema).drop(connection, checkfirst=True)


def copied_rows(connection: sa.Connection, stage: sa.Table, copied: Mapping[int, int]) -> sa.Subquery:
    """Return the rows that these attempts have copied, so many each.

    Raises `SinkError` where the table does not hold them: the server has crashed since, or somebody else wrote.
    """
    of_attempts = stage.c[ATTEMPT].in_(copied)
    counted = sa.select(stage.c[ATTEMPT], sa.func.count()).where(of_attempts).group_by(stage.c[ATTEMPT])
    found: dict[int, int] = {row[0]: row[1] for row in connection.execute(counted)}
    if any(found.get(number, 0) != rows for number, rows in copied.items()):
        raise SinkError(
            f"the staging table {stage.name} holds {sum(found.values())} rows where its tasks had copied "
            f"{sum(copied.values())}; somebody has changed it, or PostgreSQL has crashed, which empties it; nothing "
            "was stored, and Spark hands the batch over again when the query is started again"
        )
    return sa.select(*(column for column in stage.c if column.name != ATTEMPT)).where(of_attempts).subquery()
