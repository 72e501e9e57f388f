"""`SqlSink`: a foreachBatch function whose effect on a table is exactly-once.

Spark may hand a batch over again: after a crash, a lost checkpoint, a retried task. The sink keeps the next
offset of each partition in the database itself (`ledger`), in the same transaction as the rows (`merge`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.sql.elements import quoted_name

from penstock.config import names, not_empty
from penstock.errors import ConfigurationError, SinkError
from penstock.spark_sink import merge
from penstock.spark_sink.databases import Database, database_of, parse_url
from penstock.spark_sink.ledger import Span, advanced, ledger_table, replayed
from penstock.spark_sink.planning import TopicPartition
from penstock.spark_sink.sql_errors import refused
from penstock.spark_sink.sql_schema import POSITION, columns_of, require_fitting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("penstock.spark_sink")


@dataclass(frozen=True, slots=True)
class SqlSink:
    """Writes micro-batches into a table of SQLite or PostgreSQL, each row once whatever is repeated.

    Use it with `writeStream.foreachBatch(sink)`. The frame carries `topic`, `partition` and `offset` beside
    its own columns; several rows may come from one message. The batch is collected on the driver as Arrow
    columns: bound it with the source's `maxOffsetsPerTrigger`. A sink holds no connection and can be pickled.

    With a key, the newest row of a key replaces the one in the table, by offset. Kafka orders the messages of
    one partition only: use a key whose messages share a partition. Without a key every row is appended.

    A topic that was deleted and made anew begins at offset 0, below its ledger: its rows count as applied
    until its rows are removed from the ledger table. Rows left out are logged as a warning.

    Attributes:
        url: database address in SQLAlchemy's form, `sqlite:///file.db` or `postgresql+psycopg://...`; it may
            hold a password and is never shown.
        table: table to write; made from the frame's columns if it does not exist.
        key: columns that identify a row, never NULL; empty to append.
        add: number columns that are added to what the table holds instead of replacing it, for totals.
        keep_position: whether `topic`, `partition` and `offset` are stored as well.
        ledger_table: table of the ledger; queries that fill one table from the same topic in different ways
            need one each.
    """

    url: str = field(repr=False)
    table: str
    key: Sequence[str] = ()
    add: Sequence[str] = field(default=(), kw_only=True)
    keep_position: bool = field(default=False, kw_only=True)
    ledger_table: str = field(default="penstock_ledger", kw_only=True)

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigurationError: a setting is wrong; it is named.
        """
        parse_url(self.url)
        not_empty("table", self.table)
        not_empty("ledger_table", self.ledger_table)
        if len({self.table, self.ledger_table, merge.STAGING}) < 3:  # noqa: PLR2004 - three names, all different
            raise ConfigurationError(
                f"table and ledger_table must differ from each other and from {merge.STAGING}; rename one"
            )
        # Tuples, so that a frozen sink cannot be changed through a list that the caller still holds.
        object.__setattr__(self, "key", names("key", self.key) if self.key else ())
        object.__setattr__(self, "add", names("add", self.add) if self.add else ())
        if self.add and not self.key:
            raise ConfigurationError("add needs a key: without one every row is appended; give key=[...]")
        both = sorted(set(self.add) & set(self.key))
        if both:
            raise ConfigurationError(f"add names {', '.join(both)}, which is part of the key; take it out of one")

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Store one micro-batch.

        Raises:
            SinkError: the batch cannot be stored; nothing of it was.
        """
        rows = batch.toArrow()
        self._require_columns(rows.schema)
        if rows.num_rows == 0:
            return
        spans = _spans(rows)
        self._refuse_empty_keys(rows)
        url = parse_url(self.url)
        database = database_of(url)
        try:
            with database.begin(url) as connection:
                self._apply(connection, database, rows, spans, batch_id)
        except sa.exc.SQLAlchemyError as error:
            # Not chained: drivers quote keys and values in their texts, which end in Spark's log.
            raise refused(error, self.table, url, batch_id) from None

    def _apply(
        self,
        connection: sa.Connection,
        database: Database,
        rows: pa.Table,
        spans: dict[TopicPartition, Span],
        batch_id: int,
    ) -> None:
        target, ledger = self._prepared_tables(connection, database, rows.schema)
        applied = merge.lock_ledger(connection, database, ledger, self.table, spans)
        staged = sa.Table(
            merge.STAGING,
            sa.MetaData(),
            *columns_of(rows.schema, rows.schema.names),
            prefixes=["TEMPORARY"],
            postgresql_on_commit="DROP",  # SQLite's ends with the connection
        )
        staged.create(connection, checkfirst=False)
        database.stage(connection, staged, rows)
        again = replayed(applied, spans)
        if again:
            count = merge.drop_applied(connection, staged, ledger, self.table)
            _log.warning(
                "batch %d: %d of %d rows for table %s were applied before and are left out (%s)",
                batch_id,
                count,
                rows.num_rows,
                self.table,
                ", ".join(f"{topic}[{n}] up to offset {span.last}" for (topic, n), span in sorted(again.items())),
            )
        if self.key:
            merge.upsert(connection, database, staged, target, key=self.key, add=self.add)
        else:
            merge.append(connection, staged, target)
        merge.advance_ledger(connection, ledger, self.table, advanced(applied, spans))

    def _prepared_tables(
        self, connection: sa.Connection, database: Database, schema: pa.Schema
    ) -> tuple[sa.Table, sa.Table]:
        metadata = sa.MetaData()
        stored = [name for name in schema.names if self.keep_position or name not in POSITION]
        target = sa.Table(quoted_name(self.table, quote=True), metadata, *columns_of(schema, stored, self.key))
        ledger = ledger_table(self.ledger_table, metadata)
        inspector = sa.inspect(connection)
        if not (inspector.has_table(self.table) and inspector.has_table(self.ledger_table)):
            database.lock_schema(connection)
            metadata.create_all(connection)
        require_fitting(connection, target, self.key)
        return target, ledger

    def _require_columns(self, schema: pa.Schema) -> None:
        missing = [name for name in (*POSITION, *self.key, *self.add) if name not in schema.names]
        if missing:
            raise SinkError(
                f"the frame for table {self.table} lacks {', '.join(missing)}; keep topic, partition and offset "
                "of the source, and every column of key and add, in the query's select"
            )
        hidden = [] if self.keep_position else [name for name in (*self.key, *self.add) if name in POSITION]
        if hidden:
            raise SinkError(
                f"table {self.table} has {', '.join(hidden)} in key or add, but keep_position is off; set it"
            )
        wrong = [name for name in self.add if not _is_number(schema.field(name).type)]
        if wrong:
            raise SinkError(f"add names {', '.join(wrong)}, which holds no numbers; cast it, or take it out of add")

    def _refuse_empty_keys(self, rows: pa.Table) -> None:
        """Refuse NULL in a key: databases hold any two of them for different, so rows would pile up."""
        for name in self.key:
            if rows[name].null_count:
                first = rows.filter(rows[name].is_null()).slice(0, 1)
                topic, partition, offset = (first[column][0].as_py() for column in POSITION)
                raise SinkError(
                    f"column {name} is part of the key of table {self.table} and is NULL in "
                    f"{rows[name].null_count} rows, the first from {topic}[{partition}] offset {offset}; "
                    "filter such rows out in the query, or give them a value with coalesce"
                )


def _spans(rows: pa.Table) -> dict[TopicPartition, Span]:
    """Return the offsets a batch carries, by partition."""
    for name in POSITION:
        if rows[name].null_count:
            raise SinkError(
                f"column {name} is NULL in {rows[name].null_count} rows; it must come from the source as it is"
            )
    found = rows.group_by(["topic", "partition"]).aggregate([("offset", "min"), ("offset", "max")])
    return {(row["topic"], row["partition"]): Span(row["offset_min"], row["offset_max"]) for row in found.to_pylist()}


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


__all__ = ["SqlSink"]
