"""What executors do for a batch: each task copies its rows into the staging table, and reports what it copied.

A task commits its rows under the id of its own attempt. Spark's answer names the attempts that count, so what a lost or
repeated task has copied is never merged (`stages`).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.sql.elements import quoted_name

from penstock.clients.gc_pause import imports_set_aside
from penstock.clients.rights import MissingRightError
from penstock.database_url import parse_database_url
from penstock.errors import SinkError
from penstock.spark_sink.errors import errors_in
from penstock.spark_sink.sinks.frames import cores_of, tasks_of
from penstock.spark_sink.sinks.position import POSITION
from penstock.spark_sink.sinks.sql.databases.database import ROW, Server
from penstock.spark_sink.sinks.sql.databases.errors import without_values
from penstock.spark_sink.sinks.sql.rows import Deduplication, Report
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


@dataclass(frozen=True, slots=True)
class StagingTask:
    """What an executor runs on its part of a frame. Picklable; it opens its own connection.

    `table` is the staging table.
    """

    table: str
    deduplication: Deduplication
    batch_id: int

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
        with without_values(database, url, settings.table, self.batch_id):
            for piece in self.deduplication.pieces((batch.rename_columns(names) for batch in batches), report):
                marks = pa.repeat(pa.scalar(attempt, pa.int64()), piece.num_rows)
                with database.session(url) as connection, connection.begin():
                    database.stage(connection, stage, piece.append_column(ATTEMPT, marks))
                report.copied[attempt] += piece.num_rows
        # More than may be refused end the batch anyway.
        report.rejected = sorted(report.rejected)[: settings.most_rejects + 1]
        yield pa.RecordBatch.from_pydict({"report": pa.array([pickle.dumps(report)], pa.binary())})
        imports_set_aside("staging")


def run_tasks(batch: DataFrame, task: StagingTask, max_connections: int) -> Report:
    """Run a staging task on every part of a frame, at most `max_connections` at once, and gather the reports.

    Raises what a task raised, without the stack of the executor around it.
    """
    from pyspark.errors import PySparkException

    try:
        rows = _numbered_columns(in_tasks(batch, max_connections)).mapInArrow(task, "report binary").collect()
    except PySparkException as error:
        raised = (found for found in errors_in(str(error)) if isinstance(found, SinkError | MissingRightError))
        if (own := next(raised, None)) is None:
            raise
        raise own from None
    report = Report()
    for row in rows:
        report.add(pickle.loads(bytes(row["report"])))  # noqa: S301 - made by the task, in this query
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
