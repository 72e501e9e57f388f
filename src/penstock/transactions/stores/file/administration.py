"""What an operator may do on a file store, in the process that has it; and what any process may read there.

Another process is kept out by the lock. It reads the state table, and the halves in the redo log, without the lock and
without changing anything. What does not fit together, since segments come and go, is read again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import tenacity

from penstock import clients
from penstock.errors import HalfNotStoredError, PenstockError, StoreDamagedError, StoreFailedError, TransactionError
from penstock.transactions.acked_producer import AckedProducer, LateProducer
from penstock.transactions.model import PendingTransaction
from penstock.transactions.operator.administration import NO_PRODUCER, described, hanging
from penstock.transactions.operator.audit import VERBS, Act, AuditLog, Resuming
from penstock.transactions.operator.inspection import Inspection
from penstock.transactions.store import Prepared
from penstock.transactions.stores.file.log.folder import Folder
from penstock.transactions.stores.file.log.journal import Journal
from penstock.transactions.stores.file.log.ledger import StoredTransaction
from penstock.transactions.stores.file.log.redo import segments_of
from penstock.transactions.stores.file.log.table import STAYS
from penstock.transactions.stores.file.open_store import OpenStore
from penstock.transactions.stores.relayed_store import RelayedStore, StoreAdministration, decision
from penstock.transactions.wire.half import Line
from penstock.transactions.wire.ids import id_bytes, is_id
from penstock.transactions.wire.ops import Author, Verdict

#: Times that it is read before what does not fit together counts as damaged, and seconds between two.
_TRIES = 5
_REREAD_DELAY_S = 0.2


def read_pending(folder: Path, only: str | None = None) -> list[PendingTransaction]:
    """Return what is not settled in the store in a folder, oldest first; of one id, if `only` names one.

    Ages are by this machine's clock, as the births are. Raises `PenstockError` where there is no store, or where it
    cannot be read.
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
        raise StoreFailedError(f"the file store in {folder} cannot be read: {error}; look as its user") from error
    waiting = sorted(pending, key=lambda stored: stored.number)
    heads: dict[Line, StoredTransaction] = {}
    shown, now_ms, obstacle = [], time.time() * 1000, "its process, to publish it"
    for stored in waiting:
        line = stored.half.line
        head = stored if line is None else heads.setdefault(line, stored)
        is_held = head is not stored and stored.verdict is Verdict.COMMIT
        if only in {None, stored.transaction_id}:
            shown.append(shown_as(stored, now_ms, head.transaction_id if is_held else None, obstacle))
    return shown


def shown_as(
    stored: StoredTransaction, now_ms: float, held_by: str | None, obstacle: str, unasked: str = ""
) -> PendingTransaction:
    """Return a transaction as operators see it; `obstacle` and `unasked` are what stands in its way."""
    return described(
        stored.transaction_id,
        stored.group,
        stored.targets,
        birth_ms=stored.birth_ms,
        now_ms=now_ms,
        check_count=stored.check_count,
        verdict=stored.verdict,
        deliver_at_ms=stored.half.deliver_at_ms,
        held_by=held_by,
        obstacle="the discarded topic" if stored.verdict is Verdict.DISCARD else obstacle,
        unasked=unasked,
    )


def _pending(path: Path, only: str | None) -> list[StoredTransaction]:
    """Read what is pending; with an id, that and what stands in a line, which may be before it."""
    folder = Folder(path)
    if not path.is_dir() or not segments_of(folder.names()):
        raise PenstockError(f"there is no file store in {path}; a FileStore makes one")
    looked_at = Journal(folder, 0)
    looked_at.look()
    raw_id = id_bytes(only) if only is not None and is_id(only) else b""
    found = []
    for number, row in looked_at.table:
        if only is None or row[5] & STAYS or looked_at.table.key(number)[0] == raw_id:
            stored = looked_at.load(number)
            if stored is not None:
                stored.drop()
                found.append(stored)
    return found


#: Seconds that a record in Kafka may take to be acknowledged.
_SEND_TIMEOUT_S = 15.0


