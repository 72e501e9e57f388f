"""The lock on a store's folder: one process at a time, whatever way the last one ended.

`flock` goes away with the process that holds it, so there is no stale lock to remove after a crash. A forked child
shares what is open, and the lock with it: it closes that at once, or it would keep the lock after its parent has ended.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from penstock.errors import StoreInUseError

_NAME = "lock"

#: Those that this process has made.
_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in _locks:
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


class FolderLock:
    """Held from `take` to `release`. Used by one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        _locks.add(self)

    def take(self) -> None:
        """Take the lock. Raises `StoreInUseError` where another process, or a store of this one, holds it."""
        descriptor = os.open(self._path / _NAME, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise StoreInUseError(
                f"the file store in {self._path} is in use by process {holder}; "
                "stop that process, share its store within it, or give this one a folder of its own"
            ) from error
        # Only for the message above. The file stays: removing it would let two processes lock two files of one name.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Let the next one in, also while a child that was forked a moment ago has not closed it yet."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Forget it, in a forked child: its parent alone has it then."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
