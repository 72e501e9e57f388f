"""Staging from executors: each task copies its rows into one table of the sink's own, and reports what it copied.

The table belongs to one attempt of one batch at a time, and to the driver's session, which holds a lock on
its name: where the lock is free, the driver is gone and the next one removes the table. The batches of a run of a query
use it one after the other, and each empties it when its rows are merged. A task commits its rows under the id of
its own attempt. Spark's answer names the attempts that count, so what a lost or repeated task has copied is never
merged. The rows are counted against the report before they are merged: PostgreSQL's table, which is UNLOGGED, is
empty after a crash of the server.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.sql.elements import quoted_name

from penstock.clients.gc_pause import imports_set_aside
from penstock.errors import SinkError
from penstock.spark_sink.errors import errors_in
from penstock.spark_sink.ledger.rules import Span
from penstock.spark_sink.sinks.frames import cores_of, tasks_of
from penstock.spark_sink.sinks.position import POSITION
from penstock.spark_sink.sinks.reports import report_schema
from penstock.spark_sink.sinks.sql.databases.database import Database
from penstock.spark_sink.sinks.sql.databases.databases import database_of
from penstock.spark_sink.sinks.sql.databases.errors import LostTaskError, concerns_a_row, is_transient, refused
from penstock.spark_sink.sinks.sql.databases.schema import ROW, columns_of
from penstock.spark_sink.sinks.sql.rows.deduplication import BatchStatistics, Deduplication, deduplicated
from penstock.spark_sink.sinks.sql.rows.row_validator import Rejected, in_halves

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("penstock.spark_sink")

#: The attempt of a task that copied a row.
ATTEMPT = "penstock_attempt"

_PREFIX = "penstock_stage_"
#: Seconds that the removal of a table waits for a task that still copies into it; then it is left to the next batch.
_REMOVAL_S = 2

#: What a task reports, one row for each fact, and the kinds of facts.
_REPORT = (
    "kind string, attempt bigint, topic string, partition int, first bigint, last bigint, rows bigint, reason string"
)
_COPIED, _SEEN, _REJECTED, _REFUSED, _LOST = "copied", "seen", "rejected", "refused", "lost"


@dataclass(slots=True)
class Report:
    """What the tasks that count did: what they saw, how many rows each attempt committed, and why rows were refused.

    `refused` is the database's reason for rows that stand for many; None where it took all.
    """

    statistics: BatchStatistics = field(default_factory=BatchStatistics)
    copied: dict[int, int] = field(default_factory=dict)
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class StagingTask:
    """What an executor runs on its part of a frame. Picklable; it opens its own connection.

    `table` is the staging table, in `schema`. More refused rows than `most` end the batch anyway.
    """

    url: str = field(repr=False)
    table: str
    schema: str | None
    deduplication: Deduplication
    batch_id: int
    most: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Copy the rows and report; the form is that of `mapInArrow`."""
        from pyspark import TaskContext

        context = TaskContext.get()
        attempt = context.taskAttemptId() if context is not None else 0
        try:
            copied, statistics, refusal = self.copy(batches, attempt)
        except LostTaskError as error:
            # An exception would reach the driver as a text, of which it is not known that another try may help.
            yield _report_of(attempt, [{"kind": _LOST, "reason": str(error)}])
            return
        facts: list[dict[str, Any]] = [{"kind": _COPIED, "rows": copied, "last": statistics.offsets.rows}]
        facts += [
            {"kind": _SEEN, "topic": topic, "partition": n, "first": span.first, "last": span.last,
             "rows": statistics.offsets.applied.get((topic, n), 0)}
            for (topic, n), span in statistics.offsets.spans.items()
        ]  # fmt: skip
        facts += [
            {"kind": _REJECTED, "topic": one.topic, "partition": one.partition, "first": one.offset,
             "reason": one.reason}
            for one in sorted(statistics.rejected)[: self.most + 1]
        ]  # fmt: skip
        if refusal is not None:
            facts.append({"kind": _REFUSED, "reason": refusal})
        yield _report_of(attempt, facts)
        imports_set_aside("staging")

    def copy(self, batches: Iterable[pa.RecordBatch], attempt: int) -> tuple[int, BatchStatistics, str | None]:
        """Copy the rows of a task, each piece in a transaction of its own.

        Returns how many rows were copied, what was seen, and why the database refused a piece that was reduced. A
        `LostTaskError` says that it cannot take them now, a `SinkError` that it does not.
        """
        statistics = BatchStatistics()
        copied = 0
        names = [name for name in self.deduplication.schema.names if name != ROW]
        url = sa.make_url(self.url)
        database = database_of(url)
        stage = stage_table(database, self.table, self.schema, self.deduplication.schema)
        try:
            named = (batch.rename_columns(names) for batch in batches)
            for piece in deduplicated(self.deduplication, named, statistics):
                marked = piece.append_column(ATTEMPT, pa.repeat(pa.scalar(attempt, pa.int64()), piece.num_rows))
                with database.session(url) as connection, connection.begin():
                    if self.deduplication.exact:
                        copied += copy_in_halves(database, connection, stage, marked, statistics.rejected, self.most)
                    else:
                        database.stage(connection, stage, marked)
                        copied += marked.num_rows
        except sa.exc.SQLAlchemyError as error:
            if not self.deduplication.exact and concerns_a_row(error):
                return copied, statistics, type(getattr(error, "orig", None) or error).__name__
            # Not chained: drivers quote keys and values in their texts, which end in Spark's log.
            failure = refused(error, self.deduplication.target, url, self.batch_id)
            raise (LostTaskError(str(failure)) if is_transient(error) else failure) from None
        return copied, statistics, None


