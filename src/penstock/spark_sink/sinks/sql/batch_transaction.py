"""The one database transaction that applies a staged batch: upsert, dead letters, and the advance of the ledger."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import sqlalchemy as sa

from penstock.errors import SinkError
from penstock.spark_sink.ledger.rules import Batch, warn_left_out
from penstock.spark_sink.sinks.position import POSITION
from penstock.spark_sink.sinks.sql.databases.errors import concerns_a_row
from penstock.spark_sink.sinks.sql.databases.upsert import NUMBER, Upsert, numbered, remove_messages
from penstock.spark_sink.sinks.sql.ledger import Entries, Owner, write_ledger
from penstock.spark_sink.sinks.sql.rows.deduplication import BatchStatistics
from penstock.spark_sink.sinks.sql.rows.row_validator import Rejected, in_halves
from penstock.spark_sink.sinks.sql.settings import ORDERED, SqlSinkSettings
from penstock.spark_sink.sinks.sql.tables import Tables

_log = logging.getLogger("penstock.spark_sink")


@dataclass(frozen=True, slots=True)
class BatchTransaction:
    """Applies one batch, in as many tries as it takes.

    `owner` says whose rows of the ledger it moves; `run` is None where the query's run is not known.
    """

    settings: SqlSinkSettings
    owner: Owner
    batch: Batch
    run: str | None

    def apply(
        self,
        connection: sa.Connection,
        tables: Tables,
        ledger: Entries,
        staged: sa.FromClause,
        statistics: BatchStatistics,
        *,
        exact: bool,
    ) -> bool:
        """Upsert what is staged, write dead letters, advance the ledger; the transaction and the lock are there.

        False where a row was refused: the transaction is to be rolled back, and this called with all rows, and `exact`.
        Raises `SinkError` where more rows were refused than may be, or dead letters could not be written.
        """
        settings = self.settings
        entries = self.batch.entries_after(ledger, statistics.offsets.spans)
        warn_left_out(self.batch.batch_id, self.batch.target, statistics.offsets)
        rejected = list(statistics.rejected)
        if settings.mode == "batch" and settings.key:
            self._refuse_twins(connection, staged)
        if len(rejected) <= settings.most_rejects:
            if exact:
                rejected += self._upsert_in_pieces(connection, tables.upsert, staged, rejected)
            # Other rows of messages that are refused may be in what was deduplicated: they are left out as well.
            elif rejected or not _upsert_at_once(connection, tables.upsert, staged):
                return False
        if rejected:
            self._write_dead_letters(sorted(rejected))
        if entries:
            write_ledger(connection, tables.ledger, self.owner, entries)
        return True

    def _refuse_twins(self, connection: sa.Connection, staged: sa.FromClause) -> None:
        """Raise `SinkError` for several rows of one key, of which none is newer than the others."""
        keys = [staged.c[name] for name in self.settings.key]
        twins = sa.select(sa.func.count()).select_from(staged).group_by(*keys).having(sa.func.count() > 1).limit(1)
        if connection.execute(twins).first():
            raise SinkError(
                f"batch {self.batch.batch_id} has several rows of one key for {self.batch.target}, of which none is "
                "the newest; have all columns that the query groups by in the key; nothing of the batch was stored"
            )

    def _upsert_in_pieces(
        self, connection: sa.Connection, upsert: Upsert, staged: sa.FromClause, before: list[Rejected]
    ) -> list[Rejected]:
        """Upsert all rows but those of messages of which one is refused, now or before; return what is refused now.

        A message is stored whole or not at all: its dead letter may be sent again.
        """
        ordered, count = numbered(upsert.database, connection, staged, ORDERED)
        remove_messages(connection, ordered, {one.place for one in before})
        rejected: list[Rejected] = []
        while True:
            with connection.begin_nested() as tried:
                most = self.settings.most_rejects - len(before) - len(rejected)
                found = _refused_rows(connection, upsert, ordered, count, most)
                rejected += found
                rows = remove_messages(connection, ordered, {one.place for one in found})
                if rows == len(found) or len(found) > most:
                    return rejected
                tried.rollback()
            # Other rows of those messages may be stored by now.
            remove_messages(connection, ordered, {one.place for one in found})

    def _write_dead_letters(self, rejected: list[Rejected]) -> None:
        """Write refused rows to the dead letters, or refuse the batch for their sake."""
        settings = self.settings
        if len(rejected) > settings.most_rejects or settings.dead_letters is None:
            remedy = (
                "filter such rows out"
                if settings.mode == "batch"
                else "give the sink dead_letters=DeadLetters(...) to let batches go on without such rows"
                if settings.dead_letters is None
                else f"more than max_rejects={settings.max_rejects} in one batch hint at a table that does not fit"
            )
            raise SinkError(
                f"batch {self.batch.batch_id} was refused by table {settings.table}: a row from {rejected[0]}; nothing "
                f"of the batch was stored; correct the query or the table, or {remedy}"
            )
        settings.dead_letters.write(rejected)
        _log.warning(
            "batch %d: %d rows were refused by table %s and are dead letters, the first from %s",
            self.batch.batch_id,
            len(rejected),
            settings.table,
            rejected[0],
        )


def _refused_rows(
    connection: sa.Connection, upsert: Upsert, ordered: sa.Table, count: int, most: int
) -> list[Rejected]:
    """Upsert numbered rows in pieces and return those that are refused, and no more than one above `most`."""
    number = ordered.c[NUMBER]
    rejected: list[Rejected] = []

    def apply(first: int, last: int) -> None:
        _apply(connection, upsert, sa.select(ordered).where(number.between(first, last)).subquery())

    def set_aside(row: int, reason: str) -> bool:
        place = connection.execute(sa.select(*(ordered.c[name] for name in POSITION)).where(number == row)).one()
        rejected.append(Rejected(place[0], place[1], place[2], reason))
        return len(rejected) <= most

    in_halves(connection, count, apply, set_aside)
    return rejected


def _upsert_at_once(connection: sa.Connection, upsert: Upsert, staged: sa.FromClause) -> bool:
    """Upsert all rows; tell whether none was refused."""
    try:
        _apply(connection, upsert, staged)
    except sa.exc.SQLAlchemyError as error:
        if not concerns_a_row(error):
            raise
        return False
    return True


def _apply(connection: sa.Connection, upsert: Upsert, staged: sa.FromClause) -> None:
    upsert.apply(connection, staged)
    upsert.database.check_constraints(connection)
