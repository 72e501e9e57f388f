"""Which changes of a batch hold in a file store: the first decision wins. Pure.

A batch is judged before it is written, by what the store has and by what earlier changes of the batch do. What is
written holds, so a replay of the log judges nothing. There are two exceptions to "the first wins": a ROLLBACK takes
back the COMMIT of what is not due yet, and an operator's DISCARD that of what Kafka refuses, if `Publication` lets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.transactions.core.decisions import may_cancel
from penstock.transactions.stores.file.log.entries import Checked, Decided, Entry, Prepared, Settled
from penstock.transactions.stores.file.log.ledger import StoredTransaction
from penstock.transactions.stores.relay.changes import NOT_HELD, UNKNOWN_ID, Decide, Outcome, Prepare, came_first
from penstock.transactions.wire.check_request import MAX_CHECK_NUMBER
from penstock.transactions.wire.ops import Author, Verdict


class Settle(NamedTuple):
    """Transactions are over."""

    transaction_ids: tuple[str, ...]


Change = Prepare | Decide | Settle


@dataclass(slots=True)
class Applied(Outcome):
    """What became of a change: with the transactions in memory that it changed."""

    changed: Sequence[StoredTransaction] = ()


class Holdings(Protocol):
    """What the store has."""

    def number_of(self, transaction_id: str) -> int:
        """Return the number of a transaction that is pending, or 0."""

    def find(self, transaction_id: str) -> StoredTransaction | None:
        """Return a transaction that is pending."""

    def ended(self, transaction_id: str) -> Verdict | None:
        """Return how a transaction ended that was settled a while ago, if that is known still."""


class Publication(Protocol):
    """Where committed transactions wait to be published. Called with the journal's lock held."""

    def withdraw(self, stored: StoredTransaction, verdict: Verdict) -> bool:
        """Let nobody publish what is to be decided again; False where it may not be: it is under way, or about to be.

        A ROLLBACK may be where it waits for its time, a DISCARD where Kafka refuses it.
        """

    def restore(self, stored: StoredTransaction) -> None:
        """Let it wait as before."""

    def changed(self, changes: Sequence[Change], applied: Sequence[Applied]) -> None:
        """Take in what has become durable."""


class Judging:
    """Changes that are judged together: what earlier ones make of a transaction does not show in the journal yet."""

    def __init__(self, holdings: Holdings, publication: Publication | None, number: int, decided: int) -> None:
        self._holdings = holdings
        self._publication = publication
        # The highest that were given out.
        self._number, self._decided = number, decided
        # Ids of what is prepared or decided here; answered checks.
        self._taken: set[str] = set()
        self._counts: dict[str, int] = {}
        #: Ids of what was looked at, and may leave the memory again at the end.
        self.seen: set[str] = set()
        #: What is decided again, and not published before that.
        self.withdrawn: list[StoredTransaction] = []

    def judge(self, change: Change) -> Entry | str | None:
        """Return the entry of a change that holds, or why it does not; None: nothing is to be said of that."""
        if isinstance(change, Settle):
            return Settled(change.transaction_ids)
        if isinstance(change, Decide):
            return self._judge(change)
        transaction_id = change.halves[0].transaction_id
        if transaction_id in self._taken or self._holdings.number_of(transaction_id):
            return f"transaction {transaction_id} is stored already"
        self._taken.add(transaction_id)
        self._number += 1
        return Prepared(self._number, change.birth_ms, 0, 0, Verdict.UNKNOWN, 0, change.halves)

    def _judge(self, change: Decide) -> Entry | str | None:
        transaction_id = change.transaction_id
        stored = self._holdings.find(transaction_id)
        if stored is None:
            ended = self._holdings.ended(transaction_id)
            return UNKNOWN_ID if ended is None else f"{came_first(ended)}; it is settled"
        self.seen.add(transaction_id)
        if change.group not in {None, stored.group}:
            return f"it belongs to group {stored.group}"
        is_first = stored.verdict is None and not change.cancels
        if transaction_id in self._taken or not (is_first or self._is_withdrawn(change, stored)):
            # An answered check that comes late says nothing against what was decided.
            return None if change.verdict is Verdict.UNKNOWN else _too_late(change, stored)
        if change.verdict is not Verdict.UNKNOWN:
            self._taken.add(transaction_id)
            self._decided += 1
            return Decided(transaction_id, change.verdict, change.author, self._decided, change.actor)
        count = self._counts.get(transaction_id, stored.check_count) + 1
        if change.check_number != count or count > MAX_CHECK_NUMBER:
            return None
        self._counts[transaction_id] = count
        return Checked(transaction_id, count, change.now_ms)

    def _is_withdrawn(self, change: Decide, stored: StoredTransaction) -> bool:
        """Tell whether a decision counts against a COMMIT; nobody publishes that from then on.

        A ROLLBACK does before it is due, and an operator's DISCARD where Kafka refuses it.
        """
        is_early = stored.deliver_at_ms is not None and change.now_ms < stored.deliver_at_ms
        is_cancelled = is_early and may_cancel(change.verdict, change.author)
        is_discarded = (change.verdict, change.author) == (Verdict.DISCARD, Author.OPERATOR)
        publication = self._publication
        if stored.verdict is not Verdict.COMMIT or not (is_cancelled or is_discarded) or publication is None:
            return False
        may = publication.withdraw(stored, change.verdict)
        if may:
            self.withdrawn.append(stored)
        return may


def _too_late(change: Decide, stored: StoredTransaction) -> str:
    """Return why a decision does not count."""
    if stored.verdict is None:
        return "it is not decided yet" if change.cancels else "another decision came first"
    if (stored.verdict, change.verdict) == (Verdict.COMMIT, Verdict.DISCARD):
        return NOT_HELD
    return came_first(stored.verdict)
