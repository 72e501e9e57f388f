"""The base of sinks for lake tables: a batch goes through the driver, as Arrow, into one commit of a table.

The commit that adds the rows also changes the ledger, based on the table version that was read. If another writer
commits in between, the commit fails, and the batch starts again with the new table and ledger.
"""

from __future__ import annotations

import shlex
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import tenacity

from penstock.clients.bounded_calls import BackgroundCall, LeftBehind, NotAnsweredError
from penstock.errors import ConfigurationError, PenstockError, SinkError
from penstock.options import names, not_empty, positive_int, seconds
from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.ledger.rules import Batch, warn_left_out
from penstock.spark_sink.sinks.frames import (
    MAX_BATCH_BYTES,
    POSITION,
    collected,
    not_utf8,
    numbers,
    require_columns,
    require_position,
    require_position_types,
    spans_of,
    unapplied,
)
from penstock.spark_sink.sinks.sink import (
    Changes,
    Entries,
    LedgerSink,
    arrow_schema,
    micro_batch,
    origin_of,
    stored_batches,
)
from penstock.spark_sink.source.plan import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

#: How often a batch starts again because another writer was first.
_TRIES = 10
_ROW = "penstock_row"
#: The abandoned tries of this process.
_left = LeftBehind("sinks for lakes")

