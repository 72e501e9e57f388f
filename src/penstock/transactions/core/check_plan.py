"""When which undecided half is asked about. Pure: the caller gives the time, in the broker's seconds.

The first check of a half is due when it is older than the transaction timeout, or than its own immunity where that is
longer; the next ones follow at an interval, which may grow. A check counts when it was answered: a request that nobody
took up is asked again under the same number. Producer groups take turns, so that a crowd of one delays no other's.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.errors import ConfigurationError
from penstock.options import positive, positive_int
from penstock.transactions.core.pending import Pending
from penstock.transactions.wire.check_request import MAX_CHECK_NUMBER

#: An interval that grows from check to check grows to no more than this, in seconds.
_LONGEST_S = 3600.0
#: Seconds after which halves that are still missing are not waited for any more.
INCOMPLETE_S = 120.0
#: Entries of a queue before those of transactions that need no check any more are taken out.
_CROWD = 4_096


def require_checks(maximum: int, backoff: float) -> None:
    """Raise `ConfigurationError` unless a number of checks, and a factor between their intervals, are possible."""
    positive_int("check_max", maximum)
    if maximum > MAX_CHECK_NUMBER:
        raise ConfigurationError(f"check_max must be at most {MAX_CHECK_NUMBER}, but is {maximum}")
    positive("check_backoff", backoff)
    if backoff < 1:
        raise ConfigurationError(f"check_backoff must be at least 1, but is {backoff}: intervals do not shrink")


@dataclass(frozen=True, slots=True)
class CheckPolicy:
    """When to ask, and how often.

    Attributes:
        timeout_s: seconds from the birth of a half to its first check.
        interval_s: seconds between two checks of a half.
        maximum: answered checks after which an undecided half meets the discard policy.
        backoff: factor by which the interval grows from check to check; it ends at an hour.
        incomplete_s: seconds from the birth of the first half of a transaction of several messages after which it is
            rolled back if others are still missing. More than any producer goes on trying to store them.
    """

    timeout_s: float
    interval_s: float
    maximum: int
    backoff: float = 1.0
    incomplete_s: float = INCOMPLETE_S

    def interval(self, check_count: int) -> float:
        """Return the seconds between the check of that number and the next."""
        if self.backoff <= 1.0:
            return self.interval_s
        # The exponent has a bound, too: a float has one.
        grown = self.interval_s * self.backoff ** min(max(check_count - 1, 0), 64)
        return min(grown, max(self.interval_s, _LONGEST_S))

    def next_due(self, birth_s: float, immunity_s: float, answered_s: float, check_count: int) -> float:
        """Return when the next check of a transaction is due, in the clock of the times given; 0 stands for none.

        After `check_count` checks that were answered, the last one at `answered_s`.
        """
        due = birth_s + max(self.timeout_s, immunity_s)
        return max(due, answered_s + self.interval(check_count)) if answered_s else due

    def first_due(self, pending: Pending) -> float:
        """Return when the next check of a half that was just read is due."""
        born = pending.birth_ms / 1000
        if not pending.is_complete:
            return born + max(self.timeout_s, self.incomplete_s)
        immunity_s = (pending.half.immunity_ms or 0) / 1000
        return self.next_due(born, immunity_s, pending.answered_ms / 1000, pending.check_count)


class CheckSchedule:
    """The checks of one half partition. Not thread-safe: its coordinator's thread drives it.

    It keeps ids alone, so that a transaction that is settled leaves the memory whenever its check would have been due;
    `find` returns one that is not settled.
    """

    def __init__(self, policy: CheckPolicy, find: Callable[[str], Pending | None]) -> None:
        self.policy = policy
        self._find = find
        # First checks in the order of their due times, which is that of birth but for few: due time, and the ids of
        # those that were born in the same millisecond. Those of transactions that need no check any more stay until
        # they come up, or until there are many; how many there are is counted.
        self._first: deque[tuple[float, list[str]]] = deque()
        self._first_count = 0
        self._first_crowd = _CROWD
        # All others, likewise: due time, a number that settles ties, id.
        self._later: list[tuple[float, int, str]] = []
        self._later_crowd = _CROWD
        self._ticket = itertools.count()
        # Ids of what is due, by group; under "" what nobody has to be asked about. Groups at the front have their turn
        # next.
        self._due: OrderedDict[str, deque[str]] = OrderedDict()
        # Groups that are left alone until a time.
        self._parked: dict[str, float] = {}

    def add(self, pending: Pending) -> None:
        """Plan the next check of a half that was just read, or of one that has just become complete."""
        half = pending.half
        if pending.parts is not None or half.immunity_ms or pending.answered_ms:
            self.postpone(pending, self.policy.first_due(pending))
            return
        # What `first_due` says of all others.
        due = pending.birth_ms / 1000 + self.policy.timeout_s
        first = self._first
        if not first or due > first[-1][0]:
            first.append((due, [half.transaction_id]))
        elif due == first[-1][0]:
            first[-1][1].append(half.transaction_id)
        else:
            self.postpone(pending, due)
            return
        pending.check_due = due
        self._first_count += 1
        if self._first_count > self._first_crowd:
            self._thin_out()

    def _thin_out(self) -> None:
        """Take out what needs no first check any more: the ids of all that was sent within the timeout would stay."""
        kept = [(due, [name for name in names if self._planned(name, due) is not None]) for due, names in self._first]
        self._first = deque(one for one in kept if one[1])
        self._first_count = sum(len(names) for _, names in self._first)
        self._first_crowd = max(_CROWD, 2 * self._first_count)

    def postpone(self, pending: Pending, due: float) -> None:
        """Plan the next check of a half for a time."""
        pending.check_due = due
        heapq.heappush(self._later, (due, next(self._ticket), pending.half.transaction_id))
        if len(self._later) > self._later_crowd:
            self._later = [one for one in self._later if self._planned(one[2], one[0]) is not None]
            heapq.heapify(self._later)
            self._later_crowd = max(_CROWD, 2 * len(self._later))

    def bring_forward(self, pending: Pending) -> None:
        """Let a check be the next of its group: what it waited for is there."""
        pending.check_due = 0.0
        self._due.setdefault(self.turn_of(pending), deque()).appendleft(pending.half.transaction_id)

    def _planned(self, transaction_id: str, due: float) -> Pending | None:
        """Return the transaction whose check is planned for that time still, or None."""
        pending = self._find(transaction_id)
        return pending if pending is not None and pending.verdict is None and pending.check_due == due else None

    def park(self, group: str, until: float) -> int:
        """Leave a group alone until a time, and return how many of its checks wait."""
        self._parked[group] = until
        return len(self._due.get(group, ()))

    def take_due(self, now: float, limit: int) -> Iterator[Pending]:
        """Yield halves whose check is due; each must be postponed, or it is not asked about again.

        Halves that were decided since are dropped on the way.
        """
        self._ripen(now)
        for group in [group for group, until in self._parked.items() if until <= now]:
            del self._parked[group]
        groups = deque(group for group in self._due if group not in self._parked)
        while groups and limit > 0:
            group = groups.popleft()
            if group in self._parked:
                # By the caller, since it came last.
                continue
            waiting = self._due[group]
            pending = self._find(waiting.popleft())
            if waiting:
                groups.append(group)
                self._due.move_to_end(group)
            else:
                del self._due[group]
            # What was planned anew since, also as another life of the same id, comes up at its time.
            if pending is not None and pending.verdict is None and pending.check_due <= now:
                limit -= 1
                yield pending

    def _ripen(self, now: float) -> None:
        first, later = self._first, self._later
        while first and (first[0][0] <= now or not any(self._planned(name, first[0][0]) for name in first[0][1])):
            due, names = first.popleft()
            self._first_count -= len(names)
            for transaction_id in names:
                self._put(due, transaction_id)
        while later and later[0][0] <= now:
            due, _, transaction_id = heapq.heappop(later)
            self._put(due, transaction_id)

    def _put(self, due: float, transaction_id: str) -> None:
        pending = self._planned(transaction_id, due)
        if pending is not None:
            self._due.setdefault(self.turn_of(pending), deque()).append(transaction_id)

    def turn_of(self, pending: Pending) -> str:
        """Return the group whose turn it waits for; "" where nobody has to be asked."""
        asks = pending.is_complete and pending.check_count < self.policy.maximum
        return pending.half.group if asks else ""

    def next_due(self) -> float | None:
        """Return when something is due, or None; what is due already and waits for its turn is due at minus infinity.

        A half that was decided since may be the reason: then nothing comes of it.
        """
        times = [self._parked.get(group, float("-inf")) for group in self._due]
        if self._first:
            times.append(self._first[0][0])
        if self._later:
            times.append(self._later[0][0])
        return min(times, default=None)
