"""Decisions that run ahead of their halves: held until those are read, or until they cannot come. Pure.

One that would overrule what is being published is held likewise, until that has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.transactions.core.decisions import Refusal
from penstock.transactions.wire.ops import Op

#: The offset of an op record that is gone.
_NO_PLACE = -1


@dataclass(slots=True)
class Ahead:
    """A decision that runs ahead of its half: the one at `index` in the op record at `offset`.

    The half log must be read up to the limit before it can be called unknown; None: that is not known yet.
    """

    op: Op
    offset: int
    index: int
    appended_ms: int
    limit: int | None


class AheadOps:
    """Those of one half partition. Not thread-safe: its coordinator's thread drives it.

    `waits` tells whether a decision waits for more halves of a transaction that is pending, or for its next life;
    `judge` lets one take effect, or says why it is refused.
    """

    def __init__(
        self, is_pending: Callable[[str], bool], waits: Callable[[Op], bool], judge: Callable[[Ahead], Refusal | None]
    ) -> None:
        self._is_pending = is_pending
        self._waits = waits
        self._judge = judge
        #: By transaction id, in the order of the op log. Always this one object: others look whether it is empty.
        self.waiting: dict[str, list[Ahead]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def __contains__(self, transaction_id: str) -> bool:
        return transaction_id in self.waiting

    def add(self, ahead: Ahead) -> None:
        """Hold a decision, behind those of its transaction."""
        self.waiting.setdefault(ahead.op.transaction_id, []).append(ahead)

    def lose_places(self) -> None:
        """Take in that the op log was made again: places in the former one mean nothing."""
        for waiting in self.waiting.values():
            for ahead in waiting:
                ahead.offset = _NO_PLACE

    def join(self, transaction_id: str, half_position: int) -> list[tuple[int, Refusal]]:
        """Apply the decisions on a half that has just arrived; return the refused ones by op offset."""
        waiting = self.waiting.pop(transaction_id, None)
        if waiting is None:
            return []
        refused = []
        for at, ahead in enumerate(waiting):
            is_pending = self._is_pending(transaction_id)
            if is_pending and self._waits(ahead.op):
                # How far the half log must be read for the rest is not known yet.
                ahead.limit = None
                self.waiting.setdefault(transaction_id, []).extend(waiting[at:])
                break
            if not is_pending and ahead.limit is not None and ahead.limit > half_position:
                # This half was settled long ago; the decision is for a later one with the same id.
                self.add(ahead)
                continue
            refusal = self._judge(ahead)
            if refusal is not None:
                refused.append((ahead.offset, refusal))
        return refused

    def sweep(self, half_end: int, half_position: int, read_to: int | None, stays: Callable[[str], bool]) -> int:
        """Refuse decisions whose half cannot come any more, and return how many there were.

        The end of the half log was asked for after the decisions were read, when `read_to` was the next offset of the
        op log; None: all had been read. `stays` tells whether decisions on a transaction are left alone.
        """
        dropped = 0
        for transaction_id in list(self.waiting):
            kept: list[Ahead] = []
            for ahead in self.waiting[transaction_id]:
                if read_to is not None and ahead.offset >= read_to:
                    kept.append(ahead)
                    continue
                if ahead.limit is None:
                    ahead.limit = half_end
                may_come = half_position < ahead.limit <= half_end
                if kept or stays(transaction_id) or may_come:
                    kept.append(ahead)
                else:
                    # The transaction may be there in part.
                    dropped += self._judge(ahead) is not None
            if kept:
                self.waiting[transaction_id] = kept
            else:
                del self.waiting[transaction_id]
        return dropped
