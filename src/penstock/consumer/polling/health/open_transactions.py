"""Open transactions of others: under read_committed a log ends where the oldest open one begins.

Such a partition looks idle while its lag grows, and nothing in this process is the cause. So where a partition has lag,
nothing in flight, and does not move, brokers are asked where its readable end is. Whose transaction it is the client
library cannot ask; Kafka's own tool can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from confluent_kafka import KafkaException

from penstock.clients.bounded_calls import NotAnsweredError
from penstock.clients.cluster import Answer
from penstock.consumer.assignments import Assignment, Assignments
from penstock.consumer.settings import ConsumerSettings

#: Seconds between two questions, and partitions that are asked about at a time.
_EVERY_S = 3.0
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
        # The question under way, and the position of each partition that it is about.
        self._asked: tuple[Answer[Mapping[Place, int]], Mapping[Assignment, int]] | None = None
        # The position of each that waits, and where the transaction begins. Replaced as a whole: any thread reads it.
        self._found: Mapping[Assignment, tuple[int, int]] = {}

    def check(self, now: float) -> None:
        """Take an answer that came; ask again when it is time and a partition waits."""
        if self._asked is not None:
            self._take(*self._asked)
        elif now >= self._next and self._is_committed_only:
            self._next = now + _EVERY_S
            waiting = islice(filter(_waits, self._assignments.all()), _MOST)
            asked = {assignment: _position(assignment) for assignment in waiting}
            if asked:
                self._asked = self._ask([(assignment.topic, assignment.partition) for assignment in asked]), asked

    def _take(self, answer: Answer[Mapping[Place, int]], asked: Mapping[Assignment, int]) -> None:
        try:
            ends = answer.answer()
        except (KafkaException, NotAnsweredError):
            # What is wrong with brokers is shown elsewhere; it is asked again.
            ends = {}
        if ends is None:
            return
        self._asked = None
        self._found = {
            assignment: (position, ends[place])
            for assignment, position in asked.items()
            if (place := (assignment.topic, assignment.partition)) in ends
            # Where no position is known nothing came at all, though there is something.
            and ends[place] <= (position if assignment.known else (assignment.end or 0) - 1)
        }

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
