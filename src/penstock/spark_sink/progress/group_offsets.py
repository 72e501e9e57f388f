"""The position of a query as offsets of a consumer group, so that ordinary lag tools see it.

The offsets are for onlookers: a query begins where its checkpoint or its sink's ledger says, never at these. They are
written after a batch was committed, to a group that has no members.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from confluent_kafka import Consumer, KafkaError, TopicPartition

from penstock import clients
from penstock.clients.bounded_calls import CLOSE_S, end_within
from penstock.clients.kafka_errors import concerns_a_group, is_missing_right, is_rebalancing, reason
from penstock.clients.reading import reading_settings
from penstock.clients.rights import Operation, group_right, missing_right_text, principal_of, topic_right
from penstock.options import ClientConfig, not_empty

_log = logging.getLogger("penstock.spark_sink")

#: Seconds that the last offsets may take at the end.
_LAST_S = 10.0


class GroupOffsets:
    """Writes the position of one query to one group, which belongs to it alone. For one thread at a time.

    Nothing is raised once it is made: offsets that cannot be written cost a warning, and the next batch writes later
    ones. An empty name or a setting that the client refuses is a `ConfigurationError`.
    """

    def __init__(self, group: str, *, bootstrap_servers: str, config: ClientConfig | None = None) -> None:
        not_empty("group", group)
        self.group = group
        self._principal = principal_of(config or {})
        settings = reading_settings(config or {}, group, given={"on_commit": self._answered})
        #: Commits without joining the group. Its calls do not wait; `poll` brings the answers.
        self._client: Consumer = clients.consumer(bootstrap_servers, settings)
        self._unanswered = 0
        #: What was warned of since it last went well.
        self._warned: set[str] = set()

    def follow(self, position: Mapping[tuple[str, int], int]) -> None:
        """Write a position, without waiting until it is written."""
        self._poll(0)
        if position:
            self._unanswered += 1
            offsets = [TopicPartition(*part, offset) for part, offset in sorted(position.items())]
            self._client.commit(offsets=offsets, asynchronous=True)

    def close(self) -> None:
        """Wait until the last offsets are written, for some seconds at most, and close the connections."""
        deadline = time.monotonic() + _LAST_S
        while self._unanswered and time.monotonic() < deadline:
            self._poll(0.1)
        end_within(CLOSE_S, f"closing the client of the group {self.group}", self._client.close)

    def _poll(self, timeout_s: float) -> None:
        message = self._client.poll(timeout_s)
        error = None if message is None else message.error()
        if error is not None and is_missing_right(error):  # of a coordinator that may not be looked up
            self._refused(error)

    def _answered(self, error: KafkaError | None, offsets: Sequence[TopicPartition]) -> None:
        """Take the brokers' answer, within `_poll`."""
        self._unanswered -= 1
        by_topic = {offset.topic: offset.error for offset in offsets if offset.error is not None}
        refusal = error or next(iter(by_topic.values()), None)
        if refusal is None:
            self._warned.clear()  # what fails after it has gone well is logged again
        else:
            self._refused(refusal, by_topic)

    def _refused(self, error: KafkaError, topics: Iterable[str] = ()) -> None:
        text = f"the query's position is not written to group {self.group}"
        if is_missing_right(error):
            missing = [topic_right(Operation.READ, topic) for topic in sorted(topics)]
            rights = [group_right(self.group)] if concerns_a_group(error) else missing
            text = missing_right_text(f"{text}, until the right is given", rights, self._principal)
        elif is_rebalancing(error) or error.code() == KafkaError.NON_EMPTY_GROUP:
            # Only members may commit then.
            text += ": the group has members, and they alone may commit. Give the sink a group of its own"
        else:
            text += f": {reason(error)}; the next batch tries again"
        _log.log(logging.DEBUG if text in self._warned else logging.WARNING, "%s", text)
        self._warned.add(text)
