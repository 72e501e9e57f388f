"""`SqlSink`: a foreachBatch function whose effect on a table is exactly-once.

Spark may repeat a batch: after a crash, a lost checkpoint, a retried task. The sink records the last batch of each
partition in the database itself (`sql.ledger`), in the same transaction as the rows (`batch_write`).
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tenacity

from penstock.clients.rights import Right
from penstock.database_url import parse_database_url
from penstock.spark_sink.ledger.rules import Batch, LedgerEntry
from penstock.spark_sink.sinks.frames import numbered
from penstock.spark_sink.sinks.sink import Changes, Entries, LedgerSink, micro_batch, origin_of, stored_batches
from penstock.spark_sink.sinks.sql.batch_write import BatchWrite
from penstock.spark_sink.sinks.sql.databases.errors import TransientSinkError, shown
from penstock.spark_sink.sinks.sql.ledger import (
    Owner,
    ledger_exists,
    ledger_table,
    lock_ledger,
    read_ledger,
    write_ledger,
)
from penstock.spark_sink.sinks.sql.settings import SqlSinkSettings
from penstock.spark_sink.sinks.sql.tables import prepare_ledger
from penstock.spark_sink.source.plan import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_log = logging.getLogger("penstock.spark_sink")

#: Seconds before a batch is tried again: about 0.2, doubled each time, up to 10.
_WAIT = tenacity.wait_exponential(multiplier=0.2, max=10) + tenacity.wait_random(0, 0.2)


@dataclass(frozen=True, slots=True)
class SqlSink(SqlSinkSettings, LedgerSink):
    """Writes micro-batches into a table of SQLite, PostgreSQL, MySQL or MariaDB, each row exactly once.

    Use it with `writeStream.foreachBatch(sink)`, once for each batch and table. The frame needs `topic`, `partition`
    and `offset` besides its own columns; a message may have several rows. A sink can be pickled. The driver keeps a
    session of a server from one batch of a query to the next.

    With a key, the newest row of a key, by offset, replaces the stored one. Kafka orders the messages of one partition
    only: use a key whose messages share a partition. Otherwise the higher offset wins within a batch, and the later
    batch across batches. Without a key every row is appended.

    Executors fill a server. Each must reach it and have its driver, psycopg or PyMySQL; Spark's driver gets only a
    report. For SQLite, and with `staging="driver"`, the batch is collected on the driver, up to `max_batch_bytes`:
    limit it with the source's `maxOffsetsPerTrigger`. Values are stored unchanged, or not at all. In SQLite, decimals
    of more than 15 digits are stored as text, and a row with NaN, which it would store as NULL, is refused. Also
    refused are rows with a value that a server's column would round, cut or pad, and times outside the years 1 to 9999.

    A refused row fails the batch, and so the query. With `dead_letters`, its message goes there, the batch goes on, and
    the table is as if the message had never been sent. Other rows of the message are left out, too, so that a replay of
    the message stores none twice. Dead letters are acknowledged before the database commits: a crash in between writes
    them again.

    Repeated rows are left out, with a warning. Refused are a batch that starts above the ledger's end, as after a
    restore of the database, rows of an earlier batch, and a second frame of one batch. The ledger belongs to the query
    by name, which is required, so that several queries may fill one table. Under another name all rows are stored
    again. The ledger knows topics by name: for topics of one name on two clusters, use two queries or two
    `ledger_table`s.

    Totals of windows and other results of state belong to no message. With `mode="batch"` the frame has no position,
    and the rows of a batch apply once by Spark's id of the query and the batch number. Use output mode `update` or
    `complete` with the grouping columns as key; `append` also works without a key. Only the query's own checkpoint can
    continue such a table; another one is refused.
    """

    def check(self, schema: StructType) -> None:
        """Check whether frames of this schema can be stored, and create missing tables.

        Raises:
            SinkError: they cannot, with the reason for each column; or the database cannot be reached.
            MissingRightError: a permission on the tables is missing.
        """
        frame = self.arrow_frame(schema)
        nothing = Batch(f"table {self.table}", 0, planned={("(check)", 0): (0, 1)})  # an impossible topic name
        BatchWrite(self, frame, Owner("", self.table), nothing, None).rehearse()

    def least_rights(self, topics: Iterable[str]) -> list[Right]:
        """Return the permissions in Kafka that it needs for rows of some topics: those of its dead letters."""
        return [] if self.dead_letters is None else self.dead_letters.least_rights(topics)

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Store one micro-batch.

        Raises:
            SinkError: the batch cannot be stored; nothing of it was.
            MissingRightError: the same, because a permission is missing.
        """
        origin, target, ledger = origin_of(batch, self.name), f"table {self.table}", self._command_options()
        is_numbered = self.mode == "batch"
        what = micro_batch(batch, batch_id, origin, target, ledger, is_numbered=is_numbered)
        write = BatchWrite(self, self.arrow_frame(batch.schema), Owner(origin.query, self.table), what, origin.run)
        rows = numbered(batch, batch_id) if is_numbered else batch

        tries = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.tries),
            wait=_WAIT,
            retry=tenacity.retry_if_exception_type(TransientSinkError),
            before_sleep=lambda state: _log.warning(
                "batch %d for table %s is tried again: %s",
                batch_id,
                self.table,
                state.outcome and state.outcome.exception(),
            ),
            reraise=True,
        )
        with stored_batches.one_call(self.ledger_key, origin, what):
            tries(write.store, rows)

    @property
    def has_ledger(self) -> bool:
        """Whether it has a ledger of offsets. With `mode="batch"` it has batch numbers, where no query can begin."""
        return self.mode == "position"

    def ledger(self) -> dict[str, dict[TopicPartition, LedgerEntry]]:
        """Return the entries of each query that fills the table, by query name. Empty before the first batch.

        Raises:
            SinkError: the database does not answer.
            MissingRightError: the permission to read the ledger is missing.
        """
        return {owner.query: entries for owner, entries in self._read_all().items() if owner.target == self.table}

    def targets(self) -> set[str]:
        """Return all tables in the ledger, also of other sinks. Raises as `ledger`."""
        return {owner.target for owner in self._read_all()}

    def _read_all(self) -> dict[Owner, Entries]:
        with self.session() as connection, connection.begin():
            ledger = ledger_table(self.ledger_table, self.schema)
            return read_ledger(connection, ledger) if ledger_exists(connection, ledger) else {}

    def _change_ledger(
        self, query: str, parts: Collection[TopicPartition], change: Callable[[Entries], Changes]
    ) -> None:
        owner = Owner(query, self.table)
        with self.session() as connection:
            ledger = prepare_ledger(self, connection)
            with connection.begin():
                if new := change(lock_ledger(connection, self.database, ledger, owner, parts)):
                    write_ledger(connection, ledger, owner, new)

    @property
    def ledger_key(self) -> Hashable:
        """The identity of its ledger in this process."""
        return self.url, self.schema, self.table, self.ledger_table

    def _command_options(self) -> str:
        """Return the options by which `penstock sink` finds the ledger, without user and password."""
        given = {"--sql": shown(parse_database_url(self.url)), "--ledger-table": self.ledger_table}
        given |= {"--target": self.table} if self.schema is None else {"--schema": self.schema, "--target": self.table}
        return shlex.join(word for pair in given.items() for word in pair)
