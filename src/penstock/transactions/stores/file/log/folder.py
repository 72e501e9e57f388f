"""The folder of a file store: the few things that are done to its files, and the lock on it.

The former are a seam: a disk that tears stands there in simulations. Each method says what of it is durable when it
returns; the rest may be there after a power cut, or not, or in part.

The lock lets one process in at a time, whatever way the last one ended. `flock` goes away with the process that holds
it, so there is no stale lock to remove after a crash. A forked child shares what is open, and the lock with it: it
closes that at once, or it would keep the lock after its parent has ended.
"""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from penstock.errors import StoreInUseError

_LOCK = "lock"

#: Those that this process has made.
_folders: weakref.WeakSet[Folder] = weakref.WeakSet()


def _close_in_child() -> None:
    for folder in _folders:
        folder.close()


os.register_at_fork(after_in_child=_close_in_child)


class Folder:
    """A folder of files that one process writes. Used by one thread, save for `read`, which any thread may call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Descriptors stay open: opening a file for every write costs more than the write. Only the store's thread
        # adds and removes; readers on other threads look up what is there, or open for themselves.
        self._open: dict[str, int] = {}
        _folders.add(self)

    def lock(self) -> None:
        """Keep others out until `unlock`.

        Raises `StoreInUseError` where another process, or another store of this one, has the folder.
        """
        descriptor = self._descriptor(_LOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
            raise StoreInUseError(
                f"the file store in {self._path} is in use by process {holder}; "
                "stop that process, share its store within it, or give this one a folder of its own"
            ) from error
        # Only for the message above. The file stays: removing it would let two processes lock two files of one name.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

    def unlock(self) -> None:
        """Let the next one in, also while a child that was forked a moment ago has not closed the lock yet."""
        if _LOCK in self._open:
            fcntl.flock(self._open[_LOCK], fcntl.LOCK_UN)
        self.close()

    def names(self) -> list[str]:
        """Return the names of the files."""
        return sorted(path.name for path in self._path.iterdir() if path.is_file())

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes:
        """Return bytes of a file, fewer where it ends, all from `offset` where `size` is -1."""
        with (self._path / name).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def allocate(self, name: str, size: int) -> None:
        """Make a file where there is none, and at least `size` bytes of room in it."""
        descriptor = self._descriptor(name)
        # Room that is set aside now cannot run out in the midst of a write later.
        os.posix_fallocate(descriptor, 0, size)

    def map(self, name: str, size: int) -> Any:
        """Return so many bytes of a file, which has room for them then, in memory: what changes there is in the file.

        It lasts as long as what is returned. Not durable before `sync`.
        """
        self.allocate(name, size)
        return mmap(self._descriptor(name), size)

    def view(self, name: str) -> mmap | bytes:
        """Return a file in memory as it is, and becomes; nothing there can be changed."""
        with (self._path / name).open("rb") as file:
            # One that was just made has no room yet, and cannot be mapped.
            return b"" if not os.fstat(file.fileno()).st_size else mmap(file.fileno(), 0, access=ACCESS_READ)

    def write(self, name: str, offset: int, data: bytes) -> None:
        """Write into a file. Not durable before `sync`."""
        descriptor, view = self._descriptor(name), memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, offset)
            if not written:
                raise OSError(errno.EIO, "nothing was written", name)
            view, offset = view[written:], offset + written

    def sync(self, name: str) -> None:
        """Make the contents of a file durable."""
        os.fdatasync(self._descriptor(name))

    def rename(self, old: str, new: str) -> None:
        """Give a file another name. Not durable before `sync_names`."""
        (self._path / old).rename(self._path / new)
        if old in self._open:
            self._open[new] = self._open.pop(old)

    def remove(self, name: str) -> None:
        """Remove a file. Not durable before `sync_names`."""
        descriptor = self._open.pop(name, None)
        if descriptor is not None:
            os.close(descriptor)
        (self._path / name).unlink(missing_ok=True)

    def sync_names(self) -> None:
        """Make durable which files there are."""
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close what is open. In a forked child the lock stays with the parent; else it goes, too."""
        while self._open:
            _, descriptor = self._open.popitem()
            with suppress(OSError):
                os.close(descriptor)

    def _descriptor(self, name: str) -> int:
        descriptor = self._open.get(name)
        if descriptor is None:
            descriptor = os.open(self._path / name, os.O_RDWR | os.O_CREAT, 0o600)
            self._open[name] = descriptor
        return descriptor
