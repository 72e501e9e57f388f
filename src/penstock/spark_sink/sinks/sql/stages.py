"""The two ways of a batch's rows into a staging table: through the driver, or from executors.

The staging table of executors belongs to the driver's session, which holds a lock on its name: where the lock is free,
the driver is gone and the next one removes the table. Session, checked tables and staging table are kept for the next
micro-batch of a run of a query (`WorkerPool`). That one asks one question, whether the tables are still those that were
checked; where they are not, where the session is lost, or where a batch has failed, everything is made again.

What tasks copied is counted against their reports before it is merged: PostgreSQL's table, which is UNLOGGED, is
empty after a crash of the server.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import sqlalchemy as sa

from penstock.errors import SinkError
from penstock.spark_sink.sinks.frames import collected
from penstock.spark_sink.sinks.sql.databases.database import Server
from penstock.spark_sink.sinks.sql.rows import BatchStatistics, Deduplication, staged_schema
from penstock.spark_sink.sinks.sql.settings import STAGING, SqlSinkSettings
from penstock.spark_sink.sinks.sql.staging_task import ATTEMPT, Report, StagingTask, run_tasks, stage_table
from penstock.spark_sink.sinks.sql.tables import Tables, columns_of, prepare
from penstock.spark_sink.source.pool import WorkerPool

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("penstock.spark_sink")

_PREFIX = "penstock_stage_"
#: Seconds that the removal of a table waits for a task that still copies into it; then it is left to the next batch.
_REMOVAL_S = 2
#: Sessions that the driver keeps at most, one for each query and sink.
_MOST_KEPT = 32


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows of a batch in a staging table, within a transaction that is committed unless it is rolled back."""

    transaction: sa.Transaction
    rows: sa.FromClause
    statistics: BatchStatistics


class Stage(ABC):
    """A session of the driver in which the tables were checked, and its staging table. One thread uses it."""

    connection: sa.Connection
    tables: Tables

    @abstractmethod
    def staged(self, batch: DataFrame | None, batch_id: int, rows: Deduplication) -> AbstractContextManager[Staged]:
        """Stage a batch's rows, None for no rows, and begin the transaction that applies them, which ends with it."""


class DriverStage(Stage):
    """Collects the batch on the driver. Its staging table is temporary and ends with the transaction."""

    def __init__(self, settings: SqlSinkSettings, frame: pa.Schema, connection: sa.Connection) -> None:
        self.connection = connection
        self._settings = settings
        self._columns = staged_schema(frame, settings.sum_columns)
        self._collected: pa.Table | None = None
        with connection.begin():
            self.tables = prepare(settings, frame, connection)

    @contextmanager
    def staged(self, batch: DataFrame | None, batch_id: int, rows: Deduplication) -> Iterator[Staged]:
        """Put the rows into a temporary table."""
        settings, database, statistics = self._settings, self._settings.database, BatchStatistics()
        if batch is not None and self._collected is None:
            self._collected = collected(batch, settings.max_batch_bytes, batch_id, f"table {settings.table}")
        batches = [] if self._collected is None else self._collected.to_batches()
        with self.connection.begin() as transaction:
            columns = columns_of(database, self._columns, self._columns.names)
            table = database.create_temporary(self.connection, STAGING, *columns)
            for piece in rows.pieces(batches, statistics):
                database.stage(self.connection, table, piece)
            yield Staged(transaction, table, statistics)


