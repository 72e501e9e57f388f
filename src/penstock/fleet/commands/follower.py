"""`TopicFollower`: what comes to a topic from now on. It joins no group and writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException

from penstock import clients
from penstock.clients.kafka_errors import ErrorKind, is_missing_right, reason
from penstock.clients.reading import PartitionReader, Place
from penstock.clients.requests.topics import require_topics
from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right
from penstock.errors import BrokerConnectionError, PenstockError
from penstock.options import ClientConfig

if TYPE_CHECKING:
    from confluent_kafka import Message

#: The group is asked for nothing.
_GROUP = "penstock-commands"
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
        positions: Mapping[Place, int] | None = None,
        *,
        back: int = 0,
    ) -> None:
        self._servers = bootstrap_servers
        self._topic = topic
        self._principal = principal_of(config)
        admin = clients.admin(bootstrap_servers, config)
        counts = require_topics(admin, bootstrap_servers, [topic], principal=self._principal)
        self._reader = PartitionReader(
            bootstrap_servers,
            config,
            _GROUP,
            self._not_read,
            isolation="read_uncommitted",
            given={"fetch.wait.max.ms": 100, "auto.offset.reset": "latest"},
        )
        try:
            starts, ends = {}, {}
            for number, (start, end) in self._bounds(counts[topic]).items():
                place = topic, number
                at = (positions or {}).get(place, max(start, end - back))
                # A topic that was made again has other offsets.
                starts[place], ends[place] = at if start <= at <= end else end, end
            self._reader.start(starts, ends)
        except BaseException:
            self._reader.close()
            raise

    def _bounds(self, count: int) -> dict[int, tuple[int, int]]:
        try:
            return self._reader.bounds(self._topic, range(count), _ANSWER_S)
        except KafkaException as error:
            if is_missing_right(error):
                raise self._missing() from error
            raise BrokerConnectionError(
                f"no broker at {self._servers} tells where {self._topic} ends: {reason(error)}"
            ) from error

    def _missing(self) -> MissingRightError:
        return MissingRightError(
            f"{self._topic} may not be read", [topic_right(Operation.READ, self._topic)], self._principal
        )

    @property
    def trouble(self) -> str | None:
        """Why nothing comes now, or None."""
        return self._reader.trouble

    @property
    def positions(self) -> Mapping[Place, int]:
        """The next offset of each partition, as it is at any time."""
        return self._reader.positions

    @property
    def has_caught_up(self) -> bool:
        """Whether all was taken that was there at the beginning."""
        return not self._reader.behind

    def poll(self, timeout: float) -> list[Message]:
        """Return what came, within `timeout` seconds; `trouble` says why nothing does.

        Raises:
            MissingRightError: the right to read was taken away.
            PenstockError: the topic is gone, or the client has failed: begin again.
        """
        return self._reader.poll(timeout)

    def _not_read(self, kind: ErrorKind, error: KafkaError, _place: Place) -> None:
        if kind is ErrorKind.MISSING_RIGHT:
            raise self._missing()
        if kind not in {ErrorKind.PASSING, ErrorKind.GROUP}:
            raise PenstockError(f"{self._topic} cannot be followed: {reason(error)}")

    def close(self) -> None:
        """End it."""
        self._reader.close()
