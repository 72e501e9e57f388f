"""The store in files, as producers see it. It lives in one process; its messages go to Kafka like any others.

Halves and decisions are durable in a folder of this machine, without Kafka having to be there; what commits is
published exactly once: see `outbound`, whose done log settles what a crash leaves in doubt.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from penstock.clients.kafka import admin_client, partition_counts, require_topics
from penstock.clients.rights import Operation, principal_of
from penstock.errors import (
    ConfigurationError,
    DecisionNotStoredError,
    HalfNotStoredError,
    StoppedError,
    StoreFailedError,
    TransactionError,
    TransactionRefusedError,
)
from penstock.options import ClientConfig, not_empty, positive_int, seconds
from penstock.transactions.coordinator.state.cancelling import not_cancelled, not_pending
from penstock.transactions.store import (
    Administration,
    CoordinatorOptions,
    Prepared,
    Settler,
    ToldDecided,
    ToldPrepared,
    ToldSettled,
)
from penstock.transactions.stores.file.folder import OsFolder
from penstock.transactions.stores.file.journal import Decide, Journal, Outcome, Prepare
from penstock.transactions.stores.file.lock import FolderLock
from penstock.transactions.stores.file.opened import OpenStore
from penstock.transactions.stores.file.questions import Source
from penstock.transactions.stores.file.redo import NoRoomError
from penstock.transactions.wire.check_request import CheckRequest
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Verdict
from penstock.transactions.wire.topics import StoreTopics, require_prefix

#: Bytes of a segment of the redo log.
SEGMENT_BYTES = 64 << 20
_LEAST_SEGMENT_BYTES = 4_096
_MAX_PENDING_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class KeptHalves:
    """The halves of one transaction, stored in the file store."""

    halves: Sequence[Half]


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
        self._send_timeout_s = send_timeout
        self._lock = FolderLock(self.path)
        self._topics = StoreTopics(prefix)
        self._admin = admin_client(bootstrap_servers, self.config)
        # Guards starting, stopping and the fields below; `_opened` is read without it.
        self._start_lock = threading.Lock()
        self._starts = 0
        self._pid = 0
        self._opened: OpenStore | None = None
        self._folder: OsFolder | None = None
        # Partition counts of target topics found so far. Replaced as a whole.
        self._targets: dict[str, int] = {}

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
                opened = OpenStore(self.path, journal, self.path.name, _MAX_PENDING_BYTES)
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
        """Give one start back; the last one writes what has come, at most `timeout_s` seconds, and lets go.

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
            with opened.lock:
                opened.table.close()
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

    def require_target(self, topic: str, partition: int | None) -> None:
        """Raise unless a message can be published to the topic; a topic that was found is not asked for again.

        Raises:
            TopicNotFoundError: there is no such topic.
            MissingRightError: this client may not see it, if it is there.
            ConfigurationError: the topic has no such partition, or belongs to the store.
            BrokerConnectionError: no broker answered.
        """
        if not self.may_publish_to(topic):
            raise ConfigurationError(f"{topic} belongs to the store or to Kafka itself; name a topic of your own")
        count = self._targets.get(topic)
        if count is None or (partition is not None and partition >= count):
            self._targets = partition_counts(self._admin, self.bootstrap_servers)
            count = self._targets.get(topic)
        if count is None:
            # It tells whether there is none, or none that may be seen.
            principal = principal_of(self.config)
            count = require_topics(
                self._admin, self.bootstrap_servers, [topic], to=Operation.DESCRIBE, principal=principal
            )[topic]
        if partition is not None and not 0 <= partition < count:
            raise ConfigurationError(f"topic {topic} has partitions 0 to {count - 1}, but partition is {partition}")

    def prepare(self, halves: Sequence[Half], told: ToldPrepared, ordering_key: bytes | None = None) -> None:  # noqa: ARG002 - there is one partition
        """Store the halves of one transaction, all or none, and tell once they are durable."""
        first = halves[0]

        def changed(outcome: Outcome | Exception) -> None:
            why = outcome if isinstance(outcome, Exception) else outcome.refused
            if why is None:
                told(KeptHalves(halves))
                return
            error = HalfNotStoredError(
                f"transaction {first.transaction_id} for {first.topic}: its half is not stored in {self.path}: {why}; "
                "the local transaction did not run, send it again"
            )
            error.__cause__ = why if isinstance(why, Exception) else None
            told(error)

        try:
            writer = self.opened.writer
        except StoppedError as error:
            changed(error)
            return
        writer.submit(Prepare(tuple(halves), int(time.time() * 1000)), changed)

    def decide(self, prepared: Prepared, verdict: Verdict, told: ToldDecided) -> None:
        """Store the producer's decision, and tell once it is durable. The first counts; a second is only counted."""
        half = prepared.halves[0]
        self.change(half.transaction_id, half.group, verdict, Author.PRODUCER, told)

    def change(
        self,
        transaction_id: str,
        group: str,
        verdict: Verdict,
        author: Author,
        told: ToldDecided,
        *,
        check_number: int = 0,
        actor: str = "",
        cancels: bool = False,
        over_commit: bool = False,
    ) -> None:
        """Store anybody's decision, or that a check was answered UNKNOWN, and tell once it is durable.

        `over_commit` lets an operator's DISCARD stand over a COMMIT: nothing of that may be under way.
        """

        def changed(outcome: Outcome | Exception) -> None:
            if not isinstance(outcome, Exception):
                told(_refusal(transaction_id, verdict, outcome))
                return
            error = DecisionNotStoredError(
                f"transaction {transaction_id}: its {verdict.name} is not known to be stored in {self.path}: {outcome}"
            )
            error.__cause__ = outcome
            told(error)

        try:
            writer = self.opened.writer
        except StoppedError as error:
            changed(error)
            return
        now_ms = int(time.time() * 1000)
        decision = Decide(
            transaction_id, group, verdict, author, check_number, now_ms, actor, cancels, over_commit=over_commit
        )
        writer.submit(decision, changed)

    def answer(self, request: CheckRequest, verdict: Verdict, author: Author) -> None:
        """Store the answer to a check and return once it is durable.

        Raises:
            DecisionNotStoredError: it is not known to be durable; the check is asked again.
        """
        half = request.half
        # An answer that came second is counted as refused, and nothing is wrong with it.
        with contextlib.suppress(TransactionRefusedError):
            self.await_change(half.transaction_id, half.group, verdict, author, check_number=request.check_number)

    def cancel(self, transaction_id: str, group: str, wait_s: float) -> None:  # noqa: ARG002 - nobody is waited for
        """Take a committed message back that is not due yet, by this machine's clock; see `Store.cancel`."""
        opened = self.opened
        try:
            self.await_change(transaction_id, group, Verdict.ROLLBACK, Author.PRODUCER, cancels=True)
        except TransactionRefusedError as error:
            with opened.lock:
                kept = opened.kept.get(transaction_id)
            stands = opened.journal.end_of(transaction_id) if kept is None else kept.verdict
            if kept.group != group if kept is not None else stands is None:
                raise not_pending(transaction_id, group) from error
            raise not_cancelled(transaction_id, stands) from error

    def await_change(
        self,
        transaction_id: str,
        group: str,
        verdict: Verdict,
        author: Author,
        *,
        check_number: int = 0,
        actor: str = "",
        cancels: bool = False,
        over_commit: bool = False,
    ) -> None:
        """Store a decision and return once it is durable.

        Raises:
            TransactionRefusedError: another one stands.
            DecisionNotStoredError: it is not known to be durable.
        """
        told: list[TransactionError | None] = []
        done = threading.Event()

        def tell(error: TransactionError | None) -> None:
            told.append(error)
            done.set()

        options: dict[str, Any] = {
            "check_number": check_number,
            "actor": actor,
            "cancels": cancels,
            "over_commit": over_commit,
        }
        self.change(transaction_id, group, verdict, author, tell, **options)
        if not done.wait(self._send_timeout_s):
            raise DecisionNotStoredError(
                f"transaction {transaction_id}: its {verdict.name} was not stored in {self.path} within "
                f"{self._send_timeout_s:g} s"
            )
        if told[0] is not None:
            raise told[0]

    def checks(self, group: str) -> Source:
        """Return the questions to a producer group, of this process alone."""
        return self.opened.questions.source(group)

    def watch(self, transaction_id: str, told: ToldSettled) -> None:
        """Tell how a transaction is settled."""
        self.opened.watch(transaction_id, told)

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

    def settler(self, options: CoordinatorOptions) -> Settler:
        """Return a coordinator for this store, not started. A store has one at a time."""
        # It builds on the store.
        from penstock.transactions.stores.file.settler import FileSettler

        return FileSettler(self, options)

    def administration(self) -> Administration:
        """Return what an operator may do, in this process and while the store is started."""
        from penstock.transactions.stores.file.administration import FileAdministration

        return FileAdministration(self)


def _refusal(transaction_id: str, verdict: Verdict, outcome: Outcome) -> TransactionRefusedError | None:
    """Return what stands against a decision; one that says the same and came first does no harm."""
    if outcome.refused is None or outcome.stands is verdict:
        return None
    return TransactionRefusedError(f"transaction {transaction_id}: its {verdict.name} was refused: {outcome.refused}")


__all__ = ["SEGMENT_BYTES", "FileStore", "KeptHalves"]
