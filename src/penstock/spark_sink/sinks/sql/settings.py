"""The settings of a `SqlSink`, and what they ask of the frames that it is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
import sqlalchemy as sa

from penstock.database_url import parse_database_url
from penstock.errors import ConfigurationError
from penstock.options import names, not_empty, one_of, positive_int
from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks.frames import MAX_BATCH_BYTES, POSITION, require_columns, require_position_types
from penstock.spark_sink.sinks.sink import arrow_schema
from penstock.spark_sink.sinks.sql.databases import database_of
from penstock.spark_sink.sinks.sql.databases.database import Database, engine_of
from penstock.spark_sink.sinks.sql.databases.errors import refused
from penstock.spark_sink.sinks.sql.dead_letters import DeadLetters

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

#: Names of the temporary tables of a transaction.
STAGING = "penstock_stage"
ORDERED = "penstock_ordered"

#: Beginning of the names of columns and tables that the sink makes for itself.
_OWN = "penstock_"


@dataclass(frozen=True, slots=True)
class SqlSinkSettings:
    """The settings of a `SqlSink`.

    Attributes:
        url: database address in SQLAlchemy's form, `sqlite:///file.db`, `postgresql+psycopg://...` or
            `mysql+pymysql://...`, also for MariaDB; it may hold a password. Errors show host, port and database of it.
        table: table to write, without its schema; made from the frame's columns if it does not exist,
            and checked if it does: where the query starts by `start_sink` and `App.sink`, at the first batch by plain
            `foreachBatch`.
        key: columns that identify a row, never NULL; empty to append.
        sum_columns: number columns that are added to what the table holds instead of replacing it, for totals. A table
            that is made has the widest type of their kind for them: BIGINT, DOUBLE PRECISION or NUMERIC(38). SQLite
            adds no decimals.
        delete: a boolean column of the frame that is not stored: where the newest row of a key has true in it, the
            key is deleted from the table. For tombstones, select `value IS NULL AS gone` and set `delete="gone"`.
        keep_position: whether `topic`, `partition` and `offset` are stored as well; those in `key` always are.
        ledger_table: table of the ledger, which many sinks may share.
        name: of the query, in the ledger; Spark's name of the query that hands the batches over if None.
        schema: schema of PostgreSQL, or database of MySQL, that holds the table and the ledger; the connection's own if
            None.
        dead_letters: where the messages of refused rows go.
        max_rejects: refused rows that a batch may have; more end it.
        staging: for a server, whether rows come from the executors or through the driver. Behind a pooler that
            gives each transaction another session, such as PgBouncer's transaction mode, use the driver.
        max_connections: connections that executors may have at a time. More tasks than these read and transform, where
            there are cores for them.
        evolve: whether columns that the table lacks are added to it, empty in the rows that are there; those of the key
            never are.
        tries: how often a batch is tried in all, over some 20 seconds by default, where the database is away, loses
            the connection, or breaks a deadlock or a conflict of transactions at this batch's cost.
        max_batch_bytes: most bytes, in Arrow, of a batch that goes through the driver; a larger one is refused.
        mode: "batch" for frames without `topic`, `partition` and `offset`, such as totals of windows: the rows of a
            batch apply once by its number, and the query needs its checkpoint. It has no `keep_position`,
            `sum_columns` and `dead_letters`.
    """

    url: str = field(repr=False)
    table: str
    key: Sequence[str] = ()
    sum_columns: Sequence[str] = field(default=(), kw_only=True)
    delete: str | None = field(default=None, kw_only=True)
    keep_position: bool = field(default=False, kw_only=True)
    ledger_table: str = field(default="penstock_ledger", kw_only=True)
    name: str | None = field(default=None, kw_only=True)
    schema: str | None = field(default=None, kw_only=True)
    dead_letters: DeadLetters | None = field(default=None, kw_only=True)
    max_rejects: int = field(default=1_000, kw_only=True)
    staging: Literal["executors", "driver"] = field(default="executors", kw_only=True)
    max_connections: int = field(default=16, kw_only=True)
    evolve: bool = field(default=False, kw_only=True)
    tries: int = field(default=8, kw_only=True)
    max_batch_bytes: int = field(default=MAX_BATCH_BYTES, kw_only=True)
    mode: Literal["position", "batch"] = field(default="position", kw_only=True)

    def __post_init__(self) -> None:
        """Check the settings; a `ConfigurationError` names a wrong one."""
        database = self.database
        for option in ("table", "ledger_table", "name", "schema", "delete"):
            if getattr(self, option) is not None:
                not_empty(option, getattr(self, option))
        if self.schema is None and "." in self.table:
            raise ConfigurationError(
                f"table is {self.table!r}; give the schema of a server separately, as in schema='shop', table='orders'"
            )
        if len({self.table, self.ledger_table, STAGING, ORDERED}) < 4:  # noqa: PLR2004 - four names, all different
            raise ConfigurationError(
                f"table and ledger_table must differ from each other and from {STAGING} and {ORDERED}; rename one"
            )
        # Tuples, so that a frozen sink cannot be changed through a list that the caller still holds.
        object.__setattr__(self, "key", names("key", self.key) if self.key else ())
        object.__setattr__(self, "sum_columns", names("sum_columns", self.sum_columns) if self.sum_columns else ())
        if self.sum_columns and not self.key:
            raise ConfigurationError("sum_columns needs a key: without one every row is appended; give key=[...]")
        both = sorted(set(self.sum_columns) & set(self.key))
        if both:
            raise ConfigurationError(
                f"sum_columns names {', '.join(both)}, which is part of the key; take it out of one"
            )
        self._check_delete()
        if self.schema is not None and not database.is_server:
            raise ConfigurationError("schema is set, but a file of SQLite has none; leave it out")
        for option in ("max_rejects", "max_connections", "tries", "max_batch_bytes"):
            positive_int(option, getattr(self, option))
        one_of("staging", self.staging, "executors", "driver")
        self._check_mode()

    def _check_mode(self) -> None:
        one_of("mode", self.mode, "position", "batch")
        given = [name for name in ("keep_position", "sum_columns", "dead_letters") if getattr(self, name)]
        if self.mode == "batch" and given:
            named = ", ".join(given)
            raise ConfigurationError(f'mode="batch" is for rows that come from no message; leave out {named}')

    def _check_delete(self) -> None:
        if self.delete is None:
            return
        if not self.key or self.sum_columns:
            raise ConfigurationError(
                "delete needs a key, whose row it deletes, and goes with no sum_columns: a deleted total has no place "
                "to begin again from; give key=[...], and a sink of its own to the totals"
            )
        if self.delete in self.key or self.delete in POSITION:
            raise ConfigurationError(f"delete names {self.delete}, which the sink needs itself; name a column for it")

    @property
    def most_rejects(self) -> int:
        """Refused rows that a batch may have: none without dead letters."""
        return 0 if self.dead_letters is None else self.max_rejects

    @property
    def stages_on_executors(self) -> bool:
        """Whether rows go into the database from executors; those for SQLite never do."""
        return self.staging == "executors" and self.database.is_server

    @property
    def database(self) -> Database:
        """The kind of database that it writes to."""
        return database_of(self.url)

    @contextmanager
    def session(self, batch_id: int | None = None, *, is_kept: bool = False) -> Iterator[sa.Connection]:
        """Open a session, whose errors leave the block as the sink's; one that `is_kept` is there for the next."""
        url = parse_database_url(self.url)
        try:
            with engine_of(self.database, url, is_kept).connect() as connection:
                yield connection
        except sa.exc.SQLAlchemyError as error:
            # Not chained: drivers quote keys and values in their texts, which end in Spark's log.
            raise refused(self.database, error, self.table, url, batch_id) from None

    def arrow_frame(self, schema: StructType) -> pa.Schema:
        """Return the Arrow columns of such frames, or raise `SchemaMismatchError` where the sink cannot use them."""
        frame = arrow_schema(schema)
        if self.mode == "batch":
            if own := sorted(set(POSITION) & set(frame.names)):
                raise SchemaMismatchError(
                    f'the frame for table {self.table} has {", ".join(own)}, names of the position that mode="batch" '
                    "does without; rename it in the query"
                )
            frame = pa.schema([*frame, ("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64())])
        gone = [] if self.delete is None else [self.delete]
        require_columns(frame.names, f"table {self.table}", (*self.key, *self.sum_columns, *gone))
        require_position_types(frame, f"table {self.table}")
        if own := [name for name in frame.names if name.startswith(_OWN)]:
            raise SchemaMismatchError(
                f"the frame has {', '.join(own)}; names that begin with {_OWN} are the sink's, rename it"
            )
        for name in self.sum_columns:
            kind = frame.field(name).type
            is_exact = pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and self.database.adds_decimals)
            if not is_exact and not pa.types.is_floating(kind):
                raise SchemaMismatchError(
                    f"sum_columns names {name}, a {kind} of the frame: added are whole numbers, floats and, but by "
                    "SQLite, decimals; cast it, to a whole number of its smallest unit say, or take it out"
                )
        if gone and not pa.types.is_boolean(frame.field(gone[0]).type):
            raise SchemaMismatchError(
                f"delete names {gone[0]}, which is not boolean; select a condition such as value IS NULL"
            )
        return frame
