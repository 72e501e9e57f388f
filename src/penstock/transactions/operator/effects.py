"""What became of an operator's decision. A store that shows what is pending is asked until the transaction is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from penstock.clients.asking import ask_again
from penstock.transactions.model import PendingTransaction
from penstock.transactions.wire.ops import Verdict

#: Seconds between two looks.
_LOOK_S = 0.2

#: What a decision that took effect has done; and how those that may stand are called.
_ENDS = {
    Verdict.COMMIT: "committed: visible",
    Verdict.ROLLBACK: "rolled back",
    Verdict.DISCARD: "moved to the discarded topic",
}
_NAMES = {verdict: verdict.name for verdict in _ENDS}


class Effect(Enum):
    """What became of an operator's decision."""

    #: It stands, and it is done.
    DONE = "done"
    #: Another decision was in the log before it, and stands.
    REFUSED = "refused"
    #: It is stored and was not seen to take effect: no coordinator runs, or the transaction waits for something.
    WAITS = "waits"


@dataclass(frozen=True, slots=True)
class Decided:
    """The answer to an operator's decision."""

    effect: Effect
    #: The decision that stands, as far as it is known.
    stands: Verdict | None
    #: In words.
    waits_for: str = ""

    def text(self, verdict: Verdict) -> str:
        """Return what came of a decision, as the end of a line."""
        if self.effect is Effect.DONE:
            return _ENDS[verdict]
        waits = f"; it waits for {self.waits_for}" if self.waits_for else ""
        if self.effect is Effect.REFUSED:
            stands = "nothing yet" if self.stands is None else _NAMES.get(self.stands, "another decision")
            return f"refused: {stands} was decided before{waits}"
        return f"stored, not seen to take effect{waits}"


def await_effect(
    show: Callable[[str], PendingTransaction | None], transaction_id: str, verdict: Verdict, timeout_s: float
) -> Decided:
    """Wait until a transaction that was decided is settled, at most so long; return whether it is."""
    left = ask_again(lambda: show(transaction_id), timeout_s, _LOOK_S, until=lambda found: found is None)
    if left is not None:
        return Decided(Effect.WAITS, verdict, left.waits_for or "a coordinator")
    return Decided(Effect.DONE, verdict)