#: A table at one version.
TableT = TypeVar("TableT")
T = TypeVar("T")
#: Entries by query.
Ledger = dict[str, Entries]


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeSink(LedgerSink, Generic[TableT]):
    """A sink whose rows and ledger change in one commit.

    Use it with `writeStream.foreachBatch(sink)`, once for each batch and name: a second call in the same batch is an
    error, and so are rows that a stateful operator (a window, a join of streams) held back. The frame needs `topic`,
    `partition` and `offset` besides its own columns. A missing table is created from the frame's columns; all of them
    may be NULL. The batch is collected on the driver as Arrow columns, up to `max_batch_bytes`: limit it with the
    source's `maxOffsetsPerTrigger`. Readers see a whole batch or nothing of it.

    Without a key every row is appended. With a key, the newest row of a key, by offset, replaces the stored one. Kafka
    orders the messages of one partition only: use a key whose messages share a partition. Otherwise the higher offset
    wins within a batch, and the later batch across batches.

    If a second copy of the query is started by mistake, nothing is stored twice. A sink has nothing open and can be
    pickled.

    Attributes:
        name: name of the query in the ledger. Under another name all rows are stored again. Each query that fills the
            table needs its own.
        keep_position: whether `topic`, `partition` and `offset` are stored, too.
        evolve: whether missing columns are added to the table, NULL in existing rows; never columns of the key.
        max_batch_bytes: most bytes of a batch, in Arrow; larger ones are refused.
        timeout_s: most seconds of a try to store a batch, or to read or write the ledger. If it takes longer, the batch
            fails and the try is abandoned. If its commit succeeds later, the repeated batch finds it in the ledger.
    """

    name: str
    keep_position: bool = False
    evolve: bool = False
    max_batch_bytes: int = MAX_BATCH_BYTES
    timeout_s: float = 600.0

    #: Types that the format stores as other types.
    _HELD_AS: ClassVar[Mapping[pa.DataType, pa.DataType]] = {}
    #: Errors of a commit after another writer's, or with a lost answer: the batch starts again.
    _CONFLICTS: ClassVar[tuple[type[Exception], ...]]
    #: Other errors whose text contains neither values nor credentials.
    _PLAIN: ClassVar[tuple[type[Exception], ...]]

    @property
    @abstractmethod
    def key(self) -> Sequence[str]:
        """Columns that identify a row, never NULL; empty to append."""

    @property
    @abstractmethod
    def _address(self) -> Sequence[str]:
        """The options by which `penstock sink` finds the ledger. The second names the table."""

    @property
    def _target(self) -> str:
        """The table's name in errors."""
        return f"table {self._address[1]}"

    @property
    def ledger_key(self) -> Hashable:
        """The identity of its ledger in this process."""
        return self._target, self.name

    @abstractmethod
    def _opened(self, schema: pa.Schema | None = None) -> AbstractContextManager[Any]:
        """Open the present version of the table for the block, or None; with a schema, create a missing table."""

    @staticmethod
    @abstractmethod
    def _columns(table: TableT) -> pa.Schema:
        """Return the table's columns in Arrow."""

    @abstractmethod
    def _read(self, table: TableT) -> Ledger:
        """Return the whole ledger."""

    def _entries(
        self, table: TableT, query: str, partitions: Iterable[TopicPartition], _query_id: str | None = None
    ) -> Entries:
        """Return the entries of partitions for a batch of the Spark query with this id."""
        ledger = self._read(table).get(query, {})
        return {part: ledger[part] for part in partitions if part in ledger}

    @abstractmethod
    def _commit(self, table: TableT, query: str, changes: Changes, rows: pa.Table, more: pa.Schema) -> None:
        """Commit rows, entries of the ledger and new columns to the opened version; an error if it is not the last.

        The rows have the table's columns, with its types, followed by the new ones.
        """

    def check(self, schema: StructType) -> None:
        """Check whether frames of this schema fit the table; create a missing table.

        Raises:
            SinkError: a column is missing or has a type that the format lacks, or the table does not fit.
            ConfigurationError: the table cannot have a ledger.
        """
        arrow = arrow_schema(schema)
        given = pa.schema([arrow.field(name) for name in self._stored(arrow)])
        self._types(given)
        self._with_table(f"{self._target} cannot be made or read", lambda table: self._missing(table, given), given)

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Store one micro-batch.

        Raises:
            SinkError: the batch cannot be stored; nothing of it was.
            ConfigurationError: the table cannot have a ledger; nothing of the batch was stored.
        """
        rows = collected(batch, self.max_batch_bytes, batch_id, self._target)
        stored = self._stored(rows.schema)
        origin = origin_of(batch, self.name)
        what = micro_batch(batch, batch_id, origin, self._target, shlex.join(self._address))
        if rows.num_rows == 0 and not what.planned:
            return
        require_position(rows, self._target)
        # For a merge, NULLs in a key are never equal. Readers of wrong text would fail, also at a file's other rows.
        self._refuse(rows, self.key, _nulls, f"is part of the key of {self._target} and is NULL")
        self._refuse(rows, stored, not_utf8, f"for {self._target} has text that is not UTF-8")
        with stored_batches.one_call(self.ledger_key, origin, what):
            self._with_table(
                f"batch {batch_id} was refused by {self._target}",
                lambda table: self._store(table, rows, stored, what),
                rows.select(stored).schema,
            )

    def ledger(self) -> Ledger:
        """Return the entries of all queries that fill the table."""
        return self._from_ledger(self._read)

    def ledger_entries(self, _query: str, partitions: Iterable[TopicPartition]) -> Entries:
        """Return the entries of some partitions."""
        return self._from_ledger(lambda table: self._entries(table, self.name, partitions))

    def exists(self) -> bool:
        """Return whether the table exists; `SinkError` if the storage does not answer."""
        return self._with_table(f"{self._target} cannot be read", lambda table: table is not None)

    def _from_ledger(self, read: Callable[[TableT], dict[T, Any]]) -> dict[T, Any]:
        what = f"the ledger of {self._target} cannot be read"
        return self._with_table(what, lambda table: {} if table is None else read(table))

    def _change_ledger(
        self, query: str, _parts: Collection[TopicPartition], change: Callable[[Entries], Changes]
    ) -> None:
        def written(table: TableT | None) -> None:
            if table is None:
                raise SinkError(f"there is no {self._target}, and so no ledger; the sink's check makes it")
            if changed := change(self._read(table).get(query, {})):
                self._commit(table, query, changed, self._columns(table).empty_table(), pa.schema([]))

        self._with_table(f"the ledger of {self._target} cannot be written", written)

    def _check_settings(self) -> None:
        """Check the common settings; `ConfigurationError` names a wrong one."""
        not_empty("name", self.name)
        positive_int("max_batch_bytes", self.max_batch_bytes)
        seconds("timeout_s", self.timeout_s)
        # A tuple, so that the caller's list cannot change a frozen sink.
        object.__setattr__(self, "key", names("key", self.key) if self.key else ())
        if not self.keep_position and set(self.key) & set(POSITION):
            raise ConfigurationError("key names a column of the position, which is not stored; set keep_position")

    def _with_table(self, what: str, act: Callable[[Any], T], schema: pa.Schema | None = None) -> T:
        """Call `act` with the present version of the table, and again if another writer was first.

        An error of a library becomes a `SinkError`. It is not chained, and omits texts that may quote values or
        credentials.
        """

        def once() -> T:
            with self._opened(schema) as table:
                return act(table)

        def bounded() -> T:
            return BackgroundCall("to use the table", once, self.timeout_s, _left).wait()

        try:
            return tenacity.Retrying(
                stop=tenacity.stop_after_attempt(_TRIES),
                wait=tenacity.wait_random_exponential(multiplier=0.1, max=5.0),
                retry=tenacity.retry_if_exception_type(self._CONFLICTS),
                reraise=True,
            )(bounded)
        except NotAnsweredError:
            why = (
                f": it did not come to an end in {self.timeout_s:g} s, and was left behind; see whether the "
                "storage and the catalogue answer, and raise timeout_s where it only takes long"
            )
        except PenstockError:
            raise
        except self._CONFLICTS as error:
            why = (
                f": it took no commit in {_TRIES} tries, the last time for: {_first_line(error)}; stop other writers, "
                "or make fewer of them"
            )
        except self._PLAIN as error:
            why = f": {_first_line(error)}; this process needs the permission to read and to write there"
        except Exception as error:  # noqa: BLE001 - the libraries raise bare ones
            why = (
                f" ({type(error).__name__}); compare the rows with its column types and constraints, and the sink's "
                "settings with those of the storage"
            )
        raise SinkError(f"{what}{why}")

    def _store(self, table: TableT, rows: pa.Table, stored: list[str], batch: Batch) -> None:
        """Write the rows that are not applied yet in one commit, based on the version whose ledger was read."""
        more = self._missing(table, rows.select(stored).schema)
        columns = pa.schema([*self._columns(table), *more])
        required = [column.name for column in columns if not column.nullable]
        self._refuse(rows, required, _nulls, f"is NOT NULL in {self._target} and is NULL")
        spans = spans_of(rows)
        ledger = self._entries(table, self.name, spans.keys() | batch.planned.keys(), batch.query_id)
        left, seen = unapplied(rows, spans, batch.applied_below(ledger))
        entries = batch.entries_after(ledger, spans)
        warn_left_out(batch.batch_id, batch.target, seen)
        if not entries:
            return
        if self.key:
            left = _newest(one_zero(left, self.key), self.key)
        self._commit(table, self.name, entries, left.select(columns.names).cast(columns), more)

    def _stored(self, schema: pa.Schema) -> list[str]:
        """Return the columns to store, or raise `SinkError`."""
        require_columns(schema.names, self._target, self.key)
        require_position_types(schema, self._target)
        stored = [name for name in schema.names if self.keep_position or name not in POSITION]
        if not stored:
            raise SchemaMismatchError(
                f"the frame for {self._target} has no column to store; add one, or set keep_position"
            )
        return stored

    def _missing(self, table: TableT, schema: pa.Schema) -> pa.Schema:
        """Return the frame's columns that the table lacks, or raise `SinkError` if the table does not fit."""
        held, given = self._types(self._columns(table)), self._types(schema)
        new = [column for column in given if column.name not in held.names]
        both = [column.name for column in given if column.name in held.names]
        twins = {name.lower(): f", and has {name}, which differs only in case" for name in held.names}
        wrong = [
            f"the table lacks the frame's column {name}{twins.get(name.lower(), '')}"
            for name in (column.name for column in new)
            if not self.evolve or name in self.key or name.lower() in twins
        ]
        wrong += [f"the frame lacks the table's column {name}" for name in held.names if name not in given.names]
        wrong += [
            f"column {name} is {held.field(name).type} in the table and {given.field(name).type} in the frame"
            for name in both
            if held.field(name).type != given.field(name).type
        ]
        if wrong:
            raise SchemaMismatchError(
                f"{self._target} does not fit the frame: {'; '.join(wrong)}; change the query's select, or the table"
            )
        return pa.schema(new)

    def _types(self, schema: pa.Schema) -> pa.Schema:
        """Return the table's types for columns, all nullable, or raise `SchemaMismatchError`."""
        for column in schema:
            if pa.types.is_duration(column.type) or pa.types.is_time(column.type) or pa.types.is_null(column.type):
                raise SchemaMismatchError(
                    f"the frame's column {column.name} is {column.type}, which {self._target} cannot hold; cast it or "
                    "leave it out"
                )
        return pa.schema([(column.name, plain(column.type, self._HELD_AS)) for column in schema])

    @staticmethod
    def _refuse(rows: pa.Table, columns: Iterable[str], wrong: Callable[[Any], list[int]], why: str) -> None:
        """Raise `SinkError` for wrong values in some columns; `wrong` returns their indexes."""
        for name in columns:
            if found := wrong(rows[name]):
                topic, partition, offset = (rows[column][found[0]].as_py() for column in POSITION)
                raise SinkError(
                    f"column {name} {why} in {len(found)} rows, the first from {topic}:{partition}@{offset}; filter "
                    "such rows out in the query"
                )


