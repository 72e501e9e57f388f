"""How one micro-batch gets into the database: the ways of its rows, and the one transaction that settles it.

    driver:     collect -> { lock the ledger, stage, merge, dead letters, advance the ledger }
    executors:  read the ledger -> stage from tasks -> { lock and compare the ledger, merge, dead letters, advance }

What stands in braces is one transaction. A batch is merged as a whole first. Where the database refuses that for the
sake of a row, all is rolled back and the batch comes again with every row of it, to be merged in pieces until the
refused rows are alone: then it ends as if row after row had been applied in the order of offsets, without the messages
of which a row was refused.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.sql.elements import quoted_name

from penstock.errors import SinkError
from penstock.spark_sink.ledger.sql_ledger import Standing, advanced, refuse_late, replayed
from penstock.spark_sink.sinks.sink import Origin
from penstock.spark_sink.sinks.sql import staging
from penstock.spark_sink.sinks.sql import upsert as merge
from penstock.spark_sink.sinks.sql.databases import Database
from penstock.spark_sink.sinks.sql.deduplication import Reduction, Taken, reduced, staged_schema
from penstock.spark_sink.sinks.sql.row_validator import Rejected, RowRefusedError, Screen, concerns_a_row, in_halves
from penstock.spark_sink.sinks.sql.schema import (
    POSITION,
    add_columns,
    casts_of,
    columns_of,
    lacks_columns,
    ledger_table,
    require_fitting,
    require_ledger,
    whole_sums,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock.spark_sink.sinks.sql.sink import SqlSink

_log = logging.getLogger("penstock.spark_sink")

#: Names of the temporary tables of a transaction.
STAGING = "penstock_stage"
ORDERED = "penstock_ordered"

#: How often a batch is staged anew because another writer has moved the ledger in between.
_RACES = 5


@dataclass(frozen=True, slots=True)
class Tables:
    """Where a batch goes: the way into the target table, and the ledger."""

    merging: merge.Merge
    ledger: sa.Table


@dataclass(slots=True)
class Outcome:
    """What is known of the tries of one batch.

    Attributes:
        is_asked: whether a commit was asked for, so that what stands of this batch may be of a try before.
    """

    is_asked: bool = False


@dataclass(frozen=True, slots=True)
class Publication:
    """One micro-batch on its way into a table.

    Attributes:
        sink: its settings.
        url: address of the database.
        database: what is particular to it.
        frame: the frame's columns.
        batch_id: number of the batch.
        origin: which query handed it over.
        outcome: what is known of the tries before.
    """

    sink: SqlSink
    url: sa.URL
    database: Database
    frame: pa.Schema
    batch_id: int
    origin: Origin
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def owner(self) -> merge.Owner:
        """Whose rows of the ledger the batch moves."""
        return merge.Owner(self.origin.query, self.sink.table)

    def prepare(self, connection: sa.Connection) -> Tables:
        """Make the tables, and columns, that do not exist and check those that do; the transaction is the caller's.

        Raises:
            SinkError: the table does not fit the frame.
        """
        sink = self.sink
        metadata = sa.MetaData()
        stored = [
            name for name in self.frame.names if name != sink.delete and (sink.keep_position or name not in POSITION)
        ]
        target = sa.Table(
            quoted_name(sink.table, quote=True),
            metadata,
            *columns_of(self.frame, stored, sink.key, sink.add),
            *(whole_sums(self.frame, sink.add) if self.url.get_backend_name() == "sqlite" else ()),
            schema=None if sink.schema is None else quoted_name(sink.schema, quote=True),
        )
        ledger = ledger_table(sink.ledger_table, metadata, sink.schema)
        inspector = sa.inspect(connection)
        if not all(inspector.has_table(name, schema=sink.schema) for name in (sink.table, sink.ledger_table)):
            self.database.lock_schema(connection)
            metadata.create_all(connection)
        require_ledger(connection, ledger)
        if sink.evolve and lacks_columns(connection, target):
            # The one who had the lock before may have added them: they are looked for again.
            self.database.lock_schema(connection)
            add_columns(connection, target)
        require_fitting(connection, target, sink.key, sink.add)
        casts = casts_of(connection, target)
        return Tables(merge.Merge(self.database, target, sink.key, sink.add, sink.delete, casts), ledger)

    def publish(self, batch: DataFrame) -> None:
        """Store the batch; may be called again where it failed, and then finds what it has stored.

        Raises:
            SinkError: nothing was stored.
            LostTaskError: the same, and another try may help.
            sqlalchemy.exc.SQLAlchemyError: the same, but at the commit, when it is not known; the database says why.
        """
        if self.sink.staging == "executors" and self.url.get_backend_name() == "postgresql":
            self.from_executors(batch, self.sink.writers)
        else:
            self.from_driver(batch)

    def from_driver(self, batch: DataFrame) -> None:
        """Collect the batch on the driver and store it.

        Raises:
            SinkError: nothing was stored.
            sqlalchemy.exc.SQLAlchemyError: the same; the database or its driver says why.
        """
        rows = batch.toArrow()
        if rows.num_rows == 0:
            return
        places = rows.select(POSITION).group_by(["topic", "partition"]).aggregate([]).to_pylist()
        parts = {(place["topic"], place["partition"]) for place in places if None not in place.values()}
        for exact in (False, True):
            try:
                with self.database.session(self.url) as connection, connection.begin():
                    tables = self.prepare(connection)
                    standing = merge.lock_ledger(connection, self.database, tables.ledger, self.owner, parts)
                    reduction = self._reduction(standing, exact=exact)
                    staged = sa.Table(
                        STAGING,
                        sa.MetaData(),
                        *columns_of(reduction.schema, reduction.schema.names, summed=self.sink.add),
                        prefixes=["TEMPORARY"],
                        postgresql_on_commit="DROP",  # SQLite's ends with the connection
                    )
                    staged.create(connection, checkfirst=False)
                    taken = Taken()
                    for piece in reduced(reduction, rows.to_batches(), taken):
                        self._stage(connection, staged, piece, exact=exact)
                    self._settle(connection, tables, standing, staged, taken, exact=exact)
            except RowRefusedError:
                continue
            return

    def _stage(self, connection: sa.Connection, staged: sa.Table, piece: pa.Table, *, exact: bool) -> None:
        try:
            self.database.stage(connection, staged, piece)
        except sa.exc.SQLAlchemyError as error:
            if exact or not concerns_a_row(error):
                raise
            raise RowRefusedError from None

    def from_executors(self, batch: DataFrame, writers: int) -> None:
        """Copy the batch into a staging table from executors and merge it from the driver. PostgreSQL only.

        Raises:
            SinkError: nothing was stored.
            sqlalchemy.exc.SQLAlchemyError: the same; the database or its driver says why.
        """
        sink = self.sink
        prefix = staging.stage_prefix(sink.table, sink.ledger_table)
        schema = staged_schema(self.frame, sink.add)
        # One session for all: should the server crash after the staging, then what was staged is gone, and so is this.
        with self.database.session(self.url) as connection:
            with connection.begin():
                tables = self.prepare(connection)
            staging.remove_left_over(connection, prefix, sink.schema, schema)
            exact = False
            for _ in range(_RACES):
                with connection.begin():
                    standing = merge.read_ledger(connection, tables.ledger, self.owner)
                stage = staging.create_stage(connection, prefix, sink.schema, schema)
                task = staging.StagingTask(
                    self.url.render_as_string(hide_password=False),
                    str(stage.name),
                    sink.schema,
                    self._reduction(standing, exact=exact),
                    sink.table,
                    self.batch_id,
                    sink.most_rejects,
                )
                try:
                    report = staging.run_tasks(batch, task, writers)
                    if self._settle_staged(connection, tables, standing, stage, report, exact=exact):
                        return
                    _log.warning(
                        "batch %d for table %s is staged anew: another writer has moved its ledger in between",
                        self.batch_id,
                        sink.table,
                    )
                except RowRefusedError:
                    exact = True
                finally:
                    staging.remove_stage(connection, stage)
        raise SinkError(
            f"batch {self.batch_id} for table {sink.table} met another writer {_RACES} times over; is a second copy of "
            "the query running? stop one, or give each a name of its own; nothing of the batch was stored"
        )

    def _settle_staged(
        self,
        connection: sa.Connection,
        tables: Tables,
        standing: Standing,
        stage: sa.Table,
        report: staging.Report,
        *,
        exact: bool,
    ) -> bool:
        """Settle what the tasks staged; False where the ledger has moved since it was read."""
        if not report.taken.spans:
            return True
        if report.refused is not None:
            raise RowRefusedError
        with connection.begin():
            locked = merge.lock_ledger(connection, self.database, tables.ledger, self.owner, report.taken.spans)
            if any(locked.offsets[part] != standing.offsets.get(part, 0) for part in report.taken.spans):
                return False
            staging.require_copied(connection, stage, report.copied)
            rows = staging.staged_rows(stage, list(report.copied))
            self._settle(connection, tables, locked, rows, report.taken, exact=exact)
        return True

    def _reduction(self, standing: Standing, *, exact: bool) -> Reduction:
        sink = self.sink
        postgresql = self.url.get_backend_name() == "postgresql"
        screen = Screen(sink.key, no_nan=() if postgresql else self.frame.names, no_nul=postgresql)
        return Reduction(staged_schema(self.frame, sink.add), screen, sink.key, sink.add, standing.offsets, exact)

    def _settle(
        self,
        connection: sa.Connection,
        tables: Tables,
        standing: Standing,
        staged: sa.FromClause,
        taken: Taken,
        *,
        exact: bool,
    ) -> None:
        """Merge what is staged, write dead letters, advance the ledger; the transaction and the lock are there.

        Raises:
            RowRefusedError: a row was refused; to be called anew with all rows, and `exact`.
            SinkError: more rows were refused than may be, or dead letters could not be written.
        """
        sink, run = self.sink, self.origin.run
        batch = None if run is None else f"{run}/{self.batch_id}"
        # A commit whose answer was lost is no second call of the sink.
        others = {part: one for part, one in standing.batches.items() if not (self.outcome.is_asked and one == batch)}
        refuse_late(others, taken.replayed, run, self.batch_id, f"table {sink.table}")
        self._tell_replayed(standing, taken)
        rejected = list(taken.rejected)
        if len(rejected) <= sink.most_rejects:
            if exact:
                rejected += self._merge_in_pieces(connection, tables.merging, staged, rejected)
            elif rejected:
                # Other rows of those messages may be in what was reduced: they are to be left out as well.
                raise RowRefusedError
            else:
                _merge_at_once(connection, tables.merging, staged)
        if rejected:
            self._give_up(sorted(rejected))
        offsets = advanced(standing.offsets, taken.spans)
        if offsets:
            merge.advance_ledger(connection, tables.ledger, self.owner, offsets, batch)
        self.outcome.is_asked = True

    def _merge_in_pieces(
        self, connection: sa.Connection, merging: merge.Merge, staged: sa.FromClause, before: list[Rejected]
    ) -> list[Rejected]:
        """Merge all rows but those of messages of which one is refused, now or before; return what is refused now.

        A message is stored whole or not at all: its dead letter may be sent again.
        """
        ordered, count = merge.numbered(connection, staged, ORDERED)
        merge.remove_messages(connection, ordered, {one.place for one in before})
        rejected: list[Rejected] = []
        while True:
            with connection.begin_nested() as tried:
                most = self.sink.most_rejects - len(before) - len(rejected)
                found = _refused_rows(connection, merging, ordered, count, most)
                rejected += found
                rows = merge.remove_messages(connection, ordered, {one.place for one in found})
                if rows == len(found) or len(found) > most:
                    return rejected
                tried.rollback()
            # Other rows of those messages may be merged by now.
            merge.remove_messages(connection, ordered, {one.place for one in found})

    def _give_up(self, rejected: list[Rejected]) -> None:
        """Write refused rows to the dead letters, or refuse the batch for their sake."""
        sink = self.sink
        if len(rejected) > sink.most_rejects or sink.dead_letters is None:
            remedy = (
                "give the sink dead_letters=DeadLetters(...) to let batches go on without such rows"
                if sink.dead_letters is None
                else f"more than max_rejects={sink.max_rejects} in one batch hint at a table that does not fit"
            )
            raise SinkError(
                f"batch {self.batch_id} was refused by table {sink.table}: a row from {rejected[0]}; nothing of the "
                f"batch was stored; correct the query or the table, or {remedy}"
            )
        sink.dead_letters.write(rejected)
        _log.warning(
            "batch %d: %d rows were refused by table %s and are dead letters, the first from %s",
            self.batch_id,
            len(rejected),
            sink.table,
            rejected[0],
        )

    def _tell_replayed(self, standing: Standing, taken: Taken) -> None:
        if taken.replayed:
            again = replayed(standing.offsets, taken.spans)
            _log.warning(
                "batch %d: %d of %d rows for table %s were applied before and are left out (%s)",
                self.batch_id,
                sum(taken.replayed.values()),
                taken.rows,
                self.sink.table,
                ", ".join(f"{topic}[{n}] up to offset {span.last}" for (topic, n), span in sorted(again.items())),
            )


def _refused_rows(
    connection: sa.Connection, merging: merge.Merge, ordered: sa.Table, count: int, most: int
) -> list[Rejected]:
    """Merge numbered rows in pieces and return those that are refused, and no more than one above `most`."""
    number = ordered.c[merge.NUMBER]
    rejected: list[Rejected] = []

    def apply(first: int, last: int) -> None:
        _merge(connection, merging, sa.select(ordered).where(number.between(first, last)).subquery())

    def set_aside(row: int, reason: str) -> bool:
        place = connection.execute(sa.select(*(ordered.c[name] for name in POSITION)).where(number == row)).one()
        rejected.append(Rejected(place[0], place[1], place[2], reason))
        return len(rejected) <= most

    in_halves(connection, count, apply, set_aside)
    return rejected


def _merge_at_once(connection: sa.Connection, merging: merge.Merge, staged: sa.FromClause) -> None:
    try:
        _merge(connection, merging, staged)
    except sa.exc.SQLAlchemyError as error:
        if not concerns_a_row(error):
            raise
        raise RowRefusedError from None


def _merge(connection: sa.Connection, merging: merge.Merge, staged: sa.FromClause) -> None:
    merging.apply(connection, staged)
    if connection.dialect.name == "postgresql":
        # What would be refused at the commit is refused here, where it can be found which row it was.
        connection.exec_driver_sql("SET CONSTRAINTS ALL IMMEDIATE")


__all__ = ["ORDERED", "STAGING", "Publication", "Tables"]
