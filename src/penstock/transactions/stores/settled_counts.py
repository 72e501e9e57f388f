"""How transactions ended, counted: what the coordinators of all stores count alike."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, fields
from typing import Any

from penstock.transactions.model import FINISH_BUCKETS_S
from penstock.transactions.wire.ops import Verdict

# A member of an enumeration is slow to look up, and this is the way of every transaction.
_COMMIT, _DISCARD = Verdict.COMMIT, Verdict.DISCARD


@dataclass(slots=True)
class SettledCounts:
    """Counts since the start, with names of `CoordinatorStatistics`. Each is written by one thread, and read by any."""

    committed: int = 0
    rolled_back: int = 0
    discarded: int = 0
    #: By `FINISH_BUCKETS_S`, with one more for what took longer; and their sum.
    finish_times: list[int] = field(default_factory=lambda: [0] * (len(FINISH_BUCKETS_S) + 1))
    finish_seconds: float = 0.0

    def settled(self, verdict: Verdict | None, age_s: float) -> None:
        """Count a transaction that was settled, so long after its birth. One that nobody decided is rolled back."""
        if verdict is _COMMIT:
            age_s = max(0.0, age_s)
            self.finish_times[bisect_left(FINISH_BUCKETS_S, age_s)] += 1
            self.finish_seconds += age_s
            # Last: who reads it finds the time counted.
            self.committed += 1
        elif verdict is _DISCARD:
            self.discarded += 1
        else:
            self.rolled_back += 1

    def counted(self) -> dict[str, Any]:
        """Return all counts by their names."""
        counts = {count.name: getattr(self, count.name) for count in fields(self)}
        return {**counts, "finish_times": tuple(self.finish_times)}
