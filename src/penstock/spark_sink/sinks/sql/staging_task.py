"""What executors do for a batch: each task copies its rows into the staging table, and reports what it copied.

A task commits its rows under the id of its own attempt. Spark's answer names the attempts that count, so what a lost or
repeated task has copied is never merged (`stages`). A Python worker keeps its session for the next task (`WorkerPool`):
to open one takes longer than to copy the rows of a small batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.sql.elements import quoted_name

from penstock.clients.gc_pause import imports_set_aside
from penstock.database_url import parse_database_url
from penstock.spark_sink.sinks.frames import PICKLED, as_row, cores_of, from_row, run_job
from penstock.spark_sink.sinks.sql.databases.database import ROW, Server
from penstock.spark_sink.sinks.sql.databases.errors import without_values
from penstock.spark_sink.sinks.sql.rows import Deduplication, Report
from penstock.spark_sink.sinks.sql.tables import columns_of
from penstock.spark_sink.source.pool import WorkerPool

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: The attempt of a task that copied a row.
ATTEMPT = "penstock_attempt"


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


class TaskSession:
    """A session by which the tasks of a Python worker copy, one after the other; or one task, unless it `is_kept`."""

    def __init__(self, database: Server, url: sa.URL, *, is_kept: bool) -> None:
        self._database = database
        self._url = url
        self._is_kept = is_kept
        self._session = ExitStack()
        self._connection: sa.Connection | None = None

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """Begin a transaction, in another session where the server has ended the one of the last task."""
        if self._connection is not None and not self._answers(self._connection):
            self.close()
        if self._connection is None:
            self._connection = self._session.enter_context(self._database.session(self._url))
        with self._connection.begin():
            yield self._connection

    @staticmethod
    def _answers(connection: sa.Connection) -> bool:
        driver = connection.connection.dbapi_connection
        try:
            return driver is not None and connection.dialect.do_ping(driver)
        except connection.dialect.loaded_dbapi.Error:
            return False

    def release(self) -> bool:
        """Tell whether another task may use it."""
        return self._is_kept

    def close(self) -> None:
        """End the session."""
        self._connection = None
        self._session.close()


#: Of this Python worker. A session that has met an error is closed.
_sessions: WorkerPool[TaskSession] = WorkerPool(closes_idle=True)


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
            _sessions.lend(settings.url, lambda: TaskSession(database, url, is_kept=self.keeps_session)) as session,
        ):
            for piece in self.deduplication.pieces((batch.rename_columns(names) for batch in batches), report):
                marks = pa.repeat(pa.scalar(attempt, pa.int64()), piece.num_rows)
                with session.transaction() as connection:
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