class ExecutorStage(Stage):
    """Has tasks on executors copy the batch into a table that the driver's session holds.

    One session for all: should the server crash after the staging, then what was staged is gone, and so is this.
    """

    def __init__(self, settings: SqlSinkSettings, database: Server, url: sa.URL, frame: pa.Schema) -> None:
        self._settings = settings
        self._database = database
        self._url = url
        self._frame = frame
        self._columns = staged_schema(frame, settings.sum_columns)
        self._session = ExitStack()
        self._table: sa.Table | None = None
        self._fingerprint = ""

    def begin(self) -> None:
        """Check the tables and make the staging table, unless those of the last batch are as they were."""
        if self._table is not None and self._is_as_checked():
            return
        self.close()
        self.connection = self._session.enter_context(self._database.session(self._url))
        with self.connection.begin():
            self.tables = prepare(self._settings, self._frame, self.connection)
        prefix = stage_prefix(self._settings.table, self._settings.ledger_table)
        self._remove_left_over(prefix)
        stage = self._stage_table(prefix + secrets.token_hex(4))
        with self.connection.begin():
            self._database.take_lock(self.connection, str(stage.name))
            stage.create(self.connection, checkfirst=False)
        self._table = stage
        # What tasks, and the end of a batch, do with it: a permission that is missing shows before the first.
        with self.connection.begin():
            self.connection.execute(sa.insert(stage).from_select(list(stage.c), sa.select(stage).where(sa.false())))
        self._empty()
        self._fingerprint = self._look()

    @contextmanager
    def staged(self, batch: DataFrame | None, batch_id: int, rows: Deduplication) -> Iterator[Staged]:
        """Have the rows copied, and count what was."""
        settings, table = self._settings, self._stage()
        url, most = self._url.render_as_string(hide_password=False), settings.most_rejects
        task = StagingTask(url, str(table.name), settings.schema, rows, batch_id, most)
        report = Report() if batch is None else run_tasks(batch, task, settings.max_connections)
        with self.connection.begin() as transaction:
            require_copied(self.connection, table, report.copied)
            yield Staged(transaction, staged_rows(table, report.copied), report.statistics)

    def release(self) -> bool:
        """Empty the staging table for the next batch; tell whether it is. A lost task may still copy into it."""
        try:
            self._empty()
        except sa.exc.SQLAlchemyError as error:
            _log.info("the staging table %s could not be emptied (%s)", self._stage().name, type(error).__name__)
            return False
        return True

    def _empty(self) -> None:
        with self.connection.begin(), self._database.lock_waits(self.connection, _REMOVAL_S):
            name = self.connection.dialect.identifier_preparer.format_table(self._stage())
            self.connection.exec_driver_sql(f"TRUNCATE {name}")

    def close(self) -> None:
        """Remove the staging table and end the session."""
        try:
            if self._table is not None:
                self._remove(self._table)
                self._table = None
            self._session.close()
        except sa.exc.SQLAlchemyError as error:
            _log.debug("a session of table %s could not be closed: %s", self._settings.table, type(error).__name__)

    def _stage(self) -> sa.Table:
        if self._table is None:
            raise SinkError(f"table {self._settings.table} has no staging table; this is a fault of penstock")
        return self._table

    def _stage_table(self, name: str) -> sa.Table:
        return stage_table(self._database, name, self._settings.schema, self._columns)

    def _is_as_checked(self) -> bool:
        try:
            return self._look() == self._fingerprint
        except sa.exc.SQLAlchemyError as error:
            kind = type(error).__name__
            _log.info("the session that was kept for table %s is lost (%s)", self._settings.table, kind)
            return False

    def _look(self) -> str:
        tables = [self.tables.upsert.target, self.tables.ledger, self._stage()]
        with self.connection.begin():
            return self._database.fingerprint(self.connection, tables)

    def _remove(self, stage: sa.Table) -> None:
        """Remove a staging table. A lost task may still copy into it: then it is left to the next batch."""
        try:
            with self.connection.begin(), self._database.lock_waits(self.connection, _REMOVAL_S):
                stage.drop(self.connection)
        except sa.exc.SQLAlchemyError as error:
            _log.info("the staging table %s is left to the next batch (%s)", stage.name, type(error).__name__)
        try:
            with self.connection.begin():
                self._database.release_lock(self.connection, str(stage.name))
        except sa.exc.SQLAlchemyError:
            _log.debug("the session of the staging table %s has ended, and its lock with it", stage.name)

    def _remove_left_over(self, prefix: str) -> None:
        """Remove the staging tables of drivers that are gone: those whose lock nobody holds."""
        with self.connection.begin():
            found = sa.inspect(self.connection).get_table_names(schema=self._settings.schema)
        for name in found:
            if not name.startswith(prefix):
                continue
            with self.connection.begin():
                is_free = self._database.take_lock(self.connection, name)
            if is_free:
                _log.warning("the staging table %s was left by a driver that is gone; it is removed", name)
                self._remove(self._stage_table(name))


#: Of this process's queries.
_kept_stages: WorkerPool[ExecutorStage] = WorkerPool(_MOST_KEPT, closes_idle=True)


@contextmanager
def open_stage(settings: SqlSinkSettings, url: sa.URL, frame: pa.Schema, run: Hashable | None) -> Iterator[Stage]:
    """Open a stage; where executors stage, it is kept for the next batch of the `run` of a query, None for none."""
    database = settings.database
    if settings.staging == "driver" or not isinstance(database, Server):
        with database.session(url) as connection:
            yield DriverStage(settings, frame, connection)
        return
    pool = WorkerPool[ExecutorStage](0) if run is None else _kept_stages
    # All that the tables were checked for.
    key = (run, settings.url, repr(settings), str(frame))
    with pool.lend(key, lambda: ExecutorStage(settings, database, url, frame)) as stage:
        stage.begin()
        yield stage


def stage_prefix(target: str, ledger: str) -> str:
    """Return how the names of a sink's staging tables begin."""
    return _PREFIX + hashlib.sha256(f"{target}\0{ledger}".encode()).hexdigest()[:12] + "_"


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
