"""The state table: 24 bytes for each transaction, memory-mapped, beside the redo log that is the truth.

A table file holds a header page and a fixed number of records, filled in order; it is removed once all of its
transactions are settled. It is made anew whenever the store opens, from the redo log, and other processes may look at
it while the store is in use: that is how an operator sees what is pending without the store's lock.

A record, big-endian: place of the halves in the redo log (8 bytes), their size (4), birth in seconds since the epoch
(4, good until 2106), hash of the producer group (4), state (4): the upper 24 bits are a checksum of the rest.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh32_intdigest

from penstock.transactions.stores.file.ledger import Kept
from penstock.transactions.wire.ops import Verdict

_log = logging.getLogger("penstock.transactions")

SUFFIX = ".table"
#: Bytes of a record.
RECORD_BYTES = 24
#: Records of a table file.
RECORDS = 65_536
_HEADER_BYTES = 4_096
_HEADER = struct.Struct(">8sHI")
_MAGIC = b"PENTABLE"
_VERSION = 1
_BODY = struct.Struct(">QIIIB")
_RECORD = struct.Struct(">QIII")
_STATE = struct.Struct(">I")
_ALL = struct.Struct(">QIIII")
_NEVER = float("inf")


class State(IntEnum):
    """The state of a transaction in the table; 0 stands for no transaction."""

    PREPARED = 1
    COMMIT = 2
    ROLLBACK = 3
    DISCARD = 4
    SETTLED = 5


_STATES = {None: State.PREPARED, Verdict.COMMIT: State.COMMIT, Verdict.ROLLBACK: State.ROLLBACK}


class TableRecord(NamedTuple):
    """A record of the table, read back."""

    place: int
    size: int
    birth_s: int
    group_hash: int
    state: State


class TableFile:
    """One table file and the timer of the checks of its transactions. Guarded by the store's lock."""

    def __init__(self, path: Path, records: int) -> None:
        self._path = path
        self._map = _mapped(path, _HEADER_BYTES + records * RECORD_BYTES)
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, _VERSION, records)
        self._records = records
        self._used = 0
        #: Its unsettled transactions, by slot.
        self.live: dict[int, Kept] = {}
        #: Monotonic seconds at which the first of its undecided transactions is to be looked at. The one timer.
        self.due = _NEVER

    @property
    def is_full(self) -> bool:
        """Whether it has room for no more records."""
        return self._used == self._records

    def add(self, kept: Kept) -> int:
        """Write a transaction into the next slot and return its number."""
        slot = self._used
        self._used += 1
        self.live[slot] = kept
        self.put(slot, kept, _STATES.get(kept.verdict, State.DISCARD))
        return slot

    def put(self, slot: int, kept: Kept, state: State) -> None:
        """Write what is known of a transaction."""
        birth_s, group = kept.birth_ms // 1000 & 0xFFFFFFFF, xxh32_intdigest(kept.group.encode())
        begin = _HEADER_BYTES + slot * RECORD_BYTES
        check = _check(kept.place, kept.size, birth_s, group, state)
        self._map[begin : begin + RECORD_BYTES] = _RECORD.pack(kept.place, kept.size, birth_s, group) + _STATE.pack(
            check | state
        )

    def remove(self, slot: int, kept: Kept) -> None:
        """Mark a transaction as settled."""
        self.live.pop(slot, None)
        self.put(slot, kept, State.SETTLED)

    def plan(self, kept: Kept, due: float) -> None:
        """Plan the next look at an undecided transaction of this file."""
        kept.due = due
        self.due = min(self.due, due)

    def take_due(self, now: float, limit: int) -> list[Kept]:
        """Return undecided transactions whose time has come, and set the timer for the others."""
        if self.due > now or limit <= 0:
            return []
        due: list[Kept] = []
        self.due = _NEVER
        for kept in self.live.values():
            if kept.verdict is not None:
                continue
            if kept.due <= now and len(due) < limit:
                due.append(kept)
            else:
                self.due = min(self.due, kept.due)
        return due

    def close(self, *, remove: bool) -> None:
        """Unmap it, and remove the file if its transactions are settled."""
        self._map.close()
        if remove:
            self._path.unlink(missing_ok=True)


