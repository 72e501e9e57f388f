"""The done log of a store outside Kafka: the ids of published transactions, written in the same Kafka transaction.

Each shard has a partition of its own. Once the store has marked a transaction as published, its record is deleted. So
the log stays short.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import KafkaException, Message, TopicPartition

from penstock import clients
from penstock.clients.kafka_errors import is_missing_right
from penstock.clients.reading import PartitionReader
from penstock.clients.rights import Operation, topic_right
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.errors import MessageFormatError
from penstock.options import ClientConfig
from penstock.transactions.wire.ids import ID_BYTES, id_bytes, id_text

_log = logging.getLogger("penstock.transactions")

#: Seconds to ask for the bounds of the log, and to read all of it.
_ANSWER_S = 5.0
_READ_S = 15.0
_HEAD = struct.Struct(">BI")
_VERSION = 1


class DoneRead(NamedTuple):
    """The content of a done log: its end offset and its ids."""

    end: int
    ids: frozenset[str]


class DoneLog:
    """A shard's partition of the done log. Reading is thread-safe; one thread calls `forget`.

    `rights` collects missing permissions.
    """

    def __init__(
        self, bootstrap_servers: str, config: ClientConfig, topic: str, partition: int, rights: MissingRights
    ) -> None:
        self._rights = rights
        self.topic = topic
        self.partition = partition
        self._reader = partial(PartitionReader, bootstrap_servers, config, topic)
        #: Asks brokers about this log, and about the topics published with it.
        self.admin = clients.admin(bootstrap_servers, config)
        self._forgotten_to = 0

    def read(self) -> DoneRead:
        """Return the end of the log and its ids. The writers of interest must be fenced before.

        Raises `KafkaException` if a broker does not answer, and `TimeoutError` if the end was not reached in time.
        """
        place = self.topic, self.partition
        low, end = self.bounds()
        found: set[str] = set()
        with self._reader(isolation="read_committed") as reader:
            for records in reader.read({place: low}, {place: end}, limit_s=_READ_S):
                for message in records:
                    found.update(_ids(message))
        return DoneRead(end, frozenset(found))

    def bounds(self, limit_s: float = _ANSWER_S) -> tuple[int, int]:
        """Return the first and the end offset. Raises `KafkaException` if a broker does not answer in time."""
        with self._reader(isolation="read_uncommitted") as reader:
            return reader.bounds(self.topic, [self.partition], limit_s)[self.partition]

    def forget(self, offset: int) -> None:
        """Delete the records below an offset. Does not wait; after an error a later call deletes them."""
        if offset <= self._forgotten_to:
            return
        self._forgotten_to = offset
        places = [TopicPartition(self.topic, self.partition, offset)]
        for future in self.admin.delete_records(places, request_timeout=_ANSWER_S).values():
            future.add_done_callback(self._take_deletion)

    def _take_deletion(self, future: Any) -> None:
        """Handle the result of a deletion, on a thread of the client."""
        error, right = future.exception(), topic_right(Operation.DELETE, self.topic)
        if error is None:
            self._rights.granted(right)
        elif isinstance(error, KafkaException) and is_missing_right(error):
            self._rights.refused(f"topic {self.topic} cannot be truncated, so that it grows", right)
        else:
            _log.warning("%s:%d could not be truncated: %s; it is tried again", self.topic, self.partition, error)


def encode_ids(ids: Sequence[str]) -> bytes:
    """Return the value of a record: version, count, ids of 16 bytes; integers are big-endian."""
    return b"".join((_HEAD.pack(_VERSION, len(ids)), *map(id_bytes, ids)))


def decode_ids(value: bytes | None) -> list[str]:
    """Read the value of a record. Raises `MessageFormatError`."""
    content = value or b""
    if len(content) < _HEAD.size:
        raise MessageFormatError(f"a record of a done log with {len(content)} bytes; it is ignored")
    version, count = _HEAD.unpack_from(content)
    if version != _VERSION or len(content) != _HEAD.size + count * ID_BYTES:
        raise MessageFormatError(
            f"a record of a done log of version {version}, with {count} ids in {len(content)} bytes; it is ignored"
        )
    return [id_text(content[start : start + ID_BYTES]) for start in range(_HEAD.size, len(content), ID_BYTES)]


def _ids(message: Message) -> list[str]:
    try:
        return decode_ids(message.value())
    except MessageFormatError as bad:
        _log.error("%s:%s@%s: %s", message.topic(), message.partition(), message.offset(), bad)
        return []
