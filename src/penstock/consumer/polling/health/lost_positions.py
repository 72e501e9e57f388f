"""Positions that are lost: not in the log, or of a topic that was deleted and created again. Where reading goes on.

Left to itself the client would go by `auto.offset.reset` in silence: with `latest` past all that is left of a log whose
beginning was deleted. So it only reports them (`auto.offset.reset=error`), and waits to be sent somewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException, TopicPartition

from penstock.clients.cluster import ConsumerClient
from penstock.clients.kafka_errors import reason
from penstock.consumer.assignments import Assignment, Assignments
from penstock.consumer.polling.router import Router
from penstock.errors import PenstockError

_log = logging.getLogger(__name__)

#: Seconds that one question may keep the poll thread, and between two tries.
_ANSWER_S = 2.0
_AGAIN_S = 1.0


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
        self._next = now + _AGAIN_S
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
