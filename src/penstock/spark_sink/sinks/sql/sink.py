"""`SqlSink`: a foreachBatch function whose effect on a table is exactly-once.

Spark may hand a batch over again: after a crash, a lost checkpoint, a retried task. The sink keeps the next
offset of each partition in the database itself (`ledger`), in the same transaction as the rows (`sql_publication`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
import sqlalchemy as sa
import tenacity

from penstock.clients.rights import MissingRightError
from penstock.errors import ConfigurationError, PenstockError, SinkError
from penstock.options import names, not_empty, positive_int
from penstock.spark_sink.sinks.sink import Origin, arrow_schema, origin_of, require_places
from penstock.spark_sink.sinks.sql import upsert as merge
from penstock.spark_sink.sinks.sql.batch_write import ORDERED, STAGING, Publication
from penstock.spark_sink.sinks.sql.databases import database_of, parse_url
from penstock.spark_sink.sinks.sql.dead_letters import DeadLetters
from penstock.spark_sink.sinks.sql.errors import LostTaskError, facts_of, is_transient, refused
from penstock.spark_sink.sinks.sql.rights import NeededRights, is_forbidden, require_rights
from penstock.spark_sink.sinks.sql.schema import POSITION, SQLITE_DIGITS, ledger_table, require_ledger
from penstock.spark_sink.sinks.sql.staging import ATTEMPT
from penstock.spark_sink.source.planning import Offsets, TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_log = logging.getLogger("penstock.spark_sink")

#: Seconds before a batch is tried again: some 0.2, twice as many each time, up to 10.
_WAIT = tenacity.wait_exponential(multiplier=0.2, max=10) + tenacity.wait_random(0, 0.2)

#: Beginning of the names of columns and tables that the sink makes for itself.
_OWN = ATTEMPT.partition("_")[0] + "_"

#: Bytes of a name in PostgreSQL.
_LONGEST_NAME = 63


@dataclass(frozen=True, slots=True)
class SqlSink:
    """Writes micro-batches into a table of SQLite or PostgreSQL, each row once whatever is repeated.

    Use it with `writeStream.foreachBatch(sink)`, once for each batch and table. The frame carries `topic`,
    `partition` and `offset` beside its own columns; several rows may come from one message. A sink holds no
    connection and can be pickled.

    With a key, the newest row of a key replaces the one in the table, by offset. Kafka orders the messages of
    one partition only: use a key whose messages share a partition. Where they do not, the higher offset wins within
    a batch, and the later batch across batches. Without a key every row is appended.

    PostgreSQL is filled from the executors, each of which must reach it and have psycopg; nothing but a report comes
    to the driver. For SQLite the batch is collected on the driver: bound it with the source's `maxOffsetsPerTrigger`.
    Values are stored as they are, or not at all: in SQLite decimals of more than 15 digits are texts, and a row with
    NaN, which it would store as NULL, is refused.

    A row that the table refuses ends the batch, and with it the query, unless there are `dead_letters`: then its
    message goes there, the batch goes on, and the table ends as if the message had never been sent. Other rows of it
    are left out too, so that none is there twice when the message is replayed. Dead letters are acknowledged before
    the database commits: a crash in between writes them again.

    A topic that was deleted and made anew begins at offset 0, below its ledger: its rows count as applied
    until its rows are removed from the ledger table. Rows left out are logged as a warning. The ledger belongs to the
    query by name, so that several may fill one table; under another name all is stored again. It knows topics by name
    too: topics of one name on two clusters need a query, or a `ledger_table`, each.

    Attributes:
        url: database address in SQLAlchemy's form, `sqlite:///file.db` or `postgresql+psycopg://...`; it may
            hold a password. Errors show host, port and database of it.
        table: table to write, of PostgreSQL also as `schema.table`; made from the frame's columns if it does not exist,
            and checked if it does: where the query starts by `start_sink` and `App.sink`, at the first batch by plain
            `foreachBatch`.
        key: columns that identify a row, never NULL; empty to append.
        add: number columns that are added to what the table holds instead of replacing it, for totals. A table that is
            made has the widest type of their kind for them: BIGINT, DOUBLE PRECISION or NUMERIC(38). SQLite adds no
            decimals.
        delete: a boolean column of the frame that is not stored: where the newest row of a key has true in it, the
            key is deleted from the table. For tombstones, select `value IS NULL AS gone` and set `delete="gone"`.
        keep_position: whether `topic`, `partition` and `offset` are stored as well.
        ledger_table: table of the ledger, which many sinks may share.
        name: of the query, in the ledger; Spark's name of the query that hands the batches over if None. Spark Connect
            does not tell it, but for queries that `start_sink` starts.
        schema: schema of PostgreSQL that holds the table and the ledger; the connection's own if None.
        dead_letters: where the messages of refused rows go.
        max_rejects: refused rows that a batch may have; more end it.
        staging: for PostgreSQL, whether rows come from the executors or through the driver. Behind a pooler that
            gives each transaction another session, such as PgBouncer's transaction mode, use the driver.
        writers: connections that executors may have at a time.
        evolve: whether columns that the table lacks are added to it, empty in the rows that are there; those of the key
            never are.
        tries: how often a batch is tried in all, over some 20 seconds by default, where the database is away, loses
            the connection, or breaks a deadlock or a conflict of transactions at this batch's cost.
    """

    url: str = field(repr=False)
    table: str
    key: Sequence[str] = ()
    add: Sequence[str] = field(default=(), kw_only=True)
    delete: str | None = field(default=None, kw_only=True)
    keep_position: bool = field(default=False, kw_only=True)
    ledger_table: str = field(default="penstock_ledger", kw_only=True)
    name: str | None = field(default=None, kw_only=True)
    schema: str | None = field(default=None, kw_only=True)
    dead_letters: DeadLetters | None = field(default=None, kw_only=True)
    max_rejects: int = field(default=1_000, kw_only=True)
    staging: Literal["executors", "driver"] = field(default="executors", kw_only=True)
    writers: int = field(default=16, kw_only=True)
    evolve: bool = field(default=False, kw_only=True)
    tries: int = field(default=8, kw_only=True)

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigurationError: a setting is wrong; it is named.
        """
        url = parse_url(self.url)
        not_empty("table", self.table)
        self._split_table(url)
        not_empty("ledger_table", self.ledger_table)
        if self.name is not None:
            not_empty("name", self.name)
        if len({self.table, self.ledger_table, STAGING, ORDERED}) < 4:  # noqa: PLR2004 - four names, all different
            raise ConfigurationError(
                f"table and ledger_table must differ from each other and from {STAGING} and {ORDERED}; rename one"
            )
        # Tuples, so that a frozen sink cannot be changed through a list that the caller still holds.
        object.__setattr__(self, "key", names("key", self.key) if self.key else ())
        object.__setattr__(self, "add", names("add", self.add) if self.add else ())
        if self.add and not self.key:
            raise ConfigurationError("add needs a key: without one every row is appended; give key=[...]")
        both = sorted(set(self.add) & set(self.key))
        if both:
            raise ConfigurationError(f"add names {', '.join(both)}, which is part of the key; take it out of one")
        self._check_delete()
        if self.schema is not None:
            not_empty("schema", self.schema)
            if url.get_backend_name() == "sqlite":
                raise ConfigurationError("schema is set, but an SQLite file has none; leave it out")
        positive_int("max_rejects", self.max_rejects)
        positive_int("writers", self.writers)
        positive_int("tries", self.tries)
        if self.staging not in ("executors", "driver"):
            raise ConfigurationError(f"staging must be 'executors' or 'driver', but is {self.staging!r}")

    def _split_table(self, url: sa.URL) -> None:
        """Take `schema.table` for what everybody means by it; with `schema` set, a dot is a part of the name."""
        if self.schema is not None or "." not in self.table:
            return
        schema, _, table = self.table.partition(".")
        if url.get_backend_name() == "sqlite" or not schema or not table or "." in table:
            raise ConfigurationError(
                f"table is {self.table!r}, which is no name of a table and a schema; for PostgreSQL give schema and "
                "table apart, for SQLite a name without a dot"
            )
        object.__setattr__(self, "schema", schema)
        object.__setattr__(self, "table", table)

    def _check_delete(self) -> None:
        if self.delete is None:
            return
        not_empty("delete", self.delete)
        if not self.key or self.add:
            raise ConfigurationError(
                "delete needs a key, whose row it deletes, and goes with no add: a deleted total has no place to "
                "begin again from; give key=[...], and a sink of its own to the totals"
            )
        if self.delete in self.key or self.delete in POSITION:
            raise ConfigurationError(f"delete names {self.delete}, which the sink needs itself; name a column for it")

    @property
    def most_rejects(self) -> int:
        """Refused rows that a batch may have: none without dead letters."""
        return 0 if self.dead_letters is None else self.max_rejects

    def check(self, schema: StructType) -> None:
        """Judge whether frames of this schema can be stored, and make the tables that do not exist.

        Raises:
            SinkError: they cannot, column by column; or the database cannot be reached.
            MissingRightError: the sink may not write its tables.
        """
        publication = self._publication(schema, Origin(self.name or ""), -1)
        try:
            with publication.database.session(publication.url) as connection, connection.begin():
                publication.prepare(connection)
                require_rights(connection, f"table {self.table} cannot be written", self._needed_rights())
        except sa.exc.SQLAlchemyError as error:
            # Not chained: drivers quote keys and values in their texts, which end in Spark's log.
            raise self._refused(error, self.table, None) from None

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Store one micro-batch.

        Raises:
            SinkError: the batch cannot be stored; nothing of it was.
            MissingRightError: the same, for want of a right.
        """
        publication = self._publication(batch.schema, origin_of(batch, self.name), batch_id)
        try:
            self._tries(batch_id)(publication.publish, batch)
        except LostTaskError as error:
            raise SinkError(str(error)) from None
        except sa.exc.SQLAlchemyError as error:
            raise self._refused(error, self.table, batch_id) from None  # not chained, as above

    def _tries(self, batch_id: int) -> tenacity.Retrying:
        def tell(state: tenacity.RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            facts = facts_of(error) if isinstance(error, sa.exc.SQLAlchemyError) else [str(error)]
            _log.warning("batch %d for table %s is tried again: %s", batch_id, self.table, ", ".join(facts))

        return tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.tries),
            wait=_WAIT,
            retry=tenacity.retry_if_exception(is_transient),
            before_sleep=tell,
            reraise=True,
        )

    def position_of(self, query: str, partitions: Iterable[TopicPartition]) -> Offsets:
        """Return the ledger of a query for some partitions; see `ledger_positions`.

        Raises:
            SinkError: the database cannot be asked.
        """
        wanted = set(partitions)
        return {part: offset for part, offset in self.position(query).items() if part in wanted}

    def position(self, query: str = "") -> Offsets:
        """Return the ledger: of each partition, the next offset that the table takes. Empty before the first batch.

        Args:
            query: name of the query, where the sink has none of its own.

        Raises:
            SinkError: the database cannot be asked.
            MissingRightError: the sink may not read its ledger.
        """
        url = parse_url(self.url)
        ledger = ledger_table(self.ledger_table, sa.MetaData(), self.schema)
        try:
            with database_of(url).session(url) as connection, connection.begin():
                if not sa.inspect(connection).has_table(self.ledger_table, schema=self.schema):
                    return {}
                require_ledger(connection, ledger)
                return merge.read_ledger(connection, ledger, merge.Owner(self.name or query, self.table)).offsets
        except sa.exc.SQLAlchemyError as error:
            raise self._refused(error, self.ledger_table, None) from None  # not chained, as above

    def _needed_rights(self) -> NeededRights:
        """Return what the sink does in PostgreSQL."""
        of_target = ["INSERT"] if not self.key else ["SELECT", "INSERT", "UPDATE"]
        if self.delete is not None:
            of_target.append("DELETE")
        return NeededRights(
            schema=self.schema,
            tables=[(self.table, tuple(of_target)), (self.ledger_table, ("SELECT", "INSERT", "UPDATE"))],
            creates=self.staging == "executors",
            temporary=self.staging == "driver" or self.dead_letters is not None,
            adds_columns=self.evolve,
        )

    def _refused(self, error: sa.exc.SQLAlchemyError, table: str, batch_id: int | None) -> PenstockError:
        """Return what is told of an error of the database; where rights are missing, all of them."""
        url = parse_url(self.url)
        if is_forbidden(error):
            what = f"table {self.table} cannot be written"
            if batch_id is not None:
                what = f"batch {batch_id} cannot be stored in table {self.table}, and nothing of it was"
            try:
                with database_of(url).session(url) as connection, connection.begin():
                    require_rights(connection, what, self._needed_rights(), refused=True)
            except MissingRightError as missing:
                return missing
            except sa.exc.SQLAlchemyError:
                _log.debug("which rights are missing could not be asked", exc_info=True)
        return refused(error, table, url, batch_id)

    def _publication(self, schema: StructType, origin: Origin, batch_id: int) -> Publication:
        url = parse_url(self.url)
        frame = arrow_schema(schema)
        self._require_columns(frame)
        if url.get_backend_name() == "postgresql":
            self._require_short_names(frame)
        else:
            self._require_sums_of_sqlite(frame)
        return Publication(self, url, database_of(url), frame, batch_id, origin)

    def _require_columns(self, schema: pa.Schema) -> None:
        gone = [] if self.delete is None else [self.delete]
        missing = [name for name in (*POSITION, *self.key, *self.add, *gone) if name not in schema.names]
        if missing:
            raise SinkError(
                f"the frame for table {self.table} lacks {', '.join(missing)}; keep topic, partition and offset "
                "of the source, and every column of key, add and delete, in the query's select"
            )
        require_places(schema, f"table {self.table}")
        hidden = [] if self.keep_position else [name for name in (*self.key, *self.add) if name in POSITION]
        if hidden:
            raise SinkError(
                f"table {self.table} has {', '.join(hidden)} in key or add, but keep_position is off; set it"
            )
        own = [name for name in schema.names if name.startswith(_OWN)]
        if own:
            raise SinkError(f"the frame has {', '.join(own)}; names that begin with {_OWN} are the sink's, rename it")
        wrong = [name for name in self.add if not _is_number(schema.field(name).type)]
        if wrong:
            raise SinkError(f"add names {', '.join(wrong)}, which holds no numbers; cast it, or take it out of add")
        if gone and not pa.types.is_boolean(schema.field(gone[0]).type):
            raise SinkError(f"delete names {gone[0]}, which is not boolean; select a condition such as value IS NULL")

    def _require_sums_of_sqlite(self, schema: pa.Schema) -> None:
        decimals = [name for name in self.add if pa.types.is_decimal(schema.field(name).type)]
        if decimals:
            raise SinkError(
                f"add names {', '.join(decimals)}, a decimal of the frame, and SQLite adds decimals as floats of "
                f"{SQLITE_DIGITS} digits; cast it to a whole number of its smallest unit, or to a double"
            )

    def _require_short_names(self, schema: pa.Schema) -> None:
        given = (self.schema or "", self.table, self.ledger_table, *schema.names)
        long = [name for name in given if len(name.encode()) > _LONGEST_NAME]
        if long:
            raise SinkError(
                f"PostgreSQL cuts names at {_LONGEST_NAME} bytes, so table {self.table} cannot take the frame with "
                f"{', '.join(long)}; give shorter names"
            )


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


__all__ = ["SqlSink"]
