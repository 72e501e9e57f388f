"""What a coordinator counted since its start, and what its partitions hold now."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from penstock.transactions.core.pending import Pending
from penstock.transactions.model import FINISH_BUCKETS_S, CoordinatorStatistics
from penstock.transactions.wire.ops import Verdict

# A member of an enumeration is slow to look up, and this is the way of every transaction.
_COMMIT = Verdict.COMMIT


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
class Counts:
    """What a coordinator counted. Written by its thread; other threads read single numbers, which is safe.

    The lock is held while settled transactions are counted and leave what is pending, and by `statistics`, so that none
    is in both or in neither. Whoever holds it waits for nobody.
    """

    committed: int = 0
    rolled_back: int = 0
    discarded: int = 0
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
    #: By `FINISH_BUCKETS_S`, with one more for what took longer.
    finish_times: list[int] = field(default_factory=lambda: [0] * (len(FINISH_BUCKETS_S) + 1))
    finish_seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def statistics(self, read: Callable[[], Sequence[PartitionReading]]) -> CoordinatorStatistics:
        """Return a snapshot together with what is pending now, which is read while none leaves it."""
        with self.lock:
            partitions = read()
            # Each count has the same name there.
            counted: dict[str, Any] = {count.name: getattr(self, count.name) for count in fields(self)}
            del counted["lock"]
            return CoordinatorStatistics(
                partitions=sum(p.is_recovered for p in partitions),
                pending=sum(p.pending for p in partitions),
                held_by_key=sum(p.behind for p in partitions),
                delayed=sum(p.delayed for p in partitions),
                oldest_pending_age=max([0, *(p.oldest_age_ms for p in partitions)]) / 1000,
                held=sum(p.set_aside for p in partitions),
                **{**counted, "finish_times": tuple(self.finish_times)},
            )

    def settled(self, pending: Pending, now_ms: int) -> None:
        """Count a transaction by how it ended; `now_ms` is the broker's time."""
        if pending.verdict is _COMMIT:
            self.committed += 1
            took_s = max(0, now_ms - pending.birth_ms) / 1000
            self.finish_times[bisect_left(FINISH_BUCKETS_S, took_s)] += 1
            self.finish_seconds += took_s
        elif pending.verdict is Verdict.DISCARD:
            self.discarded += 1
        else:
            self.rolled_back += 1
