"""A ledger in a folder: each batch is a folder of its own, which appears by one rename, with the ledger inside.

    lake/_penstock_staging/<random>/...        being written; names that begin with _ are no data to readers
    lake/penstock_batch=12/part-....parquet    a batch, whole
    lake/penstock_batch=12/_ledger.json        the next offset of every partition after this batch

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
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import MessageFormatError, SinkError
from penstock.spark_sink.planning import Offsets, TopicPartition, from_json, to_json

#: Column under which readers see a batch's number.
BATCH_COLUMN = "penstock_batch"
#: Name of the ledger's file in each batch.
LEDGER_FILE = "_ledger.json"
#: Folder of batches that are being written.
STAGING = "_penstock_staging"

_BATCH = re.compile(rf"{BATCH_COLUMN}=(\d+)")
#: Seconds after which a batch that was being written counts as left behind: no batch takes a day.
_LEFT_BEHIND_S = 24 * 60 * 60
_TAKEN = frozenset({errno.ENOTEMPTY, errno.EEXIST})


@dataclass(frozen=True, slots=True)
class Standing:
    """What a folder holds.

    Attributes:
        number: number of its newest batch, 0 where there is none.
        offsets: the next offset to apply of each partition.
        batches: which batch moved each partition last, `"<run of the query>/<batch>"`, where that is known.
    """

    number: int
    offsets: Offsets
    batches: Mapping[TopicPartition, str]


@dataclass(frozen=True, slots=True)
class FolderLedger:
    """The batches of one folder. It keeps no state, so that any thread or process may have one.

    Attributes:
        folder: where the batches are; made when the first one is staged.
    """

    folder: Path

    def read(self) -> Standing:
        """Return the newest batch and its ledger.

        Raises:
            SinkError: the folder or the newest batch's ledger cannot be read.
        """
        try:
            names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        except OSError as error:
            raise self._failed("cannot be listed", error) from error
        number = max((int(found[1]) for found in map(_BATCH.fullmatch, names) if found), default=0)
        if not number:
            return Standing(0, {}, {})
        path = self._batch(number) / LEDGER_FILE
        try:
            held = json.loads(path.read_bytes())
            batches = {
                (topic, int(partition)): str(batch)
                for topic, partitions in held["batches"].items()
                for partition, batch in partitions.items()
            }
            return Standing(number, from_json(held["next_offsets"]), batches)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, MessageFormatError) as error:
            raise SinkError(
                f"{path}, the ledger of the newest batch, cannot be read ({type(error).__name__}); without it nobody "
                "knows which offsets are applied: bring the file back, or remove the batch, whose rows are then "
                "stored again if Kafka still holds them"
            ) from error

    def stage(self) -> Path:
        """Return the path of a folder for a batch, which is not there yet; its parent is.

        Raises:
            SinkError: the parent cannot be made.
        """
        staging = self.folder / STAGING
        try:
            staging.mkdir(parents=True, exist_ok=True)
            self._remove_left_behind(staging)
        except OSError as error:
            raise self._failed("cannot be written", error) from error
        return staging / uuid.uuid4().hex

    def publish(self, staged: Path, after: Standing) -> bool:
        """Make a staged batch visible under its number, durably.

        Args:
            staged: what `stage` returned, with the batch's files in it.
            after: what the folder holds then: the newest batch's number and one, the whole ledger.

        Returns:
            False where another writer has that number already; nothing is visible then, and `staged` is there still.

        Raises:
            SinkError: the file system refused; nothing is visible.
        """
        batches: dict[str, dict[str, str]] = {}
        for (topic, partition), batch in sorted(after.batches.items()):
            batches.setdefault(topic, {})[str(partition)] = batch
        text = json.dumps({"format": 1, "next_offsets": to_json(after.offsets), "batches": batches}, indent=1)
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
        """Remove what writers that were killed have left."""
        for left in staging.iterdir():
            try:
                old = time.time() - left.stat().st_mtime > _LEFT_BEHIND_S
            except FileNotFoundError:
                continue  # its writer has published or removed it
            if old:
                shutil.rmtree(left, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


__all__ = ["BATCH_COLUMN", "LEDGER_FILE", "STAGING", "FolderLedger", "Standing"]
