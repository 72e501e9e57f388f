"""What executors do for a batch: each task copies its rows into the staging table, and reports what it copied.

A task commits its rows under the id of its own attempt. Spark's answer names the attempts that count, so what a lost or
repeated task has copied is never merged (`stages`).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.sql.elements import quoted_name

from penstock.clients.gc_pause import imports_set_aside
from penstock.errors import SinkError
from penstock.spark_sink.errors import errors_in
from penstock.spark_sink.sinks.frames import cores_of, tasks_of
from penstock.spark_sink.sinks.position import POSITION
from penstock.spark_sink.sinks.sql.databases import database_of
from penstock.spark_sink.sinks.sql.databases.database import ROW, Server
from penstock.spark_sink.sinks.sql.databases.errors import LostTaskError, is_transient, refused
from penstock.spark_sink.sinks.sql.rows import BatchStatistics, Deduplication
from penstock.spark_sink.sinks.sql.tables import columns_of

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


@dataclass(slots=True)
class Report:
    """What tasks that count did: what they saw, and how many rows each attempt committed.

    `lost` says why a task may do better another time; None where it did all.
    """

    statistics: BatchStatistics = field(default_factory=BatchStatistics)
    copied: dict[int, int] = field(default_factory=dict)
    lost: str | None = None

    def add(self, other: Report) -> None:
        """Add what another task did."""
        self.copied |= other.copied
        self.lost = self.lost or other.lost
        self.statistics.rejected += other.statistics.rejected
        seen, offsets = other.statistics.offsets, self.statistics.offsets
        offsets.rows += seen.rows
        for part, span in seen.spans.items():
            offsets.add(part, span, seen.applied.get(part, 0))


@dataclass(frozen=True, slots=True)
class StagingTask:
    """What an executor runs on its part of a frame. Picklable; it opens its own connection.

    `table` is the staging table, in `schema`. More refused rows than `most_rejects` end the batch anyway.
    """

    url: str = field(repr=False)
    table: str
    schema: str | None
    deduplication: Deduplication
    batch_id: int
    most_rejects: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Copy the rows and report; the form is that of `mapInArrow`."""
        from pyspark import TaskContext

        context = TaskContext.get()
        try:
            report = self.copy(batches, context.taskAttemptId() if context is not None else 0)
        except LostTaskError as error:
            # An exception would reach the driver as a text, of which it is not known that another try may help.
            report = Report(lost=str(error))
        report.statistics.rejected = sorted(report.statistics.rejected)[: self.most_rejects + 1]
        yield pa.RecordBatch.from_pydict({"report": pa.array([pickle.dumps(report)], pa.binary())})
        imports_set_aside("staging")

    def copy(self, batches: Iterable[pa.RecordBatch], attempt: int) -> Report:
        """Copy the rows of a task, each piece in a transaction of its own.

        A `LostTaskError` says that the database cannot take them now, a `SinkError` that it does not.
        """
        report = Report()
        report.copied[attempt] = 0
        columns = self.deduplication.schema
        names = [name for name in columns.names if name != ROW]
        url = sa.make_url(self.url)
        database = database_of(url)
        assert isinstance(database, Server)  # noqa: S101 - for mypy: no other has such tasks
        stage = stage_table(database, self.table, self.schema, columns)
        try:
            named = (batch.rename_columns(names) for batch in batches)
            for piece in self.deduplication.pieces(named, report.statistics):
                marks = pa.repeat(pa.scalar(attempt, pa.int64()), piece.num_rows)
                with database.session(url) as connection, connection.begin():
                    database.stage(connection, stage, piece.append_column(ATTEMPT, marks))
                report.copied[attempt] += piece.num_rows
        except sa.exc.SQLAlchemyError as error:
            # Not chained: drivers quote keys and values in their texts, which end in Spark's log.
            failure = refused(database, error, self.deduplication.target, url, self.batch_id)
            raise (LostTaskError(str(failure)) if is_transient(database, error) else failure) from None
        return report


def run_tasks(batch: DataFrame, task: StagingTask, max_connections: int) -> Report:
    """Run a staging task on every part of a frame, at most `max_connections` at once, and gather the reports.

    Raises `LostTaskError` where another try may help, and `SinkError` where the database does not take the rows.
    """
    from pyspark.errors import PySparkException

    try:
        rows = _numbered_columns(in_tasks(batch, max_connections)).mapInArrow(task, "report binary").collect()
    except PySparkException as error:
        own = next((one for one in errors_in(str(error)) if isinstance(one, SinkError)), None)
        if own is None:
            raise
        # What the task raised, without the stack of the executor around it.
        raise own from None
    report = Report()
    for row in rows:
        report.add(pickle.loads(bytes(row["report"])))  # noqa: S301 - made by the task, in this query
    if report.lost is not None:
        raise LostTaskError(report.lost)
    return report


def _numbered_columns(batch: DataFrame) -> DataFrame:
    """Return a frame whose columns Spark finds by their names, which it does not where those have dots or backticks."""
    if any({".", "`"}.intersection(column.name) for column in batch.schema.fields):
        return batch.toDF(*(str(number) for number in range(len(batch.columns))))
    return batch


def in_tasks(batch: DataFrame, most: int) -> DataFrame:
    """Return a frame's rows in `most` tasks at most, each of which has a connection.

    Where more than those could read and transform at a time, they do, and hand the rows over by a shuffle.
    """
    tasks, cores = tasks_of(batch), cores_of(batch)
    if tasks is not None and cores is not None and min(tasks, cores) > most:
        return batch.repartition(most, *POSITION)
    return batch.coalesce(most)
