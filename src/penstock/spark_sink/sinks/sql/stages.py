"""The two ways of a batch's rows into a staging table: through the driver, or from executors.

Each task on an executor copies its rows and reports what it copied, under the id of its own attempt. Spark's answer
names the attempts that count, so what a lost or repeated task has copied is never merged. A Python worker keeps its
session for the next task: to open one takes longer than to copy the rows of a small batch. Spark ends a worker, and so
the session, that has had no task for a minute.

The staging table of executors belongs to the driver's session, which holds a lock on its name: where the lock is free,
the driver is gone and the next one removes the table. Session, checked tables and staging table are kept for the next
micro-batch of a run of a query (`WorkerPool`). That one begins by a look whether the target is still as it was checked;
where it is not, where the session is lost, or where a batch has failed, everything is made again.

What tasks copied is counted against their reports before it is merged: PostgreSQL's table, which is UNLOGGED, is
empty after a crash of the server.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.sql.elements import quoted_name

from penstock.clients.gc_pause import imports_set_aside
from penstock.database_url import parse_database_url
from penstock.errors import SinkError
from penstock.spark_sink.sinks.frames import PICKLED, as_row, collected, cores_of, from_row, run_job
from penstock.spark_sink.sinks.sink import Entries
from penstock.spark_sink.sinks.sql.databases.database import ROW, Server
from penstock.spark_sink.sinks.sql.databases.errors import without_values
from penstock.spark_sink.sinks.sql.ledger import Owner, read_ledger
from penstock.spark_sink.sinks.sql.rows import Deduplication, Report, staged_schema
from penstock.spark_sink.sinks.sql.settings import STAGING, SqlSinkSettings
from penstock.spark_sink.sinks.sql.tables import Tables, columns_of, prepare
from penstock.spark_sink.source.pool import WorkerPool

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("penstock.spark_sink")

#: The attempt of a task that copied a row.
ATTEMPT = "penstock_attempt"

#: How the names of staging tables begin.
PREFIX = "penstock_stage_"
#: Rows of earlier batches that a staging table may hold: emptying it costs more than to pass over so many.
MOST_LEFT = 10_000
#: Sessions that the driver keeps at most, one for each query and sink.
_MOST_KEPT = 32


def stage_table(database: Server, name: str, schema: str | None, columns: pa.Schema) -> sa.Table:
    """Return the staging table as SQLAlchemy knows it."""
    return sa.Table(
        quoted_name(name, quote=True),
        sa.MetaData(),
        *columns_of(database, columns, columns.names),
        sa.Column(ATTEMPT, sa.BigInteger),
        prefixes=list(database.stage_prefixes),
        schema=None if schema is None else quoted_name(schema, quote=True),
    )


@dataclass(frozen=True, slots=True)
class StagingTask:
    """What an executor runs on its part of a frame. Picklable; it has its own connection.

    `table` is the staging table. `keeps_session` says whether the next task may use the connection.
    """

    table: str
    deduplication: Deduplication
    batch_id: int
    keeps_session: bool = False

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Copy the rows and report; the form is that of `mapInArrow`.

        Each piece is copied in a transaction of its own. A `TransientSinkError` says that the database cannot take them
        now, another `SinkError` that it does not.
        """
        from pyspark import TaskContext

        context = TaskContext.get()
        attempt = context.taskAttemptId() if context is not None else 0
        report = Report(copied={attempt: 0})
        settings, columns = self.deduplication.settings, self.deduplication.schema
        names = [name for name in columns.names if name != ROW]
        database, url = settings.database, parse_database_url(settings.url)
        assert isinstance(database, Server)  # noqa: S101 - for mypy: no other has such tasks
        stage = stage_table(database, self.table, settings.schema, columns)
        with (
            without_values(database, url, settings.table, self.batch_id),
            database.session(url, is_kept=self.keeps_session) as connection,
        ):
            for piece in self.deduplication.pieces((batch.rename_columns(names) for batch in batches), report):
                marks = pa.repeat(pa.scalar(attempt, pa.int64()), piece.num_rows)
                with connection.begin():
                    database.stage(connection, stage, piece.append_column(ATTEMPT, marks))
                report.copied[attempt] += piece.num_rows
        # More than may be refused end the batch anyway.
        report.rejected = sorted(report.rejected)[: settings.most_rejects + 1]
        yield as_row(report)
        imports_set_aside("staging")


