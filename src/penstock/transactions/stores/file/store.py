"""The store in files, as producers see it. It lives in one process; its messages go to Kafka like any others.

Halves and decisions are durable in a folder of this machine, without Kafka having to be there; what commits is
published exactly once: by a relay, whose done log settles what a crash leaves in doubt.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from penstock.errors import ConfigurationError, PenstockError, StoppedError, StoreFailedError
from penstock.options import ClientConfig, not_empty, positive_int, seconds
from penstock.transactions.store import SettledCallback
from penstock.transactions.stores.file.administration import FileAdministration
from penstock.transactions.stores.file.checks import GroupChecks
from penstock.transactions.stores.file.log.folder import Folder
from penstock.transactions.stores.file.log.redo import NoRoomError
from penstock.transactions.stores.file.open_store import OpenStore
from penstock.transactions.stores.file.shard import FileShard
from penstock.transactions.stores.relayed_store import GroupWriter, RelayedStore
from penstock.transactions.stores.shards import CheckTerms

#: Bytes of a segment of the redo log.
SEGMENT_BYTES = 64 << 20
_LEAST_SEGMENT_BYTES = 4_096


class FileStore(RelayedStore):
    """Halves and decisions in a folder of this machine. Thread-safe.

    One process has it at a time, and all its producers and its coordinator share this object: they start and stop it,
    starts are counted. Publication into Kafka is exactly once for `read_committed` readers. A copy of the folder must
    not be used beside the original: both would claim the same Kafka transactions, and fence each other.

    Args:
        path: the folder; made if absent. It needs a file system with `flock` and `fdatasync` that mean it: a local one.
        bootstrap_servers: Kafka's addresses. Kafka is not needed to store, only to publish.
        prefix: what the names of the store's topics begin with: `<prefix>.discarded`, and a done log of its own.
        config: settings of the Kafka clients, by librdkafka's names.
        segment_bytes: bytes of disk that the redo log takes at a time, at least 4,096. The store needs at least two.
        send_timeout: seconds after which the answer to a check that is not durable counts as not stored.

    Raises:
        ConfigurationError: an argument is wrong. Nothing was started.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        bootstrap_servers: str,
        prefix: str = "penstock",
        config: ClientConfig | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        send_timeout: float = 15.0,
    ) -> None:
        not_empty("bootstrap_servers", bootstrap_servers)
        positive_int("segment_bytes", segment_bytes)
        seconds("send_timeout", send_timeout)
        if segment_bytes < _LEAST_SEGMENT_BYTES:
            raise ConfigurationError(f"segment_bytes must be at least {_LEAST_SEGMENT_BYTES}, but is {segment_bytes}")
        self.path = Path(path)
        super().__init__(
            f"the file store in {self.path}",
            bootstrap_servers=bootstrap_servers,
            prefix=prefix,
            own=".file.",
            config=config,
            answer_s=send_timeout,
        )
        self._segment_bytes = segment_bytes
        # Written under the lock of starts, read without it.
        self._opened: OpenStore | None = None

    def start(self) -> None:
        """Take the folder's lock and open the store; a start more is counted.

        Raises:
            StoreInUseError: another process has it.
            StoreDamagedError: what it had acknowledged is missing or does not read; nothing was changed.
            StoreFailedError: the disk failed, or has no room.
        """
        super().start()

    def _open(self) -> GroupWriter:
        folder = Folder(self.path)
        opened = OpenStore(folder, self._segment_bytes)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            folder.lock()
            opened.open()
        except BaseException as error:
            folder.unlock()
            if isinstance(error, OSError | NoRoomError) and not isinstance(error, PenstockError):
                raise StoreFailedError(f"{self.label} cannot be opened: {error}; repair the disk") from error
            raise
        self._opened = opened
        return GroupWriter(opened.write, self.label, self.path.name)

    def stop(self, timeout_s: float) -> None:
        """Give one start back; the last one writes what has come, at most `timeout_s` seconds, and unlocks.

        Raises:
            StoppedError: a write did not end in time; the folder stays locked until the process ends.
        """
        super().stop(timeout_s)

    def _close(self, *, has_ended: bool) -> None:
        opened, self._opened = self._opened, None
        if not has_ended:
            raise StoppedError(f"{self.label} is still writing; its folder stays locked until the process ends")
        if opened is not None:
            # Where that fails, opening reads the redo log.
            with suppress(OSError):
                if opened.failure is None:
                    opened.close()
            opened.folder.unlock()

    @property
    def opened(self) -> OpenStore:
        """What is open.

        Raises:
            StoppedError: it was not started, or in a parent process.
        """
        opened, stopped = self._opened, self.stopped()
        if opened is None or stopped is not None:
            raise stopped or StoppedError(f"{self.label} was stopped")
        return opened

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(30.0)

    def checks(self, group: str) -> GroupChecks:
        """Return the checks of a producer group, of this process alone."""
        checks = self.opened.checks_of(group)
        checks.join()
        return checks

    def watch(self, transaction_id: str, callback: SettledCallback) -> None:
        """Call back once a transaction is settled."""
        self.opened.watch(transaction_id, callback)

    def forget(self, transaction_id: str) -> None:
        """Give a watch up; one of a store that was stopped is gone."""
        opened = self._opened
        if opened is not None:
            opened.forget(transaction_id)

    def open_shards(self, checks: CheckTerms, wake: Callable[[], object]) -> FileShard:
        """Return what the coordinator works on, once the store was started. A store has one coordinator at a time."""
        return FileShard(self.opened, self.path, self.label, self.prefix, checks, self._submit, wake)

    def administration(self) -> FileAdministration:
        """Return what an operator may do, in this process and while the store is started."""
        return FileAdministration(self)
