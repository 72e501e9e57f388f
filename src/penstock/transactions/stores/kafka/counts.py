"""What a coordinator counted since its start, and what its partitions hold now."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.transactions.model import CoordinatorStatistics
from penstock.transactions.stores.settled_counts import SettledCounts


class PartitionReading(NamedTuple):
    """What one half partition holds.

    Attributes:
        is_recovered: whether all that its predecessors left was read.
        behind: those that stand behind an earlier one of their key.
        delayed: those that wait for their time.
        set_aside: those whose target takes nothing now, and what stands behind them.
    """

    is_recovered: bool
    pending: int
    behind: int
    delayed: int
    set_aside: int
    oldest_age_ms: int


@dataclass(slots=True)
class Counts(SettledCounts):
    """What a coordinator counted. Written by its thread; other threads read single numbers, which is safe.

    The lock is held while settled transactions are counted and leave what is pending, and by `statistics`, so that none
    is in both or in neither. Whoever holds it waits for nobody.
    """

    refused: int = 0
    forged: int = 0
    checks: int = 0
    answered_checks: int = 0
    no_producer: int = 0
    groups: int = 0
    recoveries: int = 0
    left_behind: int = 0
    #: A call into the Kafka client that has not returned for long, and its age.
    slow_call: str = ""
    slow_call_s: float = 0.0
    lost: int = 0
    hung_checks: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def statistics(self, read: Callable[[], Sequence[PartitionReading]]) -> CoordinatorStatistics:
        """Return a snapshot together with what is pending now, which is read while none leaves it."""
        with self.lock:
            partitions = read()
            counted = self.counted()
            del counted["lock"]
            return CoordinatorStatistics(
                partitions=sum(p.is_recovered for p in partitions),
                pending=sum(p.pending for p in partitions),
                held_by_key=sum(p.behind for p in partitions),
                delayed=sum(p.delayed for p in partitions),
                oldest_pending_age=max([0, *(p.oldest_age_ms for p in partitions)]) / 1000,
                held=sum(p.set_aside for p in partitions),
                **counted,
            )
