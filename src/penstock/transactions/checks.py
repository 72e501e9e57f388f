"""When which undecided half is asked about. Pure: the caller gives the time.

The first check of a half is due when it is older than the transaction timeout, or than its own immunity where that is
longer; the next ones follow at an interval. A check counts when it was answered: a request that nobody took up is
asked again under the same number.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.transactions.settlement import Pending


@dataclass(frozen=True, slots=True)
class CheckPolicy:
    """When to ask, and how often.

    Attributes:
        timeout_s: seconds from the birth of a half to its first check.
        interval_s: seconds between two checks of a half.
        maximum: answered checks after which an undecided half is discarded.
    """

    timeout_s: float
    interval_s: float
    maximum: int


@dataclass(slots=True)
class CheckSchedule:
    """The checks of one half partition, soonest first. Not thread-safe: its coordinator's thread drives it."""

    policy: CheckPolicy
    #: Due time, a number that settles ties, the half. Decided halves stay until they come up.
    _due: list[tuple[float, int, Pending]] = field(default_factory=list)
    _ticket: Iterator[int] = field(default_factory=itertools.count)

    def add(self, pending: Pending, now: float, age_s: float, answered_age_s: float | None) -> None:
        """Plan the next check of a half that was just read.

        Args:
            pending: the half.
            now: monotonic seconds.
            age_s: seconds since the broker appended the half.
            answered_age_s: seconds since its last check was answered, or None when none was.
        """
        first = max(self.policy.timeout_s, (pending.half.immunity_ms or 0) / 1000)
        wait = first - max(age_s, 0.0)
        if answered_age_s is not None:
            wait = max(wait, self.policy.interval_s - max(answered_age_s, 0.0))
        self.postpone(pending, now + max(wait, 0.0))

    def postpone(self, pending: Pending, due: float) -> None:
        """Plan the next check of a half for a time."""
        pending.check_due = due
        heapq.heappush(self._due, (due, next(self._ticket), pending))

    def take_due(self, now: float, limit: int) -> Iterator[Pending]:
        """Yield halves whose check is due; each must be postponed, or it is not asked about again.

        Entries of halves that were decided since are dropped on the way.
        """
        while self._due and limit > 0 and self._due[0][0] <= now:
            due, _, pending = heapq.heappop(self._due)
            if pending.verdict is None and pending.check_due == due:
                limit -= 1
                yield pending

    def next_due(self) -> float | None:
        """Return the monotonic time at which the next entry is due, or None."""
        return self._due[0][0] if self._due else None


__all__ = ["CheckPolicy", "CheckSchedule"]
