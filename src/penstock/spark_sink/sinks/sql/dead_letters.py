"""`DeadLetters`: writes the original messages of refused rows to a dead-letter topic.

A frame no longer has the original message. So it is read again by its position, and written with its key, value and
headers, and the headers of a dead letter. `write` returns when the brokers have acknowledged all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from confluent_kafka import KafkaError, KafkaException, Message

from penstock import clients
from penstock.clients.kafka_errors import reason
from penstock.clients.reading import NotReadInTimeError, PartitionReader
from penstock.clients.rights import MissingRightError, Operation, Right, require_rights, topic_right
from penstock.clients.topics import TopicSpec, ensure_topics, require_topics
from penstock.dead_letters.headers import DeadLetterFormat, DeadLetterOrigin, default_topic, write
from penstock.errors import PenstockError, SinkError
from penstock.message import FixedRecord, Record, position_of
from penstock.options import ClientConfig, not_empty

#: Seconds for reading one message, and for the acknowledgement of all.
_READ_S = 30.0
_WRITE_S = 60.0

#: Bytes: the client must not refuse a message that could be read. The topic's own limit decides.
_LARGEST_MESSAGE = 1_000_000_000


@dataclass(frozen=True, slots=True, order=True)
class Rejected:
    """A message with a refused row.

    Attributes:
        topic: its topic.
        partition: its partition.
        offset: its offset.
        reason: kind of the refusal, with SQLSTATE and column if known.
    """

    topic: str
    partition: int
    offset: int
    reason: str

    @property
    def place(self) -> tuple[str, int, int]:
        """Topic, partition and offset."""
        return self.topic, self.partition, self.offset

    def __str__(self) -> str:
        """Return place and reason."""
        return f"{self.topic}:{self.partition}@{self.offset} ({self.reason})"


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The target for messages of rows that a sink's table refuses. Picklable; it has no connection.

    A missing topic is created with as many partitions as the message's topic. A message that is no longer in its topic
    is written with its position and without a value. `penstock dlq` reads and replays these dead letters.

    Attributes:
        bootstrap_servers: addresses of the brokers, of the source and of the dead letters.
        topic: topic of the dead letters; `{topic}` stands for the message's topic.
        config: client settings by librdkafka's names, for example for security; they may contain passwords and are
            never shown.
        group: the group named in the dead letters.
    """

    bootstrap_servers: str
    topic: str = default_topic(DeadLetterFormat.KAFKA)
    config: ClientConfig = field(default_factory=dict, repr=False, kw_only=True)
    group: str = field(default="penstock-spark", kw_only=True)

    def __post_init__(self) -> None:
        """Check the settings; `ConfigurationError` names a wrong one."""
        not_empty("bootstrap_servers", self.bootstrap_servers)
        not_empty("topic", self.topic)
        not_empty("group", self.group)
        object.__setattr__(self, "config", dict(self.config))

    def write(self, rejected: Iterable[Rejected]) -> None:
        """Write the messages of refused rows, each once, and return when they are acknowledged.

        Raises:
            MissingRightError: the permission to read the messages, or to write the dead letters, is missing.
            SinkError: a message could not be read or written; the first one is named.
        """
        reasons: dict[tuple[str, int, int], str] = {}
        for message in sorted(rejected):
            reasons.setdefault(message.place, message.reason)
        try:
            topics = {topic for topic, _, _ in reasons}
            admin = clients.admin(self.bootstrap_servers, self.config)
            rights = [right for right in self.least_rights(topics) if right.operation is not Operation.CREATE]
            require_rights(admin, "dead letters cannot be written, so nothing of the batch was stored", rights)
            counts = require_topics(admin, topics)
            ensure_topics(admin, [TopicSpec(self._topic_of(topic), count) for topic, count in counts.items()])
            self._write(reasons)
        except (SinkError, MissingRightError):
            raise
        except (KafkaException, NotReadInTimeError, PenstockError) as error:
            raise self._failed(reason(error) if isinstance(error, KafkaException) else str(error)) from error

    def least_rights(self, topics: Iterable[str]) -> list[Right]:
        """Return the permissions that its client needs for rows of some topics."""
        letters = sorted(set(map(self._topic_of, topics)))
        return [
            *(topic_right(Operation.READ, topic) for topic in sorted(topics)),
            *(topic_right(operation, name) for operation in (Operation.WRITE, Operation.CREATE) for name in letters),
        ]

    def _topic_of(self, topic: str) -> str:
        return self.topic.replace("{topic}", topic)

    def _write(self, reasons: Mapping[tuple[str, int, int], str]) -> None:
        failures: list[str] = []
        producer = clients.producer(
            self.bootstrap_servers, {"message.max.bytes": _LARGEST_MESSAGE, **self.config, "enable.idempotence": True}
        )
        # The source has read the messages: they are known to be committed.
        settings = {"queued.min.messages": 1, **self.config}
        with PartitionReader(self.bootstrap_servers, settings, self.group, isolation="read_uncommitted") as reader:
            for place, why in reasons.items():
                record = _read(reader, *place)
                message = position_of(record)
                origin = DeadLetterOrigin.of(record, SinkError(why), group=self.group, attempts=1)

                def delivered(error: KafkaError | None, _message: Message, letter: str = message) -> None:
                    if error is not None:
                        failures.append(f"{letter}: {reason(error)}")

                topic, headers = self._topic_of(record.topic()), write(DeadLetterFormat.KAFKA, record, origin)
                producer.produce(topic, record.value(), record.key(), headers=headers, on_delivery=delivered)
                producer.poll(0)
            if unsent := producer.flush(_WRITE_S):
                failures.append(f"{unsent} were not acknowledged within {_WRITE_S:g} s")
        if failures:
            raise self._failed(failures[0])

    def _failed(self, why: str) -> SinkError:
        return SinkError(
            f"dead letters could not be written to {self.topic}: {why}; nothing of the batch was stored, and it comes "
            f"again when the query is started again; check the brokers at {self.bootstrap_servers}"
        )


def _read(reader: PartitionReader, topic: str, partition: int, offset: int) -> Record:
    """Return the message at an offset, or a record without key and value if it is gone."""
    found = reader.record_at((topic, partition), offset, _READ_S)
    return FixedRecord(topic, partition, offset, None, None, (), None) if found is None else cast("Record", found)
