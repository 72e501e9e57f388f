"""How one micro-batch gets into the database, in three steps: plan, stage, apply.

    plan:   read the ledger, and decide by its rules which rows are left out
    stage:  put the others into a staging table, through the driver or from executors (`stages`)
    apply:  { lock the ledger and compare it with the plan, upsert, dead letters, advance the ledger }

What stands in braces is one transaction (`batch_transaction`). Where another writer has moved the ledger meanwhile, all
three are done again. A batch is applied as a whole first. Where the database refuses that for the sake of a row, the
batch comes again with every row of it, to be applied in pieces until the refused rows are alone: then it ends as if row
after row had been applied in the order of offsets, without the messages of which a row was refused.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import pyarrow as pa
import sqlalchemy as sa

from penstock.errors import SinkError
from penstock.spark_sink.sinks.sql.batch_transaction import BatchTransaction
from penstock.spark_sink.sinks.sql.ledger import Entries, lock_ledger, read_ledger
from penstock.spark_sink.sinks.sql.rows.deduplication import Deduplication, staged_schema
from penstock.spark_sink.sinks.sql.rows.row_validator import RowValidator
from penstock.spark_sink.sinks.sql.settings import SqlSinkSettings
from penstock.spark_sink.sinks.sql.stages import Stage, Staged, open_stage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("penstock.spark_sink")

#: How often a batch is staged, where another writer has moved the ledger in between or rows are refused.
_TRIES = 6


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done to the rows of a batch, upon the ledger as it was read."""

    ledger: Entries
    deduplication: Deduplication


class Outcome(Enum):
    """What came of a batch that was staged."""

    STORED = auto()
    #: Another writer has moved the ledger since it was read; nothing was stored.
    MOVED = auto()
    #: The database refused it for the sake of a row; nothing was stored.
    REFUSED = auto()


@dataclass(frozen=True, slots=True)
class BatchWrite:
    """One micro-batch, of frames with these columns, on its way into a table."""

    url: sa.URL
    frame: pa.Schema
    transaction: BatchTransaction

    @property
    def settings(self) -> SqlSinkSettings:
        """Those of the sink."""
        return self.transaction.settings

    def store(self, batch: DataFrame) -> None:
        """Store the batch; may be called again where it failed, and then finds what it has stored.

        After a `SinkError` nothing was stored; after a `LostTaskError` neither, and another try may help. Nor was it
        after an error of SQLAlchemy's, unless that came at the commit: then it is not known.
        """
        settings, batch_id, exact = self.settings, self.transaction.batch.batch_id, False
        with open_stage(self.transaction, self.url, self.frame, batch) as stage:
            for _ in range(_TRIES):
                plan = self.plan(stage, exact=exact)
                with stage.staged(plan.deduplication) as staged:
                    outcome = self.apply(stage, plan, staged)
                    if outcome is Outcome.STORED:
                        return
                    staged.transaction.rollback()
                stage.clear()
                exact = exact or outcome is Outcome.REFUSED
                if outcome is Outcome.MOVED:
                    _log.warning(
                        "batch %d for table %s is staged again: another writer has moved its ledger in between",
                        batch_id,
                        settings.table,
                    )
        raise SinkError(
            f"batch {batch_id} for table {settings.table} met another writer {_TRIES - 1} times; is a second copy of "
            "the query running? stop one, or give each a name of its own; nothing of the batch was stored"
        )

    def plan(self, stage: Stage, *, exact: bool) -> Plan:
        """Read the ledger and decide which rows are left out; a `SinkError` refuses a batch that does not fit it."""
        settings, database = self.settings, self.settings.database
        with stage.connection.begin():
            ledger = read_ledger(stage.connection, stage.tables.ledger, self.transaction.owner)
        validator = RowValidator(
            settings.key,
            no_nan=() if database.knows_nan else self.frame.names,
            no_infinity=not database.knows_infinity,
            no_nul=not database.takes_nul,
        )
        schema = staged_schema(self.frame, settings.sum_columns)
        below = self.transaction.batch.applied_below(ledger)
        exact |= settings.mode == "batch"  # where no row of a key is newer than another one
        summed = settings.sum_columns
        return Plan(ledger, Deduplication(settings.table, schema, validator, settings.key, summed, below, exact))

    def apply(self, stage: Stage, plan: Plan, staged: Staged) -> Outcome:
        """Apply what was staged, in its transaction."""
        if staged.rows is None:
            return Outcome.REFUSED
        transaction, connection, ledger = self.transaction, stage.connection, stage.tables.ledger
        parts = staged.statistics.offsets.spans.keys() | transaction.batch.moves(plan.ledger)
        if not parts:
            return Outcome.STORED
        locked = lock_ledger(connection, self.settings.database.insert_new, ledger, transaction.owner, parts)
        if any(locked.get(part) != plan.ledger.get(part) for part in parts):
            return Outcome.MOVED
        is_applied = transaction.apply(
            connection, stage.tables, plan.ledger, staged.rows, staged.statistics, exact=plan.deduplication.exact
        )
        return Outcome.STORED if is_applied else Outcome.REFUSED
