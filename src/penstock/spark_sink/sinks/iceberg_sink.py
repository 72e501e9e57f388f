"""`IcebergSink`: a foreachBatch function that writes each batch once into an Iceberg table, without Java packages.

The ledger is part of the summary of the snapshot that adds the rows. pyiceberg writes, on the driver.
"""

# Why the ledger is in the summary, and how it is found. A rollback, or a catalogue restored from a backup, removes
# rows. The ledger must go with them, so that the next batch is refused as a hole. Properties of the table would stay,
# but a snapshot goes with its rows. So the valid ledger is that of the newest ancestor of the current snapshot that
# has one: snapshots of other writers (a compaction, a DELETE) have none. Each ledger covers all queries.
#
# Snapshots expire, also our last one while only others write. Its ancestors are then read from former versions of the
# table's metadata. By default a hundred are kept. If these are gone too, it is unknown whether the rows are there, and
# the batch is refused. A property of the table, which is set with the first ledger and never changes, distinguishes
# such a table from one that never had a ledger.
#
# Each change is a commit that adds a snapshot to the one whose ledger was read: the catalogue refuses any other.

from __future__ import annotations

import functools
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg import exceptions as refusals
from pyiceberg import expressions as ex
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.io import pyarrow as files
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import FileScanTask, Table, TableProperties
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from penstock.errors import ConfigurationError, SinkError
from penstock.options import not_empty
from penstock.spark_sink.ledger.rules import LedgerEntry
from penstock.spark_sink.sinks.frames import numbers
from penstock.spark_sink.sinks.lake_sink import LakeSink, Ledger, one_zero
from penstock.spark_sink.sinks.sink import Changes

#: The key of the ledger in the summary of a snapshot, and the table's property which says that there is a ledger.
_LEDGER = "penstock.ledger"
_ROW = "penstock_row"
# pyiceberg's public functions write files only together with a commit.
_to_data_files = files._dataframe_to_data_files  # noqa: SLF001 - see above
#: The table's property for pyiceberg's own retries of a commit, since 0.12.
_OWN_TRIES = "commit.retry.num-retries"
#: Maximum number of values that pyiceberg compares with the bounds of a file.
_MAX_VALUES = 200


@dataclass(frozen=True, slots=True)
class IcebergSink(LakeSink[Table]):
    """Writes micro-batches into an Iceberg table, each row once even if batches are repeated.

    `LakeSink` describes the guarantees. A batch is one snapshot of the table. With a key, each data file that holds a
    key of the batch is rewritten without it, one file after the other, on the driver. Others may compact the table,
    delete its rows and expire its snapshots.

    Attributes:
        table: its name in the catalogue, with the namespace: `db.orders`.
        catalog: pyiceberg's properties of the catalogue, with its `name` if that matters; or the name of a catalogue in
            pyiceberg's own configuration. May hold secrets and is never shown.
        key: columns that identify a row and are never NULL; empty to append.
    """

    table: str
    catalog: Mapping[str, str] | str = field(repr=False)
    key: Sequence[str] = ()

    _HELD_AS = MappingProxyType({pa.int8(): pa.int32(), pa.int16(): pa.int32()})
    _CONFLICTS = (refusals.CommitFailedException, refusals.CommitStateUnknownException)
    _PLAIN = (refusals.NoSuchNamespaceError, refusals.NoSuchPropertyException, refusals.RESTError, OSError)

    def __post_init__(self) -> None:
        """Check the settings; a `ConfigurationError` names the wrong one."""
        not_empty("table", self.table)
        if "." not in self.table.strip("."):
            raise ConfigurationError(f'table is {self.table!r}, without a namespace; write it as in "db.orders"')
        if not self.catalog:
            raise ConfigurationError("catalog is empty; give pyiceberg's properties of a catalogue, or the name of one")
        if not isinstance(self.catalog, str):
            object.__setattr__(self, "catalog", dict(self.catalog))
        self._check_settings()

    def _read(self, table: Table) -> Ledger:
        """Return the ledger of the newest ancestor of the current snapshot that has one."""
        snapshots: dict[int | None, Snapshot] = {}
        for metadata in self._versions(table):
            # Include those of former versions: expiring snapshots may also remove them as parents of the others.
            snapshots |= {snapshot.snapshot_id: snapshot for snapshot in metadata.snapshots}
            ancestor = snapshots.get(table.metadata.current_snapshot_id)
            while ancestor is not None:
                if text := ancestor.summary and ancestor.summary.get(_LEDGER):
                    return _ledger_of(text)
                ancestor = snapshots.get(ancestor.parent_snapshot_id)
            if _LEDGER not in table.properties:
                return {}
        raise SinkError(
            f"no snapshot of {self._target} holds the ledger any longer: the table was replaced or rolled back to "
            "before its first batch, or that snapshot and its metadata files have expired; compare the table with the "
            f"topic, then ALTER TABLE ... UNSET TBLPROPERTIES ('{_LEDGER}') and set the ledger's entries"
        )

    def _commit(self, table: Table, query: str, changes: Changes, rows: pa.Table, more: pa.Schema) -> None:
        ledger = self._read(table)
        changed = {**ledger.get(query, {}), **changes}
        ledger[query] = {part: entry for part, entry in changed.items() if entry is not None}
        summary = {_LEDGER: _text_of(ledger)}

        # The library gets a part of the metadata, for it copies all snapshots some twenty times. Its own retries are
        # off: they could append to another writer's commit, whose ledger was not read.
        current = table.current_snapshot()
        part = {
            "snapshots": [] if current is None else [current],
            "snapshot_log": [],
            "properties": {**table.properties, _OWN_TRIES: "0"},
        }
        table.metadata = table.metadata.model_copy(update=part)
        transaction = table.transaction()
        if _LEDGER not in table.properties:
            transaction.set_properties({_LEDGER: "in the summaries of snapshots"})
        if len(more):
            with transaction.update_schema() as columns_update:
                columns_update.union_by_name(more)
        metadata = transaction.table_metadata
        added, removed = list[DataFile](), list[DataFile]()
        for file, written in chain([(None, rows)], self._replaced(table, metadata.schema(), rows)):
            removed += [] if file is None else [file]
            added += _to_data_files(metadata, written, table.io) if written.num_rows else ()
        update = transaction.update_snapshot(snapshot_properties=summary)
        snapshot = update.overwrite() if removed else update.merge_append()
        for file in removed:
            snapshot.delete_data_file(file)
        for file in added:
            snapshot.append_data_file(file)
        snapshot.commit()
        transaction.commit_transaction()

    def _replaced(self, table: Table, schema: Schema, rows: pa.Table) -> Iterator[tuple[DataFile, pa.Table]]:
        """Yield each data file that holds keys of these rows, with its other rows."""
        # The library's upsert makes several snapshots. Its filter of all keys takes quadratic time.
        if not self.key or not rows.num_rows:
            return

        def read(task: FileScanTask, columns: Schema) -> pa.Table:
            return files.ArrowScan(table.metadata, table.io, columns, ex.AlwaysTrue()).to_table([task])

        keys = one_zero(rows.select(self.key), self.key)
        for task in table.scan(row_filter=_may_hold(keys)).plan_files():
            # Of most files, only the columns of the key are read.
            held = read(task, schema.select(*self.key))
            if _without(held, keys).num_rows < held.num_rows:
                yield task.file, _without(read(task, schema), keys)

    @contextmanager
    def _opened(self, schema: pa.Schema | None = None) -> Iterator[Table | None]:
        name: dict[str, Any] = {"name": self.catalog} if isinstance(self.catalog, str) else {**self.catalog}
        with load_catalog(**name) as catalog:
            yield self._loaded(catalog, schema)

    def _loaded(self, catalog: Catalog, schema: pa.Schema | None) -> Table | None:
        with suppress(refusals.NoSuchTableError):
            return catalog.load_table(self.table)
        if schema is None:
            return None
        catalog.create_namespace_if_not_exists(self.table.rpartition(".")[0])
        # Without merging, each batch adds a manifest that every reader opens.
        merged = {TableProperties.MANIFEST_MERGE_ENABLED: "true"}
        return catalog.create_table_if_not_exists(self.table, self._types(schema), properties=merged)

    @staticmethod
    def _versions(table: Table) -> Iterator[TableMetadata]:
        """Yield the table's metadata and its former versions that still exist, the newest first."""
        yield table.metadata
        for entry in reversed(table.metadata.metadata_log):
            with suppress(FileNotFoundError):
                yield FromInputFile.table_metadata(table.io.new_input(entry.metadata_file))

    @staticmethod
    def _columns(table: Table) -> pa.Schema:
        return files.schema_to_pyarrow(table.schema(), include_field_ids=False)

    @property
    def _address(self) -> Sequence[str]:
        return "--iceberg", self.table, *(["--catalog", self.catalog] if isinstance(self.catalog, str) else [])

    @property
    def ledger_key(self) -> Hashable:
        """A value that distinguishes its ledger from others in this process."""
        return self.table, hash(str(self.catalog)), self.name