def copy_in_halves(  # noqa: PLR0917 - a piece, and where it goes
    database: Database, connection: sa.Connection, stage: sa.Table, rows: pa.Table, rejected: list[Rejected], most: int
) -> int:
    """Copy what the database takes, set the rest aside, and return how many rows were copied.

    Where more rows are refused than `most`, it ends there.
    """
    places = rows.select(POSITION)
    copied = 0

    def put(first: int, last: int) -> None:
        nonlocal copied
        count = last - first + 1
        database.stage(connection, stage, rows.slice(first - 1, count))
        copied += count

    def set_aside(number: int, reason: str) -> bool:
        rejected.append(Rejected(**places.slice(number - 1, 1).to_pylist()[0], reason=reason))
        return len(rejected) <= most

    in_halves(connection, rows.num_rows, put, set_aside)
    return copied


def _report_of(attempt: int, facts: Iterable[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"attempt": attempt} | fact for fact in facts], report_schema(_REPORT))


def run_tasks(batch: DataFrame, task: StagingTask, max_connections: int) -> Report:
    """Run a staging task on every part of a frame, at most `max_connections` at once, and gather the reports.

    Raises `LostTaskError` where another try may help, and `SinkError` where the database does not take the rows.
    """
    from pyspark.errors import PySparkException

    report = Report()
    try:
        rows = _numbered_columns(in_tasks(batch, max_connections)).mapInArrow(task, _REPORT).collect()
    except PySparkException as error:
        own = next((one for one in errors_in(str(error)) if isinstance(one, SinkError)), None)
        if own is None:
            raise
        # What the task raised, without the stack of the executor around it.
        raise own from None
    for row in rows:
        if row["kind"] == _COPIED:
            report.copied[row["attempt"]] = row["rows"]
            report.statistics.offsets.rows += row["last"]
        elif row["kind"] == _SEEN:
            span = Span(row["first"], row["last"])
            report.statistics.offsets.add((row["topic"], row["partition"]), span, row["rows"])
        elif row["kind"] == _REJECTED:
            report.statistics.rejected.append(Rejected(row["topic"], row["partition"], row["first"], row["reason"]))
        elif row["kind"] == _LOST:
            raise LostTaskError(row["reason"])
        else:
            report.refused = row["reason"]
    return report


def _numbered_columns(batch: DataFrame) -> DataFrame:
    """Return a frame whose columns Spark finds by their names, which it does not where those have dots or backticks."""
    if any({".", "`"}.intersection(one.name) for one in batch.schema.fields):
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


