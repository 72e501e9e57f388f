"""What an operator may do on a file store, in the process that has it.

Another process is kept out by the lock; what it may do is look at the table: see `table.read_table`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock.errors import TransactionError
from penstock.transactions.file.ledger import Kept
from penstock.transactions.file.opened import OpenStore
from penstock.transactions.file.store import FileStore
from penstock.transactions.model import PendingTransaction, TransactionState
from penstock.transactions.records import Author, Verdict

_STATES = {Verdict.COMMIT: TransactionState.COMMIT, Verdict.ROLLBACK: TransactionState.ROLLBACK}


class FileAdministration:
    """Shows and settles what is pending in a file store that is started. Thread-safe."""

    def __init__(self, store: FileStore) -> None:
        self._store = store

    def pending(self) -> Sequence[PendingTransaction]:
        """Return what is not settled, oldest first.

        Raises:
            StoppedError: the store is not started in this process.
        """
        opened = self._store.opened
        with opened.lock:
            return [_shown(opened, kept) for kept in opened.kept.values() if not kept.settled]

    def show(self, transaction_id: str) -> PendingTransaction | None:
        """Return one pending transaction, or None.

        Raises:
            StoppedError: the store is not started in this process.
        """
        opened = self._store.opened
        with opened.lock:
            kept = opened.kept.get(transaction_id)
            return None if kept is None or kept.settled else _shown(opened, kept)

    def decide(self, transaction_id: str, verdict: Verdict, actor: str) -> None:
        """Store an operator's decision, with who it was; it counts if it is the first.

        Raises:
            TransactionError: no such transaction is pending.
            DecisionNotStoredError: it is not known to be durable.
            StoppedError: the store is not started in this process.
        """
        shown = self.show(transaction_id)
        if shown is None:
            raise TransactionError(
                f"no transaction {transaction_id} is pending in {self._store.path}: look at what is, or at the "
                "discarded topic"
            )
        self._store.await_change(transaction_id, shown.group, verdict, Author.OPERATOR, actor=actor)

    def resume(self, transaction_id: str, actor: str) -> None:
        """Bring a discarded transaction back: not from here yet.

        Raises:
            TransactionError: always. Its message is in the discarded topic; send it again from there.
        """
        raise TransactionError(
            f"transaction {transaction_id} cannot be resumed by {actor} into a file store: its message is in "
            f"{self._store.prefix}.discarded; send it again from there"
        )


def _shown(opened: OpenStore, kept: Kept) -> PendingTransaction:
    now_ms = time.time() * 1000
    held_by = opened.shelf.held_by(kept) if kept.verdict is Verdict.COMMIT else None
    delayed = kept.verdict is Verdict.COMMIT and kept.deliver_at_ms is not None and kept.deliver_at_ms > now_ms
    waits_for = ""
    if kept.verdict is not None and held_by is None and not delayed:
        waits_for = "Kafka to take it" if opened.shelf.is_paused(kept) else "publication"
    return PendingTransaction(
        transaction_id=kept.transaction_id,
        group=kept.group,
        topics=kept.topics,
        age_s=max(0.0, (now_ms - kept.birth_ms) / 1000),
        check_count=kept.check_count,
        # DISCARD is no state that a user knows; it waits for the discarded topic.
        decided=_STATES.get(kept.verdict) if kept.verdict is not None else None,
        deliver_at_ms=kept.deliver_at_ms,
        held_by=held_by,
        waits_for="the discarded topic" if kept.verdict is Verdict.DISCARD else waits_for,
    )


__all__ = ["FileAdministration"]