def _text_of(ledger: Ledger) -> str:
    """Return a ledger as JSON: by query, lists `[topic, topic id, query id, batch id, {partition: [start, end]}]`.

    Ids are written once for all partitions of a batch, because every snapshot stores a ledger.
    """
    batches_by_query: dict[str, list[list[Any]]] = {}
    for query, entries in ledger.items():
        batches: dict[tuple[Any, ...], dict[int, tuple[int | None, int]]] = {}
        for (topic, partition), entry in sorted(entries.items()):
            of_batch = batches.setdefault((topic, entry.topic_id, entry.query_id, entry.batch_id), {})
            of_batch[partition] = entry.start, entry.end
        if batches:
            batches_by_query[query] = [[*batch, ends] for batch, ends in batches.items()]
    return json.dumps(batches_by_query, separators=(",", ":"))


def _ledger_of(text: str) -> Ledger:
    return {
        query: {
            (topic, int(partition)): LedgerEntry(end, start, *ids)
            for topic, *ids, ends in batches
            for partition, (start, end) in ends.items()
        }
        for query, batches in json.loads(text).items()
    }


def _may_hold(keys: pa.Table) -> ex.BooleanExpression:
    """Return a filter for files that may hold a key, by the bounds of their columns."""
    filters: list[ex.BooleanExpression] = [ex.AlwaysTrue()]
    for name in keys.column_names:
        values = pc.unique(keys[name])
        if pa.types.is_floating(values.type):
            continue  # NaN is outside of all bounds
        if len(values) <= _MAX_VALUES:
            filters.append(ex.In(term=name, values=set(values.to_pylist())))
        else:
            ends = pc.min_max(values).as_py()
            filters += [
                ex.GreaterThanOrEqual(term=name, value=ends["min"]),
                ex.LessThanOrEqual(term=name, value=ends["max"]),
            ]
    return functools.reduce(ex.And, filters)


def _without(rows: pa.Table, keys: pa.Table) -> pa.Table:
    """Return the rows whose key is not in `keys`."""
    names = keys.column_names
    numbered = one_zero(rows.select(names), names).cast(keys.schema).append_column(_ROW, numbers(0, rows.num_rows))
    left = numbered.join(keys, names, join_type="left anti")[_ROW]
    return rows.take(left.take(pc.sort_indices(left)))