def _nulls(column: pa.ChunkedArray) -> list[int]:
    return list(pc.indices_nonzero(column.is_null()).to_pylist())


def one_zero(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """Return the rows with 0.0 instead of -0.0 in the key: a merge would distinguish them."""
    for name in key:
        column = rows.schema.field(name)
        if pa.types.is_floating(column.type):
            index = rows.schema.get_field_index(name)
            rows = rows.set_column(index, column, pc.add(rows[name], pa.scalar(0.0, column.type)))
    return rows


def plain(kind: pa.DataType, held_as: Mapping[pa.DataType, pa.DataType]) -> pa.DataType:
    """Return a type with all nested values nullable, and without the large offsets of a Spark setting."""
    if pa.types.is_struct(kind):
        return pa.struct([(column.name, plain(column.type, held_as)) for column in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(plain(kind.value_type, held_as))
    if pa.types.is_map(kind):
        return pa.map_(plain(kind.key_type, held_as), plain(kind.item_type, held_as))
    return {pa.large_string(): pa.string(), pa.large_binary(): pa.binary(), **held_as}.get(kind, kind)


def _newest(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """Return the newest row of each key by offset; for equal offsets, that of the highest partition and topic."""
    ordered = rows.sort_by([(name, "ascending") for name in ("offset", "partition", "topic")])
    last = ordered.append_column(_ROW, numbers(0, rows.num_rows)).group_by(list(key)).aggregate([(_ROW, "max")])
    return ordered.take(last[f"{_ROW}_max"])


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