def stage_table(
    database: Database, name: str, schema: str | None, columns: pa.Schema, checks: Iterable[sa.CheckConstraint] = ()
) -> sa.Table:
    """Return the staging table as SQLAlchemy knows it; the checks count where it is made."""
    return sa.Table(
        quoted_name(name, quote=True),
        sa.MetaData(),
        *columns_of(database, columns, columns.names),
        sa.Column(ATTEMPT, sa.BigInteger),
        *checks,
        prefixes=list(database.stage_prefixes),
        schema=None if schema is None else quoted_name(schema, quote=True),
    )


def stage_prefix(target: str, ledger: str) -> str:
    """Return how the names of a sink's staging tables begin."""
    return _PREFIX + hashlib.sha256(f"{target}\0{ledger}".encode()).hexdigest()[:12] + "_"


def create_stage(
    connection: sa.Connection,
    prefix: str,
    schema: str | None,
    columns: pa.Schema,
    checks: Iterable[sa.CheckConstraint] = (),
) -> sa.Table:
    """Make a staging table with a new name, locked by this session until it ends or `remove_stage` is called."""
    name, database = prefix + secrets.token_hex(4), database_of(connection.engine.url)
    with connection.begin():
        database.take_lock(connection, name)
        stage = stage_table(database, name, schema, columns, checks)
        stage.create(connection, checkfirst=False)
    return stage


def remove_stage(connection: sa.Connection, stage: sa.Table) -> None:
    """Remove a staging table. A lost task may still copy into it: then it is left to the next batch."""
    database = database_of(connection.engine.url)
    try:
        with connection.begin(), database.lock_waits(connection, _REMOVAL_S):
            stage.drop(connection)
    except sa.exc.SQLAlchemyError as error:
        _log.info("the staging table %s is left to the next batch (%s)", stage.name, type(error).__name__)
    try:
        with connection.begin():
            database.release_lock(connection, str(stage.name))
    except sa.exc.SQLAlchemyError:
        _log.debug("the session of the staging table %s has ended, and its lock with it", stage.name)


def empty_stage(connection: sa.Connection, stage: sa.Table) -> bool:
    """Empty a staging table for the next batch; tell whether it is. A lost task may still copy into it."""
    try:
        with connection.begin(), database_of(connection.engine.url).lock_waits(connection, _REMOVAL_S):
            name = connection.dialect.identifier_preparer.format_table(stage)
            connection.exec_driver_sql(f"TRUNCATE {name}")
    except sa.exc.SQLAlchemyError as error:
        _log.info("the staging table %s could not be emptied (%s)", stage.name, type(error).__name__)
        return False
    return True


def remove_left_over(connection: sa.Connection, prefix: str, schema: str | None, columns: pa.Schema) -> None:
    """Remove the staging tables of drivers that are gone: those whose lock nobody holds."""
    with connection.begin():
        found = [name for name in sa.inspect(connection).get_table_names(schema=schema) if name.startswith(prefix)]
    database = database_of(connection.engine.url)
    for name in found:
        with connection.begin():
            free = database.take_lock(connection, name)
        if free:
            _log.warning("the staging table %s was left by a driver that is gone; it is removed", name)
            remove_stage(connection, stage_table(database, name, schema, columns))


def require_copied(connection: sa.Connection, stage: sa.Table, copied: dict[int, int]) -> None:
    """Raise `SinkError` unless the table holds what the tasks reported.

    The server has crashed since, or somebody else wrote.
    """
    attempt = stage.c[ATTEMPT]
    counted = sa.select(attempt, sa.func.count()).where(attempt.in_(copied)).group_by(attempt)
    found: dict[int, int] = {row[0]: row[1] for row in connection.execute(counted)}
    wrong = {number for number, rows in copied.items() if found.get(number, 0) != rows}
    if wrong:
        raise SinkError(
            f"the staging table {stage.name} holds {sum(found.values())} rows where its tasks had copied "
            f"{sum(copied.values())}; somebody has changed it, or PostgreSQL has crashed, which empties it; nothing "
            "was stored, and Spark hands the batch over again when the query is started again"
        )


def staged_rows(stage: sa.Table, attempts: Sequence[int]) -> sa.Subquery:
    """Return the rows that the named attempts copied."""
    columns = [column for column in stage.c if column.name != ATTEMPT]
    return sa.select(*columns).where(stage.c[ATTEMPT].in_(attempts)).subquery()
