"""How one micro-batch gets into the database: the two ways of its rows to a staging table.

    driver:     collect -> { lock the ledger, stage, upsert, dead letters, advance the ledger }
    executors:  read the ledger -> stage from tasks -> { lock and compare the ledger, upsert, dead letters, advance }

What stands in braces is one transaction (`batch_transaction`). Session and staging table of the second way are kept
from one batch of a query to the next (`kept_stage`). A batch is applied as a whole first. Where the database
refuses that for the sake of a row, all is rolled back and the batch comes again with every row of it, to be applied in
pieces until the refused rows are alone: then it ends as if row after row had been applied in the order of offsets,
without the messages of which a row was refused.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.sql.elements import quoted_name

from penstock.errors import SinkError
from penstock.spark_sink.ledger.sql_ledger import Entries, is_former, ledger_table, lock_ledger, read_ledger
from penstock.spark_sink.sinks.frames import collected
from penstock.spark_sink.sinks.position import POSITION
from penstock.spark_sink.sinks.sql.batch_transaction import BatchTransaction, Tables
from penstock.spark_sink.sinks.sql.databases.database import Database
from penstock.spark_sink.sinks.sql.databases.errors import concerns_a_row
from penstock.spark_sink.sinks.sql.databases.schema import (
    add_columns,
    columns_of,
    lacks_columns,
    require_fitting,
)
from penstock.spark_sink.sinks.sql.databases.upsert import Upsert
from penstock.spark_sink.sinks.sql.kept_stage import KeptStages, OpenStage
from penstock.spark_sink.sinks.sql.rows import staging
from penstock.spark_sink.sinks.sql.rows.deduplication import BatchStatistics, Deduplication, deduplicated, staged_schema
from penstock.spark_sink.sinks.sql.rows.row_validator import RowRefusedError, RowValidator
from penstock.spark_sink.sinks.sql.settings import STAGING, SqlSinkSettings
from penstock.spark_sink.source.offsets.planning import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("penstock.spark_sink")

#: How often a batch is staged anew because another writer has moved the ledger in between.
_RACES = 5

#: Of this process's queries.
_kept_stages = KeptStages()


def carry_over(database: Database, connection: sa.Connection, ledger: sa.Table) -> None:
    """Add the columns that a former version's ledger lacks: its rows keep working."""
    if is_former(connection, ledger):
        with database.schema_lock(connection):
            add_columns(connection, ledger)


