"""When which undecided half is asked about. Pure: the caller gives the time, in the broker's seconds.

The first check of a half is due when it is older than the transaction timeout, or than its own immunity where that is
longer; the next ones follow at an interval, which may grow. A check counts when it was answered: a request that nobody
took up is asked again under the same number, and of another producer, for each attempt chooses whom to ask. Producer
groups take turns, so that a crowd of one delays no other's, and one has no more questions open than it can answer.
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
from penstock.transactions.wire.half import MAX_CHECK_NUMBER

#: An interval that grows from check to check grows to no more than this, in seconds.
_LONGEST_S = 3600.0
#: Seconds after which halves that are still missing are not waited for any more.
INCOMPLETE_S = 120.0
#: Checks of one group that may be unanswered at a time: more would find all workers busy, be passed over, and be sent
#: again only after an interval.
WINDOW = 128
#: Entries of a plan before those of transactions that need no check any more are taken out.
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


class CheckPlan:
    """The checks of one half partition. Not thread-safe: its coordinator's thread drives it.

    It keeps ids alone, so that a transaction that is settled leaves the memory whenever its check would have been due;
    `find` returns one that is undecided still, or None.
    """

    def __init__(self, policy: CheckPolicy, find: Callable[[str], Pending | None]) -> None:
        self.policy = policy
        self._find = find
        # A heap: due time, a number that settles ties, id. Those of transactions that need no check any more stay until
        # they come up, or until there are many.
        self._planned: list[tuple[float, int, str]] = []
        self._crowd = _CROWD
        self._ticket = itertools.count()
        # Ids of what is due, by group; under "" what nobody has to be asked about. Groups at the front have their turn
        # next.
        self._due: OrderedDict[str, deque[str]] = OrderedDict()
        # Groups that are left alone until a time.
        self._parked: dict[str, float] = {}
        # Checks that were sent and may be on their way to an answer, by group: until when, their number, the id.
        self._sent: dict[str, list[tuple[float, int, str]]] = {}
        # Ids of those whose payload is being read, because a question needs it.
        self._unread: set[str] = set()

    def add(self, asked: Pending) -> None:
        """Plan the next check of a half that was just read, or of one that has just become complete."""
        policy, immunity_ms = self.policy, asked.half.immunity_ms
        wait_s = policy.timeout_s if immunity_ms is None else max(policy.timeout_s, immunity_ms / 1000)
        if asked.parts is not None and not asked.is_complete:
            wait_s = max(policy.timeout_s, policy.incomplete_s)
        due = asked.birth_ms / 1000 + wait_s
        if asked.answered_ms and asked.is_complete:
            due = max(due, asked.answered_ms / 1000 + policy.interval(asked.check_count))
        self.postpone(asked, due)

    def postpone(self, asked: Pending, due: float) -> None:
        """Plan the next check of a half for a time."""
        asked.check_due = due
        heapq.heappush(self._planned, (due, next(self._ticket), asked.transaction_id))
        if len(self._planned) > self._crowd:
            self._planned = [entry for entry in self._planned if self._is_planned(entry[0], entry[2]) is not None]
            heapq.heapify(self._planned)
            self._crowd = max(_CROWD, 2 * len(self._planned))

    def _is_planned(self, due: float, transaction_id: str) -> Pending | None:
        """Return the transaction whose check is planned for that time still, or None."""
        asked = self._find(transaction_id)
        return asked if asked is not None and asked.check_due == due else None

    def sent(self, asked: Pending, number: int, now: float) -> None:
        """Take in that a check was sent: it is repeated where it is not answered within an interval."""
        due = now + self.policy.interval(number)
        self.postpone(asked, due)
        self._sent.setdefault(asked.group, []).append((due, number, asked.transaction_id))

    def has_room(self, group: str, now: float) -> bool:
        """Tell whether one more check of a group may be sent; those that were answered, or are asked again, leave."""
        sent = self._sent.get(group, [])
        if len(sent) >= WINDOW:
            sent[:] = [check for check in sent if check[0] > now and self._is_unanswered(check[2], check[1])]
        return len(sent) < WINDOW

    def _is_unanswered(self, transaction_id: str, number: int) -> bool:
        asked = self._find(transaction_id)
        return asked is not None and asked.check_count < number

    def await_payload(self, asked: Pending, due: float) -> None:
        """Plan a check for the time at which its payload is there, or else for a time."""
        self._unread.add(asked.transaction_id)
        self.postpone(asked, due)

    def loaded(self, transaction_id: str) -> None:
        """Let a check be the next of its group, if it waited for the payload."""
        asked = self._find(transaction_id)
        if transaction_id in self._unread and asked is not None:
            asked.check_due = 0.0
            self._due.setdefault(self.turn_of(asked), deque()).appendleft(transaction_id)
        self._unread.discard(transaction_id)

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
            asked = self._find(waiting.popleft())
            if waiting:
                groups.append(group)
                self._due.move_to_end(group)
            else:
                del self._due[group]
            # What was planned again since, also as another life of the same id, comes up at its time.
            if asked is not None and asked.check_due <= now:
                limit -= 1
                yield asked

    def _ripen(self, now: float) -> None:
        planned = self._planned
        while planned:
            due, _, transaction_id = planned[0]
            asked = self._is_planned(due, transaction_id)
            if asked is not None and due > now:
                break
            heapq.heappop(planned)
            if asked is not None:
                self._due.setdefault(self.turn_of(asked), deque()).append(transaction_id)

    def turn_of(self, asked: Pending) -> str:
        """Return the group whose turn it waits for; "" where nobody has to be asked."""
        return asked.group if asked.is_complete and asked.check_count < self.policy.maximum else ""

    def next_due(self) -> float | None:
        """Return when something is due, or None; what is due already and waits for its turn is due at minus infinity.

        A half that was decided since may be the reason: then nothing comes of it.
        """
        times = [self._parked.get(group, float("-inf")) for group in self._due]
        times += [due for due, *_ in self._planned[:1]]
        return min(times, default=None)
