"""Open transactions of others: under read_committed a log ends where the oldest open one begins.

Such a partition looks idle while its lag grows, and nothing in this process is the cause. So where a partition has lag,
nothing in flight, and does not move, brokers are asked where its readable end is. Whose transaction it is the client
library cannot ask; Kafka's own tool can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from confluent_kafka import KafkaException

from penstock.clients.bounded_calls import NotAnsweredError
from penstock.clients.cluster import Answer
from penstock.consumer.assignments import Assignment, Assignments
from penstock.consumer.settings import ConsumerSettings

#: Seconds between two looks; what stood still between two of them is asked about.
_EVERY_S = 1.5
#: Seconds until a partition is asked about again that waits for something else, as one whose log was deleted; sooner
#: where its log has grown.
_AGAIN_S = 10.0
#: Partitions that are asked about at a time.
_MOST = 100

#: A topic and a partition.
Place = tuple[str, int]


class OpenTransactions:
    """Looks for them. On the poll thread only, save `trouble`."""

    def __init__(
        self,
        assignments: Assignments,
        ask: Callable[[Sequence[Place]], Answer[Mapping[Place, int]]],
        settings: ConsumerSettings,
    ) -> None:
        self._assignments = assignments
        self._ask = ask
        self._is_committed_only = settings.reads_committed_only
        self._next = 0.0
        self._stood: dict[Assignment, int] = {}
        # The question under way, and the position and the end of each when it was asked.
        self._asked: tuple[Answer[Mapping[Place, int]], dict[Assignment, tuple[int, int | None]]] | None = None
        # Those that were found to wait for something else: when they are asked about again, and where their logs ended.
        self._others: dict[Assignment, tuple[float, int | None]] = {}
        # The position of each that waits, and where the transaction begins. Replaced as a whole: any thread reads it.
        self._found: Mapping[Assignment, tuple[int, int]] = {}

    def check(self, now: float) -> None:
        """Take an answer that came; look whether there is something to ask, when it is time."""
        if self._asked is not None:
            self._take(*self._asked, now)
        if now < self._next or not self._is_committed_only:
            return
        self._next = now + _EVERY_S
        waiting = {assignment: _position(assignment) for assignment in self._assignments.all() if _waits(assignment)}
        stood, self._stood = self._stood, waiting
        self._others = {
            assignment: (until, end)
            for assignment, (until, end) in self._others.items()
            if assignment in waiting and now < until and assignment.end == end
        }
        still = [
            assignment
            for assignment, at in waiting.items()
            if stood.get(assignment) == at and assignment not in self._others
        ][:_MOST]
        if not still:
            self._found = {}
        elif self._asked is None:
            asked = {assignment: (waiting[assignment], assignment.end) for assignment in still}
            self._asked = self._ask([(assignment.topic, assignment.partition) for assignment in still]), asked

    def _take(
        self, answer: Answer[Mapping[Place, int]], asked: Mapping[Assignment, tuple[int, int | None]], now: float
    ) -> None:
        try:
            ends = answer.answer()
        except (KafkaException, NotAnsweredError):
            # What is wrong with brokers is told elsewhere; it is asked again.
            ends = {}
        if ends is None:
            return
        self._asked = None
        found = {}
        for assignment, (position, log_end) in asked.items():
            end = ends.get((assignment.topic, assignment.partition))
            # Where no position is known nothing came at all, though there is something.
            if end is not None and end <= (position if assignment.known else (log_end or 0) - 1):
                found[assignment] = (position, end)
            else:
                self._others[assignment] = now + _AGAIN_S, log_end
        self._found = found

    def trouble(self, assignment: Assignment) -> str | None:
        """Return that a partition waits for an open transaction, or None. Any thread."""
        position, begins = self._found.get(assignment, (None, 0))
        if position is None or _position(assignment) != position or not _waits(assignment):
            return None
        return (
            f"a transaction that another producer began is open at offset {begins}: what is behind it cannot be read "
            "until it is committed or aborted, or its transaction.timeout.ms ends it; to find the producer: "
            f"kafka-transactions.sh describe-producers --topic {assignment.topic} --partition {assignment.partition}"
        )


def _position(assignment: Assignment) -> int:
    return assignment.tracker.position if assignment.known else -1


def _waits(assignment: Assignment) -> bool:
    """Tell whether a partition has lag and nothing in flight, and may be fetched from."""
    tracker, end = assignment.tracker, assignment.end
    return (
        assignment.active
        and assignment.paused is None
        and end is not None
        and _position(assignment) < end
        and not tracker.in_flight
    )
