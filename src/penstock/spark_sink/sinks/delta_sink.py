"""`DeltaSink`: a foreachBatch function that writes each batch once into a Delta table, without Java packages.

The ledger is Delta's own: per partition an application transaction, whose version is the next offset, in the commit
that adds the rows. Two others say where the last batch was planned to start (`<application>#start`) and which batch it
was (`<application>#batch`). delta-rs writes, on the driver.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import tenacity
from deltalake import CommitProperties, DeltaTable, Field, Schema, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, DeltaProtocolError, TableNotFoundError

from penstock.errors import ConfigurationError, PenstockError, SinkError
from penstock.options import names, not_empty, positive_int
from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.ledger.rules import Batch, LedgerEntry, OffsetStatistics, unknown, warn_left_out
from penstock.spark_sink.sinks.folder_access import local_path, require_access
from penstock.spark_sink.sinks.frames import MAX_BATCH_BYTES, collected
from penstock.spark_sink.sinks.planned_offsets import micro_batch
from penstock.spark_sink.sinks.position import (
    POSITION,
    null_counts,
    offset_spans,
    require_columns,
    require_position,
    require_position_types,
    unapplied,
)
from penstock.spark_sink.sinks.sink import arrow_schema, origin_of, stored_batches
from penstock.spark_sink.source.offsets.planning import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

#: Times a batch is written anew because another writer was first, before that is called an error.
_TRIES = 10
_RETRYING = tenacity.Retrying(
    stop=tenacity.stop_after_attempt(_TRIES),
    wait=tenacity.wait_exponential(multiplier=0.1, max=5.0),
    retry=tenacity.retry_if_exception_type(CommitFailedError),
    reraise=True,
)

_ROW = "penstock_row"
#: Folder of a table in which its commits are.
_LOG = "_delta_log"

#: Ends of the application ids whose versions tell where the last batch of a partition was planned to start, and which
#: batch it was; and the bits of a batch's number. Versions below zero stand for what is not known.
_START, _BATCH, _BATCH_BITS = "#start", "#batch", (1 << 31) - 1
_UNKNOWN = -1

#: The table's setting by which application transactions, which are the ledger, expire.
_RETENTION = "delta.setTransactionRetentionDuration"


@dataclass(frozen=True, slots=True)
class DeltaSink:
    """Writes micro-batches into a Delta table, each row once whatever is repeated.

    Use it with `writeStream.foreachBatch(sink)`, once for each batch and name: a second call in the same batch is an
    error, and so are rows that an operator with state (a window, a join of streams) holds back. The frame carries
    `topic`, `partition` and `offset` beside its own columns. The table is made from the frame's columns if it does not
    exist; any of its columns may be NULL. The batch is collected on the driver as Arrow columns, up to
    `max_batch_bytes`: keep it below with the source's `maxOffsetsPerTrigger`. Readers see all of a batch or nothing.

    Without a key every row is appended. With one, the newest row of a key, by offset, replaces the one in the table.
    Kafka orders the messages of one partition only: use a key whose messages share a partition. Where they do not, the
    higher offset wins within a batch, and the later batch across batches.

    Application transactions must not expire: a table with `delta.setTransactionRetentionDuration` is refused. A second
    copy of the query, started by mistake, stores nothing twice. A sink holds nothing open and can be pickled.

    Attributes:
        path: folder or address of the table, as delta-rs takes it.
        key: columns that identify a row, never NULL; empty to append.
        name: of the query, in the application ids `<name>/<topic>/<partition>`. It is the memory of what was stored:
            under another name all of it is stored again. Queries that fill one table need one each.
        keep_position: whether `topic`, `partition` and `offset` are stored as well.
        evolve: whether columns that the table lacks are added to it, empty in the rows that are there, in a commit of
            their own; those of the key never are.
        storage_options: settings of the storage as delta-rs takes them; may hold secrets and is never shown.
        max_batch_bytes: most bytes of a batch, in Arrow; a larger one is refused.
    """

    path: str
    key: Sequence[str] = ()
    name: str = field(kw_only=True)
    keep_position: bool = field(default=False, kw_only=True)
    evolve: bool = field(default=False, kw_only=True)
    storage_options: Mapping[str, str] = field(default_factory=dict, kw_only=True, repr=False)
    max_batch_bytes: int = field(default=MAX_BATCH_BYTES, kw_only=True)

    def __post_init__(self) -> None:
        """Check the settings; a `ConfigurationError` names a wrong one."""
        object.__setattr__(self, "path", os.fspath(self.path))
        not_empty("path", self.path)
        not_empty("name", self.name)
        positive_int("max_batch_bytes", self.max_batch_bytes)
        # A tuple, so that a frozen sink cannot be changed through a list that the caller still holds.
        object.__setattr__(self, "key", names("key", self.key) if self.key else ())
        object.__setattr__(self, "storage_options", dict(self.storage_options))
        if not self.keep_position and set(self.key) & set(POSITION):
            raise ConfigurationError("key names a column of the position, which is not stored; set keep_position")

    def check(self, schema: StructType) -> None:
        """Say what is wrong with a frame of this schema, or how it differs from the table. An absent table is made.

        Raises:
            SinkError: a column is missing or has a type that Delta does not know, or the table does not fit.
            ConfigurationError: the table forgets what is stored.
            MissingRightError: its folder may not be written.
        """
        self._require_access()
        arrow = arrow_schema(schema)
        given = pa.schema([arrow.field(name) for name in self._stored(arrow)])
        _delta_types(given)
        try:
            table = self._opened(given)
        except (DeltaError, OSError) as error:
            raise SinkError(f"table {self.path} cannot be made or read: {_first_line(error)}") from None
        self._require_fitting(table, given)

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Store one micro-batch.

        Raises:
            SinkError: the batch cannot be stored; nothing of it was.
            ConfigurationError: the table forgets what is stored; nothing of the batch was.
            MissingRightError: its folder may not be written; nothing of the batch was.
        """
        self._require_access()
        rows = collected(batch, self.max_batch_bytes, batch_id, f"table {self.path}")
        stored = self._stored(rows.schema)
        origin = origin_of(batch, self.name)
        what = micro_batch(
            batch,
            batch_id,
            origin,
            f"table {self.path}",
            f"the application transaction {self.name}/<topic>/<partition>",
        )
        if rows.num_rows == 0 and not what.planned:
            return
        require_position(null_counts(rows), f"table {self.path}")
        self._refuse_null(rows, self.key, "is part of the key of")
        try:
            with stored_batches.one_call((self.path, self.name), origin, what):
                for attempt in _RETRYING.copy():
                    with attempt:
                        self._store(rows, stored, what)
        except CommitFailedError as error:
            raise SinkError(
                f"batch {batch_id}: table {self.path} took no commit in {_TRIES} tries, the last time for: "
                f"{_first_line(error)}; stop other writers, or make fewer of them"
            ) from None
        except (TableNotFoundError, DeltaProtocolError, OSError) as error:
            raise SinkError(f"batch {batch_id} was refused by table {self.path}: {_first_line(error)}") from None
        except PenstockError:
            raise
        except Exception as error:  # noqa: BLE001 - the library raises bare ones
            # Not chained, and without its text: where rows break a rule of the table, it quotes their values.
            raise SinkError(
                f"batch {batch_id} was refused by table {self.path} ({type(error).__name__}); compare the rows with "
                "its column types and constraints"
            ) from None

    def ledger_entries(self, _query: str, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, LedgerEntry]:
        """Return what the ledger has of some partitions. The sink's own name counts.

        Raises:
            SinkError: the table cannot be read.
            MissingRightError: its folder may not be.
        """
        self._require_access(write=False)
        try:
            if not DeltaTable.is_deltatable(self.path, self._options):
                return {}
            return self._entries(self._opened(), partitions, None)
        except Exception as error:  # noqa: BLE001 - the library raises bare ones
            raise SinkError(f"the ledger of table {self.path} cannot be read: {_first_line(error)}") from None

    def begin_ledger(self, _query: str, entries: Mapping[TopicPartition, LedgerEntry]) -> None:
        """Write where a query begins, in partitions that the ledger does not know. Raises as `ledger_entries` does."""
        try:
            for attempt in _RETRYING.copy():
                with attempt:
                    table = self._opened()
                    new = unknown(self._entries(table, entries, None), entries)
                    if new:
                        empty = table.to_pyarrow_dataset().schema.empty_table()
                        write_deltalake(table, empty, mode="append", commit_properties=self._commit(new))
        except Exception as error:  # noqa: BLE001 - the library raises bare ones
            raise SinkError(f"the ledger of table {self.path} cannot be written: {_first_line(error)}") from None

    def _entries(
        self, table: DeltaTable, partitions: Iterable[TopicPartition], query_id: str | None
    ) -> dict[TopicPartition, LedgerEntry]:
        """Return the entries of partitions; whose batch it was is known where it was of this query."""
        found: dict[TopicPartition, LedgerEntry] = {}
        for part in partitions:
            application = self._application(*part)
            end = table.transaction_version(application)
            if end is None:
                continue
            start, mark = (table.transaction_version(application + kind) for kind in (_START, _BATCH))
            is_ours = query_id is not None and mark and mark == _mark(query_id, mark & _BATCH_BITS)
            found[part] = LedgerEntry(
                end,
                None if start == _UNKNOWN else start,
                query_id=query_id if is_ours else None,
                batch_id=mark & _BATCH_BITS if mark and is_ours else None,
            )
        return found

    def _commit(self, entries: Mapping[TopicPartition, LedgerEntry]) -> CommitProperties:
        """Return a commit that writes entries, upon the version that was opened."""
        transactions = []
        for part, entry in entries.items():
            application = self._application(*part)
            # A query that is not known is like no other: what stands of another one is taken back.
            mark = 0 if entry.query_id is None else _mark(entry.query_id, entry.batch_id or 0)
            start = _UNKNOWN if entry.start is None else entry.start
            versions = ((application, entry.end), (application + _START, start), (application + _BATCH, mark))
            transactions += [Transaction(*version) for version in versions]
        # The library would put the commit behind another writer's, whose ledger was not looked at.
        return CommitProperties(app_transactions=transactions, max_commit_retries=0)

    def _store(self, rows: pa.Table, stored: list[str], batch: Batch) -> None:
        """Write what is not applied yet, in one commit, upon the version of the table whose ledger was read."""
        schema = rows.select(stored).schema
        table = self._opened(schema)
        self._require_fitting(table, schema)
        self._add_columns(table, schema)
        held = pa.schema(table.schema().to_arrow())
        self._refuse_null(rows, [name for name in stored if not held.field(name).nullable], "is NOT NULL in")
        spans = offset_spans(rows)
        ledger = self._entries(table, spans.keys() | batch.planned.keys(), batch.query_id)
        left, applied = unapplied(rows, spans, batch.applied_below(ledger))
        entries = batch.entries_after(ledger, spans)
        warn_left_out(batch.batch_id, batch.target, OffsetStatistics(rows.num_rows, spans, applied))
        if not entries:
            return
        commit = self._commit(entries)
        if not self.key or not left.num_rows:  # a merge of nothing would commit nothing, and the ledger neither
            write_deltalake(table, _as_held(left.select(stored), held), mode="append", commit_properties=commit)
            return
        same = " AND ".join(f"held.{_quoted(name)} = new.{_quoted(name)}" for name in self.key)
        merge = table.merge(
            _as_held(_newest(_one_zero(left, self.key), self.key).select(stored), held),
            same,
            source_alias="new",
            target_alias="held",
            commit_properties=commit,
        )
        merge.when_matched_update_all().when_not_matched_insert_all().execute()

    def _opened(self, schema: pa.Schema | None = None) -> DeltaTable:
        """Return the table as it is now; with a schema, make it where there is none."""
        if schema is not None and not DeltaTable.is_deltatable(self.path, self._options):
            # Another writer may have made it in the meantime; if not, opening it tells what is the matter.
            with suppress(DeltaError):
                # No column is NOT NULL: a literal has a value in this batch, and its column may have none in the next.
                fields = [Field(name, kind, nullable=True) for name, kind in _delta_types(schema).items()]
                return DeltaTable.create(self.path, Schema(fields), mode="ignore", storage_options=self._options)
        return DeltaTable(self.path, storage_options=self._options)

    def _require_access(self, *, write: bool = True) -> None:
        folder = local_path(self.path)
        if folder is not None:
            what = f"table {self.path} cannot be {'written' if write else 'read'}"
            require_access(what, (folder.absolute(), folder.absolute() / _LOG), write=write)

    @property
    def _options(self) -> dict[str, str] | None:
        return dict(self.storage_options) or None

    def _application(self, topic: str, partition: int) -> str:
        return f"{self.name}/{topic}/{partition}"

    def _stored(self, schema: pa.Schema) -> list[str]:
        """Return the columns to store, or raise `SinkError`."""
        columns = schema.names
        require_columns(columns, f"table {self.path}", self.key)
        require_position_types(schema, f"table {self.path}")
        stored = [name for name in columns if self.keep_position or name not in POSITION]
        if not stored:
            raise SchemaMismatchError(
                f"the frame for table {self.path} has no column to store; add one, or set keep_position"
            )
        return stored

    def _add_columns(self, table: DeltaTable, schema: pa.Schema) -> None:
        """Add the frame's columns that the table lacks; `_require_fitting` has seen to it that they may be."""
        held = {one.name for one in table.schema().fields}
        more = [Field(name, kind, nullable=True) for name, kind in _delta_types(schema).items() if name not in held]
        if more:
            # Upon the version that was opened: where another writer was first, the batch begins anew.
            table.alter.add_columns(more, commit_properties=CommitProperties(max_commit_retries=0))

    def _require_fitting(self, table: DeltaTable, schema: pa.Schema) -> None:
        if _RETENTION in table.metadata().configuration:
            raise ConfigurationError(
                f"table {self.path} has {_RETENTION}, so that Delta forgets which rows are stored; unset it with "
                f"ALTER TABLE ... UNSET TBLPROPERTIES ('{_RETENTION}')"
            )
        held = _delta_types(pa.schema(table.schema().to_arrow()))
        given = _delta_types(schema)
        twins = {name.lower(): f", and has {name}, which differs only in case" for name in held}
        wrong = [
            f"the table lacks the frame's column {name}{twins.get(name.lower(), '')}"
            for name in given
            if name not in held and (not self.evolve or name in self.key or name.lower() in twins)
        ]
        wrong += [f"the frame lacks the table's column {name}" for name in held if name not in given]
        wrong += [
            f"column {name} is {_type_name(held[name])} in the table and {_type_name(given[name])} in the frame"
            for name in given
            if name in held and held[name] != given[name]
        ]
        if wrong:
            raise SchemaMismatchError(
                f"table {self.path} does not fit the frame: {'; '.join(wrong)}; change the query's select, or the table"
            )

    def _refuse_null(self, rows: pa.Table, columns: Iterable[str], why: str) -> None:
        """Refuse NULL in some columns; of those in a key, any two are different to a merge."""
        for name in columns:
            if count := rows[name].null_count:
                first = rows.filter(rows[name].is_null()).slice(0, 1)
                topic, partition, offset = (first[column][0].as_py() for column in POSITION)
                raise SinkError(
                    f"column {name} {why} table {self.path} and is NULL in {count} rows, the first "
                    f"from {topic}[{partition}] offset {offset}; filter such rows out in the query"
                )


