"""Which changes of a file store hold: they are judged before they are written.

By what the store has, and by what earlier changes of the batch do: the first decision wins. There are two exceptions:
a ROLLBACK takes back the COMMIT of what is not due yet, and an operator's DISCARD that of what Kafka refuses, if the
store lets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.transactions.core.decisions import may_cancel
from penstock.transactions.stores.file.log.frames import Checked, Decided, Entry, Prepared, Settled
from penstock.transactions.stores.file.log.holdings import Holdings
from penstock.transactions.stores.file.log.ledger import StoredTransaction
from penstock.transactions.stores.relayed_store import NOT_HELD, UNKNOWN_ID, Decide, Outcome, Prepare, came_first
from penstock.transactions.wire.half import MAX_CHECK_NUMBER
from penstock.transactions.wire.ops import Author, Verdict


class Settle(NamedTuple):
    """Transactions are over."""

    transaction_ids: tuple[str, ...]


Change = Prepare | Decide | Settle


@dataclass(slots=True)
class Applied(Outcome):
    """What became of a change: with the transactions in memory that it changed."""

    changed: Sequence[StoredTransaction] = ()


class Judging:
    """Changes that are judged together: what earlier ones make of a transaction does not show in the journal yet."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        # The highest that were given out.
        self._number, self._decided = holdings.table.number, holdings.table.decided
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
        group = stored.half.group
        if change.group not in {None, group}:
            return f"it belongs to group {group}"
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
        deliver_at_ms = stored.half.deliver_at_ms
        is_early = deliver_at_ms is not None and change.now_ms < deliver_at_ms
        is_cancelled = is_early and may_cancel(change.verdict, change.author)
        is_discarded = (change.verdict, change.author) == (Verdict.DISCARD, Author.OPERATOR)
        if stored.verdict is not Verdict.COMMIT or not (is_cancelled or is_discarded):
            return False
        may = self._holdings.withdraw(stored, change.verdict)
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
