"""A ledger in a folder: each batch is a folder of its own, which appears by one rename, with the ledger inside.

    lake/_penstock_staging/<random>/...        being written; names that begin with _ are no data to readers
    lake/penstock_batch=12/part-....parquet    a batch, whole
    lake/penstock_batch=12/_ledger.json        of each query, the next offset of every partition after this batch

The newest batch's file is the ledger. Rows and ledger become visible in the same instant, because a rename of a folder
is one step for the file system; and it fails where the name is taken, so of two writers that saw the same ledger one
has to read it anew. That holds for disks and for network file systems, not for object stores: those have no rename.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import MessageFormatError, SinkError
from penstock.spark_sink.ledger.rules import LedgerEntry
from penstock.spark_sink.source.offsets.planning import TopicPartition, from_json, to_json

#: Column under which readers see a batch's number.
BATCH_COLUMN = "penstock_batch"
#: Name of the ledger's file in each batch.
LEDGER_FILE = "_ledger.json"
#: Folder of batches that are being written.
STAGING = "_penstock_staging"

#: What an entry holds beside the next offset. An entry ends behind the last row of its batch.
_IDS = ("query_id", "batch_id")
Entries = Mapping[TopicPartition, LedgerEntry]

_BATCH = re.compile(rf"{BATCH_COLUMN}=(\d+)")
#: Seconds after which a batch that was being written counts as left behind: no batch takes a day.
_LEFT_BEHIND_S = 24 * 60 * 60
_TAKEN = frozenset({errno.ENOTEMPTY, errno.EEXIST})
#: How the file is laid out; another number is another layout.
_FORMAT = 2


@dataclass(frozen=True, slots=True)
class FolderState:
    """What a folder holds.

    Number 0 stands for a folder without batches. Queries go by their names, columns have their types in Spark's words,
    and `split_by` are the columns by which batches are split into folders, in their order.
    """

    number: int = 0
    queries: Mapping[str, Entries] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    split_by: tuple[str, ...] = ()

    def ledger_of(self, query: str) -> Entries:
        """Return the ledger of a query."""
        return self.queries.get(query) or {}

    def differences(self, columns: Mapping[str, str], split_by: tuple[str, ...]) -> list[str]:
        """Say what keeps a batch of these columns from being read together with those that are there."""
        if not self.number:
            return []
        found = [
            f"column {name} is {held} in the folder and {columns[name]} in the frame"
            for name, held in self.columns.items()
            if columns.get(name, held) != held
        ]
        if split_by != self.split_by:
            found.append(
                f"the folder is split by ({', '.join(self.split_by)}), and the frame by ({', '.join(split_by)})"
            )
        return found

    def after(self, query: str, entries: Entries, columns: Mapping[str, str], split_by: tuple[str, ...]) -> FolderState:
        """Return what the folder holds after a batch of these columns that leaves a query's ledger so."""
        return FolderState(self.number + 1, {**self.queries, query: entries}, {**self.columns, **columns}, split_by)


@dataclass(frozen=True, slots=True)
class FolderLedger:
    """The batches of one folder. It keeps no state, so that any thread or process may have one."""

    folder: Path

    def read(self) -> FolderState:
        """Return the newest batch and the ledgers in it, or raise `SinkError` where one cannot be read."""
        try:
            names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        except OSError as error:
            raise self._failed("cannot be listed", error) from error
        number = max((int(found[1]) for found in map(_BATCH.fullmatch, names) if found), default=0)
        if not number:
            return FolderState()
        path = self._batch(number) / LEDGER_FILE
        try:
            held = json.loads(path.read_bytes())
            if held["format"] != _FORMAT:
                raise SinkError(
                    f"{path} is a ledger of format {held['format']}, and this version of penstock knows {_FORMAT}; "
                    "write into another folder"
                )
            return FolderState(
                number,
                {query: _from_json(one) for query, one in held["queries"].items()},
                dict(held["columns"]),
                tuple(held["split_by"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, MessageFormatError) as error:
            raise SinkError(
                f"{path}, the ledger of the newest batch, cannot be read ({type(error).__name__}); without it nobody "
                "knows which offsets are applied: bring the file back, or remove the batch, whose rows are then "
                "stored again if Kafka still holds them"
            ) from error

    def stage(self) -> Path:
        """Return a path for a staged batch, which is not there yet. Its parent is made, or a `SinkError` raised."""
        staging = self.folder / STAGING
        try:
            staging.mkdir(parents=True, exist_ok=True)
            self._remove_left_behind(staging)
        except OSError as error:
            raise self._failed("cannot be written", error) from error
        return staging / uuid.uuid4().hex

    def publish(self, staged: Path, after: FolderState) -> bool:
        """Make a staged batch visible under its number, durably; `after` is what the folder holds then.

        Returns False where another writer has that number already; nothing is visible then, and `staged` is there
        still. Where the file system refuses, a `SinkError` says whether the batch may be lost.
        """
        queries = {
            query: {"next_offsets": to_json({part: entry.end for part, entry in entries.items()})}
            | {name: to_json({part: getattr(entry, name) for part, entry in entries.items()}) for name in _IDS}
            for query, entries in sorted(after.queries.items())
        }
        held = {"format": _FORMAT, "queries": queries, "columns": dict(after.columns), "split_by": after.split_by}
        text = json.dumps(held, indent=1)
        try:
            (staged / LEDGER_FILE).write_text(text, encoding="utf-8")
            for folder, _, files in os.walk(staged):
                for name in files:
                    _sync(Path(folder, name))
                _sync(Path(folder))
            staged.rename(self._batch(after.number))
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            raise self._failed(f"took no batch {after.number}", error) from error
        try:
            _sync(self.folder)
        except OSError as error:
            raise self._failed(f"may have lost batch {after.number}", error) from error
        return True

    def count(self, staged: Path) -> int:
        """Return the rows of a staged batch by the footers of its files, as readers would find them; or `SinkError`."""
        # Spark's rule of what readers pass over.
        names = (path.relative_to(staged) for path in staged.rglob("*.parquet"))
        seen = [name for name in names if not any(part[0] in "._" and "=" not in part for part in name.parts)]
        try:
            return sum(pq.read_metadata(staged / name).num_rows for name in seen)
        except (OSError, pa.ArrowException) as error:
            raise SinkError(
                f"folder {self.folder}: a file that was just written cannot be read ({type(error).__name__}); check "
                "the disk; nothing of the batch is visible"
            ) from error

    @staticmethod
    def discard(staged: Path) -> None:
        """Remove a staged batch, if it is there."""
        shutil.rmtree(staged, ignore_errors=True)

    def _batch(self, number: int) -> Path:
        return self.folder / f"{BATCH_COLUMN}={number}"

    def _failed(self, what: str, error: OSError) -> SinkError:
        return SinkError(
            f"folder {self.folder} {what}: {error.strerror or error}; check its disk and permissions, then start the "
            "query anew"
        )

    @staticmethod
    def _remove_left_behind(staging: Path) -> None:
        for left in staging.iterdir():
            try:
                old = time.time() - left.stat().st_mtime > _LEFT_BEHIND_S
            except FileNotFoundError:
                continue  # its writer has published or removed it
            if old:
                shutil.rmtree(left, ignore_errors=True)


def _from_json(held: Any) -> Entries:
    """Return a query's entries; those of a former version have no ids."""

    def given(name: str, part: TopicPartition) -> Any:
        return held.get(name, {}).get(part[0], {}).get(str(part[1]))

    ends = from_json(held["next_offsets"])
    return {part: LedgerEntry(end, **{name: given(name, part) for name in _IDS}) for part, end in ends.items()}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
