"""The plan of checks: when which undecided half is checked. Pure: the caller gives the time, in the broker's seconds.

The first check of a half is due after the transaction timeout, or after the half's own immunity if that is longer. The
next ones follow at an interval, which may grow. Only an answered check counts: without an answer, the check is repeated
under the same number, and each attempt goes to another producer. Producer groups take turns, so that a group with many
checks delays no other. A group has no more open checks than it can answer.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.errors import ConfigurationError
from penstock.options import positive, positive_int
from penstock.transactions.core.pending import Pending
from penstock.transactions.wire.half import MAX_CHECK_NUMBER

#: A growing interval grows to this at most, in seconds.
_MAX_INTERVAL_S = 3600.0
#: Seconds after which missing halves are no longer waited for.
INCOMPLETE_S = 120.0
#: Most unanswered checks of one group. More would find all workers busy, be skipped, and be repeated only after an
#: interval.
WINDOW = 128
#: Entries of a plan before those of transactions that need no check are removed.
_COMPACT_AT = 4_096


def require_checks(maximum: int, backoff: float) -> None:
    """Raise `ConfigurationError` unless the number of checks and the growth of their intervals are possible."""
    positive_int("check_max", maximum)
    if maximum > MAX_CHECK_NUMBER:
        raise ConfigurationError(f"check_max must be at most {MAX_CHECK_NUMBER}, but is {maximum}")
    positive("check_backoff", backoff)
    if backoff < 1:
        raise ConfigurationError(f"check_backoff must be at least 1, but is {backoff}: intervals do not shrink")


@dataclass(frozen=True, slots=True)
class CheckPolicy:
    """When to check, and how often.

    Attributes:
        timeout_s: seconds from the birth of a half to its first check.
        interval_s: seconds between two checks of a half.
        maximum: answered checks after which an undecided half meets the discard policy.
        backoff: factor by which the interval grows from check to check, up to an hour.
        incomplete_s: seconds from the birth of the first half of a transaction of several messages until it is rolled
            back if others are still missing. Longer than any producer tries to store them.
    """

    timeout_s: float
    interval_s: float
    maximum: int
    backoff: float = 1.0
    incomplete_s: float = INCOMPLETE_S

    def interval(self, check_count: int) -> float:
        """Return the seconds between the check with that number and the next."""
        if self.backoff <= 1.0:
            return self.interval_s
        # Without a bound on the exponent a float overflows.
        grown = self.interval_s * self.backoff ** min(max(check_count - 1, 0), 64)
        return min(grown, max(self.interval_s, _MAX_INTERVAL_S))


class CheckPlan:
    """The checks of one half partition. Not thread-safe: its coordinator's thread drives it.

    It keeps only ids, so that settled transactions leave the memory before their check would be due. `find` returns a
    transaction if it is still undecided, else None.
    """

    def __init__(self, policy: CheckPolicy, find: Callable[[str], Pending | None]) -> None:
        self.policy = policy
        self._find = find
        # A heap of due time and id. Entries of transactions that need no check stay until they are due, or until there
        # are many.
        self._planned: list[tuple[float, str]] = []
        self._compact_at = _COMPACT_AT
        # Ids with a due check, by group; under "" those that need no producer. The first group has the next turn.
        self._due: OrderedDict[str, deque[str]] = OrderedDict()
        # Groups without checks until a time.
        self._parked: dict[str, float] = {}
        # Checks that may still be answered, by group: until when, their number, the id.
        self._sent: dict[str, list[tuple[float, int, str]]] = {}
        # Ids of transactions whose payload is being read for a check.
        self._unread: set[str] = set()

    def add(self, pending: Pending) -> None:
        """Plan the next check of a half that was just read, or of a transaction that has just become complete."""
        policy, immunity_ms = self.policy, pending.half.immunity_ms
        wait_s = policy.timeout_s if immunity_ms is None else max(policy.timeout_s, immunity_ms / 1000)
        if pending.parts is not None and not pending.is_complete:
            wait_s = max(policy.timeout_s, policy.incomplete_s)
        due = pending.birth_ms / 1000 + wait_s
        if pending.answered_ms and pending.is_complete:
            due = max(due, pending.answered_ms / 1000 + policy.interval(pending.check_count))
        self.postpone(pending, due)

    def postpone(self, pending: Pending, due: float) -> None:
        """Plan the next check of a transaction for a time."""
        pending.check_due = due
        heapq.heappush(self._planned, (due, pending.transaction_id))
        if len(self._planned) > self._compact_at:
            self._planned = [entry for entry in self._planned if self._planned_at(*entry) is not None]
            heapq.heapify(self._planned)
            self._compact_at = max(_COMPACT_AT, 2 * len(self._planned))

    def _planned_at(self, due: float, transaction_id: str) -> Pending | None:
        """Return a transaction if its check is still planned for that time, else None."""
        pending = self._find(transaction_id)
        return pending if pending is not None and pending.check_due == due else None

    def sent(self, pending: Pending, number: int, now: float) -> None:
        """Note that a check was sent. It is repeated if there is no answer within an interval."""
        due = now + self.policy.interval(number)
        self.postpone(pending, due)
        self._sent.setdefault(pending.group, []).append((due, number, pending.transaction_id))

    def has_room(self, group: str, now: float) -> bool:
        """Tell whether one more check of a group may be sent. Answered and expired checks leave the window."""
        sent = self._sent.get(group, [])
        if len(sent) >= WINDOW:
            sent[:] = [check for check in sent if check[0] > now and self._is_unanswered(check[2], check[1])]
        return len(sent) < WINDOW

    def _is_unanswered(self, transaction_id: str, number: int) -> bool:
        pending = self._find(transaction_id)
        return pending is not None and pending.check_count < number

    def await_payload(self, pending: Pending, due: float) -> None:
        """Plan a check for the moment when its payload is in memory, or for a time, whichever is first."""
        self._unread.add(pending.transaction_id)
        self.postpone(pending, due)

    def loaded(self, transaction_id: str) -> None:
        """Make a check the next of its group, if it waited for the payload."""
        pending = self._find(transaction_id)
        if transaction_id in self._unread and pending is not None:
            pending.check_due = 0.0
            self._due.setdefault(self.turn_of(pending), deque()).appendleft(transaction_id)
        self._unread.discard(transaction_id)

    def park(self, group: str, until: float) -> int:
        """Send no checks of a group until a time. Return how many of its checks wait."""
        self._parked[group] = until
        return len(self._due.get(group, ()))

    def take_due(self, now: float, limit: int) -> Iterator[Pending]:
        """Yield transactions whose check is due. The caller must postpone each, or it is never checked again.

        Transactions that were decided meanwhile are dropped.
        """
        self._move_due(now)
        for group in [group for group, until in self._parked.items() if until <= now]:
            del self._parked[group]
        groups = deque(group for group in self._due if group not in self._parked)
        while groups and limit > 0:
            group = groups.popleft()
            if group in self._parked:
                # The caller parked it since its last turn.
                continue
            waiting = self._due[group]
            pending = self._find(waiting.popleft())
            if waiting:
                groups.append(group)
                self._due.move_to_end(group)
            else:
                del self._due[group]
            # A check that was planned again, perhaps for the next life of the same id, is due at its own time.
            if pending is not None and pending.check_due <= now:
                limit -= 1
                yield pending

    def _move_due(self, now: float) -> None:
        planned = self._planned
        while planned:
            due, transaction_id = planned[0]
            pending = self._planned_at(due, transaction_id)
            if pending is not None and due > now:
                break
            heapq.heappop(planned)
            if pending is not None:
                self._due.setdefault(self.turn_of(pending), deque()).append(transaction_id)

    def turn_of(self, pending: Pending) -> str:
        """Return the group whose turn a transaction waits for; "" if it needs no producer."""
        return pending.group if pending.is_complete and pending.check_count < self.policy.maximum else ""

    def next_due(self) -> float | None:
        """Return when the next check is due, or None; minus infinity if a due check waits for its turn.

        The check may belong to a transaction that was decided meanwhile.
        """
        times = [self._parked.get(group, float("-inf")) for group in self._due]
        times += [due for due, *_ in self._planned[:1]]
        return min(times, default=None)
