"""The settings of a `SqlSink`, and their requirements on frames."""

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
from penstock.spark_sink.sinks.sql.databases.errors import refused, shown
from penstock.spark_sink.sinks.sql.dead_letters import DeadLetters

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

#: Names of the temporary tables of a transaction.
STAGING = "penstock_stage"
ORDERED = "penstock_ordered"

#: Prefix of the sink's own columns and tables.
_OWN = "penstock_"


@dataclass(frozen=True, slots=True)
class SqlSinkSettings:
    """The settings of a `SqlSink`.

    Attributes:
        url: database address in SQLAlchemy's form: `sqlite:///file.db`, `postgresql+psycopg://...` or
            `mysql+pymysql://...`, also for MariaDB. It may contain a password; errors show only host, port and
            database.
        table: the table, without its schema. It is created from the frame's columns if it does not exist, and checked
            otherwise: at the start of the query with `start_sink` and `App.sink`, at the first batch with plain
            `foreachBatch`.
        key: columns that identify a row, never NULL; empty: append.
        sum_columns: number columns that are added to the stored values instead of replacing them, for totals. A created
            table has the widest type of their kind: BIGINT, DOUBLE PRECISION or NUMERIC(38). SQLite cannot add
            decimals.
        delete: a boolean column of the frame, which is not stored. If it is true in the newest row of a key, the key is
            deleted from the table. For tombstones, select `value IS NULL AS gone` and set `delete="gone"`.
        keep_position: whether `topic`, `partition` and `offset` are stored, too; those in `key` always are.
        ledger_table: table of the ledger; many sinks may share it.
        name: name of the query in the ledger; None: Spark's name of the query.
        schema: schema of PostgreSQL, or database of MySQL, with the table and the ledger; None: the connection's own.
        dead_letters: the target for messages of refused rows.
        max_rejects: most refused rows of a batch; with more, the batch fails.
        staging: for a server, whether rows come from executors or through the driver. Use the driver behind a pooler
            that changes the session with each transaction, such as PgBouncer in transaction mode.
        max_connections: most connections of executors at a time, and most tasks of the stage that writes. Raise it for
            more tasks.
        evolve: whether missing columns are added to the table, NULL in existing rows; never columns of the key.
        tries: how often a batch is tried, over about 20 seconds by default, if the database is unreachable, loses the
            connection, or ends this transaction because of a deadlock or conflict.
        max_batch_bytes: most bytes, in Arrow, of a batch that goes through the driver; larger ones are refused.
        mode: "batch" for frames without `topic`, `partition` and `offset`, such as totals of windows. The rows of a
            batch apply once by its number, and the query needs its checkpoint. It excludes `keep_position`,
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
        """Check the settings; `ConfigurationError` names a wrong one."""
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
        # Tuples, so that the caller's lists cannot change a frozen sink.
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
        """Most refused rows of a batch: none without dead letters."""
        return 0 if self.dead_letters is None else self.max_rejects

    @property
    def stages_on_executors(self) -> bool:
        """Whether executors write rows to the database; never for SQLite."""
        return self.staging == "executors" and self.database.is_server

    @property
    def database(self) -> Database:
        """The kind of database."""
        return database_of(self.url)

    @contextmanager
    def session(self, batch_id: int | None = None, *, is_kept: bool = False) -> Iterator[sa.Connection]:
        """Open a session for the block and convert its errors to the sink's; `is_kept`: keep it for the next use."""
        url, connection = parse_database_url(self.url), None
        try:
            with engine_of(self.database, url, is_kept).connect() as connection:
                yield connection
        except sa.exc.SQLAlchemyError as error:
            # Not chained: drivers' texts quote keys and values, and would end in Spark's log.
            raise refused(self.database, error, self.table, url, batch_id) from None
        except (TypeError, ValueError, AttributeError, NotImplementedError, OSError) as error:
            if connection is not None:
                raise
            why = (
                f"the driver cannot use the address {shown(url)} ({type(error).__name__}); correct its host or options"
            )
            raise ConfigurationError(why) from None  # the driver's text may repeat an option

    def arrow_frame(self, schema: StructType) -> pa.Schema:
        """Return the Arrow columns of such frames, or raise `SchemaMismatchError` if they do not fit the settings."""
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
