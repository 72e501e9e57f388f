"""The checks of a producer group, as a store in Kafka has them: the group's share of the check topic."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from typing import Any

from confluent_kafka import KafkaError, Message

from penstock import clients
from penstock.clients.kafka_errors import concerns_a_group, is_missing_right, reason
from penstock.clients.rights import Operation, group_right, topic_right
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.errors import MessageFormatError
from penstock.options import ClientConfig
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.wire.check_request import CheckRequest, decode_check_request
from penstock.transactions.wire.topics import StoreTopics
from penstock.transactions.writing.acked_producer import wire_headers

_log = logging.getLogger("penstock.transactions")

#: Requests taken from the check topic at once.
_REQUESTS = 500


class KafkaCheckSource:
    """A group's share of the check topic. Used by one thread."""

    def __init__(self, bootstrap_servers: str, config: ClientConfig, topics: StoreTopics, group: str) -> None:
        self._group = group
        self._topics = topics
        self._rights = MissingRights(config)
        self._ration = RationedLog()
        settings: dict[str, Any] = {
            **config,
            "group.id": topics.checkers(group),
            # A request that came before the first start of the group shall be answered, too.
            "auto.offset.reset": "earliest",
            # A producer that died gives its share up after this long; until then its checks are sent in vain.
            # Partitions added later are noticed within seconds.
            "topic.metadata.refresh.interval.ms": 10_000,
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 1500,
        }
        self._consumer = clients.consumer(bootstrap_servers, settings)
        self._consumer.subscribe([topics.check])

    def take(self, timeout_s: float, running: Collection[str] = ()) -> Sequence[CheckRequest]:  # noqa: ARG002 - each is sent to one
        """Return the checks that are there, waiting at most `timeout_s` seconds for the first.

        What does not read as a request is logged and skipped.
        """
        first = self._consumer.poll(timeout_s)
        if first is None:
            return ()
        return [
            request
            for message in (first, *self._consumer.consume(_REQUESTS, 0))
            if (request := self._read(message)) is not None and request.half.group == self._group
        ]

    def _read(self, message: Message) -> CheckRequest | None:
        error = message.error()
        if error is not None:
            self._report_not_read(error)
            # Errors come back at once: without a pause this would spin.
            time.sleep(0.1)
            return None
        try:
            return decode_check_request(message.key(), message.value(), wire_headers(message))
        except MessageFormatError as bad:
            _log.warning("%s[%s]@%s: %s", self._topics.check, message.partition(), message.offset(), bad)
            return None

    def _report_not_read(self, error: KafkaError) -> None:
        if is_missing_right(error):
            is_group = concerns_a_group(error)
            checkers = group_right(self._topics.checkers(self._group))
            right = checkers if is_group else topic_right(Operation.READ, self._topics.check)
            self._rights.refused(f"checks of group {self._group} cannot be answered", right)
        else:
            text = "%s cannot be read: %s; it is tried again"
            self._ration.warn("check", text, self._topics.check, reason(error))

    def close(self) -> None:
        """Leave the group, so that another producer gets its checks at once."""
        self._consumer.close()
