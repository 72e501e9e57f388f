"""Positions: where partitions begin that come to this member, and go on that have lost their place; and logs' ends.

A position is lost where it is not in the log, or is of a topic that was deleted and created again. Left to itself the
client would go by `auto.offset.reset` in silence: with `latest` past all that is left of a log whose beginning was
deleted. So it only reports them (`auto.offset.reset=error`), and waits to be sent somewhere.

The ends are those that the client last heard of: no request is made. Under read_committed a log ends where the oldest
open transaction begins. Such a partition looks idle while its lag grows, and nothing in this process is the cause. So
where a partition has lag, nothing in flight, and does not move, brokers are asked where its readable end is. Whose
transaction it is the client library cannot ask; Kafka's own tool can.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from operator import attrgetter

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, OFFSET_INVALID, KafkaError, KafkaException, TopicPartition

from penstock.clients.bounded_calls import NotAnsweredError
from penstock.clients.cluster import Answer, ConsumerClient
from penstock.clients.kafka_errors import reason
from penstock.consumer.assignments import Assignment
from penstock.consumer.engine import Engine
from penstock.errors import PenstockError

_log = logging.getLogger(__name__)

#: Seconds that the request for the group's committed offsets may take.
_COMMITTED_TIMEOUT_S = 10.0
#: Seconds that finding the first offsets of new topics may take.
_FIRST_TIMEOUT_S = 5.0
#: Seconds that a question about a lost position may keep the poll thread, and between two tries.
_ANSWER_S = 2.0
_RETRY_DELAY_S = 1.0
#: Seconds between two looks at each partition, and how many may be looked at in a second: one costs some µs. Commits
#: have a pace of their own, which may be an hour.
_ENDS_EVERY_S = 1.0
_MOST_PER_S = 1000
#: Seconds between two questions, and partitions that are asked about at a time.
_ASK_EVERY_S = 3.0
_MOST_ASKED = 100

_NUMBER = attrgetter("partition")
#: A topic and a partition.
Place = tuple[str, int]


class Positions:
    """Finds them. On the poll thread only, save `trouble`."""

    #: Asks brokers where partitions end for readers of committed messages. Set before the start.
    ask: Callable[[Sequence[Place]], Answer[Mapping[Place, int]]]

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Where partitions begin that the group has no offset of, as a logical offset; None where nowhere.
        self._reset = engine.settings.offset_reset
        # Partitions to be sent on, and whether the topic was created again; and when that is tried.
        self._lost: dict[Assignment, bool] = {}
        self._next = 0.0
        # When the ends are noted, and when it is asked for the readable ones.
        self._note_at = self._ask_at = 0.0
        # The question under way, and the position of each partition that it is about.
        self._asked: tuple[Answer[Mapping[Place, int]], Mapping[Assignment, int]] | None = None
        # The position of each that waits, and where the transaction begins. Replaced as a whole: any thread reads it.
        self._open: Mapping[Assignment, tuple[int, int]] = {}

    def find(
        self, client: ConsumerClient, partitions: list[TopicPartition]
    ) -> tuple[list[TopicPartition], list[TopicPartition]]:
        """Return the group's offsets, and those of them that are where a partition begins, for the group has none.

        They may stay out for long: a transaction of the former owner is open, or the group's coordinator is away. With
        `exactly_once` they are waited for: without its map, results that are visible would be written again. None at
        all where a stop was asked for before they were known.
        """
        while True:
            try:
                found = client.committed(partitions, timeout=_COMMITTED_TIMEOUT_S)
                trouble = next((reason(partition.error) for partition in found if partition.error is not None), "")
                if not trouble:
                    return found, self._begin(client, [partition for partition in found if partition.offset < 0])
            except KafkaException as error:
                # Without the map only work is repeated; without the offset the client asks for it itself.
                found = [TopicPartition(partition.topic, partition.partition) for partition in partitions]
                trouble = reason(error)
            if not self._engine.settings.exactly_once:
                _log.warning("the group's offsets are not known yet: %s; work above them may repeat", trouble)
                return found, []
            _log.warning("the group's offsets are not known yet: %s; they are asked for again", trouble)
            if self._engine.stop_request.is_requested:
                return [], []

    def _begin(self, client: ConsumerClient, without: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Say where partitions begin that the group has no offset of; return those of which that is to be committed.

        `KafkaException` where the group's coordinator did not answer.
        """
        at_first = [other for other in without if self._engine.routes.begins_at_first(other.topic)]
        if at_first:
            _log.info("the group has no offset of %s, new topics or its own: they begin at the first", names(at_first))
        if added := self._added(client, [other for other in without if other not in at_first]):
            _log.warning("%s were added to topics that the group reads: they begin at the first", names(added))
            at_first += added
        if others := [other for other in without if other not in at_first]:
            _log.info("the group has no offset of %s: auto.offset.reset says where it begins", names(others))
        for other in others:
            other.offset = OFFSET_INVALID if self._reset is None else self._reset
        for other in at_first:
            other.offset = OFFSET_BEGINNING
        # An end is another at each look, and who begins there later than it was meant to has lost what came between.
        begun = at_first + [other for other in others if other.offset == OFFSET_END]
        end = self._engine.clock.monotonic() + _FIRST_TIMEOUT_S
        for other in begun:
            try:
                known = client.get_watermark_offsets(other, timeout=max(0.0, end - self._engine.clock.monotonic()))
            except KafkaException as error:
                _log.info("where the log of %s begins and ends is not known: %s", names([other]), reason(error))
            else:
                if known is not None:
                    other.offset = known[0 if other.offset == OFFSET_BEGINNING else 1]
        return begun

    def _added(self, client: ConsumerClient, without: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Return those that a topic got since the group began to read it: they are above all that it has offsets of.

        What is written to one before a member has it is not to be passed over.
        """
        if self._reset != OFFSET_END:
            return []
        highest = {partition.topic: partition.partition for partition in sorted(without, key=_NUMBER)}
        below = [TopicPartition(topic, number) for topic, most in highest.items() for number in range(most)]
        found = client.committed(below, timeout=_COMMITTED_TIMEOUT_S) if below else []
        known = {place.topic: place.partition for place in sorted(found, key=_NUMBER) if place.offset >= 0}
        return [place for place in without if place.partition > known.get(place.topic, place.partition)]

    def note_lost(self, error: KafkaError, topic: str, partition: int) -> None:
        """Note that the client does not know where to read on; `PenstockError` where no other place is allowed."""
        if self._reset is None:
            raise PenstockError(
                f"the group's offset is not in the log and auto.offset.reset forbids another: {reason(error)}; "
                "reset the group's offsets, or set auto.offset.reset to earliest or latest"
            )
        assignment = self._engine.assignments.get(topic, partition)
        if assignment is not None:
            self._lost.setdefault(assignment, False)

    def restart(self, client: ConsumerClient, recreated: Sequence[str], now: float) -> None:
        """Send the client to where lost partitions go on, and those of topics that were created again.

        Raises `PenstockError` where `auto.offset.reset` forbids to begin again with such a topic.
        """
        if recreated:
            assignments = self._engine.assignments.all()
            self._lost |= {assignment: True for assignment in assignments if assignment.topic in recreated}
            self._next = now
        if self._lost and now >= self._next:
            self._next = now + _RETRY_DELAY_S
            self._lost = {
                assignment: is_recreated
                for assignment, is_recreated in self._lost.items()
                if assignment.active and not self._restarted(client, assignment, is_recreated=is_recreated)
            }

    def _restarted(self, client: ConsumerClient, assignment: Assignment, *, is_recreated: bool) -> bool:
        place = TopicPartition(assignment.topic, assignment.partition)
        try:
            self._go_on(client, assignment, place, is_recreated=is_recreated)
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
            self._engine.begin_again(assignment, None)
        else:
            assignment.is_sought = True
        return True

    def _go_on(
        self, client: ConsumerClient, assignment: Assignment, place: TopicPartition, *, is_recreated: bool
    ) -> None:
        """Find out where a partition goes on that has lost its position."""
        position, what = assignment.tracker.position, f"topic {place.topic} was deleted and created again"
        if not is_recreated:
            if not assignment.known and (position := client.committed([place], _ANSWER_S)[0].offset) < 0:
                self._begin(client, [place])
                return
            known = client.get_watermark_offsets(TopicPartition(place.topic, place.partition), timeout=_ANSWER_S)
            start, end = (position, position) if known is None else known
            place.offset = max(position, start)
            if position < start:
                _log.warning(
                    "%s stood at offset %d, and its log begins at %d by now: what lay between was deleted, by "
                    "retention or by hand, before it was handled; it goes on at the first message that is there",
                    assignment,
                    position,
                    start,
                )
            if position <= end:
                return
            what = f"its log ends at {end} (truncated, or created again)"
        # One that a pattern matches is a new topic.
        reset = self._reset if place.topic in self._engine.patterns.named else OFFSET_BEGINNING
        if reset is None:
            raise PenstockError(
                f"{assignment} stood at offset {position}, and {what}: auto.offset.reset forbids to begin again; "
                "reset the group's offsets, or set auto.offset.reset to earliest or latest"
            )
        place.offset = reset
        _log.warning(
            "%s stood at offset %d, and %s: it begins again at its %s, and what was handled of the new log since is "
            "handled again",
            assignment,
            position,
            what,
            "end" if reset == OFFSET_END else "beginning",
        )

    def note_ends(self, client: ConsumerClient, now: float) -> None:
        """Note the ends, and take an answer that came; ask again when it is time and a partition waits."""
        assignments = self._engine.assignments.all() if now >= self._note_at else ()
        if assignments:
            self._note_at = now + max(_ENDS_EVERY_S, len(assignments) / _MOST_PER_S)
        for assignment in assignments:
            known = client.get_watermark_offsets(TopicPartition(assignment.topic, assignment.partition), cached=True)
            if known is not None and known[1] >= 0:
                assignment.end = known[1]
        if self._asked is not None:
            self._take(*self._asked)
        elif now >= self._ask_at and self._engine.settings.reads_committed_only:
            self._ask_at = now + _ASK_EVERY_S
            waiting = islice(filter(_waits, self._engine.assignments.all()), _MOST_ASKED)
            asked = {assignment: _position(assignment) for assignment in waiting}
            if asked:
                self._asked = self.ask([(assignment.topic, assignment.partition) for assignment in asked]), asked

    def _take(self, answer: Answer[Mapping[Place, int]], asked: Mapping[Assignment, int]) -> None:
        try:
            ends = answer.answer()
        except (KafkaException, NotAnsweredError):
            # What is wrong with brokers is shown elsewhere; it is asked again.
            ends = {}
        if ends is None:
            return
        self._asked = None
        self._open = {
            assignment: (position, ends[place])
            for assignment, position in asked.items()
            if (place := (assignment.topic, assignment.partition)) in ends
            # Where no position is known nothing came at all, though there is something.
            and ends[place] <= (position if assignment.known else (assignment.end or 0) - 1)
        }

    def trouble(self, assignment: Assignment) -> str | None:
        """Return that a partition waits for an open transaction, or None. Any thread."""
        position, begins = self._open.get(assignment, (None, 0))
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


def names(partitions: Sequence[TopicPartition]) -> str:
    """Return partitions in words."""
    return ", ".join(f"{partition.topic}:{partition.partition}" for partition in partitions)
