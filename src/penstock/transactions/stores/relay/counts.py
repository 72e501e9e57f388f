"""What a coordinator of a store outside Kafka has counted since its start."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

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

    def statistics(
        self, *, pending: int = 0, oldest_age_s: float = 0.0, held: int = 0, delayed: int = 0, held_by_key: int = 0
    ) -> CoordinatorStatistics:
        """Return the counts with what the store holds now; what relays count is 0."""
        return CoordinatorStatistics(
            partitions=0,
            pending=pending,
            oldest_pending_age=max(0.0, oldest_age_s),
            held=held,
            committed=self.committed,
            rolled_back=self.rolled_back,
            discarded=self.discarded,
            refused=self.refused,
            forged=0,
            checks=self.checks,
            answered_checks=self.answered_checks,
            no_producer=self.no_producer,
            groups=0,
            recoveries=0,
            held_by_key=held_by_key,
            delayed=delayed,
            finish_times=tuple(self.finish_times),
            finish_seconds=self.finish_seconds,
        )