@dataclass(frozen=True, slots=True)
class BatchWrite:
    """One micro-batch, of frames with these columns, on its way into a table."""

    settings: SqlSinkSettings
    url: sa.URL
    database: Database
    frame: pa.Schema
    transaction: BatchTransaction

    def prepare(self, connection: sa.Connection) -> Tables:
        """Make the tables, and columns, that do not exist and check those that do; the transaction is the caller's.

        Raises `SinkError` where the table does not fit the frame.
        """
        settings = self.settings
        metadata = sa.MetaData()
        stored = [
            name
            for name in self.frame.names
            if name != settings.delete and (settings.keep_position or name not in POSITION)
        ]
        target = sa.Table(
            quoted_name(settings.table, quote=True),
            metadata,
            *columns_of(self.database, self.frame, stored, settings.key, settings.sum_columns),
            *self.database.constraints(self.frame, settings.sum_columns),
            schema=None if settings.schema is None else quoted_name(settings.schema, quote=True),
        )
        ledger = ledger_table(settings.ledger_table, metadata, settings.schema)
        inspector = sa.inspect(connection)
        if not all(
            inspector.has_table(name, schema=settings.schema) for name in (settings.table, settings.ledger_table)
        ):
            with self.database.schema_lock(connection):
                metadata.create_all(connection)
        for table in (target, ledger):
            self.database.require_transactions(connection, table)
        carry_over(self.database, connection, ledger)
        if settings.evolve and lacks_columns(connection, target):
            # The one who had the lock before may have added them: they are looked for again.
            with self.database.schema_lock(connection):
                add_columns(connection, target)
        require_fitting(self.database, connection, target, settings.key, settings.sum_columns)
        found = self.database.conversions(connection, target)
        return Tables(Upsert(self.database, target, settings.key, settings.sum_columns, settings.delete, found), ledger)

    def store(self, batch: DataFrame) -> None:
        """Store the batch; may be called again where it failed, and then finds what it has stored.

        After a `SinkError` nothing was stored; after a `LostTaskError` neither, and another try may help. Nor was it
        after an error of SQLAlchemy's, unless that came at the commit: then it is not known.
        """
        if self.settings.staging == "executors" and self.database.stages_on_executors:
            self.from_executors(batch, self.settings.max_connections)
        else:
            self.from_driver(batch)

    def from_driver(self, batch: DataFrame) -> None:
        """Collect the batch on the driver and store it. Raises as `store` does."""
        target = f"table {self.settings.table}"
        rows = collected(batch, self.settings.max_batch_bytes, self.transaction.batch.batch_id, target)
        if rows.num_rows == 0 and not self.transaction.batch.planned:
            return
        places = rows.select(POSITION).group_by(["topic", "partition"]).aggregate([]).to_pylist()
        parts = {(place["topic"], place["partition"]) for place in places if None not in place.values()}
        for exact in (False, True):
            try:
                with self.database.session(self.url) as connection, connection.begin():
                    tables = self.prepare(connection)
                    ledger = read_ledger(connection, tables.ledger, self.transaction.owner)
                    moved = parts | self.transaction.batch.moves(ledger)
                    if not moved:
                        return
                    ledger |= self._locked(connection, tables, moved)
                    deduplication = self._deduplication(ledger, exact=exact)
                    schema, summed = deduplication.schema, self.settings.sum_columns
                    columns = columns_of(self.database, schema, schema.names, summed=summed)
                    staged = self.database.create_temporary(connection, STAGING, *columns, *tables.upsert.checks())
                    statistics = BatchStatistics()
                    for piece in deduplicated(deduplication, rows.to_batches(), statistics):
                        if exact:
                            most = self.settings.most_rejects
                            staging.copy_in_halves(self.database, connection, staged, piece, statistics.rejected, most)
                        else:
                            self._stage(connection, staged, piece)
                    self.transaction.apply(connection, tables, ledger, staged, statistics, exact=exact)
            except RowRefusedError:
                continue
            return

    def _locked(self, connection: sa.Connection, tables: Tables, parts: Iterable[TopicPartition]) -> Entries:
        return lock_ledger(connection, self.database.insert_new, tables.ledger, self.transaction.owner, parts)

    def _stage(self, connection: sa.Connection, staged: sa.Table, piece: pa.Table) -> None:
        try:
            self.database.stage(connection, staged, piece)
        except sa.exc.SQLAlchemyError as error:
            if not concerns_a_row(error):
                raise
            raise RowRefusedError from None

    def from_executors(self, batch: DataFrame, max_connections: int) -> None:
        """Copy the batch into a staging table from executors and merge it from the driver.

        Where the database stages on executors.
        Raises as `store` does.
        """
        key = self._key()
        opened = (None if key is None else _kept_stages.take(key)) or self._opened()
        is_kept = False
        try:
            self._stage_and_apply(batch, max_connections, opened)
            is_kept = key is not None and opened.clear()
        finally:
            if not is_kept:
                opened.close()
        if is_kept:
            _kept_stages.keep(key, opened)

    def _key(self) -> Hashable | None:
        """Return what is kept between batches by: the run of the query, and all that the tables were checked for.

        None where the run is not known: then nothing tells one start of the query from another.
        """
        one, settings = self.transaction, self.settings
        if one.run is None:
            return None
        checked = [getattr(settings, name) for name in ("schema", "table", "ledger_table", "key", "sum_columns")]
        options = (settings.delete, settings.keep_position, settings.evolve)
        return (self.url.render_as_string(hide_password=False), one.owner, one.run, *checked, *options, str(self.frame))

    def _opened(self) -> OpenStage:
        """Begin a session: check the tables, and remove what drivers that are gone have left."""
        settings = self.settings
        prefix = staging.stage_prefix(settings.table, settings.ledger_table)
        columns = staged_schema(self.frame, settings.sum_columns)
        with ExitStack() as session:
            connection = session.enter_context(self.database.session(self.url))
            with connection.begin():
                tables = self.prepare(connection)
            staging.remove_left_over(connection, prefix, settings.schema, columns)
            return OpenStage(connection, tables, prefix, settings.schema, columns, session.pop_all())

    def _stage_and_apply(self, batch: DataFrame, max_connections: int, opened: OpenStage) -> None:
        # One session for all: should the server crash after the staging, then what was staged is gone, and so is this.
        settings, connection, tables = self.settings, opened.connection, opened.tables
        exact = False
        for _ in range(_RACES):
            with connection.begin():
                ledger = read_ledger(connection, tables.ledger, self.transaction.owner)
            deduplication = self._deduplication(ledger, exact=exact)
            stage = opened.stage()
            task = staging.StagingTask(
                self.url.render_as_string(hide_password=False),
                str(stage.name),
                settings.schema,
                deduplication,
                self.transaction.batch.batch_id,
                settings.most_rejects,
            )
            try:
                report = staging.run_tasks(batch, task, max_connections)
                if self._apply_staged(connection, tables, ledger, stage, report, exact=exact):
                    return
                _log.warning(
                    "batch %d for table %s is staged anew: another writer has moved its ledger in between",
                    self.transaction.batch.batch_id,
                    settings.table,
                )
            except RowRefusedError:
                exact = True
            opened.remove_stage()
        raise SinkError(
            f"batch {self.transaction.batch.batch_id} for table {settings.table} met another writer {_RACES} times; is "
            "a second copy of the query running? stop one, or give each a name of its own; nothing of the batch was "
            "stored"
        )

    def _apply_staged(
        self,
        connection: sa.Connection,
        tables: Tables,
        ledger: Entries,
        stage: sa.Table,
        report: staging.Report,
        *,
        exact: bool,
    ) -> bool:
        """Apply what the tasks staged; False where the ledger has moved since it was read."""
        if report.refused is not None:
            raise RowRefusedError
        parts = report.statistics.offsets.spans.keys() | self.transaction.batch.moves(ledger)
        if not parts:
            return True
        with connection.begin() as transaction:
            locked = self._locked(connection, tables, parts)
            if any(locked.get(part) != ledger.get(part) for part in parts):
                transaction.rollback()
                return False
            staging.require_copied(connection, stage, report.copied)
            rows = staging.staged_rows(stage, list(report.copied))
            self.transaction.apply(connection, tables, ledger, rows, report.statistics, exact=exact)
        return True

    def _deduplication(self, ledger: Entries, *, exact: bool) -> Deduplication:
        """Return what is done to the rows; a `SinkError` refuses a batch that does not fit the ledger."""
        settings = self.settings
        validator = RowValidator(
            settings.key,
            no_nan=() if self.database.knows_nan else self.frame.names,
            no_infinity=not self.database.knows_infinity,
            no_nul=not self.database.takes_nul,
        )
        schema = staged_schema(self.frame, settings.sum_columns)
        below = self.transaction.batch.applied_below(ledger)
        exact |= settings.mode == "batch"  # where no row of a key is newer than another one
        return Deduplication(settings.table, schema, validator, settings.key, settings.sum_columns, below, exact)