class FileAdministration(StoreAdministration):
    """Shows and settles what is pending in a file store that is started. Thread-safe.

    `opened` returns what is open, or raises `StoppedError`.
    """

    def __init__(self, store: RelayedStore, path: Path, opened: Callable[[], OpenStore]) -> None:
        self._store = store
        self._path = path
        self._opened = opened

    def pending(self) -> Sequence[PendingTransaction]:
        """Return what is not settled, oldest first. Raises `StoppedError` where the store is not started here."""
        return self._shown(self._opened().table.used)

    def oldest(self, most: int, shards: Collection[int]) -> Sequence[PendingTransaction]:  # noqa: ARG002 - there is one
        """Return the oldest of those that are not settled, at most so many. Raises as `pending`."""
        return self._shown(most)

    def show(self, transaction_id: str) -> PendingTransaction | None:
        """Return one pending transaction, or None. Raises as `pending`."""
        opened = self._opened()
        with opened.lock:
            number = opened.number_of(transaction_id)
        shown = self._described([number]) if number else []
        return shown[0] if shown else None

    def decide(self, transaction_id: str, verdict: Verdict, actor: str, why: str = "") -> None:
        """Store an operator's decision; it counts if it is the first. So does a DISCARD of what Kafka refuses.

        A ROLLBACK also counts against a COMMIT, as long as the message waits for its `deliver_at`. The act stands in
        the topic `<prefix>.audit` before it is done, and who it was in the store itself.

        Args:
            transaction_id: a pending one.
            verdict: COMMIT, ROLLBACK or DISCARD.
            actor: who decides.
            why: the reason, for the audit log.

        Raises:
            TransactionError: no such transaction is pending.
            TransactionRefusedError: another decision stands; or what is committed is to be discarded, but is not
                refused by Kafka, or is being published just now.
            PenstockError: the act could not be written down; nothing was done.
            DecisionNotStoredError: it is not known to be durable.
            StoppedError: the store is not started in this process.
        """
        store, shown = self._store, self.show(transaction_id)
        if shown is None:
            raise TransactionError(
                f"no transaction {transaction_id} is pending in {self._path}: look at what is, or at the "
                "discarded topic"
            )
        with self._auditing() as (audit, _):
            audit.write(Act(actor, VERBS[verdict], transaction_id, shown.group, str(self._path), why))
        change = decision(transaction_id, shown.group, verdict, Author.OPERATOR)
        store.await_decision(change._replace(actor=actor))

    def resume(self, transaction_id: str, actor: str, why: str = "", *, again: bool = False) -> int:
        """Bring a discarded transaction back from Kafka, undecided, with a fresh count of checks; return its messages.

        The act stands in the topic `<prefix>.audit` before it is done: what stands at a place of the discarded topic is
        brought back once.

        Args:
            transaction_id: a discarded one.
            actor: who brings it back.
            why: the reason, for the audit log.
            again: also what was brought back before; it may become visible twice.

        Raises:
            TransactionError: it is pending, is not in the discarded topic, or was brought back before.
            PenstockError: the act could not be written down, or a half not be stored; then try again with `again`.
            StoppedError: the store is not started in this process.
        """
        store, opened = self._store, self._opened()
        with opened.lock:
            # One that is settled and not durably so is there, too.
            number = opened.number_of(transaction_id)
        if number:
            raise TransactionError(
                f"transaction {transaction_id} is pending in {self._path}, or on its way to the discarded topic: "
                "there is nothing to bring back; look again in a moment"
            )
        with self._auditing() as (audit, inspection):
            resuming = Resuming(store.topics, inspection, audit, store.may_publish_to)
            halves = resuming.claim(transaction_id, actor, why, again=again)
        answers: SimpleQueue[Prepared | HalfNotStoredError] = SimpleQueue()
        store.prepare(halves, answers.put)
        answer = answers.get()
        if isinstance(answer, HalfNotStoredError):
            raise PenstockError(
                f"transaction {transaction_id} was to be brought back, which is written down, but is not stored: "
                f"{answer.__cause__ or answer}; try it with again=True"
            ) from answer
        return len(halves)

    def _shown(self, most: int) -> list[PendingTransaction]:
        opened = self._opened()
        # Of those that are begun first, some may be settled, and not durably so.
        shown = self._described(opened.table.oldest(most + len(opened.over)))
        return shown[:most]

    def _described(self, numbers: Sequence[int]) -> list[PendingTransaction]:
        """Return those that are not settled as operators see them. They are read while others change the store."""
        opened = self._opened()
        slow, now_ms, shard = opened.slow_call, time.time() * 1000, opened.shard
        publication = "publication" if slow is None else hanging(slow[0], time.monotonic() - slow[1])
        shown: list[tuple[int, PendingTransaction]] = []
        for number in numbers:
            stored = opened.peek(number)
            if stored is None:
                continue
            with opened.lock:
                if stored.transaction_id in opened.over:
                    continue
                before = opened.queue.held_by(stored) if stored.verdict is Verdict.COMMIT else None
                reason = shard.why_held(stored) if shard is not None and stored.held else None
            held_by = None if before is None else before.transaction_id
            obstacle = publication if reason is None else f"Kafka to take it: {reason}"
            unasked = NO_PRODUCER.format(stored.group) if opened.checks_of(stored.group).lacks else ""
            shown.append((stored.number, shown_as(stored, now_ms, held_by, obstacle, unasked)))
        return [transaction for _, transaction in sorted(shown, key=lambda entry: entry[0])]

    @contextmanager
    def _auditing(self) -> Iterator[tuple[AuditLog, Inspection]]:
        """Lend the audit log and what reads Kafka, over connections of their own: operators act seldom."""
        store = self._store
        servers, config, topics = store.bootstrap_servers, store.config, store.topics
        sends = LateProducer(lambda: AckedProducer(servers, config, _SEND_TIMEOUT_S, f"operator-{store.prefix}"))
        admin, inspection = clients.admin(servers, config), Inspection(servers, config, topics)
        try:
            yield AuditLog(topics, admin, sends, inspection), inspection
        finally:
            sends.stop(_SEND_TIMEOUT_S)
