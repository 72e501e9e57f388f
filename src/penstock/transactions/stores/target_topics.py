"""The topics that messages of transactions may be published to, as far as they were looked up."""

from __future__ import annotations

import threading
from collections.abc import Callable

from confluent_kafka.admin import AdminClient

from penstock.clients.requests.topics import partition_counts, require_topics
from penstock.clients.rights import Operation, principal_of
from penstock.errors import ConfigurationError
from penstock.options import ClientConfig


class TargetTopics:
    """Looks targets up, each once. Thread-safe.

    `may_publish_to` tells whether a topic is a user's: no topic of the store, and none of Kafka's own.
    """

    def __init__(
        self, admin: AdminClient, bootstrap_servers: str, config: ClientConfig, may_publish_to: Callable[[str], bool]
    ) -> None:
        self._admin = admin
        self._bootstrap_servers = bootstrap_servers
        self._config = config
        self._may_publish_to = may_publish_to
        # Lookups are made one at a time: many threads begin with the same topic.
        self._lock = threading.Lock()
        #: Partition counts of targets found so far. Replaced as a whole under the lock, read without it.
        self.counts: dict[str, int] = {}

    def require(self, topic: str, partition: int | None) -> None:
        """Raise unless a message can be published to the topic; a topic that was found is not asked for again.

        Raises:
            TopicNotFoundError: there is no such topic.
            MissingRightError: this client may not see it, if it is there.
            ConfigurationError: the topic has no such partition, or belongs to the store.
            BrokerConnectionError: no broker answered.
        """
        count = self.counts.get(topic)
        if count is not None and (partition is None or 0 <= partition < count):
            return
        if not self._may_publish_to(topic):
            raise ConfigurationError(f"{topic} belongs to the store or to Kafka itself; name a topic of your own")
        if count is None or (partition is not None and partition >= count):
            with self._lock:
                found = partition_counts(self._admin, self._bootstrap_servers)
                self.counts = {name: count for name, count in found.items() if self._may_publish_to(name)}
            count = self.counts.get(topic)
        if count is None:
            # It tells whether there is none, or none that may be seen.
            count = require_topics(
                self._admin,
                self._bootstrap_servers,
                [topic],
                to=Operation.DESCRIBE,
                principal=principal_of(self._config),
            )[topic]
        if partition is not None and not 0 <= partition < count:
            raise ConfigurationError(f"topic {topic} has partitions 0 to {count - 1}, but partition is {partition}")