def run_tasks(batch: DataFrame, task: StagingTask, max_connections: int) -> Report:
    """Run a staging task on every part of a frame, at most `max_connections` at once, and gather the reports.

    Raises what a task raised, without the stack of the executor around it.
    """
    # By `coalesce` the plan need not be known before it runs. Sessions are kept where they stay within the bound: a
    # core has two Python workers, of the source and of the sink, and each of them may have been the sink's.
    cores = cores_of(batch)
    task = replace(task, keeps_session=cores is not None and 2 * cores <= max_connections)
    job = _numbered_columns(batch).coalesce(max_connections).mapInArrow(task, PICKLED)
    report = Report()
    for row in run_job(job):
        report.add(from_row(row))
    return report


def _numbered_columns(batch: DataFrame) -> DataFrame:
    """Return a frame whose columns Spark finds by their names, which it does not where those have dots or backticks."""
    if any({".", "`"}.intersection(column.name) for column in batch.schema.fields):
        return batch.toDF(*(str(number) for number in range(len(batch.columns))))
    return batch


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows of a batch in a staging table, within a transaction that is committed unless it is rolled back."""

    transaction: sa.Transaction
    rows: sa.FromClause
    report: Report


class DriverStage:
    """A session of the driver in which the tables were checked, and into which batches are collected.

    Its staging table is temporary and ends with the transaction. One thread uses it.
    """

    connection: sa.Connection
    tables: Tables

    def __init__(self, settings: SqlSinkSettings, url: sa.URL, frame: pa.Schema) -> None:
        self._settings = settings
        self._url = url
        self._frame = frame
        self._columns = staged_schema(frame, settings.sum_columns)
        self._session = ExitStack()
        self._is_open = False
        self._collected: pa.Table | None = None

    def begin(self, owner: Owner) -> Entries:
        """Check the tables where that was not done, and return what the ledger has of a query, without a lock."""
        if not self._is_open:
            self._open()
        with self.connection.begin():
            return self._ledger_of(owner)

    @contextmanager
    def staged(self, batch: DataFrame | None, batch_id: int, rows: Deduplication) -> Iterator[Staged]:
        """Stage a batch's rows, None for no rows, and begin the transaction that applies them, which ends with it."""
        settings, database, report = self._settings, self._settings.database, Report()
        if batch is not None and self._collected is None:
            self._collected = collected(batch, settings.max_batch_bytes, batch_id, f"table {settings.table}")
        batches = [] if self._collected is None else self._collected.to_batches()
        with self.connection.begin() as transaction:
            columns = columns_of(database, self._columns, self._columns.names)
            table = database.create_temporary(self.connection, STAGING, *columns)
            for piece in rows.pieces(batches, report):
                database.stage(self.connection, table, piece)
            yield Staged(transaction, table, report)

    def close(self) -> None:
        """End the session."""
        self._session.close()
        self._is_open = False

    def _open(self) -> None:
        self.connection = self._session.enter_context(self._settings.database.session(self._url))
        self.tables = prepare(self._settings, self._frame, self.connection)
        self._is_open = True

    def _ledger_of(self, owner: Owner) -> Entries:
        return read_ledger(self.connection, self.tables.ledger, owner).get(owner, {})


