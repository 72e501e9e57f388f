"""Positions: start offsets of assigned partitions, recovery of lost positions, and the ends of the logs.

A position is lost if the log does not contain it, or if its topic was deleted and created again. By default the client
then applies `auto.offset.reset` silently: with `latest` it skips everything left of a log whose beginning was deleted.
Therefore the client only reports lost positions (`auto.offset.reset=error`), and this module decides.

The log ends are the client's last known values, without a request. Under read_committed a log ends where the oldest
open transaction begins. Such a partition looks idle while its lag grows, and the cause is in another process. So if a
partition has lag, nothing in flight, and does not move, brokers are asked for its readable end. The client library
cannot name the owner of the transaction; Kafka's own tool can.
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

#: Time limit in seconds for the group's committed offsets.
_COMMITTED_TIMEOUT_S = 10.0
#: Time limit in seconds for the first offsets of new topics.
_FIRST_TIMEOUT_S = 5.0
#: Seconds that a request about a lost position may block the poll thread, and seconds between two tries.
_ANSWER_S = 2.0
_RETRY_DELAY_S = 1.0
#: Seconds between two readings of a partition's end, and readings per second at most: one costs some µs. Commits have
#: their own interval, which may be an hour.
_ENDS_INTERVAL_S = 1.0
_MAX_READINGS_PER_S = 1000
#: Seconds between two requests for readable ends, and the most partitions in one request.
_REQUEST_INTERVAL_S = 3.0
_MAX_REQUESTED = 100

_NUMBER = attrgetter("partition")
#: A topic and a partition.
Place = tuple[str, int]


class Positions:
    """Finds positions. On the poll thread only, except `trouble`."""

    #: Asks brokers where partitions end for readers of committed messages. Set before the start.
    ask: Callable[[Sequence[Place]], Answer[Mapping[Place, int]]]

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Where a partition without a group offset begins, as a logical offset; None if the consumer must fail.
        self._reset = engine.settings.offset_reset
        # Partitions with a lost position, each with whether its topic was created again; and the time of the next try.
        self._lost: dict[Assignment, bool] = {}
        self._retry_at = 0.0
        # Times of the next reading of the ends, and of the next request for readable ends.
        self._read_at = self._request_at = 0.0
        # The request that waits for its answer, and the position of each partition in it.
        self._request: tuple[Answer[Mapping[Place, int]], Mapping[Assignment, int]] | None = None
        # Partitions behind an open transaction: the position, and where the transaction begins. Replaced as a whole, so
        # any thread may read it.
        self._open_transactions: Mapping[Assignment, tuple[int, int]] = {}

    def find(
        self, client: ConsumerClient, partitions: list[TopicPartition]
    ) -> tuple[list[TopicPartition], list[TopicPartition]]:
        """Return the group's offsets, and the subset that was chosen here because the group had none.

        The answer may take long: a transaction of the former owner is open, or the group's coordinator is away. With
        `exactly_once` the call waits for it: without the offset map, visible results would be written again. It returns
        nothing if a stop is requested first.
        """
        while True:
            try:
                found = client.committed(partitions, timeout=_COMMITTED_TIMEOUT_S)
                trouble = next((reason(partition.error) for partition in found if partition.error is not None), "")
                if not trouble:
                    return found, self._choose_starts(
                        client, [partition for partition in found if partition.offset < 0]
                    )
            except KafkaException as error:
                # Without the map, only work is repeated. Without the offset, the client requests it itself.
                found = [TopicPartition(partition.topic, partition.partition) for partition in partitions]
                trouble = reason(error)
            if not self._engine.settings.exactly_once:
                _log.warning("the group's offsets are not known yet: %s; work above them may repeat", trouble)
                return found, []
            _log.warning("the group's offsets are not known yet: %s; the request is repeated", trouble)
            if self._engine.stop_request.is_requested:
                return [], []

    def _choose_starts(self, client: ConsumerClient, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Choose the start of partitions without a group offset; return the partitions whose start must be committed.

        Raises `KafkaException` if the group's coordinator does not answer.
        """
        from_first = [partition for partition in partitions if self._engine.routes.begins_at_first(partition.topic)]
        if from_first:
            _log.info(
                "the group has no offset of %s, new topics or its own: they begin at the first message",
                names(from_first),
            )
        if added := self._added(client, [partition for partition in partitions if partition not in from_first]):
            _log.warning("%s were added to topics that the group reads: they begin at the first message", names(added))
            from_first += added
        if by_reset := [partition for partition in partitions if partition not in from_first]:
            _log.info("the group has no offset of %s: auto.offset.reset says where it begins", names(by_reset))
        for partition in by_reset:
            partition.offset = OFFSET_INVALID if self._reset is None else self._reset
        for partition in from_first:
            partition.offset = OFFSET_BEGINNING
        # The end moves. A member that starts later at the new end loses the messages in between.
        chosen = from_first + [partition for partition in by_reset if partition.offset == OFFSET_END]
        end = self._engine.clock.monotonic() + _FIRST_TIMEOUT_S
        for partition in chosen:
            try:
                offsets = client.get_watermark_offsets(
                    partition, timeout=max(0.0, end - self._engine.clock.monotonic())
                )
            except KafkaException as error:
                _log.info("where the log of %s begins and ends is not known: %s", names([partition]), reason(error))
            else:
                if offsets is not None:
                    partition.offset = offsets[0 if partition.offset == OFFSET_BEGINNING else 1]
        return chosen

    def _added(self, client: ConsumerClient, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Return the partitions that were added to a topic after the group began to read it.

        Their numbers are above all partitions with a group offset. Messages that were written to them before a member
        has them must not be skipped.
        """
        if self._reset != OFFSET_END:
            return []
        highest = {partition.topic: partition.partition for partition in sorted(partitions, key=_NUMBER)}
        below = [TopicPartition(topic, number) for topic, limit in highest.items() for number in range(limit)]
        committed = client.committed(below, timeout=_COMMITTED_TIMEOUT_S) if below else []
        known = {place.topic: place.partition for place in sorted(committed, key=_NUMBER) if place.offset >= 0}
        return [place for place in partitions if place.partition > known.get(place.topic, place.partition)]

    def note_lost(self, error: KafkaError, topic: str, partition: int) -> None:
        """Note that the client has lost a position; raise `PenstockError` if `auto.offset.reset` forbids another."""
        if self._reset is None:
            raise PenstockError(
                f"the group's offset is not in the log and auto.offset.reset forbids another: {reason(error)}; "
                "reset the group's offsets, or set auto.offset.reset to earliest or latest"
            )
        assignment = self._engine.assignments.get(topic, partition)
        if assignment is not None:
            self._lost.setdefault(assignment, False)

    def restart(self, client: ConsumerClient, recreated: Sequence[str], now: float) -> None:
        """Move the client to the new positions of lost partitions, and of topics that were created again.

        Raises `PenstockError` if `auto.offset.reset` forbids to start such a topic again.
        """
        if recreated:
            assignments = self._engine.assignments.all()
            self._lost |= {assignment: True for assignment in assignments if assignment.topic in recreated}
            self._retry_at = now
        if self._lost and now >= self._retry_at:
            self._retry_at = now + _RETRY_DELAY_S
            self._lost = {
                assignment: is_recreated
                for assignment, is_recreated in self._lost.items()
                if assignment.active and not self._try_restart(client, assignment, is_recreated=is_recreated)
            }

    def _try_restart(self, client: ConsumerClient, assignment: Assignment, *, is_recreated: bool) -> bool:
        target = TopicPartition(assignment.topic, assignment.partition)
        try:
            self._find_offset(client, assignment, target, is_recreated=is_recreated)
            # Assigned again: the client refuses `seek` on a partition that stands still (librdkafka 2.16).
            with suppress(KafkaException):  # an earlier try may have unassigned it
                client.incremental_unassign([TopicPartition(assignment.topic, assignment.partition)])
            client.incremental_assign([target])
        except KafkaException as error:
            _log.warning("it is not known where %s goes on: %s; it is tried again", assignment, reason(error))
            return False
        if target.offset >= 0:
            assignment.tracker.advance(target.offset)
        elif assignment.known or is_recreated:
            self._engine.begin_again(assignment, None)
        else:
            assignment.is_sought = True
        return True

    def _find_offset(
        self, client: ConsumerClient, assignment: Assignment, target: TopicPartition, *, is_recreated: bool
    ) -> None:
        """Set `target` to the offset from which a partition with a lost position goes on."""
        position, cause = assignment.tracker.position, f"topic {target.topic} was deleted and created again"
        if not is_recreated:
            if not assignment.known and (position := client.committed([target], _ANSWER_S)[0].offset) < 0:
                self._choose_starts(client, [target])
                return
            known = client.get_watermark_offsets(TopicPartition(target.topic, target.partition), timeout=_ANSWER_S)
            start, end = (position, position) if known is None else known
            target.offset = max(position, start)
            if position < start:
                _log.warning(
                    "%s stood at offset %d, but its log now begins at %d: the messages in between were deleted, by "
                    "retention or by hand, before they were handled; it goes on at the first message of the log",
                    assignment,
                    position,
                    start,
                )
            if position <= end:
                return
            cause = f"its log ends at {end} (truncated, or created again)"
        # A topic that a pattern matches counts as new.
        reset = self._reset if target.topic in self._engine.patterns.named else OFFSET_BEGINNING
        if reset is None:
            raise PenstockError(
                f"{assignment} stood at offset {position}, and {cause}: auto.offset.reset forbids to begin again; "
                "reset the group's offsets, or set auto.offset.reset to earliest or latest"
            )
        target.offset = reset
        _log.warning(
            "%s stood at offset %d, and %s: it begins again at its %s, and messages of the new log that were handled "
            "since are handled again",
            assignment,
            position,
            cause,
            "end" if reset == OFFSET_END else "beginning",
        )

    def note_ends(self, client: ConsumerClient, now: float) -> None:
        """Note the log ends and the answer about readable ends; request readable ends again if a partition waits."""
        assignments = self._engine.assignments.all() if now >= self._read_at else ()
        if assignments:
            self._read_at = now + max(_ENDS_INTERVAL_S, len(assignments) / _MAX_READINGS_PER_S)
        for assignment in assignments:
            known = client.get_watermark_offsets(TopicPartition(assignment.topic, assignment.partition), cached=True)
            if known is not None and known[1] >= 0:
                assignment.end = known[1]
        if self._request is not None:
            self._note_readable_ends(*self._request)
        elif now >= self._request_at and self._engine.settings.reads_committed_only:
            self._request_at = now + _REQUEST_INTERVAL_S
            waiting = islice(filter(_waits, self._engine.assignments.all()), _MAX_REQUESTED)
            asked = {assignment: _position(assignment) for assignment in waiting}
            if asked:
                self._request = self.ask([(assignment.topic, assignment.partition) for assignment in asked]), asked

    def _note_readable_ends(self, answer: Answer[Mapping[Place, int]], asked: Mapping[Assignment, int]) -> None:
        try:
            ends = answer.answer()
        except (KafkaException, NotAnsweredError):
            # Broker errors are reported elsewhere; the request is repeated.
            ends = {}
        if ends is None:
            return
        self._request = None
        self._open_transactions = {
            assignment: (position, ends[place])
            for assignment, position in asked.items()
            if (place := (assignment.topic, assignment.partition)) in ends
            # Without a known position: nothing has arrived, although the log has messages.
            and ends[place] <= (position if assignment.known else (assignment.end or 0) - 1)
        }

    def trouble(self, assignment: Assignment) -> str | None:
        """Return the text about the open transaction that a partition waits for, or None. Any thread."""
        position, begins = self._open_transactions.get(assignment, (None, 0))
        if position is None or _position(assignment) != position or not _waits(assignment):
            return None
        return (
            f"a transaction that another producer began is open at offset {begins}: the messages behind it are hidden "
            "until it is committed or aborted, or its transaction.timeout.ms ends it; to find the producer: "
            f"kafka-transactions.sh describe-producers --topic {assignment.topic} --partition {assignment.partition}"
        )


def _position(assignment: Assignment) -> int:
    return assignment.tracker.position if assignment.known else -1


def _waits(assignment: Assignment) -> bool:
    """Tell whether a partition has lag, nothing in flight, and no pause."""
    tracker, end = assignment.tracker, assignment.end
    return (
        assignment.active
        and assignment.paused is None
        and end is not None
        and _position(assignment) < end
        and not tracker.in_flight
    )


def names(partitions: Sequence[TopicPartition]) -> str:
    """Return the names of partitions for a log line."""
    return ", ".join(f"{partition.topic}:{partition.partition}" for partition in partitions)
