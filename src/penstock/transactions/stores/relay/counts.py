"""What a coordinator of a store outside Kafka has counted since its start."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.transactions.model import CoordinatorStatistics
from penstock.transactions.stores.settled_counts import SettledCounts


@dataclass(slots=True)
class Counts(SettledCounts):
    """Counts since the start. Each is a number that one thread writes at a time; any thread reads."""

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

    def statistics(self, *, oldest_age_s: float = 0.0, **held: int) -> CoordinatorStatistics:
        """Return the counts with what the store holds now, by the names there; what is not given is 0."""
        nothing = {"pending": 0, "held": 0, "forged": 0}
        return CoordinatorStatistics(oldest_pending_age=max(0.0, oldest_age_s), **{**nothing, **held, **self.counted()})