class ExecutorStage(DriverStage):
    """Has tasks of Spark fill a staging table, which the driver's session makes and locks. May be kept."""

    _table: sa.Table
    _fingerprint = ""
    #: Rows of batches in the staging table.
    _left = 0

    def begin(self, owner: Owner) -> Entries:
        """Check the tables, unless the target is as it was, and return what the ledger has of a query."""
        if self._is_open and (found := self._kept_ledger_of(owner)) is not None:
            return found
        self.close()
        return super().begin(owner)

    @contextmanager
    def staged(self, batch: DataFrame | None, batch_id: int, rows: Deduplication) -> Iterator[Staged]:
        """Have the rows copied, and count what was."""
        settings, table = self._settings, self._table
        task = StagingTask(str(table.name), rows, batch_id)
        report = Report() if batch is None else run_tasks(batch, task, settings.max_connections)
        self._left += sum(report.copied.values())
        with self.connection.begin() as transaction:
            require_copied(self.connection, table, report.copied)
            yield Staged(transaction, staged_rows(table, report.copied), report)

    def release(self) -> bool:
        """Tell that another batch may begin with what is left: the rows in the staging table are of other attempts."""
        return True

    def close(self) -> None:
        """Remove the staging table and end the session."""
        try:
            if self._is_open:
                self._remove(self._table)
            super().close()
        except sa.exc.SQLAlchemyError as error:
            _log.debug("a session of table %s could not be closed: %s", self._settings.table, type(error).__name__)

    def _open(self) -> None:
        database, name = self._database, PREFIX + secrets.token_hex(8)
        stage = self._table = stage_table(database, name, self._settings.schema, self._columns)
        super()._open()
        self._remove_left_over()
        with self.connection.begin():
            database.take_lock(self.connection, name)
            stage.create(self.connection, checkfirst=False)
        # What tasks and later batches do with it: a permission that is missing shows before the first.
        with self.connection.begin():
            self.connection.execute(sa.insert(stage).from_select(list(stage.c), sa.select(stage).where(sa.false())))
            self._empty()
            self._fingerprint = database.fingerprint(self.connection, self.tables.target)

    @property
    def _database(self) -> Server:
        database = self._settings.database
        assert isinstance(database, Server)  # noqa: S101 - for mypy: no other has such stages
        return database

    def _kept_ledger_of(self, owner: Owner) -> Entries | None:
        """Return what the ledger has of a query, in one transaction; None where all is to be made again."""
        table = self.tables.target
        try:
            with self.connection.begin():
                if self._database.fingerprint(self.connection, table) != self._fingerprint:
                    return None
                if self._left > MOST_LEFT:
                    self._empty()
                return self._ledger_of(owner)
        except sa.exc.SQLAlchemyError as error:
            # The session is lost, the tables are gone, or a lost task still copies.
            _log.info("what was kept for table %s is made again (%s)", table.name, type(error).__name__)
            return None

    def _empty(self) -> None:
        name = self.connection.dialect.identifier_preparer.format_table(self._table)
        self.connection.exec_driver_sql(f"TRUNCATE {name}")
        self._left = 0

    def _remove(self, stage: sa.Table) -> None:
        """Remove a staging table. A lost task may still copy into it: then it is left to the next batch."""
        try:
            with self.connection.begin():
                stage.drop(self.connection, checkfirst=True)
        except sa.exc.SQLAlchemyError as error:
            _log.info("the staging table %s is left to the next batch (%s)", stage.name, type(error).__name__)

    def _remove_left_over(self) -> None:
        """Remove the staging tables of drivers that are gone: those whose lock nobody holds."""
        with self.connection.begin():
            found = sa.inspect(self.connection).get_table_names(schema=self._settings.schema)
        for name in found:
            if not name.startswith(PREFIX):
                continue
            with self.connection.begin():
                is_free = self._database.take_lock(self.connection, name)
            if is_free:
                _log.warning("the staging table %s was left by a driver that is gone; it is removed", name)
                self._remove(sa.Table(name, sa.MetaData(), schema=self._settings.schema))


#: Of this process's queries.
_kept_stages: WorkerPool[ExecutorStage] = WorkerPool(_MOST_KEPT)


@contextmanager
def open_stage(settings: SqlSinkSettings, url: sa.URL, frame: pa.Schema, run: Hashable | None) -> Iterator[DriverStage]:
    """Lend a stage; where executors stage, it is kept for the next batch of the `run` of a query, None for none."""
    on_executors = settings.staging == "executors" and isinstance(settings.database, Server)
    if on_executors and run is not None:
        # All that the tables were checked for.
        key = (run, settings.url, repr(settings), str(frame))
        with _kept_stages.lend(key, lambda: ExecutorStage(settings, url, frame)) as kept:
            yield kept
    else:
        with closing((ExecutorStage if on_executors else DriverStage)(settings, url, frame)) as stage:
            yield stage


def require_copied(connection: sa.Connection, stage: sa.Table, copied: Mapping[int, int]) -> None:
    """Raise `SinkError` unless the table holds what the tasks reported.

    The server has crashed since, or somebody else wrote.
    """
    attempt = stage.c[ATTEMPT]
    counted = sa.select(attempt, sa.func.count()).where(attempt.in_(copied)).group_by(attempt)
    found: dict[int, int] = {row[0]: row[1] for row in connection.execute(counted)}
    if any(found.get(number, 0) != rows for number, rows in copied.items()):
        raise SinkError(
            f"the staging table {stage.name} holds {sum(found.values())} rows where its tasks had copied "
            f"{sum(copied.values())}; somebody has changed it, or PostgreSQL has crashed, which empties it; nothing "
            "was stored, and Spark hands the batch over again when the query is started again"
        )


def staged_rows(stage: sa.Table, attempts: Collection[int]) -> sa.Subquery:
    """Return the rows that the named attempts copied."""
    columns = [column for column in stage.c if column.name != ATTEMPT]
    return sa.select(*columns).where(stage.c[ATTEMPT].in_(attempts)).subquery()
