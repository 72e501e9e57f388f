"""The store in files, as producers see it. It lives in one process; its messages go to Kafka like any others.

Halves and decisions are durable in a folder of this machine, without Kafka having to be there; what commits is
published exactly once: by a relay, whose done log settles what a crash leaves in doubt.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from penstock import clients
from penstock.errors import ConfigurationError, StoppedError, StoreFailedError, TransactionRefusedError
from penstock.options import ClientConfig, not_empty, positive_int, seconds
from penstock.transactions.core.decisions import not_cancelled, not_pending
from penstock.transactions.store import DecidedCallback, Prepared, PreparedCallback, SettledCallback
from penstock.transactions.stores.file.administration import FileAccess, FileAdministration, KafkaAccess
from penstock.transactions.stores.file.changes import Changes
from penstock.transactions.stores.file.check_sources import FileCheckSource
from penstock.transactions.stores.file.log.folder import OsFolder
from penstock.transactions.stores.file.log.journal import Decide, Journal
from penstock.transactions.stores.file.log.lock import FolderLock
from penstock.transactions.stores.file.log.redo import NoRoomError
from penstock.transactions.stores.file.open_store import OpenStore
from penstock.transactions.stores.file.shard import FileShard
from penstock.transactions.stores.relay.relayed_store import CheckTerms
from penstock.transactions.stores.target_topics import TargetTopics
from penstock.transactions.wire.check_request import CheckRequest
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Verdict
from penstock.transactions.wire.topics import StoreTopics, require_prefix

#: Bytes of a segment of the redo log.
SEGMENT_BYTES = 64 << 20
_LEAST_SEGMENT_BYTES = 4_096
_MAX_PENDING_BYTES = 256 << 20


class FileStore:
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
        require_prefix(prefix, f".file.{'0' * 36}.done")
        self.path = Path(path)
        self.bootstrap_servers = bootstrap_servers
        self.prefix = prefix
        self.config = config or {}
        self._segment_bytes = segment_bytes
        #: What it is called in messages.
        self.label = f"the file store in {self.path}"
        self._changes = Changes(self.path, lambda: self.opened, send_timeout)
        self._lock = FolderLock(self.path)
        self._topics = StoreTopics(prefix)
        admin = clients.admin(bootstrap_servers, self.config)
        #: Raises unless a message can be published to a topic: `TargetTopics.require`.
        self.require_target = TargetTopics(admin, bootstrap_servers, self.config, self.may_publish_to).require
        # Guards starting, stopping and the fields below; `_opened` is read without it.
        self._start_lock = threading.Lock()
        self._starts = 0
        self._pid = 0
        self._opened: OpenStore | None = None
        self._folder: OsFolder | None = None

    def start(self) -> None:
        """Take the folder's lock and open the store; a start more is counted.

        Raises:
            StoreInUseError: another process has it.
            StoreDamagedError: what it had acknowledged is missing or does not read; nothing was changed.
            StoreFailedError: the disk failed, or has no room.
        """
        with self._start_lock:
            if self._starts == 0:
                self._open()
            self._starts += 1

    def _open(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.take()
            folder = OsFolder(self.path)
            try:
                journal = Journal(folder, self._segment_bytes)
                journal.open()
                opened = OpenStore(journal, self.path.name, _MAX_PENDING_BYTES)
            except BaseException:
                folder.close()
                self._lock.release()
                raise
        except (OSError, NoRoomError) as error:
            if isinstance(error, StoreFailedError):
                raise
            raise StoreFailedError(f"the file store in {self.path} cannot be opened: {error}; mend the disk") from error
        opened.writer.start()
        self._folder, self._pid = folder, os.getpid()
        self._opened = opened

    def stop(self, timeout_s: float) -> None:
        """Give one start back; the last one writes what has come, at most `timeout_s` seconds, and unlocks.

        Raises:
            StoppedError: a write did not end in time; the folder stays locked until the process ends.
        """
        with self._start_lock:
            if self._starts == 0:
                return
            self._starts -= 1
            opened = self._opened
            if self._starts or opened is None:
                return
            self._opened = None
            if not opened.writer.stop(timeout_s):
                raise StoppedError(f"the file store in {self.path} is still writing after {timeout_s:g} s")
            if self._folder is not None:
                self._folder.close()
            self._lock.release()

    @property
    def opened(self) -> OpenStore:
        """What is open.

        Raises:
            StoppedError: it was not started, or in a parent process.
        """
        opened = self._opened
        if opened is None:
            raise StoppedError(f"the file store in {self.path} is not started, or was stopped")
        if self._pid != os.getpid():
            raise StoppedError(f"the file store in {self.path} belongs to process {self._pid}, which made this one")
        return opened

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(30.0)

    def may_publish_to(self, topic: str) -> bool:
        """Tell whether a message may name a topic as its target."""
        return self._topics.may_publish_to(topic) and not topic.startswith(f"{self.prefix}.file.")

    def prepare(
        self,
        halves: Sequence[Half],
        callback: PreparedCallback,
        ordering_key: bytes | None = None,  # noqa: ARG002 - there is one partition
    ) -> None:
        """Store the halves of one transaction, all or none, and call back once they are durable."""
        self._changes.prepare(halves, callback)

    def decide(self, prepared: Prepared, verdict: Verdict, callback: DecidedCallback) -> None:
        """Store the producer's decision, and call back once it is durable. The first one stands."""
        half = prepared.halves[0]
        decision = Decide(half.transaction_id, half.group, verdict, Author.PRODUCER, 0, int(time.time() * 1000))
        self._changes.decide(decision, callback)

    def answer(self, request: CheckRequest, verdict: Verdict, author: Author) -> None:
        """Store the answer to a check and return once it is durable, or raise `DecisionNotStoredError`."""
        half, now_ms = request.half, int(time.time() * 1000)
        # An answer that came second is counted as refused, and nothing is wrong with it.
        with contextlib.suppress(TransactionRefusedError):
            self._changes.await_decision(
                Decide(half.transaction_id, half.group, verdict, author, request.check_number, now_ms)
            )

    def cancel(self, transaction_id: str, group: str, wait_s: float) -> None:  # noqa: ARG002 - nobody is waited for
        """Take a committed message back that is not due yet, by this machine's clock; see `Store.cancel`."""
        opened = self.opened
        try:
            now_ms = int(time.time() * 1000)
            self._changes.await_decision(
                Decide(transaction_id, group, Verdict.ROLLBACK, Author.PRODUCER, 0, now_ms, cancels=True)
            )
        except TransactionRefusedError as error:
            with opened.lock:
                stored = opened.pending.get(transaction_id)
            stands = opened.journal.end_of(transaction_id) if stored is None else stored.verdict
            if stored.group != group if stored is not None else stands is None:
                raise not_pending(transaction_id, group) from error
            raise not_cancelled(transaction_id, stands) from error

    def checks(self, group: str) -> FileCheckSource:
        """Return the checks of a producer group, of this process alone."""
        return self.opened.check_sources.add(group)

    def watch(self, transaction_id: str, callback: SettledCallback) -> None:
        """Call back once a transaction is settled."""
        self.opened.watch(transaction_id, callback)

    def forget(self, transaction_id: str) -> None:
        """Give a watch up; one of a store that was stopped is gone."""
        opened = self._opened
        if opened is not None:
            opened.forget(transaction_id)

    def waits_for(self, transaction_id: str, topics: Sequence[str]) -> str:  # noqa: ARG002 - the store itself tells
        """Say what a committed transaction waits for; see `Store.waits_for`."""
        try:
            shown = self.administration().show(transaction_id)
        except StoppedError:
            return ""
        return "" if shown is None else shown.waits_for

    def open_shards(self, checks: CheckTerms, wake: Callable[[], object]) -> FileShard:
        """Return what the coordinator works on, once the store was started. A store has one coordinator at a time."""
        return FileShard(self.opened, self.path, self.label, self.prefix, checks, self._changes, wake)

    def administration(self) -> FileAdministration:
        """Return what an operator may do, in this process and while the store is started."""
        return FileAdministration(
            FileAccess(self.path, lambda: self.opened, self._changes),
            KafkaAccess(self.bootstrap_servers, self.prefix, self.config, self.may_publish_to),
        )
