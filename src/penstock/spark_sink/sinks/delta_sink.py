"""`DeltaSink`: a foreachBatch function that writes each batch once into a Delta table, without Java packages.

The ledger uses Delta's application transactions, in the commit that adds the rows. For each partition, the version of
one is the next offset. Two more have the planned start of the last batch (`<application>#start`) and the batch
(`<application>#batch`). One for each query has the version of the table (`<name>#version`). delta-rs writes, on the
driver.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, DeltaProtocolError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler

from penstock.errors import ConfigurationError, SinkError
from penstock.options import not_empty
from penstock.spark_sink.ledger.rules import LedgerEntry
from penstock.spark_sink.sinks.lake_sink import LakeSink, Ledger
from penstock.spark_sink.sinks.sink import Changes
from penstock.spark_sink.source.plan import TopicPartition

#: Suffixes of the application ids for the planned start of a partition's last batch, and for that batch; and the bits
#: of a batch number. Negative versions mean "unknown", because Delta cannot remove an application transaction.
_START, _BATCH, _BATCH_BITS = "#start", "#batch", (1 << 31) - 1
_UNKNOWN = -1
_VERSION = "#version"
_APPLICATION = re.compile(r"(.+)/([^/]+)/(\d+)", re.DOTALL)

#: The table's setting that lets application transactions, the ledger, expire.
_RETENTION = "delta.setTransactionRetentionDuration"


@dataclass(frozen=True, slots=True)
class DeltaSink(LakeSink[DeltaTable]):
    """Writes micro-batches into a Delta table, each row exactly once; see `LakeSink`.

    Application transactions must not expire: a table with `delta.setTransactionRetentionDuration` is refused. RESTORE
    does not restore them: batches are refused afterwards, until `write_ledger` has set the ledger. They hold no ids of
    topics: after a topic was deleted and created again, remove its entries (`penstock sink reset NAME --forget`).

    Attributes:
        path: folder or address of the table, for delta-rs.
        key: columns that identify a row, never NULL; empty: append.
        storage_options: settings of the storage, for delta-rs; they may contain secrets and are never shown.
    """

    path: str
    key: Sequence[str] = ()
    storage_options: Mapping[str, str] = field(default_factory=dict, kw_only=True, repr=False)

    _CONFLICTS = (CommitFailedError,)
    _PLAIN = (TableNotFoundError, DeltaProtocolError, OSError)

    def __post_init__(self) -> None:
        """Check the settings; `ConfigurationError` names a wrong one."""
        object.__setattr__(self, "path", os.fspath(self.path))
        not_empty("path", self.path)
        object.__setattr__(self, "storage_options", dict(self.storage_options))
        self._check_settings()

    def _read(self, table: DeltaTable) -> Ledger:
        partitions: dict[str, list[TopicPartition]] = {}
        for application in sorted(self._applications(table)):
            if found := _APPLICATION.fullmatch(application):
                partitions.setdefault(found[1], []).append((found[2], int(found[3])))
        ledger = {query: self._transactions(table, query, some) for query, some in partitions.items()}
        return {query: entries for query, entries in ledger.items() if entries}

    def _applications(self, table: DeltaTable) -> set[str]:
        """Return the ids of all application transactions: the library returns versions by id only.

        A checkpoint of the log has them all, and anybody may make one at any time.
        """
        table.create_checkpoint()
        log = pa_fs.PyFileSystem(DeltaStorageHandler(self.path, self._options))
        with log.open_input_file(f"_delta_log/{table.version():020}.checkpoint.parquet") as checkpoint:
            actions = pq.read_table(checkpoint, columns=["txn"])["txn"].to_pylist()
        return {action["appId"] for action in actions if action and action["appId"]}

    def _entries(
        self, table: DeltaTable, query: str, partitions: Iterable[TopicPartition], query_id: str | None = None
    ) -> dict[TopicPartition, LedgerEntry]:
        """Return the entries of partitions. The batch of an entry is known only if it belongs to this query.

        Refuses a table that was restored since the query's last commit: RESTORE does not restore application
        transactions.
        """
        last = table.transaction_version(query + _VERSION)
        others = 0 if last is None else table.version() - last
        if others and any(commit.get("operation") == "RESTORE" for commit in table.history(others)):
            raise SinkError(
                f"{self._target} was restored (RESTORE) after its version {last}, the last of query {query}, whose "
                "ledger is still that of the rows from before: set the ledger's entries to where the rows end now"
            )
        return self._transactions(table, query, partitions, query_id)

    @staticmethod
    def _transactions(
        table: DeltaTable, query: str, partitions: Iterable[TopicPartition], query_id: str | None = None
    ) -> dict[TopicPartition, LedgerEntry]:
        found: dict[TopicPartition, LedgerEntry] = {}
        for topic, partition in partitions:
            application = f"{query}/{topic}/{partition}"
            end = table.transaction_version(application)
            if end is None or end == _UNKNOWN:
                continue
            start, mark = (table.transaction_version(application + kind) for kind in (_START, _BATCH))
            number = mark & _BATCH_BITS if mark else None
            is_ours = query_id is not None and number is not None and mark == _mark(query_id, number)
            planned = None if start == _UNKNOWN else start
            found[topic, partition] = LedgerEntry(end, planned, None, query_id if is_ours else None, number)
        return found

    def _commit(self, table: DeltaTable, query: str, changes: Changes, rows: pa.Table, more: pa.Schema) -> None:
        transactions = [Transaction(query + _VERSION, table.version() + 1)]
        for (topic, partition), entry in changes.items():
            application, held = f"{query}/{topic}/{partition}", entry or LedgerEntry(_UNKNOWN)
            # Without a known query, an existing mark of another query is removed.
            mark = 0 if held.query_id is None else _mark(held.query_id, held.batch_id or 0)
            start = _UNKNOWN if held.start is None else held.start
            versions = ((application, held.end), (application + _START, start), (application + _BATCH, mark))
            transactions += [Transaction(*version) for version in versions]
        # With retries, the library would commit after another writer whose ledger was not read.
        commit = CommitProperties(app_transactions=transactions, max_commit_retries=0)
        if not self.key or not rows.num_rows:  # a merge without rows would commit nothing, not even the ledger
            schema_mode: Literal["merge"] | None = "merge" if len(more) else None
            write_deltalake(table, rows, mode="append", schema_mode=schema_mode, commit_properties=commit)
            return
        same = " AND ".join(f"held.{_quoted(name)} = new.{_quoted(name)}" for name in self.key)
        merge = table.merge(
            rows, same, source_alias="new", target_alias="held", merge_schema=len(more) > 0, commit_properties=commit
        )
        merge.when_matched_update_all().when_not_matched_insert_all().execute()

    @contextmanager
    def _opened(self, schema: pa.Schema | None = None) -> Iterator[DeltaTable | None]:
        if not DeltaTable.is_deltatable(self.path, self._options):
            if "://" not in (local := self.path.removeprefix("file://")):
                # The library takes an unreadable folder for an absent one; the system does not.
                with suppress(FileNotFoundError):
                    Path(local, "_delta_log").stat()
            if schema is None:
                yield None
                return
            # Another writer may have created it meanwhile; otherwise opening it raises the error.
            with suppress(DeltaError):
                # All columns are nullable: a literal of this batch may be NULL in the next.
                columns = Schema.from_arrow(self._types(schema))
                DeltaTable.create(self.path, columns, mode="ignore", storage_options=self._options)
        table = DeltaTable(self.path, storage_options=self._options)
        if _RETENTION in table.metadata().configuration:
            raise ConfigurationError(
                f"table {self.path} has {_RETENTION}, so that Delta forgets which rows are stored; unset it with "
                f"ALTER TABLE ... UNSET TBLPROPERTIES ('{_RETENTION}')"
            )
        yield table

    @staticmethod
    def _columns(table: DeltaTable) -> pa.Schema:
        return pa.schema(table.schema().to_arrow())

    @property
    def _address(self) -> Sequence[str]:
        return "--delta", self.path

    @property
    def _options(self) -> dict[str, str] | None:
        return dict(self.storage_options) or None


def _mark(query_id: str, batch_id: int) -> int:
    """Return a batch and its query's id as a version: 32 bits of the id's hash, 31 bits of the batch number."""
    hashed = int.from_bytes(hashlib.blake2b(query_id.encode(), digest_size=4).digest(), "big")
    return hashed << 31 | batch_id & _BATCH_BITS


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
