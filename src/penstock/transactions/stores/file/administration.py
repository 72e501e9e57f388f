"""What an operator may do on a file store, in the process that has it.

Another process is kept out by the lock; it may read: see `reader`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from penstock import clients
from penstock.errors import HalfNotStoredError, PenstockError, TransactionError, TransactionRefusedError
from penstock.options import ClientConfig
from penstock.transactions.model import PendingTransaction, TransactionState
from penstock.transactions.operator.audit import VERBS, Act, AuditLog
from penstock.transactions.operator.description import NO_PRODUCER
from penstock.transactions.operator.inspection import Inspection
from penstock.transactions.operator.resuming import Resuming
from penstock.transactions.store import Prepared
from penstock.transactions.stores.file.changes import Changes
from penstock.transactions.stores.file.log.journal import Decide
from penstock.transactions.stores.file.log.ledger import StoredTransaction
from penstock.transactions.stores.file.open_store import OpenStore
from penstock.transactions.stores.file.reader import described
from penstock.transactions.stores.file.slow_call import read_slow_call
from penstock.transactions.wire.ops import Author, Verdict
from penstock.transactions.wire.topics import StoreTopics
from penstock.transactions.writing.acked_producer import AckedProducer, LateProducer

#: Seconds that a record in Kafka may take to be acknowledged.
_SEND_S = 15.0


class FileAccess(NamedTuple):
    """The store, as its administration uses it."""

    path: Path
    #: Returns the open store, or raises `StoppedError`.
    opened: Callable[[], OpenStore]
    changes: Changes


class KafkaAccess(NamedTuple):
    """Kafka, as the administration of a store that is not there uses it: for the audit log and the discarded topic."""

    bootstrap_servers: str
    prefix: str
    config: ClientConfig
    may_publish_to: Callable[[str], bool]


class FileAdministration:
    """Shows and settles what is pending in a file store that is started. Thread-safe."""

    def __init__(self, store: FileAccess, kafka: KafkaAccess) -> None:
        self._store = store
        self._kafka = kafka

    def pending(self) -> Sequence[PendingTransaction]:
        """Return what is not settled, oldest first. Raises `StoppedError` where the store is not started here."""
        opened = self._store.opened()
        with opened.lock:
            return [self._shown(opened, stored) for stored in opened.pending.values() if not stored.settled]

    def oldest(self, most: int, shards: Collection[int]) -> Sequence[PendingTransaction]:  # noqa: ARG002 - there is one
        """Return the oldest of those that are not settled, at most so many. Raises as `pending`."""
        opened = self._store.opened()
        with opened.lock:
            # In the order in which they were prepared.
            waiting = (stored for stored in opened.pending.values() if not stored.settled)
            return [self._shown(opened, stored) for stored in islice(waiting, most)]

    def show(self, transaction_id: str) -> PendingTransaction | None:
        """Return one pending transaction, or None. Raises as `pending`."""
        opened = self._store.opened()
        with opened.lock:
            stored = opened.pending.get(transaction_id)
            return None if stored is None or stored.settled else self._shown(opened, stored)

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
        shown = self.show(transaction_id)
        if shown is None:
            raise TransactionError(
                f"no transaction {transaction_id} is pending in {self._store.path}: look at what is, or at the "
                "discarded topic"
            )
        discards_refused = verdict is Verdict.DISCARD and shown.decided is TransactionState.COMMIT
        with self._kept_off(transaction_id) if discards_refused else nullcontext():
            with self._auditing() as (audit, _):
                audit.write(Act(actor, VERBS[verdict], transaction_id, shown.group, str(self._store.path), why))
            now_ms = int(time.time() * 1000)
            decision = Decide(transaction_id, shown.group, verdict, Author.OPERATOR, 0, now_ms, actor)
            self._store.changes.await_decision(decision._replace(over_commit=discards_refused))

    @contextmanager
    def _kept_off(self, transaction_id: str) -> Iterator[None]:
        """Keep trials off what is to be discarded though it is committed."""
        opened = self._store.opened()
        with opened.lock:
            stored = opened.pending.get(transaction_id)
            if stored is None or not opened.ready.begin_discard(stored):
                raise TransactionRefusedError(
                    f"transaction {transaction_id}: its DISCARD was refused: COMMIT was decided before, and it is not "
                    "held, or is being published just now; what Kafka refuses can be discarded: look at what it waits "
                    "for, and try again"
                )
        try:
            yield
        finally:
            with opened.lock:
                opened.ready.end_discard(stored)

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
        store, opened = self._store, self._store.opened()
        with opened.lock:
            # One that is settled and not durably so is here, too.
            if transaction_id in opened.pending:
                raise TransactionError(
                    f"transaction {transaction_id} is pending in {store.path}, or on its way to the discarded topic: "
                    "there is nothing to bring back; look again in a moment"
                )
        with self._auditing() as (audit, inspection):
            resuming = Resuming(StoreTopics(self._kafka.prefix), inspection, audit, self._kafka.may_publish_to)
            halves = resuming.claim(transaction_id, actor, why, again=again)
        answers: SimpleQueue[Prepared | HalfNotStoredError] = SimpleQueue()
        store.changes.prepare(halves, answers.put)
        answer = answers.get()
        if isinstance(answer, HalfNotStoredError):
            raise PenstockError(
                f"transaction {transaction_id} was to be brought back, which is written down, but is not stored: "
                f"{answer.__cause__ or answer}; try it with again=True"
            ) from answer
        return len(halves)

    def _shown(self, opened: OpenStore, stored: StoredTransaction) -> PendingTransaction:
        held_by = opened.ready.held_by(stored) if stored.verdict is Verdict.COMMIT else None
        reason = opened.ready.reason(stored)
        obstacle = read_slow_call(self._store.path) or "publication"
        if reason is not None:
            obstacle = f"Kafka to take it: {reason.why}"
        unasked = NO_PRODUCER.format(stored.group) if stored.group in opened.unasked else ""
        return described(stored, time.time() * 1000, held_by, obstacle, unasked)

    @contextmanager
    def _auditing(self) -> Iterator[tuple[AuditLog, Inspection]]:
        """Lend the audit log and what reads Kafka, over connections of their own: operators act seldom."""
        servers, prefix, config, _ = self._kafka
        topics = StoreTopics(prefix)
        sends = LateProducer(lambda: AckedProducer(servers, config, _SEND_S, f"operator-{prefix}"))
        admin, inspection = clients.admin(servers, config), Inspection(servers, config, topics)
        try:
            yield AuditLog(servers, config, topics=topics, admin=admin, sends=sends, inspection=inspection), inspection
        finally:
            sends.stop(_SEND_S)
