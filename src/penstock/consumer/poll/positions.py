"""Where partitions stand in their logs: ends, positions that are lost, open transactions in the way.

The ends are those that the client last heard of: no request is made. A position is lost where it is not in the log, or
of a topic that was deleted and created again. Left to itself the client would go by `auto.offset.reset` in silence:
with `latest` past all that is left of a log whose beginning was deleted. So it only reports them
(`auto.offset.reset=error`), and waits to be sent somewhere.

Under read_committed a log ends where the oldest open transaction begins. Such a partition looks idle while its lag
grows, and nothing in this process is the cause. So where a partition has lag, nothing in flight, and does not move,
brokers are asked where its readable end is. Whose transaction it is the client library cannot ask; Kafka's own tool
can.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException, TopicPartition

from penstock.clients.bounded_calls import NotAnsweredError
from penstock.clients.cluster import Answer, ConsumerClient
from penstock.clients.kafka_errors import reason
from penstock.consumer.assignments import Assignment, Assignments
from penstock.consumer.poll.router import Router
from penstock.consumer.settings import ConsumerSettings
from penstock.errors import PenstockError

_log = logging.getLogger(__name__)

#: Seconds between two looks at each partition, and how many may be looked at in a second: one costs some µs.
_ENDS_EVERY_S = 1.0
_MOST_PER_S = 1000


class LogEnds:
    """Notes them, for lag and for the causes of a stall. Commits have a pace of their own, which may be an hour."""

    def __init__(self, assignments: Assignments) -> None:
        self._assignments = assignments
        self._next = 0.0

    def note(self, client: ConsumerClient, now: float) -> None:
        """Note them, when it is time."""
        if now < self._next:
            return
        assignments = self._assignments.all()
        self._next = now + max(_ENDS_EVERY_S, len(assignments) / _MOST_PER_S)
        for assignment in assignments:
            known = client.get_watermark_offsets(TopicPartition(assignment.topic, assignment.partition), cached=True)
            if known is not None and known[1] >= 0:
                assignment.end = known[1]


#: Seconds that one question may keep the poll thread, and between two tries.
_ANSWER_S = 2.0
_RETRY_DELAY_S = 1.0


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class LostPositions:
    """On the poll thread only."""

    assignments: Assignments
    router: Router
    #: Says where partitions begin that the group has no offset of.
    begin: Callable[[ConsumerClient, Sequence[TopicPartition]], object]
    #: Where a topic begins whose log has become shorter, as a logical offset; None where it may not.
    offset_reset: Callable[[str], int | None]
    #: Whether the user lets partitions go on elsewhere than at the group's offset.
    is_allowed: bool
    # Partitions to be sent on, and whether the topic was created again.
    _waiting: dict[Assignment, bool] = field(default_factory=dict, init=False)
    _next: float = field(default=0.0, init=False)

    def note(self, error: KafkaError, topic: str, partition: int) -> None:
        """Note that the client does not know where to read on; `PenstockError` where no other place is allowed."""
        if not self.is_allowed:
            raise PenstockError(
                f"the group's offset is not in the log and auto.offset.reset forbids another: {reason(error)}; "
                "reset the group's offsets, or set auto.offset.reset to earliest or latest"
            )
        assignment = self.assignments.get(topic, partition)
        if assignment is not None:
            self._waiting.setdefault(assignment, False)

    def restart(self, client: ConsumerClient, recreated: Sequence[str], now: float) -> None:
        """Send the client to where these partitions go on, and those of topics that were created again.

        Raises `PenstockError` where `auto.offset.reset` forbids to begin again with such a topic.
        """
        if recreated:
            self._waiting |= {
                assignment: True for assignment in self.assignments.all() if assignment.topic in recreated
            }
            self._next = now
        if not self._waiting or now < self._next:
            return
        self._next = now + _RETRY_DELAY_S
        waiting = [
            assignment for assignment in self._waiting if assignment.active and not self._restarted(client, assignment)
        ]
        self._waiting = {assignment: self._waiting[assignment] for assignment in waiting}

    def _restarted(self, client: ConsumerClient, assignment: Assignment) -> bool:
        place = TopicPartition(assignment.topic, assignment.partition)
        is_recreated = self._waiting[assignment]
        try:
            if is_recreated:
                place.offset = self._beginning(assignment)
            else:
                self._find(client, assignment, place)
            # It stands still: `seek` is refused (librdkafka 2.16).
            with suppress(KafkaException):  # the last try may have come as far as this
                client.incremental_unassign([TopicPartition(assignment.topic, assignment.partition)])
            client.incremental_assign([place])
        except KafkaException as error:
            _log.warning("it is not known where %s goes on: %s; it is tried again", assignment, reason(error))
            return False
        if place.offset >= 0:
            assignment.tracker.advance(place.offset)
        elif assignment.known or is_recreated:
            self.router.begin_again(assignment, None)
        else:
            assignment.is_sought = True
        return True

    def _beginning(self, assignment: Assignment) -> int:
        """Return where a partition of a topic that was created again begins, as a logical offset."""
        begin = self.offset_reset(assignment.topic)
        if begin is None:
            raise PenstockError(
                f"topic {assignment.topic} was deleted and created again: auto.offset.reset forbids to begin again; "
                "reset the group's offsets, or set auto.offset.reset to earliest or latest"
            )
        _log.warning(
            "topic %s was deleted and created again: partition %d begins again at its %s; it stood at "
            "offset %d of the former one, and what was handled of the new one since is handled again",
            assignment.topic,
            assignment.partition,
            "end" if begin == OFFSET_END else "beginning",
            assignment.tracker.position,
        )
        return begin

    def _find(self, client: ConsumerClient, assignment: Assignment, place: TopicPartition) -> None:
        """Find out where a partition goes on that the client does not know a position of."""
        position = assignment.tracker.position if assignment.known else client.committed([place], _ANSWER_S)[0].offset
        if position < 0:
            self.begin(client, [place])
        else:
            place.offset = self._in_log(client, assignment, position)

    def _in_log(self, client: ConsumerClient, assignment: Assignment, position: int) -> int:
        """Return where a partition goes on that stood at a position: there, if that is in its log."""
        known = client.get_watermark_offsets(TopicPartition(assignment.topic, assignment.partition), timeout=_ANSWER_S)
        start, end = (position, position) if known is None else known
        if position < start:
            _log.warning(
                "%s stood at offset %d, and its log begins at %d by now: what lay between was deleted, by retention or "
                "by hand, before it was handled; it goes on at the first message that is there",
                assignment,
                position,
                start,
            )
            return start
        if position <= end:
            return position
        reset = self.offset_reset(assignment.topic)
        _log.warning(
            "%s stood at offset %d, and its log ends at %d (truncated, or created again): it begins at its %s",
            assignment,
            position,
            end,
            "end" if reset == OFFSET_END else "beginning",
        )
        return OFFSET_BEGINNING if reset is None else reset


#: Seconds between two questions, and partitions that are asked about at a time.
_ASK_EVERY_S = 3.0
_MOST_ASKED = 100

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
            self._next = now + _ASK_EVERY_S
            waiting = islice(filter(_waits, self._assignments.all()), _MOST_ASKED)
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
