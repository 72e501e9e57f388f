"""`TopicFollower`: what comes to a topic from now on. It joins no group and writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from penstock import clients
from penstock.clients.kafka_errors import concerns_a_group, is_missing_right, is_transient, reason
from penstock.clients.requests.topics import require_topics
from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right
from penstock.errors import BrokerConnectionError, PenstockError
from penstock.options import ClientConfig

if TYPE_CHECKING:
    from confluent_kafka import Message

#: Over the user's own, which are for his own clients: the group is asked for nothing.
_SETTINGS = {
    "group.id": "penstock-commands",
    "enable.auto.commit": False,
    "auto.offset.reset": "latest",
    "isolation.level": "read_uncommitted",
    "fetch.wait.max.ms": 100,
}
#: Of the user's settings, those that are for his own clients alone.
NOT_TAKEN = frozenset(
    {
        "group.instance.id",
        "transactional.id",
        "transaction.timeout.ms",
        "delivery.timeout.ms",
        "on_commit",
        "on_delivery",
        "stats_cb",
    }
)
_BATCH = 100
_ANSWER_S = 10.0


class TopicFollower:
    """Follows all partitions of a topic. For one thread; `close` ends it.

    Args:
        bootstrap_servers: addresses of the brokers.
        config: client settings by librdkafka's names.
        topic: name of the topic.
        positions: where to begin, by partition; at the end where it says nothing.
        back: of how many records before the end to begin, of each partition.

    Raises:
        BrokerConnectionError: no broker answered.
        TopicNotFoundError: there is no such topic.
        MissingRightError: this user may not read it.
        ConfigurationError: the client library refused a setting.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        config: ClientConfig,
        topic: str,
        positions: Mapping[int, int] | None = None,
        *,
        back: int = 0,
    ) -> None:
        self._topic = topic
        self._principal = principal_of(config)
        admin = clients.admin(bootstrap_servers, config)
        counts = require_topics(admin, bootstrap_servers, [topic], principal=self._principal)
        taken = {name: value for name, value in config.items() if name not in NOT_TAKEN}
        self._consumer = clients.consumer(bootstrap_servers, {**taken, **_SETTINGS})
        #: Why nothing comes now, or None.
        self.trouble: str | None = None
        #: The next offset of each partition, and the end that it had at the beginning.
        self.positions: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        try:
            for number in range(counts[topic]):
                start, end = self._bounds(number, bootstrap_servers)
                self.ends[number] = end
                at = (positions or {}).get(number, max(start, end - back))
                # A topic that was made anew has other offsets.
                self.positions[number] = at if start <= at <= end else end
            places = [TopicPartition(topic, number, offset) for number, offset in self.positions.items()]
            self._consumer.assign(places)
        except BaseException:
            self._consumer.close()
            raise

    def _bounds(self, number: int, bootstrap_servers: str) -> tuple[int, int]:
        try:
            found = self._consumer.get_watermark_offsets(TopicPartition(self._topic, number), timeout=_ANSWER_S)
        except KafkaException as error:
            if is_missing_right(error):
                raise self._missing() from error
            raise BrokerConnectionError(
                f"no broker at {bootstrap_servers} tells where {self._topic}[{number}] ends: {reason(error)}"
            ) from error
        if found is None:
            raise BrokerConnectionError(f"no broker at {bootstrap_servers} tells where {self._topic}[{number}] ends")
        return found

    def _missing(self) -> MissingRightError:
        return MissingRightError(
            f"{self._topic} may not be read", [topic_right(Operation.READ, self._topic)], self._principal
        )

    @property
    def has_caught_up(self) -> bool:
        """Whether all was taken that was there at the beginning."""
        return all(self.positions[number] >= end for number, end in self.ends.items())

    def poll(self, timeout: float) -> list[Message]:
        """Return what came, within `timeout` seconds; `trouble` says why nothing does.

        Raises:
            MissingRightError: the right to read was taken away.
            PenstockError: the topic is gone, or the client has failed: begin anew.
        """
        found = []
        for message in self._consumer.consume(_BATCH, timeout=timeout):
            error = message.error()
            if error is not None:
                self._take_error(error)
                continue
            self.trouble = None
            number, offset = message.partition(), message.offset()
            if number is not None and offset is not None:
                self.positions[number] = offset + 1
            found.append(message)
        return found

    def _take_error(self, error: KafkaError) -> None:
        if concerns_a_group(error):
            return
        if is_missing_right(error):
            raise self._missing()
        gone = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}  # noqa: SLF001 - public codes of the library
        if error.fatal() or error.code() in gone or not is_transient(error):
            raise PenstockError(f"{self._topic} cannot be followed: {reason(error)}")
        self.trouble = reason(error)

    def close(self) -> None:
        """End it."""
        self._consumer.close()
