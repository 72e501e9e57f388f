"""`DeltaSink`: a foreachBatch function that writes each batch once into a Delta table, without Java packages.

The ledger is Delta's own: per partition an application transaction, whose version is the next offset, in the commit
that adds the rows. Batch numbers of Spark do not decide, so a lost checkpoint changes nothing: which batch moved a
partition last stands in a second one, `<application>#batch`, and tells rows that come late from repeated ones. delta-rs
writes, on the driver.
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
from penstock.spark_sink.ledger.state import OffsetStatistics, advanced, refuse_late, replayed, warn_replayed
from penstock.spark_sink.sinks.folder_access import local_path, require_access
from penstock.spark_sink.sinks.frames import MAX_BATCH_BYTES, collected
from penstock.spark_sink.sinks.position import (
    POSITION,
    null_counts,
    offset_spans,
    require_columns,
    require_position,
    require_position_types,
    unapplied,
)
from penstock.spark_sink.sinks.sink import arrow_schema, origin_of
from penstock.spark_sink.source.offsets.planning import Offsets, TopicPartition

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

#: End of the application id whose version tells which batch moved a partition last, and the bits of a batch's number.
_BATCH, _BATCH_BITS = "#batch", (1 << 31) - 1

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
        """Say what is wrong with a frame of this schema, or how it differs from the table.

        Raises:
            SinkError: a column is missing or has a type that Delta does not know, or the table does not fit.
            ConfigurationError: the table forgets what is stored.
            MissingRightError: its folder may not be written.
        """
        self._require_access()
        arrow = arrow_schema(schema)
        given = pa.schema([arrow.field(name) for name in self._stored(arrow)])
        _delta_types(given)
        if DeltaTable.is_deltatable(self.path, self._options):
            self._require_fitting(self._opened(), given)

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
        if rows.num_rows == 0:
            return
        require_position(null_counts(rows), f"table {self.path}")
        self._refuse_null(rows, self.key, "is part of the key of")
        origin = origin_of(batch, self.name)
        try:
            for attempt in _RETRYING.copy():
                with attempt:
                    self._store(rows, stored, batch_id, origin.run, again=attempt.retry_state.attempt_number > 1)
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

    def position_of(self, _query: str, partitions: Iterable[TopicPartition]) -> Offsets:
        """Return the ledger for some partitions; see `ledger_positions`. The sink's own name counts.

        Raises:
            SinkError: the table cannot be read.
            MissingRightError: its folder may not be.
        """
        self._require_access(write=False)
        try:
            if not DeltaTable.is_deltatable(self.path, self._options):
                return {}
            table = self._opened()
            held = {part: table.transaction_version(self._application(*part)) for part in partitions}
        except Exception as error:  # noqa: BLE001 - the library raises bare ones
            raise SinkError(f"the ledger of table {self.path} cannot be read: {_first_line(error)}") from None
        return {part: offset for part, offset in held.items() if offset is not None}

    def _store(self, rows: pa.Table, stored: list[str], batch_id: int, run: str | None, *, again: bool) -> None:
        """Write what is not applied yet, in one commit, upon the version of the table whose ledger was read.

        Where this was tried before, `again`, what then stands of this batch is that try's.
        """
        schema = rows.select(stored).schema
        table = self._opened(schema)
        self._require_fitting(table, schema)
        self._add_columns(table, schema)
        held = pa.schema(table.schema().to_arrow())
        self._refuse_null(rows, [name for name in stored if not held.field(name).nullable], "is NOT NULL in")
        spans = offset_spans(rows)
        ledger: Offsets = {}
        for part in spans:
            ledger[part] = table.transaction_version(self._application(*part)) or 0
        if run is not None:
            marks = {part: table.transaction_version(self._application(*part) + _BATCH) for part in spans}
            found = {part: _batch_of(mark, run) for part, mark in marks.items() if mark is not None}
            others = {part: batch for part, batch in found.items() if not (again and batch == f"{run}/{batch_id}")}
            refuse_late(others, replayed(ledger, spans), run, batch_id, f"table {self.path}")
        left, applied = unapplied(rows, spans, ledger)
        warn_replayed(batch_id, f"table {self.path}", OffsetStatistics(rows.num_rows, spans, applied), ledger)
        if left.num_rows == 0:
            return
        moved = advanced(ledger, spans)
        # A run that is not known is like no other: what stands of another one is taken back.
        mark = _mark(run, batch_id) if run is not None else 0
        commit = CommitProperties(
            app_transactions=[
                *(Transaction(self._application(*part), offset) for part, offset in moved.items()),
                *(Transaction(self._application(*part) + _BATCH, mark) for part in moved),
            ],
            # The library would put the commit behind another writer's, whose ledger was not looked at.
            max_commit_retries=0,
        )
        if not self.key:
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


def _mark(run: str, batch_id: int) -> int:
    """Return a batch and its run as a version: 32 bits of the run's hash, 31 of the batch's number."""
    hashed = int.from_bytes(hashlib.blake2b(run.encode(), digest_size=4).digest(), "big")
    return hashed << 31 | batch_id & _BATCH_BITS


def _batch_of(mark: int, run: str) -> str:
    """Return the batch that a mark stands for, as ledgers write it; empty where another run has made it."""
    return f"{run}/{mark & _BATCH_BITS}" if mark and mark == _mark(run, mark & _BATCH_BITS) else ""


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
