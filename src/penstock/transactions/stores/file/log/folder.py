"""The folder of a file store: the operations on its files, and the lock on it.

The file operations are a seam: simulations replace them by a disk that tears writes. Each method says which of its
effects are durable on return. The rest may survive a power cut wholly, in part, or not at all.

The lock admits one process at a time, however the last one ended. `flock` ends with its process, so a crash leaves no
stale lock. A forked child inherits the open files and with them the lock. It closes them at once; else it would keep
the lock after the end of its parent.
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
_DIRECTORY = "."

#: The folders of this process, for `_close_in_child`.
_folders: weakref.WeakSet[Folder] = weakref.WeakSet()


def _close_in_child() -> None:
    for folder in _folders:
        folder.close()


os.register_at_fork(after_in_child=_close_in_child)


class Folder:
    """A folder of files that one process writes. Each file has one thread, except for `read`: any thread may read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Descriptors stay open: opening a file for every write costs more than the write. `read` opens the file itself.
        self._open: dict[str, int] = {}
        _folders.add(self)

    @property
    def _directory(self) -> int:
        """A descriptor of the folder, which stays the same folder if it is moved and another one gets its path."""
        if _DIRECTORY not in self._open:
            self._open[_DIRECTORY] = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        return self._open[_DIRECTORY]

    def _open_file(self, name: str, flags: int) -> int:
        return os.open(name, flags, 0o600, dir_fd=self._directory)

    def lock(self) -> None:
        """Lock the folder until `unlock`.

        Raises `StoreInUseError` if another process, or another store of this process, has it.
        """
        descriptor = self._descriptor(_LOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
            raise StoreInUseError(
                f"the file store in {self._path} is in use by process {holder}; "
                "stop that process, share its store within it, or give this one a folder of its own"
            ) from error
        # The process id is for the message above. The file stays: after a removal, two processes could lock two files
        # of one name.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

    def unlock(self) -> None:
        """Release the lock, even if a forked child has not closed its copy yet."""
        if _LOCK in self._open:
            with suppress(OSError):
                fcntl.flock(self._open[_LOCK], fcntl.LOCK_UN)
        self.close()

    def names(self) -> list[str]:
        """Return the names of the files."""
        with os.scandir(self._directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_file())

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes:
        """Return at most `size` bytes of a file from `offset`, or all of them if `size` is -1."""
        with open(name, "rb", opener=self._open_file) as file:
            file.seek(offset)
            return file.read(size)

    def allocate(self, name: str, size: int) -> None:
        """Create a file if it is absent, and reserve at least `size` bytes of the disk for it."""
        descriptor = self._descriptor(name)
        # With the room reserved here, a later write cannot fail for lack of it.
        os.posix_fallocate(descriptor, 0, size)

    def map(self, name: str, size: int) -> Any:
        """Map `size` bytes of a file into memory for writing, and reserve them on the disk.

        The mapping lives as long as the returned object. Not durable before `sync`.
        """
        self.allocate(name, size)
        return mmap(self._descriptor(name), size)

    def view(self, name: str) -> mmap | bytes:
        """Map a file read-only. It shows later changes of the file."""
        with open(name, "rb", opener=self._open_file) as file:
            # A new file has no bytes yet, and cannot be mapped.
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
        """Make the contents of a file durable. Raises `OSError` if the file was deleted."""
        descriptor = self._descriptor(name)
        os.fdatasync(descriptor)
        if not os.fstat(descriptor).st_nlink:
            raise OSError(errno.ENOENT, "the file was deleted", name)

    def rename(self, old: str, new: str) -> None:
        """Rename a file. Not durable before `sync_names`."""
        os.rename(old, new, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        self._close_file(new)
        if old in self._open:
            self._open[new] = self._open.pop(old)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there. Not durable before `sync_names`."""
        self._close_file(name)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._directory)

    def _close_file(self, name: str) -> None:
        descriptor = self._open.pop(name, None)
        if descriptor is not None:
            os.close(descriptor)

    def sync_names(self) -> None:
        """Make the creation, renaming and removal of files durable."""
        os.fsync(self._directory)

    def close(self) -> None:
        """Close all files. This releases the lock, except in a forked child: there the parent keeps it."""
        while self._open:
            _, descriptor = self._open.popitem()
            with suppress(OSError):
                os.close(descriptor)

    def __del__(self) -> None:
        # A thread that reads after `close` opens the folder again.
        self._close_file(_DIRECTORY)

    def _descriptor(self, name: str) -> int:
        descriptor = self._open.get(name)
        if descriptor is None:
            descriptor = self._open[name] = self._open_file(name, os.O_RDWR | os.O_CREAT)
        return descriptor
