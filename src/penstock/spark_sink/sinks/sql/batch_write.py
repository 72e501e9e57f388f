"""Writes one micro-batch into the database in three steps: plan, stage, apply.

    plan:   read the ledger, and decide by its rules which rows are left out
    stage:  put the others into a staging table, through the driver or from executors (`stages`)
    apply:  { lock the ledger and compare it with the plan, upsert, dead letters, advance the ledger }

The braces are one transaction. If another writer has moved the ledger meanwhile, the batch is tried again. It is first
applied as a whole. If the database refuses a row, the batch is repeated with all its rows and applied in pieces, until
the refused messages are found. The result is as if messages had been applied one by one in order of offset, without the
refused ones.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import sqlalchemy as sa

from penstock.errors import SinkError
from penstock.spark_sink.ledger.rules import Batch, warn_left_out
from penstock.spark_sink.sinks.frames import POSITION, collected
from penstock.spark_sink.sinks.sink import Entries
from penstock.spark_sink.sinks.sql.databases.errors import RefusedRowError, TransientSinkError
from penstock.spark_sink.sinks.sql.dead_letters import Rejected
from penstock.spark_sink.sinks.sql.ledger import Owner, lock_ledger, read_ledger, write_ledger
from penstock.spark_sink.sinks.sql.rows import StagingTask
from penstock.spark_sink.sinks.sql.settings import SqlSinkSettings
from penstock.spark_sink.sinks.sql.stages import Staged, checked, staged_batch
from penstock.spark_sink.sinks.sql.tables import NUMBER, Tables, numbered, staged_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("penstock.spark_sink")


@dataclass(frozen=True, slots=True)
class BatchWrite:
    """One micro-batch on its way into a table.

    `owner` identifies its rows in the ledger; `run` is None if the query's run is unknown.
    """

    settings: SqlSinkSettings
    frame: pa.Schema
    owner: Owner
    batch: Batch
    run: str | None

    def rehearse(self) -> None:
        """Check the tables and run every statement of a batch without rows, to find missing permissions early.

        It changes nothing except that it creates missing tables and columns.
        """
        with self.settings.session() as connection:
            tables = checked(self.settings, self.frame, connection, self.owner, None)
            self._write(connection, tables, None, exact=self.settings.dead_letters is not None)

    def store(self, rows: DataFrame) -> None:
        """Store the batch. It may be called again after a failure, and then finds rows that it has stored.

        After `SinkError` nothing was stored. After `TransientSinkError` another try may help; if it came at the commit,
        it is unknown whether the batch was stored.
        """
        settings, batch_id = self.settings, self.batch.batch_id
        on_executors = settings.stages_on_executors
        given = rows if on_executors else collected(rows, settings.max_batch_bytes, batch_id, f"table {settings.table}")
        with settings.session(batch_id, is_kept=on_executors and self.run is not None) as connection:
            tables = checked(settings, self.frame, connection, self.owner, self.run)
            # With mode="batch" no row of a key is newer than another one: all are needed.
            if not self._write(connection, tables, given, exact=settings.mode == "batch"):
                self._write(connection, tables, given, exact=True)

    def _write(self, connection: sa.Connection, tables: Tables, rows: Any, *, exact: bool) -> bool:
        """Plan, stage and apply the batch; with rows=None, roll it back.

        Returns whether it was stored: unless `exact`, with every row, the database may refuse it because of a row.
        """
        with connection.begin():
            planned = read_ledger(connection, tables.ledger, self.owner).get(self.owner, {})
        columns = staged_schema(self.frame, self.settings.sum_columns)
        task = StagingTask(self.settings, columns, self.batch.applied_below(planned), exact, self.batch.batch_id)
        with staged_batch(connection, tables, rows, task) as staged:
            is_stored = self.apply(connection, tables, planned, staged, exact=exact)
            if rows is None or not is_stored:
                connection.rollback()
            return is_stored

    def apply(
        self, connection: sa.Connection, tables: Tables, planned: Entries, staged: Staged, *, exact: bool
    ) -> bool:
        """Apply the staged rows in their transaction, if the ledger is still as planned.

        Returns False if the database refuses a row. Raises `TransientSinkError` if another writer has moved the ledger,
        and `SinkError` if too many rows were refused or dead letters could not be written.
        """
        (rows, report), settings, ledger = staged, self.settings, tables.ledger
        offsets = report.offsets
        parts = offsets.spans.keys() | self.batch.moves(planned)
        if not parts:
            return True
        locked = lock_ledger(connection, settings.database, ledger, self.owner, parts, known=planned)
        if any(locked.get(part) != planned.get(part) for part in parts):
            raise TransientSinkError(
                f"batch {self.batch.batch_id} for table {settings.table} met another writer, which has moved its "
                "ledger since it was read; nothing of the batch was stored; is a second copy of the query running? "
                "stop one, or give each a name of its own"
            )
        entries = self.batch.entries_after(planned, offsets.spans)
        warn_left_out(self.batch.batch_id, self.batch.target, offsets)
        if settings.mode == "batch" and settings.key:
            self._refuse_twins(connection, tables, rows)
        rejected = report.rejected
        if len(rejected) <= settings.most_rejects and exact:
            rejected = rejected + self._upsert_in_pieces(connection, tables, rows, rejected)
        elif len(rejected) <= settings.most_rejects:
            if rejected:
                return False  # the deduplicated rows may include other rows of their messages
            try:
                tables.apply(connection, rows)
            except RefusedRowError:
                return False
        if rejected:
            self._write_dead_letters(sorted(rejected))
        if entries:
            write_ledger(connection, ledger, self.owner, entries)
        return True

    def _upsert_in_pieces(
        self, connection: sa.Connection, tables: Tables, staged: sa.FromClause, before: list[Rejected]
    ) -> list[Rejected]:
        """Upsert all messages except those refused before; return the newly refused ones.

        A message is stored completely or not at all, because its dead letter may be replayed. Pieces are as large as
        the database accepts them, each in a savepoint.
        """
        without = {message.place for message in before}
        ordered, count = numbered(self.settings.database, connection, staged, without)
        number, most = ordered.c[NUMBER], self.settings.most_rejects - len(before)
        rejected: list[Rejected] = []
        pieces = [(1, count)]
        while pieces and len(rejected) <= most:
            first, last = pieces.pop()
            piece = sa.select(ordered).where(number.between(first, last))
            try:
                with connection.begin_nested():
                    tables.apply(connection, piece.subquery())
            except RefusedRowError as error:
                if first < last:
                    middle = (first + last) // 2
                    pieces += [(middle + 1, last), (first, middle)]
                    continue
                if not count:
                    text = f"table {self.settings.table} refuses a statement without rows: {error}; change its trigger"
                    raise SinkError(text) from None
                places = piece.with_only_columns(*(ordered.c[name] for name in POSITION)).limit(1)
                topic, partition, offset = connection.execute(places).one()
                rejected.append(Rejected(topic, partition, offset, str(error)))
        return rejected

    def _refuse_twins(self, connection: sa.Connection, tables: Tables, staged: sa.FromClause) -> None:
        """Raise `SinkError` for several rows of one key that have no order."""
        keys = [tables.value(staged, name) for name in self.settings.key]
        twins = sa.select(sa.func.count()).select_from(staged).group_by(*keys).having(sa.func.count() > 1).limit(1)
        if connection.execute(twins).first():
            raise SinkError(
                f"batch {self.batch.batch_id} has several rows of one key for {self.batch.target}, of which none is "
                "the newest; have all columns that the query groups by in the key; nothing of the batch was stored"
            )

    def _write_dead_letters(self, rejected: list[Rejected]) -> None:
        """Write the messages of refused rows to the dead-letter topic, or refuse the batch."""
        settings, batch_id = self.settings, self.batch.batch_id
        if len(rejected) > settings.most_rejects or settings.dead_letters is None:
            remedy = (
                "filter such rows out"
                if settings.mode == "batch"
                else "give the sink dead_letters=DeadLetters(...) to let batches go on without such rows"
                if settings.dead_letters is None
                else f"more than max_rejects={settings.max_rejects} in one batch hint at a table that does not fit"
            )
            raise SinkError(
                f"batch {batch_id} was refused by table {settings.table}: a row from {rejected[0]}; nothing "
                f"of the batch was stored; correct the query or the table, or {remedy}"
            )
        settings.dead_letters.write(rejected)
        _log.warning(
            "batch %d: %d rows were refused by table %s and are dead letters, the first from %s",
            batch_id,
            len(rejected),
            settings.table,
            rejected[0],
        )
