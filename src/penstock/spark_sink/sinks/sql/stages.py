"""The two ways of a batch's rows into a staging table: through the driver, or from executors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import sqlalchemy as sa

from penstock.spark_sink.sinks.frames import collected
from penstock.spark_sink.sinks.sql.batch_transaction import BatchTransaction
from penstock.spark_sink.sinks.sql.databases.errors import concerns_a_row
from penstock.spark_sink.sinks.sql.databases.schema import columns_of
from penstock.spark_sink.sinks.sql.kept_stage import KeptStages, OpenStage
from penstock.spark_sink.sinks.sql.rows import staging
from penstock.spark_sink.sinks.sql.rows.deduplication import BatchStatistics, Deduplication, deduplicated
from penstock.spark_sink.sinks.sql.settings import STAGING, SqlSinkSettings
from penstock.spark_sink.sinks.sql.tables import Tables, prepare

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Of this process's queries.
_kept_stages = KeptStages()


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows of a batch in a staging table, within a transaction that is committed unless it is rolled back.

    Attributes:
        transaction: in which they are to be applied.
        rows: what was staged; None where the database refused it for the sake of a row.
        statistics: what was seen of the batch.
    """

    transaction: sa.Transaction
    rows: sa.FromClause | None
    statistics: BatchStatistics


class Stage(ABC):
    """A session of the driver in which the tables were checked, and its staging table. One thread uses it."""

    connection: sa.Connection
    tables: Tables

    @abstractmethod
    def staged(self, deduplication: Deduplication) -> AbstractContextManager[Staged]:
        """Stage a batch's rows, and begin the transaction that applies them, which ends with the block."""

    @abstractmethod
    def clear(self) -> None:
        """Remove what was staged, so that the batch can be staged again."""


class DriverStage(Stage):
    """Collects the batch on the driver. Its staging table is temporary and ends with the transaction."""

    def __init__(self, settings: SqlSinkSettings, frame: pa.Schema, connection: sa.Connection, rows: pa.Table) -> None:
        self.connection = connection
        self._settings = settings
        self._rows = rows
        with connection.begin():
            self.tables = prepare(settings, frame, connection)

    @contextmanager
    def staged(self, deduplication: Deduplication) -> Iterator[Staged]:
        """Put the rows into a temporary table."""
        settings, database, schema = self._settings, self._settings.database, deduplication.schema
        columns = columns_of(database, schema, schema.names, summed=settings.sum_columns)
        statistics = BatchStatistics()
        with self.connection.begin() as transaction:
            table = database.create_temporary(self.connection, STAGING, *columns, *self.tables.upsert.checks())
            rows: sa.Table | None = table
            try:
                for piece in deduplicated(deduplication, self._rows.to_batches(), statistics):
                    if deduplication.exact:
                        most = settings.most_rejects
                        staging.copy_in_halves(database, self.connection, table, piece, statistics.rejected, most)
                    else:
                        database.stage(self.connection, table, piece)
            except sa.exc.SQLAlchemyError as error:
                if not concerns_a_row(error):
                    raise
                rows = None
            yield Staged(transaction, rows, statistics)

    def clear(self) -> None:
        """Nothing: it ended with the transaction."""


class ExecutorStage(Stage):
    """Has tasks on executors copy the batch into a table that the driver's session holds: see `rows.staging`.

    One session for all: should the server crash after the staging, then what was staged is gone, and so is this.
    """

    def __init__(self, settings: SqlSinkSettings, batch: DataFrame, batch_id: int, opened: OpenStage) -> None:
        self.connection, self.tables = opened.connection, opened.tables
        self._settings = settings
        self._batch = batch
        self._batch_id = batch_id
        self._opened = opened

    @contextmanager
    def staged(self, deduplication: Deduplication) -> Iterator[Staged]:
        """Have the rows copied, and count what was."""
        settings, table = self._settings, self._opened.stage()
        url = self.connection.engine.url.render_as_string(hide_password=False)
        task = staging.StagingTask(
            url, str(table.name), settings.schema, deduplication, self._batch_id, settings.most_rejects
        )
        report = staging.run_tasks(self._batch, task, settings.max_connections)
        with self.connection.begin() as transaction:
            rows = None
            if report.refused is None:
                staging.require_copied(self.connection, table, report.copied)
                rows = staging.staged_rows(table, list(report.copied))
            yield Staged(transaction, rows, report.statistics)

    def clear(self) -> None:
        """Remove the staging table."""
        self._opened.remove_stage()


@contextmanager
def open_stage(write: BatchTransaction, url: sa.URL, frame: pa.Schema, batch: DataFrame) -> Iterator[Stage]:
    """Open the stage of a batch; where executors stage, session and table are kept for the query's next batch."""
    settings, batch_id = write.settings, write.batch.batch_id
    database, key = settings.database, _key(write, url, frame)
    if settings.staging == "driver" or not database.stages_on_executors:
        rows = collected(batch, settings.max_batch_bytes, batch_id, f"table {settings.table}")
        with database.session(url) as connection:
            yield DriverStage(settings, frame, connection, rows)
        return
    opened = (None if key is None else _kept_stages.take(key)) or OpenStage.begin(settings, url, frame)
    is_kept = False
    try:
        yield ExecutorStage(settings, batch, batch_id, opened)
        is_kept = key is not None and opened.clear()
    finally:
        if not is_kept:
            opened.close()
    if is_kept:
        _kept_stages.keep(key, opened)


def _key(write: BatchTransaction, url: sa.URL, frame: pa.Schema) -> Hashable | None:
    """Return what is kept between batches by: the run of the query, and all that the tables were checked for.

    None where the run is not known: then nothing tells one start of the query from another.
    """
    settings = write.settings
    if write.run is None:
        return None
    checked = [getattr(settings, name) for name in ("schema", "table", "ledger_table", "key", "sum_columns")]
    options = (settings.delete, settings.keep_position, settings.evolve)
    return (url.render_as_string(hide_password=False), write.owner, write.run, *checked, *options, str(frame))
