"""Checks that target topics of transactions exist, and caches their partition counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from penstock.clients.bounded_calls import BriefQuestion
from penstock.clients.factory import AdminClient
from penstock.clients.rights import Operation
from penstock.clients.topics import require_topics
from penstock.errors import BrokerConnectionError, ConfigurationError, PenstockError
from penstock.transactions.rationed_log import RationedLog

#: Seconds to wait for brokers that storing does not need: a first connection takes less, even with TLS.
_LOOKUP_BUDGET_S = 1.0


class TargetTopics:
    """Looks each target up once. Thread-safe.

    `may_publish_to` returns whether a topic is the user's: neither the store's nor Kafka's own. If the store does not
    need Kafka (`stores_in_kafka` is false) and no broker answers within a second, the target is accepted; an error then
    shows at publication.
    """

    def __init__(
        self, admin: AdminClient, may_publish_to: Callable[[str], bool], *, stores_in_kafka: bool = False
    ) -> None:
        self._admin = admin
        self._may_publish_to = may_publish_to
        self._stores_in_kafka = stores_in_kafka
        # One lookup at a time: many threads start with the same topic.
        self._lock = threading.Lock()
        self._question = BriefQuestion("lookup of targets")
        # Whether no broker answered the last lookup: then the next one does not wait.
        self._is_away = False
        self._ration = RationedLog()
        #: Partition counts of the targets found. Replaced as a whole under the lock, read without it.
        self.counts: dict[str, int] = {}

    def require(self, topic: str, partition: int | None) -> None:
        """Raise an error unless a message can be published to the topic. Each topic is looked up once.

        Raises:
            TopicNotFoundError: there is no such topic.
            MissingRightError: this client may not see the topic, if it exists.
            ConfigurationError: the topic has no such partition, or belongs to the store.
            BrokerConnectionError: no broker answered, and the store is in Kafka.
        """
        if not self._is_found(topic, partition):
            if not self._may_publish_to(topic):
                raise ConfigurationError(f"{topic} belongs to the store or to Kafka itself; name a topic of your own")
            if self._stores_in_kafka:
                self._look_up(topic, partition)
            else:
                self._look_up_within_a_moment(topic, partition)
        count = self.counts.get(topic)
        if count is not None and partition is not None and not 0 <= partition < count:
            raise ConfigurationError(f"topic {topic} has partitions 0 to {count - 1}, but partition is {partition}")

    def _is_found(self, topic: str, partition: int | None) -> bool:
        count = self.counts.get(topic)
        return count is not None and (partition is None or partition < count)

    def _look_up_within_a_moment(self, topic: str, partition: int | None) -> None:
        wait_s = 0.0 if self._is_away else _LOOKUP_BUDGET_S
        try:
            if self._question.ask(partial(self._look_up, topic, partition), wait_s) is None:
                self._is_away = True
        except BrokerConnectionError:
            pass

    def _look_up(self, topic: str, partition: int | None) -> bool:
        """Look a topic up; return True, or raise the errors of `require`."""
        with self._lock:
            if self._is_found(topic, partition):
                return True
            try:
                found = require_topics(self._admin, [topic], to=Operation.DESCRIBE)
            except PenstockError as error:
                self._is_away = isinstance(error, BrokerConnectionError)
                if self._is_away and not self._stores_in_kafka:
                    text = "targets cannot be looked up: %s; messages are stored, and published once Kafka takes them"
                    self._ration.warn("away", text, error)
                raise
            self._is_away = False
            self.counts = {**self.counts, **found}
        return True
