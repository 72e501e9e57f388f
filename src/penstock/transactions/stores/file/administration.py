"""Operator commands on a file store: all of them in the process that has it open, only reading in every other process.

The lock keeps other processes out. They read the state table and the halves in the redo log without the lock, and
change nothing. If a read finds parts that do not match, because a segment was added or removed meanwhile, they look for
the segments again, and read all again if that does not help.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path
from queue import Empty, SimpleQueue

import tenacity

from penstock.errors import (
    ConfigurationError,
    HalfNotStoredError,
    PenstockError,
    StoreDamagedError,
    StoreFailedError,
    TransactionError,
)
from penstock.options import ClientConfig
from penstock.transactions.model import PendingTransaction
from penstock.transactions.operator.administration import (
    NO_PRODUCER,
    Act,
    Administration,
    Discarded,
    StoreAdministration,
    hanging,
    shown,
)
from penstock.transactions.operator.audit import VERBS, AuditLog
from penstock.transactions.store import Prepared
from penstock.transactions.stores.file.log.entries import StoredTransaction
from penstock.transactions.stores.file.log.folder import Folder
from penstock.transactions.stores.file.log.journal import Journal
from penstock.transactions.stores.file.log.redo import segments_of
from penstock.transactions.stores.file.log.table import STAYS
from penstock.transactions.stores.file.open_store import OpenStore
from penstock.transactions.stores.relayed_store import RelayedStore, decision
from penstock.transactions.wire.half import Line
from penstock.transactions.wire.ids import id_bytes, is_id
from penstock.transactions.wire.ops import Author, Verdict
from penstock.transactions.wire.topics import StoreTopics

#: Attempts to read before the store counts as damaged, however long they take; and seconds between two.
_TRIES = 5
_REREAD_DELAY_S = 0.2
#: The obstacle of a transaction that is discarded and not yet in the discarded topic.
_DISCARDED = "the discarded topic"


def read_pending(folder: Path, only: str | None = None) -> list[PendingTransaction]:
    """Return the unsettled transactions of the store in a folder, oldest first; with `only`, that transaction.

    Ages are by this machine's clock, as the births are. Raises `PenstockError` if there is no store, or if it is
    unreadable.
    """
    reading = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(_TRIES),
        wait=tenacity.wait_fixed(_REREAD_DELAY_S),
        retry=tenacity.retry_if_exception_type((StoreDamagedError, FileNotFoundError)),
        reraise=True,
    )
    try:
        pending = reading(_pending, folder, only)
    except OSError as error:
        raise StoreFailedError(f"the file store in {folder} cannot be read: {error}; read it as its user") from error
    heads: dict[Line, StoredTransaction] = {}
    listed, now_ms = [], time.time() * 1000
    for stored in sorted(pending, key=lambda stored: stored.number):
        line = stored.half.line
        head = stored if line is None else heads.setdefault(line, stored)
        held_by = head.transaction_id if head is not stored and stored.verdict is Verdict.COMMIT else None
        otherwise = _DISCARDED if stored.verdict is Verdict.DISCARD else "its process, to publish it"
        if only in {None, stored.transaction_id}:
            listed.append(shown(stored, now_ms, held_by, "", otherwise))
    return listed


def _pending(path: Path, only: str | None) -> list[StoredTransaction]:
    """Read the pending transactions. With an id, read that one and all in lines, which may be before it."""
    found = []
    with closing(Folder(path)) as folder:
        if not path.is_dir() or not segments_of(folder.names()):
            raise PenstockError(f"there is no file store in {path}; a FileStore makes one")
        journal = Journal(folder, 0)
        journal.open_read_only()
        raw_id = id_bytes(only) if only is not None and is_id(only) else b""
        for number, row in journal.table:
            if only is None or row[5] & STAYS or journal.table.key(number)[0] == raw_id:
                try:
                    stored = journal.load(number)
                except StoreDamagedError:
                    # Its record may have moved, meanwhile, to a segment that did not exist yet.
                    journal.redo.open_read_only()
                    stored = journal.load(number)
                if stored is not None:
                    stored.drop()
                    found.append(stored)
    return found


class FolderReading(Administration):
    """Shows a store in a folder to any process, without its lock. Only the process that has the store open changes it.

    `kafka` locates its audit log: addresses, client settings and topics; None if it is unknown.
    """

    def __init__(self, path: Path, kafka: tuple[str, ClientConfig, StoreTopics] | None) -> None:
        self._path = path
        self._kafka = kafka

    def pending(self) -> Sequence[PendingTransaction]:
        """Return the unsettled transactions, oldest first. Raises as `read_pending`."""
        return read_pending(self._path)

    def show(self, transaction_id: str) -> PendingTransaction | None:
        """Return one pending transaction, or None. Raises as `read_pending`."""
        return next(iter(read_pending(self._path, transaction_id)), None)

    def discarded(self) -> Sequence[Discarded]:
        """Return nothing: discarded transactions are in Kafka, in the topic `<prefix>.discarded`."""
        return ()

    def acts(self, transaction_id: str) -> Sequence[Act]:
        """Return the acts of operators on a transaction, oldest first; none if Kafka's address is unknown."""
        if self._kafka is None:
            return ()
        with AuditLog(*self._kafka) as audit:
            return audit.acts(transaction_id)

    def decide(self, transaction_id: str, verdict: Verdict, actor: str, why: str = "", timeout_s: float = 0.0) -> str:  # noqa: ARG002 - it refuses
        """Refuse, with the call to make in the store's process."""
        raise self._refusal(f"decide({transaction_id!r}, Verdict.{verdict.name}, actor)")

    def resume(self, transaction_id: str, actor: str, why: str = "", *, again: bool = False) -> int:  # noqa: ARG002 - it refuses
        """Refuse, with the call to make in the store's process."""
        raise self._refusal(f"resume({transaction_id!r}, actor)")

    def _refusal(self, call: str) -> ConfigurationError:
        return ConfigurationError(
            f"the file store in {self._path} can be changed only by the process that has it open: call "
            f"store.administration().{call} there"
        )


