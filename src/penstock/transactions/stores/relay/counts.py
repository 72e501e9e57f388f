"""What a coordinator of a store outside Kafka has counted since its start."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, fields
from typing import Any

from penstock.transactions.model import FINISH_BUCKETS_S, CoordinatorStatistics
from penstock.transactions.wire.ops import Verdict


@dataclass(slots=True)
class Counts:
    """Counts since the start. Each is a number that one thread writes at a time; any thread reads."""

    committed: int = 0
    rolled_back: int = 0
    discarded: int = 0
    refused: int = 0
    checks: int = 0
    answered_checks: int = 0
    no_producer: int = 0
    #: Of the relays: shards that were taken over, Kafka transactions, and ends of them that were in doubt.
    partitions: int = 0
    groups: int = 0
    recoveries: int = 0
    #: The call into the Kafka client that has not gone on for longest, and its age.
    slow_call: str = ""
    slow_call_s: float = 0.0
    finish_times: list[int] = field(default_factory=lambda: [0] * (len(FINISH_BUCKETS_S) + 1))
    finish_seconds: float = 0.0

    def settled(self, verdict: Verdict, age_s: float) -> None:
        """Count a transaction that was settled, so long after its birth."""
        if verdict is Verdict.COMMIT:
            age_s = max(0.0, age_s)
            self.finish_times[bisect_left(FINISH_BUCKETS_S, age_s)] += 1
            self.finish_seconds += age_s
            # Last: who reads it finds the time counted.
            self.committed += 1
        elif verdict is Verdict.ROLLBACK:
            self.rolled_back += 1
        else:
            self.discarded += 1

    def statistics(self, *, oldest_age_s: float = 0.0, **held: int) -> CoordinatorStatistics:
        """Return the counts with what the store holds now, by the names there; what is not given is 0."""
        counted: dict[str, Any] = {count.name: getattr(self, count.name) for count in fields(self)}
        counted["finish_times"] = tuple(self.finish_times)
        nothing = {"pending": 0, "held": 0, "forged": 0}
        return CoordinatorStatistics(oldest_pending_age=max(0.0, oldest_age_s), **{**nothing, **held, **counted})
