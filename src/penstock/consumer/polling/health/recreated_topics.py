"""Topics that were deleted and created again: their partitions begin anew by `auto.offset.reset`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from confluent_kafka import OFFSET_END, KafkaException, TopicPartition

from penstock.clients.cluster import ConsumerClient
from penstock.clients.kafka_errors import reason
from penstock.consumer.assignments import Assignment, Assignments
from penstock.consumer.polling.router import Router
from penstock.errors import PenstockError

_log = logging.getLogger(__name__)


class RecreatedTopics:
    """On the poll thread only."""

    def __init__(self, assignments: Assignments, router: Router, offset_reset: Callable[[str], int | None]) -> None:
        self._assignments = assignments
        self._router = router
        # Where a topic begins, as a logical offset; None where it may not.
        self._offset_reset = offset_reset
        # Partitions that the client could not be sent to the beginning of yet.
        self._waiting: list[Assignment] = []

    def restart(self, client: ConsumerClient, recreated: Sequence[str]) -> None:
        """Begin anew with the partitions of these topics, and with those that could not begin at the last call.

        Raises `PenstockError` where `auto.offset.reset` forbids it.
        """
        if not recreated and not self._waiting:
            return
        waiting = list(self._waiting)
        waiting += [one for one in self._assignments.all() if one.topic in recreated and one not in waiting]
        self._waiting = [one for one in waiting if one.active and not self._restarted(client, one)]

    def _restarted(self, client: ConsumerClient, former: Assignment) -> bool:
        begin = self._offset_reset(former.topic)
        if begin is None:
            raise PenstockError(
                f"topic {former.topic} was deleted and created again, and auto.offset.reset forbids to begin anew; "
                "reset the group's offsets, or set auto.offset.reset to earliest or latest"
            )
        try:
            client.seek(TopicPartition(former.topic, former.partition, begin))
        except KafkaException as error:
            _log.warning("%s cannot begin anew yet: %s; it is tried again", former, reason(error))
            return False
        _log.warning(
            "topic %s was deleted and created again: partition %d begins anew at its %s; it stood at "
            "offset %d of the former one, and what was handled of the new one since is handled again",
            former.topic,
            former.partition,
            "end" if begin == OFFSET_END else "beginning",
            former.tracker.position,
        )
        self._router.begin_again(former, None)
        return True
