"""`ParquetSink`: a foreachBatch function that writes each batch once into a folder of Parquet files.

Executors write, Spark's own writer does the work; the driver makes the batch visible by one rename (`folder_ledger`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import tenacity
from pyspark import StorageLevel
from pyspark.sql import DataFrame

from penstock.errors import ConfigurationError, SinkError
from penstock.options import names, not_empty
from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.ledger.folder_ledger import BATCH_COLUMN, STAGING, FolderLedger, FolderState
from penstock.spark_sink.ledger.rules import Batch, warn_left_out
from penstock.spark_sink.sinks.folder_access import require_access
from penstock.spark_sink.sinks.frames import is_applied, offset_statistics
from penstock.spark_sink.sinks.position import POSITION, require_columns
from penstock.spark_sink.sinks.sink import Origin, origin_of, stored_batches
from penstock.spark_sink.source.offsets.planning import Offsets

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql.types import StructType

#: Times a batch is written anew because another writer was first, before that is called an error.
_TRIES = 10
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*):/")


@dataclass(frozen=True, slots=True)
class ParquetSink:
    """Writes micro-batches into a folder of Parquet files, each row once whatever is repeated.

    Use it with `writeStream.foreachBatch(sink)`, once for each batch and folder. The frame carries `topic`,
    `partition` and `offset` beside its own columns. Read the folder with `spark.read.parquet(folder)`, or any other
    reader that knows folders named `column=value` and passes over names that begin with `_`: a batch is in a folder
    `penstock_batch=<number>`, whose number readers see as a column. They see all of a batch or nothing of it.

    The newest batch holds the ledger: older ones may be moved or rewritten, that one must stay. The ledger belongs to
    the query by name, so that several may fill one folder; under another name all is stored again. A second copy of a
    query, started by mistake, stores nothing twice. The batch is kept in Spark's cache while it is written, because
    its offsets must be known first. A sink holds nothing open and can be pickled.

    Attributes:
        folder: where the batches go: a local disk or a network file system that the driver and all executors see
            under this path. Object stores and HDFS are refused: a rename is no single step there, or not to be had.
        partition_by: columns by which each batch is split into folders `column=value`.
        keep_position: whether `topic`, `partition` and `offset` are stored as well.
        name: of the query, in the ledger; Spark's name of the query that hands the batches over if None. Spark Connect
            does not tell it, but for queries that `start_sink` starts.
    """

    folder: str
    partition_by: Sequence[str] = ()
    keep_position: bool = field(default=False, kw_only=True)
    name: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check the settings; a `ConfigurationError` names a wrong one."""
        folder = os.fspath(self.folder)
        not_empty("folder", folder)
        if self.name is not None:
            not_empty("name", self.name)
        scheme = _SCHEME.match(folder)
        if scheme is not None and scheme[1].lower() != "file":
            raise ConfigurationError(
                f"folder is at {scheme[1]}, where a batch cannot appear in one step; use DeltaSink for object stores, "
                "or the path of a file system that is mounted"
            )
        path = re.sub(r"^file:/+", "/", folder, flags=re.IGNORECASE)
        object.__setattr__(self, "folder", str(Path(path).absolute()))
        # A tuple, so that a frozen sink cannot be changed through a list that the caller still holds.
        object.__setattr__(self, "partition_by", names("partition_by", self.partition_by) if self.partition_by else ())
        if not self.keep_position and set(self.partition_by) & set(POSITION):
            raise ConfigurationError(
                "partition_by names a column of the position, which is not stored; set keep_position"
            )

    def check(self, schema: StructType) -> None:
        """Say what is wrong with a frame of this schema.

        Raises:
            SinkError: a column is missing, has a name that the sink needs, or another type than in the folder.
            MissingRightError: the folder may not be written.
        """
        self._require_access()
        stored = self._stored(schema.names)
        self._require_fitting(FolderLedger(Path(self.folder)).read(), schema, stored)

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Store one micro-batch.

        Raises:
            SinkError: the batch cannot be stored; nothing of it is visible.
            MissingRightError: the same, as the folder may not be written.
        """
        self._require_access()
        stored = self._stored(batch.columns)
        origin = origin_of(batch, self.name)
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(_TRIES),
            retry=tenacity.retry_if_result(lambda is_stored: not is_stored),
            retry_error_callback=lambda _: False,
        )
        # Without its plan: entries end behind last rows, as a batch without rows makes no folder.
        what = Batch(f"folder {self.folder}", batch_id, origin.query_id)
        with stored_batches.one_call(self.folder, origin, what), _cached(batch):
            if not retrying(self._store, batch, what, origin, stored):
                raise SinkError(
                    f"batch {batch_id} for folder {self.folder}: another copy of the query was first {_TRIES} times in "
                    "a row; find it and stop it, or give each a name of its own"
                )

    def position(self, query: str = "") -> Offsets:
        """Return the ledger: of each partition, the next offset that the folder takes. Empty before the first batch.

        Args:
            query: name of the query, where the sink has none of its own.

        Raises:
            SinkError: the folder cannot be read.
            MissingRightError: the folder may not be read.
        """
        self._require_access(write=False)
        entries = FolderLedger(Path(self.folder)).read().ledger_of(self.name or query)
        return {part: entry.end for part, entry in entries.items()}

    def _store(self, batch: DataFrame, what: Batch, origin: Origin, stored: list[str]) -> bool:
        """Write what is not applied yet; return whether it stands, by this or another copy's hand."""
        ledger, query, batch_id = FolderLedger(Path(self.folder)), origin.query, what.batch_id
        state = ledger.read()
        columns = self._require_fitting(state, batch.schema, stored)
        before = state.ledger_of(query)
        below = what.applied_below(before)
        statistics = offset_statistics(batch, below, what.target)
        after = {**before, **what.entries_after(before, statistics.spans)}
        warn_left_out(batch_id, what.target, statistics)
        expected = statistics.rows - sum(statistics.applied.values())
        if not expected:
            return True
        rows = batch.where(~is_applied(below)) if statistics.applied else batch
        staged = ledger.stage()
        try:
            rows.select(*(_quoted(name) for name in stored)).write.partitionBy(*self.partition_by).parquet(str(staged))
            if not staged.is_dir():
                raise SinkError(
                    f"batch {batch_id}: what Spark wrote into folder {self.folder} is not to be seen from the driver; "
                    "name a file system that the driver and all executors share"
                )
            written = ledger.count(staged)
            if written != expected:
                raise SinkError(
                    f"batch {batch_id}: of {expected} rows that Spark wrote into folder {self.folder} the driver sees "
                    f"{written}; name a file system that the driver and all executors share; nothing of the batch is "
                    "visible"
                )
            while not ledger.publish(staged, state.after(query, after, columns, tuple(self.partition_by))):
                state = ledger.read()
                self._require_fitting(state, batch.schema, stored)
                if state.ledger_of(query) != before:
                    return False
                # A batch of another query came first: this one goes behind it as it is.
            return True
        finally:
            ledger.discard(staged)

    def _require_access(self, *, write: bool = True) -> None:
        folder = Path(self.folder)
        what = f"folder {self.folder} cannot be {'written' if write else 'read'}"
        require_access(what, (folder, folder / STAGING) if write else (folder,), write=write)

    def _require_fitting(self, state: FolderState, schema: StructType, stored: list[str]) -> dict[str, str]:
        """Return the types of the columns to store, or raise `SinkError`: readers take a column to be of one type."""
        columns = {name: schema[name].dataType.simpleString() for name in stored}
        wrong = state.differences(columns, tuple(self.partition_by))
        if wrong:
            raise SchemaMismatchError(
                f"folder {self.folder} does not fit the frame: {'; '.join(wrong)}; nobody could read both: cast the "
                "column in the query, give it another name, or write into another folder"
            )
        return columns

    def _stored(self, columns: Iterable[str]) -> list[str]:
        """Return the columns to store, or raise `SinkError`."""
        present = list(columns)
        require_columns(present, f"folder {self.folder}", self.partition_by)
        if BATCH_COLUMN in present:
            raise SchemaMismatchError(
                f"the frame for folder {self.folder} has a column {BATCH_COLUMN}, a name the sink needs"
            )
        stored = [name for name in present if self.keep_position or name not in POSITION]
        if not set(stored) - set(self.partition_by):
            raise SchemaMismatchError(
                f"the frame for folder {self.folder} has no column to store beside its position and partition_by; "
                "add one, or set keep_position"
            )
        return stored


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


@contextmanager
def _cached(batch: DataFrame) -> Iterator[None]:
    """Keep a batch while it is gone through twice, unless its owner keeps it already."""
    if batch.storageLevel != StorageLevel.NONE:
        yield
        return
    batch.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        yield
    finally:
        batch.unpersist()
