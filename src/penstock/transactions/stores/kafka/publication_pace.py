"""The pace of a producer: while publication does not keep up, answers of stored decisions come when it has.

Who sends faster than coordinators publish fills the logs, and each message waits for all before it. So what is decided
and not published is bounded by what the producer has in flight: an answer beyond that waits until enough was published,
and with it whoever waits for it before sending more. No answer waits long, and none where publication is away: what it
has not reached within half a second counts no more.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

#: How many may be decided and not published: at least and at most, and for each transaction in flight beyond a few.
#: With few in flight the time to visible counts, with hundreds the rate, and more than the most made it no higher.
_LEAST, _MOST = 128, 4_000
_EACH, _FEW = 6, 42
#: Seconds that an answer is held at most, about. Who catches up after an outage is behind for much longer.
_HELD_S = 0.1
#: Seconds after which a decision that is not published yet counts no more.
_AWAY_S = 0.5
#: Seconds in which as many decisions as may be unpublished make a producer busy enough to follow the publication.
_BUSY_S = 0.1

#: Place of a decision: offset of its op record, and index there.
Place = tuple[int, int]
_NOWHERE: Place = (-1, -1)
Complete = Callable[[], object]


class _Answered(NamedTuple):
    """An op record whose decisions are answered and not published: the place of the last one, how many, since when."""

    place: Place
    decisions: int
    at: float


class _Held(NamedTuple):
    """An op record whose decisions are stored and not answered."""

    partition: int
    record: _Answered
    complete: Complete


class PublicationPace:
    """Holds answers back while publication lags. Thread-safe; answers are given in the thread that lets them go.

    Args:
        in_flight: tells how many transactions the producer has in flight.
        follow: has `published` called from now on, by a thread that follows the publication; called once, when the
            producer becomes busy. Until the first such call nothing is held.
        now: the time in seconds that only rise.
    """

    def __init__(
        self, in_flight: Callable[[], int], follow: Callable[[], object], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._in_flight = in_flight
        self._follow = follow
        self._now = now
        # Guards all below.
        self._lock = threading.Lock()
        # By half partition, in the order of the op log; and how many decisions they are in all.
        self._answered: defaultdict[int, deque[_Answered]] = defaultdict(deque)
        self._ahead = 0
        # In the order in which they were stored.
        self._held: deque[_Held] = deque()
        # To which place each half partition is published, and when the last of them moved.
        self._published: dict[int, Place] = {}
        self._moved_at = float("-inf")
        self._is_followed = self._is_ended = False
        # Decisions stored since a monotonic second, for telling who is busy.
        self._count, self._since = 0, now()

    def stored(self, partition: int, offset: int, count: int, complete: Complete) -> None:
        """Take in that an op record with so many decisions is stored; `complete` gives their answers, now or later."""
        follows = False
        with self._lock:
            now = self._now()
            if not self._is_followed:
                follows = self._is_followed = self._is_busy(count, now)
            self._held.append(_Held(partition, _Answered((offset, count - 1), count, now), complete))
            due = self._due(now)
        if follows:
            self._follow()
        _complete(due)

    def _is_busy(self, count: int, now: float) -> bool:
        if now - self._since > _BUSY_S:
            self._count, self._since = 0, now
        self._count += count
        return self._count > _LEAST

    def published(self, partition: int, place: Place) -> None:
        """Take in that all decisions of a half partition up to a place are published, save what is put off."""
        with self._lock:
            self._moved_at, self._published[partition] = self._now(), place
            due = self._due(self._moved_at)
        _complete(due)

    def look(self) -> None:
        """Let those go that were held for long. Called now and then."""
        if self._held:
            with self._lock:
                due = self._due(self._now())
            _complete(due)

    def end(self) -> None:
        """Let all go, and hold nothing any more."""
        with self._lock:
            self._is_ended = True
            due = self._due(self._now())
        _complete(due)

    def _due(self, now: float) -> list[Complete]:
        """Return the answers that are due."""
        is_away = self._is_ended or now - self._moved_at > _AWAY_S
        for partition, records in self._answered.items():
            while records and (now - records[0].at > _AWAY_S or self._is_published(partition, records[0])):
                self._ahead -= records.popleft().decisions
        due: list[Complete] = []
        limit = max(_LEAST, min(_MOST, _EACH * (self._in_flight() - _FEW)))
        while self._held:
            partition, record, complete = self._held[0]
            is_over = is_away or self._is_published(partition, record)
            if not is_over and self._ahead + record.decisions > limit and now - record.at < _HELD_S:
                break
            self._held.popleft()
            due.append(complete)
            if not is_over:
                self._answered[partition].append(record)
                self._ahead += record.decisions
        return due

    def _is_published(self, partition: int, record: _Answered) -> bool:
        return record.place <= self._published.get(partition, _NOWHERE)


def _complete(due: list[Complete]) -> None:
    for complete in due:
        complete()