class Table:
    """All table files of a store. Guarded by the store's lock.

    Args:
        folder: where the files are; what is there is replaced.
        records: records of a file.
    """

    def __init__(self, folder: Path, records: int = RECORDS) -> None:
        self._folder = folder
        self._records = records
        self._files: dict[int, TableFile] = {}
        self._last = 0
        for old in folder.glob(f"*{SUFFIX}"):
            old.unlink()

    def add(self, kept: Kept) -> TableFile:
        """Take a transaction in and return the file it is in."""
        file = self._files.get(self._last)
        if file is None or file.is_full:
            self._last += 1
            file = TableFile(self._folder / f"{self._last:010d}{SUFFIX}", self._records)
            self._files[self._last] = file
        kept.slot = (self._last - 1) * self._records + file.add(kept)
        return file

    def update(self, kept: Kept) -> None:
        """Write what is known of a transaction now."""
        file = self._file(kept)
        if file is not None:
            file.put(kept.slot % self._records, kept, _STATES.get(kept.verdict, State.DISCARD))

    def move(self, kept: Kept) -> None:
        """Give a transaction whose halves were written again a new record, so that old files can go, too."""
        self.remove(kept)
        self.add(kept)
        if kept.verdict is None:
            self.plan(kept, kept.due)

    def remove(self, kept: Kept) -> None:
        """Take a settled transaction out, and its file, if that was the last in it."""
        file = self._file(kept)
        if file is None:
            return
        file.remove(kept.slot % self._records, kept)
        if file.is_full and not file.live:
            del self._files[kept.slot // self._records + 1]
            file.close(remove=True)

    def plan(self, kept: Kept, due: float) -> None:
        """Plan the next look at an undecided transaction."""
        file = self._file(kept)
        if file is not None:
            file.plan(kept, due)

    def take_due(self, now: float, limit: int) -> list[Kept]:
        """Return undecided transactions whose time has come, so many at most; each must be planned again."""
        due: list[Kept] = []
        for file in self._files.values():
            due += file.take_due(now, limit - len(due))
        return due

    def next_due(self) -> float:
        """Return the monotonic time at which the first timer goes off."""
        return min((file.due for file in self._files.values()), default=_NEVER)

    def live(self) -> Iterator[Kept]:
        """Yield the unsettled transactions."""
        for file in self._files.values():
            yield from file.live.values()

    def close(self) -> None:
        """Unmap all."""
        for file in self._files.values():
            file.close(remove=False)
        self._files.clear()

    def _file(self, kept: Kept) -> TableFile | None:
        return self._files.get(kept.slot // self._records + 1) if kept.slot >= 0 else None


def read_table(folder: Path) -> list[TableRecord]:
    """Read the table of a store, also of one that is in use. What is being written at the moment is left out.

    Raises:
        OSError: the folder cannot be read.
    """
    return [record for path in sorted(folder.glob(f"*{SUFFIX}")) for record in _read_file(path)]


def _read_file(path: Path) -> Iterable[TableRecord]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        # Settled and removed meanwhile.
        return
    if data[: len(_MAGIC)] != _MAGIC:
        return
    for begin in range(_HEADER_BYTES, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
        place, size, birth_s, group, state = _ALL.unpack_from(data, begin)
        code = state & 0xFF
        if code and state == _check(place, size, birth_s, group, code) | code:
            yield TableRecord(place, size, birth_s, group, State(code))


def _check(place: int, size: int, birth_s: int, group: int, state: int) -> int:
    return zlib.crc32(_BODY.pack(place, size, birth_s, group, state)) & 0xFFFFFF00


def _mapped(path: Path, size: int) -> mmap.mmap:
    """Map a new file; memory alone where the disk has no room: the table is a copy, and the log goes on."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        # A page that the disk has no room for would end the process by a signal when it is written.
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError as error:
        _log.warning("%s: no room for a table (%s); it is kept in memory", path, error.strerror)
        path.unlink(missing_ok=True)
        return mmap.mmap(-1, size)
    finally:
        os.close(descriptor)


__all__ = ["RECORDS", "RECORD_BYTES", "SUFFIX", "State", "Table", "TableRecord", "read_table"]
