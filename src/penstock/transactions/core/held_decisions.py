"""Decisions that are judged later: they run ahead of their halves, or would overrule what is being published. Pure.

They stand in the order of the op log, by transaction. Their op records are needed until they are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.transactions.core.checkpoints import LogPlaces
from penstock.transactions.wire.ops import Op


@dataclass(slots=True)
class HeldOp:
    """A decision that is judged later; its place is the offset of its op record, and its index there.

    The half log must be read up to the limit before its half can be called unknown; None: that is not known yet.
    """

    op: Op
    place: tuple[int, int]
    appended_ms: int
    limit: int | None = None

    @property
    def judged(self) -> tuple[Op, tuple[int, int], int]:
        """What it is judged by."""
        return self.op, self.place, self.appended_ms


class HeldDecisions:
    """Those of one half partition. Not thread-safe: its coordinator's thread drives it.

    What is yielded is to be judged at once, and may be held again.
    """

    def __init__(self, places: LogPlaces) -> None:
        self._places = places
        self._waiting: dict[str, list[HeldOp]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, transaction_id: str) -> bool:
        return transaction_id in self._waiting

    def hold(self, decision: HeldOp) -> None:
        """Hold a decision, behind those of its transaction."""
        self._waiting.setdefault(decision.op.transaction_id, []).append(decision)
        self._places.open_op(decision.place[0])

    def take(self, transaction_id: str) -> Iterator[HeldOp]:
        """Yield the decisions of a transaction."""
        for decision in self._waiting.pop(transaction_id, ()):
            yield decision
            self._close(decision)

    def take_hopeless(self, may_come: Callable[[HeldOp], bool]) -> Iterator[HeldOp]:
        """Yield those that need not wait any more, for what they wait for cannot come; what is behind others waits."""
        for transaction_id in list(self._waiting):
            waiting = self._waiting.pop(transaction_id)
            for at, decision in enumerate(waiting):
                if may_come(decision):
                    self._waiting[transaction_id] = waiting[at:]
                    break
                yield decision
                self._close(decision)

    def _close(self, decision: HeldOp) -> None:
        # After judging: what is open stays in its place among the others.
        self._places.close_op(decision.place[0])