class FileAdministration(StoreAdministration, FolderReading):
    """Shows and settles pending transactions of a started file store. Thread-safe.

    `opened` returns the open store, or raises `StoppedError`, as then every method does. A write may take `answer_s`
    seconds.
    """

    def __init__(self, store: RelayedStore, path: Path, opened: Callable[[], OpenStore], answer_s: float) -> None:
        super().__init__(path, (store.bootstrap_servers, store.config, store.topics))
        self._store = store
        self._opened = opened
        self._answer_s = answer_s

    def pending(self) -> Sequence[PendingTransaction]:
        """Return the unsettled transactions, oldest first."""
        return self.oldest(self._opened().table.used, ())

    def oldest(self, most: int, shards: Collection[int]) -> Sequence[PendingTransaction]:  # noqa: ARG002 - there is one
        """Return the oldest unsettled transactions, at most `most`."""
        opened = self._opened()
        # Some of the oldest may be published already.
        return self._describe(opened.table.oldest(most + len(opened.published_ids)))[:most]

    def show(self, transaction_id: str) -> PendingTransaction | None:
        """Return one pending transaction, or None."""
        number = self._number_of(transaction_id)
        return next(iter(self._describe([number] if number else [])), None)

    def _store_decision(self, transaction_id: str, verdict: Verdict, actor: str, why: str) -> None:
        """Store an operator's decision, after writing the act to the topic `<prefix>.audit`."""
        found = self.show(transaction_id)
        if found is None:
            raise TransactionError(
                f"no transaction {transaction_id} is pending in {self._path}: list the pending ones, or look "
                "into the discarded topic"
            )
        with self._audit_log() as audit:
            audit.write(Act(actor, VERBS[verdict], transaction_id, found.group, str(self._path), why))
        change = decision(transaction_id, found.group, verdict, Author.OPERATOR)
        self._store.await_decision(change._replace(actor=actor))

    def resume(self, transaction_id: str, actor: str, why: str = "", *, again: bool = False) -> int:
        """Bring a discarded transaction back from Kafka; see `Administration.resume`.

        The act in the topic `<prefix>.audit` is the claim: each record of the discarded topic is brought back once.
        """
        store = self._store
        # A published transaction that is not durably settled is still in the table.
        if self._number_of(transaction_id):
            raise TransactionError(
                f"transaction {transaction_id} is pending in {self._path}, or on its way to the discarded topic: "
                "there is nothing to bring back; look again in a moment"
            )
        with self._audit_log() as audit:
            halves = audit.claim(transaction_id, actor, why, again=again, may_publish_to=store.may_publish_to)
        answers: SimpleQueue[Prepared | HalfNotStoredError] = SimpleQueue()
        store.prepare(halves, answers.put)
        try:
            answer = answers.get(timeout=self._answer_s)
        except Empty:
            answer = HalfNotStoredError(f"the disk did not answer within {self._answer_s:g} s")
        if isinstance(answer, HalfNotStoredError):
            raise PenstockError(
                f"transaction {transaction_id} was claimed in the audit log, but is not known to be stored again: "
                f"{answer.__cause__ or answer}; if it is not pending either, resume it with again=True"
            ) from answer
        return len(halves)

    def _number_of(self, transaction_id: str) -> int:
        """Return the table number of a transaction, or 0."""
        opened = self._opened()
        with opened.lock:
            return opened.number_of(transaction_id)

    def _describe(self, numbers: Sequence[int]) -> list[PendingTransaction]:
        """Return the unsettled transactions among these, as operators see them. Safe while others change the store."""
        opened = self._opened()
        slow, now_ms, shard = opened.slow_call, time.time() * 1000, opened.shard
        hangs = "" if slow is None else hanging(slow[0], time.monotonic() - slow[1])
        found: list[tuple[int, PendingTransaction]] = []
        for number in numbers:
            stored = opened.peek(number)
            if stored is None:
                continue
            with opened.lock:
                if stored.transaction_id in opened.published_ids:
                    continue
                before = opened.queue.held_by(stored) if stored.verdict is Verdict.COMMIT else None
                reason = shard.why_held(stored) if shard is not None and stored.held else None
            obstacle = hangs if reason is None else f"Kafka to take it: {reason}"
            if stored.verdict is None:
                obstacle = NO_PRODUCER.format(stored.group) if opened.checks_of(stored.group).lacks_producer else ""
            held_by = None if before is None else before.transaction_id
            otherwise = _DISCARDED if stored.verdict is Verdict.DISCARD else "publication"
            found.append((stored.number, shown(stored, now_ms, held_by, obstacle, otherwise)))
        return [transaction for _, transaction in sorted(found, key=lambda entry: entry[0])]

    def _audit_log(self) -> AuditLog:
        """Return the audit log over a connection of its own: operators act rarely."""
        return AuditLog(self._store.bootstrap_servers, self._store.config, self._store.topics)
