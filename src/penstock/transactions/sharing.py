"""Which decided transactions the next Kafka transaction settles.

Pure. A decided transaction is ready, held (its target cannot take it now), delayed (`deliver_at`), or it stands behind
an earlier one of its line (`order="half"`). Only what is ready is looked at, so that a crowd of those that wait delays
nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from penstock.transactions.delays import Delays
from penstock.transactions.done_records import Carry, Note
from penstock.transactions.key_order import KeyOrder
from penstock.transactions.pending import Pending
from penstock.transactions.records import Line, Verdict


@dataclass(slots=True)
class Share:
    """One partition's share of a Kafka transaction.

    Attributes:
        decided: what is settled by it, in the order in which it is published.
        answered: pending transactions whose count of answered checks is written down by it.
        half_checkpoint: where reading of the half log would start once it is committed.
        op_checkpoint: the same for the op log.
        done_checkpoint: the offset of the done log below which nothing is needed.
        log_ids: topic ids of the logs, as they stand beside the positions.
        counts: notes on these as they were when it was chosen: answers may come while it is under way.
        carried: pending transactions, as they were then, that it writes down whole so that the checkpoints pass them.
    """

    decided: list[Pending]
    answered: list[Pending]
    half_checkpoint: int
    op_checkpoint: int
    counts: list[Note] = field(default_factory=list)
    carried: list[Carry] = field(default_factory=list)
    done_checkpoint: int = 0
    log_ids: str = ""

    def notes(self) -> list[Note]:
        """Return what the done log shall say."""
        return [pending.note() for pending in self.decided] + self.counts


class Decisions:
    """The decided transactions of one half partition. Not thread-safe: its coordinator's thread drives it."""

    def __init__(self) -> None:
        #: All of them, by id, in the order in which the decisions took effect.
        self.all: dict[str, Pending] = {}
        self.keys = KeyOrder()
        self.delays = Delays()
        self._ready: dict[str, Pending] = {}
        self._held: dict[str, Pending] = {}

    @property
    def ready(self) -> int:
        """How many could be published now; those that are under way are among them."""
        return len(self._ready)

    @property
    def held(self) -> int:
        """How many wait aside."""
        return len(self._held)

    def add(self, pending: Pending) -> None:
        """Take a transaction in that was just decided."""
        half = pending.half
        self.all[half.transaction_id] = pending
        if half.deliver_at_ms is not None and pending.verdict is Verdict.COMMIT:
            self.delays.add(pending, half.deliver_at_ms)
        else:
            self._enter(pending)

    def _enter(self, pending: Pending) -> None:
        """Let it be published, unless it stands behind another one of its key."""
        line = pending.half.line
        if line is None or pending.verdict is not Verdict.COMMIT or self.keys.head(line) is pending:
            self._ready[pending.half.transaction_id] = pending

    def forget(self, pending: Pending) -> None:
        """Forget a transaction that is settled; the next one of its key takes its place."""
        transaction_id = pending.half.transaction_id
        if self.all.pop(transaction_id, None) is not None:
            self._ready.pop(transaction_id, None)
            if self._held:
                self._held.pop(transaction_id, None)
            if self.delays:
                self.delays.remove(transaction_id)
        line = pending.half.line
        if line is not None:
            head = self.keys.remove(line, pending)
            if head is not None and head.verdict is Verdict.COMMIT and head.half.transaction_id not in self.delays:
                self._ready.setdefault(head.half.transaction_id, head)

    def sort(self, line: Line) -> None:
        """Let all of a line stand in the order of their offsets; who does not stand in front any more is not ready."""
        self.keys.sort(line)
        head = self.keys.head(line)
        for pending in self.keys.standing(line):
            if pending is not head and pending.verdict is Verdict.COMMIT:
                self._ready.pop(pending.half.transaction_id, None)

    def release_due(self, now_ms: int) -> None:
        """Let delayed transactions go whose time has come."""
        for pending in self.delays.take_due(now_ms):
            self._enter(pending)

    def release_held(self) -> None:
        """Let held transactions try again, before those that came later."""
        if self._held:
            for pending in self._held.values():
                pending.held = False
            self._ready = {**self._held, **self._ready}
            self._held.clear()

    def held_by(self, pending: Pending) -> Pending | None:
        """Return the transaction behind which one stands, or None."""
        line = pending.half.line
        head = None if line is None else self.keys.head(line)
        return None if head is pending else head

    def choose(self, limit: int, publishable: Callable[[Pending], bool]) -> dict[str, Pending]:
        """Return what can be settled now, by id, in the order of publication. What its target refuses is held."""
        chosen: dict[str, Pending] = {}
        aside: list[Pending] = []
        looked: set[Line] = set()
        for transaction_id, pending in self._ready.items():
            if len(chosen) >= limit:
                break
            if looked and transaction_id in chosen:
                # It went with others of its key.
                continue
            if pending.held or (pending.verdict is Verdict.COMMIT and not publishable(pending)):
                aside.append(pending)
            elif pending.suspect:
                # It goes alone, after those before it: the order of decisions is kept.
                if not chosen:
                    chosen[transaction_id] = pending
                break
            else:
                line = pending.half.line
                if line is not None and line not in looked:
                    looked.add(line)
                    chosen.update(self._passable(line, publishable, limit - len(chosen)))
                if len(chosen) < limit or line is None:
                    chosen[transaction_id] = pending
        for pending in aside:
            pending.held = True
            self._held[pending.half.transaction_id] = self._ready.pop(pending.half.transaction_id)
        return chosen

    def _passable(
        self, line: Line, publishable: Callable[[Pending], bool], limit: int
    ) -> Iterator[tuple[str, Pending]]:
        """Yield the beginning of a line that can go in one go: a hot key does not wait for a group per message."""
        for pending in self.keys.standing(line):
            waits = pending.verdict is None or pending.suspect or pending.held
            if waits or limit <= 0 or pending.half.transaction_id in self.delays:
                return
            if pending.verdict is Verdict.COMMIT and not publishable(pending):
                return
            limit -= 1
            yield pending.half.transaction_id, pending


__all__ = ["Decisions", "Share"]
