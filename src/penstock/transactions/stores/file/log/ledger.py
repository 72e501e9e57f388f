"""What a file store holds: its unsettled transactions, as the redo log's entries make them. Pure.

The same code applies an entry while the store runs and when its log is replayed, so that both come to the same state.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from penstock.transactions.stores.file.log.entries import Checked, Decided, Entry, Prepared
from penstock.transactions.wire.half import Half, Line
from penstock.transactions.wire.ops import Author, Verdict


class Standing(IntEnum):
    """How far a transaction is on its way to Kafka; the queue of what is ready changes it."""

    UNDECIDED = 0
    #: It waits for its time; for those before it in its line.
    DELAYED = 1
    BEHIND = 2
    READY = 3
    #: A relay has it; Kafka refuses it, or what it must stay behind; a trial has it.
    TAKEN = 4
    HELD = 5
    TRIED = 6
    #: Nobody publishes it: it is about to be decided again.
    WITHDRAWN = 7
    #: It is over, a little before that is durable here: what waits for it must not take it again.
    SETTLED = 8


@dataclass(slots=True, eq=False)
class StoredTransaction:
    """An unsettled transaction. The payloads stay in the redo log; here is what decides what becomes of it.

    Changed by the ledger alone, save for `due` and `standing`, which belong to those who look after it.
    """

    transaction_id: str
    group: str
    number: int
    birth_ms: int
    check_count: int
    answered_ms: int
    #: None while it is undecided.
    verdict: Verdict | None
    #: Rises from decision to decision; 0 while there is none.
    decided: int
    #: Where its halves stand in the redo log.
    place: int
    size: int
    immunity_ms: int | None
    deliver_at_ms: int | None
    #: With `order="half"`: the group and key within which it waits for those before it.
    line: Line | None
    topics: tuple[str, ...]
    #: Where an operator brought it back from; None: it was never discarded.
    resumed: str | None = None
    #: Who decided, where the log still has it.
    author: Author | None = None
    #: By name, where a person decided.
    actor: str = ""
    #: Monotonic seconds of its next check.
    due: float = 0.0
    standing: Standing = Standing.UNDECIDED

    @property
    def settled(self) -> bool:
        """Whether it is over."""
        return self.standing is Standing.SETTLED


class Ledger:
    """The unsettled transactions of one store. Not thread-safe: its store guards it."""

    def __init__(self) -> None:
        #: By id, in no order that matters.
        self.pending: dict[str, StoredTransaction] = {}
        #: The highest numbers that were given out.
        self.number = 0
        self.decided = 0

    def prepare(self, entry: Prepared, place: int, size: int) -> StoredTransaction:
        """Take in a transaction, or its halves' new place in the log."""
        self.number = max(self.number, entry.number)
        self.decided = max(self.decided, entry.decided)
        first = entry.halves[0]
        stored = self.pending.get(first.transaction_id)
        if stored is not None:
            stored.place, stored.size = place, size
            return stored
        stored = StoredTransaction(
            transaction_id=first.transaction_id,
            group=first.group,
            number=entry.number,
            birth_ms=entry.birth_ms,
            check_count=entry.check_count,
            answered_ms=entry.answered_ms,
            verdict=None if entry.verdict is Verdict.UNKNOWN else entry.verdict,
            decided=entry.decided,
            place=place,
            size=size,
            immunity_ms=_longest([half.immunity_ms for half in entry.halves]),
            deliver_at_ms=_longest([half.deliver_at_ms for half in entry.halves]),
            line=first.line,
            topics=tuple(dict.fromkeys(half.topic for half in entry.halves)),
            resumed=first.resumed,
        )
        self.pending[first.transaction_id] = stored
        return stored

    def apply(self, entry: Entry, place: int, size: int) -> list[StoredTransaction]:
        """Apply an entry of the log; return the transactions it speaks of. Settled ones are not kept any more."""
        if isinstance(entry, Prepared):
            return [self.prepare(entry, place, size)]
        if isinstance(entry, Decided):
            self.decided = max(self.decided, entry.decided)
            stored = self.pending.get(entry.transaction_id)
            # Absent: it was settled, and its halves' segment is gone. The first decision is the only one written, save
            # for one that takes a COMMIT back before it is due, and for an operator's DISCARD of what Kafka refused.
            if stored is None or not _counts(stored, entry):
                return []
            stored.verdict, stored.decided = entry.verdict, entry.decided
            stored.author, stored.actor = entry.author, entry.actor
            if entry.verdict is Verdict.ROLLBACK:
                # There is nothing left to do for it: it is settled by being decided.
                del self.pending[entry.transaction_id]
            return [stored]
        if isinstance(entry, Checked):
            stored = self.pending.get(entry.transaction_id)
            if stored is None:
                return []
            stored.check_count, stored.answered_ms = entry.check_count, entry.answered_ms
            return [stored]
        return [
            stored
            for transaction_id in entry.transaction_ids
            if (stored := self.pending.pop(transaction_id, None)) is not None
        ]

    def entries_of(self, stored: StoredTransaction, halves: tuple[Half, ...]) -> list[Entry]:
        """Return entries that tell all of a transaction, to be written again."""
        verdict = stored.verdict or Verdict.UNKNOWN
        numbers = (stored.number, stored.birth_ms, stored.check_count, stored.answered_ms)
        if stored.author is Author.OPERATOR:
            # The first entry alone would not say who it was.
            decision = Decided(stored.transaction_id, verdict, stored.author, stored.decided, stored.actor)
            return [Prepared(*numbers, Verdict.UNKNOWN, 0, halves), decision]
        return [Prepared(*numbers, verdict, stored.decided, halves)]


def _counts(stored: StoredTransaction, decision: Decided) -> bool:
    """Tell whether a decision that is in the log counts."""
    is_first, verdict = stored.verdict is None, decision.verdict
    return is_first or verdict is Verdict.ROLLBACK or is_discard_of_refused(stored, verdict, decision.author)


def is_discard_of_refused(stored: StoredTransaction, verdict: Verdict, author: Author) -> bool:
    """Tell whether an operator discards what is committed: the one decision that counts after another one."""
    return (stored.verdict, verdict, author) == (Verdict.COMMIT, Verdict.DISCARD, Author.OPERATOR)


def _longest(times: list[int | None]) -> int | None:
    return max((time for time in times if time is not None), default=None)
