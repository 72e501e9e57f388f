"""The pace of a producer: while publication does not keep up, answers of stored decisions come when it has.

Who sends faster than coordinators publish fills the logs, and each message waits for all before it. So what is decided
and not published is bounded by what the producer has in flight: an answer beyond that waits until enough was published,
and with it whoever waits for it before sending more. No answer waits long, and none where publication does not move.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

#: How many may be decided and not published: at least and at most, and for each transaction in flight beyond a few.
#: With few in flight the time to visible counts, with hundreds the rate, and more than the most made it no higher.
_LEAST, _MOST = 128, 4_000
_EACH, _FEW = 6, 42
#: Nothing is held as long as publication takes less than this multiple of its shortest time: on brokers far away it
#: takes long without being late.
_UNHURRIED = 2.5
#: Seconds that an answer is held at most, about. Who catches up after an outage is behind for much longer.
_HELD_S = 0.1
#: Seconds without a move after which publication counts as away.
_AWAY_S = 0.5
#: Seconds in which as many decisions as may be unpublished make a producer busy enough to follow the publication.
_BUSY_S = 0.1
#: Records of a half partition that are remembered; with more, publication is as good as away.
_REMEMBERED = 10_000

#: Place of a decision: offset of its op record, and index there.
Place = tuple[int, int]
Complete = Callable[[], object]


@dataclass(slots=True, eq=False)
class _Record:
    """A stored op record that is not published yet."""

    #: The place of its last decision.
    place: Place
    count: int
    #: When it was stored, in monotonic seconds.
    at: float
    #: Gives its answers; None once they were given.
    complete: Complete | None


@dataclass(slots=True)
class _Partition:
    """What is stored in a half partition and not published, in the order of the places."""

    #: When something of it was last published, in monotonic seconds.
    moved_at: float
    records: deque[_Record] = field(default_factory=deque)


class PublicationPace:
    """Holds answers back while publication lags. Thread-safe; answers are given in the thread that lets them go.

    Args:
        in_flight: tells how many transactions the producer has in flight.
        follow: has `published` called from now on, by a thread that follows the publication; called once, when the
            producer becomes busy. Until then nothing is held.
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
        # Half partitions whose publication moves.
        self._moving: dict[int, _Partition] = {}
        # Records whose answers are held, in the order in which they were stored; some may be answered meanwhile.
        self._held: deque[_Record] = deque()
        # Decisions that are answered and not published, in those partitions.
        self._ahead = 0
        # The seconds that publication took: the shortest, and the longest of what was published last.
        self._least_s, self._last_s = float("inf"), 0.0
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
            moving = self._moving.get(partition)
            if moving is None or self._is_ended:
                due = [complete]
            else:
                record = _Record((offset, count - 1), count, now, complete)
                moving.records.append(record)
                self._held.append(record)
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
            now, due = self._now(), list[Complete]()
            moving = self._moving.setdefault(partition, _Partition(now))
            moving.moved_at = now
            records = moving.records
            if records and records[0].place <= place:
                self._last_s = now - records[0].at
            while records and records[0].place <= place:
                record = records.popleft()
                self._least_s = min(self._least_s, now - record.at)
                due += self._answer(record, is_published=True)
            due += self._due(now)
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
            self._is_ended, due = True, [move for number in list(self._moving) for move in self._leave(number)]
        _complete(due)

    def _answer(self, record: _Record, *, is_published: bool) -> list[Complete]:
        """Take in that a record is answered, or published; return its answers if they are due now."""
        complete, record.complete = record.complete, None
        if is_published and complete is None:
            self._ahead -= record.count
        elif not is_published and complete is not None:
            self._ahead += record.count
        return [] if complete is None else [complete]

    def _due(self, now: float) -> list[Complete]:
        """Return the answers that are due."""
        due: list[Complete] = []
        oldest = now
        for number, moving in list(self._moving.items()):
            records = moving.records
            if records and (now - max(moving.moved_at, records[0].at) > _AWAY_S or len(records) > _REMEMBERED):
                due += self._leave(number)
            elif records:
                oldest = min(oldest, records[0].at)
        limit = max(_LEAST, min(_MOST, _EACH * (self._in_flight() - _FEW)))
        is_late = max(self._last_s, now - oldest) > _UNHURRIED * self._least_s
        while self._held:
            record = self._held[0]
            is_held = is_late and self._ahead + record.count > limit and now - record.at < _HELD_S
            if is_held and record.complete is not None:
                break
            due += self._answer(record, is_published=False)
            self._held.popleft()
        return due

    def _leave(self, partition: int) -> list[Complete]:
        """Hold nothing of a half partition until its publication moves again; return the answers that were held."""
        left = self._moving.pop(partition).records
        return [complete for record in left for complete in self._answer(record, is_published=True)]


def _complete(due: list[Complete]) -> None:
    for complete in due:
        complete()
