"""The file store as producers see it. It stores in a folder of this machine, and Kafka need not be reachable for that.

A relay publishes committed messages exactly once; its done log settles what a crash leaves in doubt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Self

from penstock.errors import ConfigurationError, PenstockError, StoppedError, StoreFailedError
from penstock.options import ClientConfig, not_empty, positive_int, seconds
from penstock.transactions.store import SettledCallback
from penstock.transactions.stores.file.administration import FileAdministration
from penstock.transactions.stores.file.checks import GroupChecks
from penstock.transactions.stores.file.log.entries import Settled
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

    One process has the folder at a time. All its producers and its coordinator share this object: they start and stop
    it, and starts are counted. Publication into Kafka is exactly once for `read_committed` readers. Do not use a copy
    of the folder next to the original: both would claim the same transactional ids, and fence each other.

    Args:
        path: the folder; created if absent. It needs a local file system whose `flock` and `fdatasync` work.
        bootstrap_servers: Kafka's addresses. Kafka is needed to publish, not to store.
        prefix: what the names of the store's topics begin with: `<prefix>.discarded`, and a done log of its own.
        config: settings of the Kafka clients, by librdkafka's names.
        segment_bytes: bytes of disk that the redo log takes at a time, at least 4,096. The store needs at least two.
        send_timeout: seconds after which the answer to a check counts as not stored if it is not durable.

    Raises:
        ConfigurationError: an argument is wrong. Nothing was started.
    """

    #: Errors of a full disk or of a process without descriptors: the coordinator tries again.
    transient_errors = (OSError,)

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
        # Written under the lock of `start` and `stop`, read without it.
        self._opened: OpenStore | None = None

    def start(self) -> None:
        """Lock the folder and open the store. A further start is only counted.

        Raises:
            StoreInUseError: another process has the folder.
            StoreDamagedError: acknowledged data is missing or unreadable; nothing was changed.
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
                raise StoreFailedError(
                    f"{self.label} cannot be opened: {error}; repair the disk, or use a local one"
                ) from error
            raise
        self._opened = opened
        return GroupWriter(opened.write, self.label, self.path.name)

    def stop(self, timeout_s: float) -> None:
        """Undo one start. The last stop writes what was submitted, at most `timeout_s` seconds, and unlocks the folder.

        Raises:
            StoppedError: a write did not end in time; the folder stays locked until the process ends.
        """
        super().stop(timeout_s)

    def _close(self, *, has_ended: bool) -> None:
        opened, self._opened = self._opened, None
        if not has_ended:
            raise StoppedError(f"{self.label} is still writing; its folder stays locked until the process ends")
        if opened is not None:
            # If this fails, the next opening reads the redo log.
            with suppress(OSError):
                if opened.failure is None:
                    opened.close()
            opened.folder.unlock()

    @property
    def opened(self) -> OpenStore:
        """The open store.

        Raises:
            StoppedError: the store was not started, or was started in a parent process.
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
        """Return the checks of a producer group, for the producers of this process."""
        checks = self.opened.checks_of(group)
        checks.join()
        return checks

    def watch(self, transaction_id: str, callback: SettledCallback) -> None:
        """Call back once a transaction is settled."""
        self.opened.watch(transaction_id, callback)

    def forget(self, transaction_id: str) -> None:
        """Remove the callback of a transaction, if the store is still open."""
        opened = self._opened
        if opened is not None:
            opened.forget(transaction_id)

    def open_shards(self, checks: CheckTerms, wake: Callable[[], object]) -> FileShard:
        """Return the shard of a started store. A store has one coordinator at a time."""
        return FileShard(self.opened, self.label, self.prefix, checks, self._settle, wake)

    def _settle(self, transaction_ids: Collection[str]) -> None:
        """Settle published transactions, without waiting until that is durable."""
        self._submit(Settled(tuple(transaction_ids)), lambda _: None)

    def administration(self) -> FileAdministration:
        """Return the operator commands, for this process, while the store is started."""
        return FileAdministration(self, self.path, lambda: self.opened, self._answer_s)
