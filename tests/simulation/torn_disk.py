"""A disk for simulations of the file store: at a power cut it forgets, tears and garbles unsynced writes.

Nothing that was not synced is stored in any order: of each write since the last sync of its file, any sector may be on
the disk, or not, or half of it, or garbage; of the changes of names, any may have happened.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from penstock.transactions.stores.file.log.folder import Folder

SECTOR = 16


class PowerCut(BaseException):
    """The machine went dark; no handler of errors catches it."""


@dataclass
class Inode:
    """A file: its content on the disk and in the cache, and the writes between the two."""

    durable: bytearray = field(default_factory=bytearray)
    cached: bytearray = field(default_factory=bytearray)
    #: Writes (offset, data) since the last sync.
    pending: list[tuple[int, bytes]] = field(default_factory=list)


class TornDisk(Folder):
    """A folder in memory, instead of a real one.

    Args:
        chance: decides what a power cut leaves.
        garble: whether an unsynced write may leave random bytes.
    """

    def __init__(self, chance: random.Random, *, garble: bool = True) -> None:
        super().__init__(Path())
        self.chance = chance
        self.garble = garble
        self.files: dict[str, Inode] = {}
        #: Files that are mapped into memory: what changes there is written at any time.
        self.mapped: set[str] = set()
        self.durable_names: dict[str, Inode] = {}
        #: Changes of names since the last sync of the folder: name, and the file it stands for then, or None.
        self.renamings: list[list[tuple[str, Inode | None]]] = []
        #: Operations until the power is cut; None: it stays.
        self.left: int | None = None
        self.operations = 0
        #: Room that is left; None: enough.
        self.room: int | None = None
        self.torn = 0
        #: Syncs of files until one fails; None: none does.
        self.good_syncs: int | None = None

    def _tick(self) -> None:
        self.operations += 1
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise PowerCut

    def names(self) -> list[str]:
        return sorted(self.files)

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes:
        content = self.files[name].cached
        return bytes(content[offset:] if size < 0 else content[offset : offset + size])

    def allocate(self, name: str, size: int) -> None:
        self._tick()
        file = self._file(name)
        more = size - len(file.cached)
        if more > 0:
            if self.room is not None:
                if more > self.room:
                    raise OSError(28, "No space left on device", name)
                self.room -= more
            file.pending.append((len(file.cached), bytes(more)))
            file.cached.extend(bytes(more))

    def map(self, name: str, size: int) -> bytearray:
        self.allocate(name, size)
        self.mapped.add(name)
        return self._file(name).cached

    def write(self, name: str, offset: int, data: bytes) -> None:
        file = self._file(name)
        _put(file.cached, offset, data)
        file.pending.append((offset, data))
        # A cut after the write: it may be there already, wholly or in part.
        self._tick()

    def sync(self, name: str) -> None:
        self._tick()
        file = self._file(name)
        if self.good_syncs is not None:
            self.good_syncs -= 1
            if self.good_syncs < 0:
                self.good_syncs = None
                self._lose(file)
                raise OSError(5, "Input/output error", name)
        # Writes that a failed sync lost are no longer pending.
        for offset, data in file.pending:
            _put(file.durable, offset, data)
        file.pending.clear()
        if name in self.mapped:
            file.durable[:] = file.cached

    def _lose(self, file: Inode) -> None:
        """Fail as Linux does: pending writes may be lost, and the cache shows them as written."""
        for offset, data in file.pending:
            self._tear(file.durable, offset, data)
        file.pending.clear()

    def rename(self, old: str, new: str) -> None:
        self._tick()
        file = self.files.pop(old)
        self.files[new] = file
        self.renamings.append([(old, None), (new, file)])

    def remove(self, name: str) -> None:
        self._tick()
        if self.files.pop(name, None) is not None:
            self.renamings.append([(name, None)])

    def sync_names(self) -> None:
        self._tick()
        self.durable_names = dict(self.files)
        self.renamings.clear()

    def close(self) -> None:
        """Nothing is open."""

    def _file(self, name: str) -> Inode:
        if name not in self.files:
            file = Inode()
            self.files[name] = file
            self.renamings.append([(name, file)])
        return self.files[name]

    def restart(self, *, power: bool) -> None:
        """Come back: after a power cut with the content of the disk, after a killed process with that of the cache."""
        self.left = self.good_syncs = None
        if not power:
            return
        chance = self.chance
        names = dict(self.durable_names)
        for change in self.renamings:
            if chance.random() < 0.5:
                for name, file in change:
                    if file is None:
                        names.pop(name, None)
                    else:
                        names[name] = file
        self._note_mapped()
        for file in {id(one): one for one in (*names.values(), *self.files.values())}.values():
            for offset, data in file.pending:
                self._tear(file.durable, offset, data)
            file.pending.clear()
            file.cached = bytearray(file.durable)
        self.files, self.durable_names = names, dict(names)
        self.renamings.clear()

    def _note_mapped(self) -> None:
        """What changed in memory may have been written, or not."""
        for name in self.mapped & self.files.keys():
            file = self.files[name]
            file.pending.append((0, bytes(file.cached)))

    def _tear(self, durable: bytearray, offset: int, data: bytes) -> None:
        """Let some of a write reach the disk."""
        chance = self.chance
        how = chance.random()
        if how < 0.25:
            return
        if how < 0.45 or not any(data):
            _put(durable, offset, data)
            return
        self.torn += 1
        if how < 0.7:
            # As much as had gone out when the light did.
            _put(durable, offset, data[: chance.randrange(len(data) + 1)])
            return
        for start in range(0, len(data), SECTOR):
            piece = data[start : start + SECTOR]
            fate = chance.random()
            if fate < 0.5:
                _put(durable, offset + start, piece)
            elif fate < 0.6 and self.garble and durable[offset + start : offset + start + len(piece)] != piece:
                _put(durable, offset + start, chance.randbytes(len(piece)))


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data