def _mark(query_id: str, batch_id: int) -> int:
    """Return a batch and its query's id as a version: 32 bits of the id's hash, 31 of the batch's number."""
    hashed = int.from_bytes(hashlib.blake2b(query_id.encode(), digest_size=4).digest(), "big")
    return hashed << 31 | batch_id & _BATCH_BITS


def _one_zero(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """Return the rows with 0.0 for -0.0 in the key: they are equal, but not to a merge."""
    for name in key:
        field = rows.schema.field(name)
        if pa.types.is_floating(field.type):
            index = rows.schema.get_field_index(name)
            rows = rows.set_column(index, field, pc.add(rows[name], pa.scalar(0.0, field.type)))
    return rows


def _newest(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """Return the newest row of each key by offset; topic and partition tell apart what has one offset."""
    ordered = rows.sort_by([(name, "ascending") for name in ("offset", "partition", "topic")])
    numbered = ordered.append_column(_ROW, pa.array(range(rows.num_rows), pa.int64()))
    last = numbered.group_by(list(key)).aggregate([(_ROW, "max")])
    return ordered.take(last[f"{_ROW}_max"])


def _delta_types(schema: pa.Schema) -> dict[str, Any]:
    """Return Delta's types of columns, in which any value may be NULL, or raise `SinkError` where there is none."""
    types: dict[str, Any] = {}
    for column in schema:
        try:
            types[column.name] = Schema.from_arrow(pa.schema([(column.name, _nullable(column.type))])).fields[0].type
        except Exception as error:  # the library raises bare ones
            raise SchemaMismatchError(
                f"the frame's column {column.name} is {column.type}, which Delta does not know; cast it or leave it out"
            ) from error
    return types


def _nullable(kind: pa.DataType) -> pa.DataType:
    """Return a type in which any value within may be NULL."""
    if pa.types.is_struct(kind):
        return pa.struct([(one.name, _nullable(one.type)) for one in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_nullable(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, _nullable(kind.item_type))
    return kind


def _as_held(rows: pa.Table, held: pa.Schema) -> pa.Table:
    """Return the rows with the table's own types where values within those must not be NULL; others it takes."""
    for index, one in enumerate(rows.schema):
        kind = held.field(one.name).type
        if kind != _nullable(kind):
            rows = rows.set_column(index, pa.field(one.name, kind), rows[one.name].cast(kind))
    return rows


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _type_name(kind: Any) -> str:
    return str(getattr(kind, "type", kind))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
