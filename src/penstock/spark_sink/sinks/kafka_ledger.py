"""A ledger in Kafka: a compacted topic with a record for each sink, source topic and partition.

One Kafka transaction writes rows and the records of their sources (`kafka_publisher`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from confluent_kafka import OFFSET_BEGINNING, IsolationLevel, KafkaException, Message
from xxhash import xxh3_64_intdigest

from penstock import clients
from penstock.clients import require_travelling
from penstock.clients.kafka_errors import reason
from penstock.clients.reading import NotReadInTimeError, PartitionReader, Place
from penstock.clients.rights import Operation, Right, require_rights, topic_right, transactional_right
from penstock.clients.topics import TopicSpec, ensure_topics, log_ends, partition_counts, require_topics, topic_settings
from penstock.errors import ConfigurationError, MessageFormatError, SinkError
from penstock.options import ClientConfig, not_empty, reserved
from penstock.spark_sink.ledger.rules import LedgerEntry
from penstock.spark_sink.sinks.sink import Entries
from penstock.spark_sink.source.options import GROUP
from penstock.spark_sink.source.plan import TopicPartition

#: Default topic of the ledger.
LEDGER_TOPIC = "penstock.spark-ledger"
#: Number of partitions of the ledger. It never changes: it determines the place of each record.
PARTITIONS = 16
#: Only the newest record of each key is needed. Segments are small, because the active one is never compacted.
TOPIC_CONFIG = {"cleanup.policy": "compact", "segment.bytes": str(1 << 20), "min.cleanable.dirty.ratio": "0.1"}

#: Number of transactional ids of a sink. It never changes: otherwise a task that Spark gave up as lost would have
#: another id than its successor, and nobody would fence it.
SLOTS = 64

#: Seconds after which the broker ends the transaction of a dead process without a successor.
TRANSACTION_TIMEOUT_S = 30.0
#: Seconds to wait for open transactions in the ledger: that time-out, plus the broker's interval of ten seconds.
_LEDGER_TIMEOUT_S = TRANSACTION_TIMEOUT_S + 30.0
ANSWER_S = 30.0
#: Fields of a record besides the next offset. Records of earlier versions lack them.
_OTHERS = ("start", "topic_id", "query_id", "batch_id")

_OWNED = {
    "transactional.id": "it is made of the sink's name; give the sink another name",
    "transaction.timeout.ms": "it is part of how the ledger is read",
    "message.timeout.ms": "it follows the transaction's",
    "enable.idempotence": "a transaction needs it",
    "isolation.level": "the ledger is read as committed",
}


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a publishing sink, and the permissions it needs. Picklable."""

    servers: str
    config: ClientConfig = field(repr=False)
    name: str
    ledger: str

    def transactional_id(self, source: TopicPartition) -> str:
        """Return the transactional id for rows of a source partition.

        It never changes: a task that publishes rows of a source partition takes the id, and fences its predecessor.
        """
        return f"{self.name}/{slot_of(source)}"

    @property
    def ids_right(self) -> Right:
        """The permission on its transactional ids."""
        return transactional_right(f"{self.name}/")

    def rights(self, topics: Iterable[str]) -> list[Right]:
        """Return the permissions on topics for publishing to some and for the ledger."""
        on_ledger = [topic_right(operation, self.ledger) for operation in (Operation.READ, Operation.WRITE)]
        return [topic_right(Operation.WRITE, topic) for topic in sorted(set(topics))] + on_ledger

    def least_rights(self, topics: Iterable[str], made: Iterable[str] = ()) -> list[Right]:
        """Return all permissions for publishing to topics; some, such as the ledger, are created at the first start."""
        making = [topic_right(Operation.CREATE, name) for name in (self.ledger, *made)]
        return [*self.rights([*topics, *made]), *making, self.ids_right]


def slot_of(source: TopicPartition) -> int:
    """Return the slot of a source partition; `kafka_sink.slot_column` computes the same in Spark."""
    return zlib.crc32(f"{source[0]}/{source[1]}".encode()) % SLOTS


def require_settings(sink: str, target: Target) -> None:
    """Raise `ConfigurationError` for wrong settings of such a sink."""
    not_empty("bootstrap_servers", target.servers)
    not_empty("name", target.name)
    not_empty("ledger_topic", target.ledger)
    reserved(target.config, _OWNED, sink)
    for key, value in target.config.items():
        require_travelling(key, value)


def require_target(target: Target, topics: Collection[str], made: Mapping[str, Collection[str]]) -> None:
    """Check permissions and target topics; create the ledger's topic and the dead-letter topics of `made`.

    Raises:
        MissingRightError: the permission to publish to a topic, or to use the ledger, is missing.
        TopicNotFoundError: a topic does not exist.
        BrokerConnectionError: no broker answered.
        ConfigurationError: the ledger's topic cannot be used, or the client library refuses the settings.
    """
    admin = clients.admin(target.servers, target.config)
    require_rights(admin, f"sink {target.name} cannot publish", target.rights([*topics, *made]))
    counts = partition_counts(admin) if made else {}
    specs = [TopicSpec(name, max(counts.get(topic, 1) for topic in sources)) for name, sources in made.items()]
    specs.append(TopicSpec(target.ledger, PARTITIONS, TOPIC_CONFIG))
    count = ensure_topics(admin, specs)[target.ledger]
    if count < PARTITIONS:
        raise ConfigurationError(
            f"topic {target.ledger} has {count} partitions, a ledger needs {PARTITIONS}; give another "
            "ledger_topic, which is made as it has to be"
        )
    settings, _ = topic_settings(admin, [target.ledger])
    policy = settings.get(target.ledger, {}).get("cleanup.policy", "compact")
    if policy != "compact":
        raise ConfigurationError(
            f"topic {target.ledger} has cleanup.policy={policy}: Kafka deletes the ledger with time, and all is "
            "published again; set it to compact, or give another ledger_topic, which is made as it has to be"
        )
    if topics:
        require_topics(admin, topics)


class KafkaLedger:
    """Reads the ledger of one sink incrementally. Used by one thread at a time; close it after use."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._admin = clients.admin(target.servers, target.config)
        self._reader = PartitionReader(target.servers, target.config, GROUP)
        #: The read position of each partition of the ledger, and the entries of all sinks found so far.
        self._positions: dict[Place, int] = {}
        self._known: dict[str, Entries] = {}

    def read(self, sources: Collection[TopicPartition]) -> Entries:
        """Return the entries of source partitions, as far as the ledger has them.

        Waits for open transactions in the same partitions of the ledger: the entries may be behind them. After
        `KafkaException`, another try may help. `SinkError`: the ledger could not be read to its end, or has invalid
        records.
        """
        self._catch_up({ledger_partition(ledger_key(self._target.name, source)) for source in sources})
        known = self._known.get(self._target.name, {})
        return {source: known[source] for source in sources if source in known}

    def read_all(self) -> dict[str, Entries]:
        """Return the entries of all sinks by name; empty if the ledger's topic does not exist yet.

        Raises `SinkError` if it cannot be read, `MissingRightError` and `BrokerConnectionError`.
        """
        target, topic = self._target, self._target.ledger
        # A hidden topic looks like an absent one, and the query would start again from the beginning.
        what, reading = f"the ledger of sink {target.name} cannot be read", [topic_right(Operation.READ, topic)]
        require_rights(self._admin, what, reading)
        if topic in partition_counts(self._admin):
            try:
                self._catch_up(range(PARTITIONS))
            except KafkaException as error:
                raise SinkError(f"{what} from {topic}: {reason(error)}; check the brokers") from error
        return {name: entries for name, entries in self._known.items() if entries}

    def close(self) -> None:
        """Close the consumer."""
        self._reader.close()

    def _catch_up(self, partitions: Iterable[int]) -> None:
        places = [(self._target.ledger, partition) for partition in partitions]
        # Ends behind open transactions: the needed record may lie after the last stable offset.
        ends = log_ends(self._admin, places, ANSWER_S, IsolationLevel.READ_UNCOMMITTED) if places else {}
        if any(self._positions.get(place, 0) > end for place, end in ends.items()):
            # The topic was recreated: entries of the old one no longer count.
            self._positions, self._known = {}, {}
        read = self._positions
        starts = {place: read.get(place) or OFFSET_BEGINNING for place, end in ends.items() if read.get(place, 0) < end}
        try:
            for records in self._reader.read(starts, ends, limit_s=_LEDGER_TIMEOUT_S):
                for record in records:
                    self._take(record)
        except NotReadInTimeError as late:
            place = min(self._reader.behind)
            raise SinkError(
                f"the ledger {place[0]}:{place[1]} was not read to offset {ends[place]} within "
                f"{_LEDGER_TIMEOUT_S:g} s: a transaction holds it back at {self._reader.positions[place]}; find its "
                "producer and stop it"
            ) from late
        self._positions |= {place: self._reader.positions[place] for place in starts}

    def _take(self, record: Message) -> None:
        try:
            name, topic, partition = json.loads(record.key() or b"")
            entries = self._known.setdefault(name, {})
        except (ValueError, TypeError):
            return  # not a ledger's key
        if (value := record.value()) is None:
            entries.pop((topic, partition), None)  # the entry was removed: all rows of that partition apply again
            return
        try:
            entries[topic, partition] = decode_entry(value)
        except MessageFormatError as bad:
            raise SinkError(
                f"{self._target.ledger}:{record.partition()}@{record.offset()} is no record of a ledger; give the sink "
                "a ledger_topic of its own"
            ) from bad


def decode_entry(value: bytes | None) -> LedgerEntry:
    """Read the value of a ledger's record, or raise `MessageFormatError`."""
    try:
        held = json.loads(value or b"")
        start, topic_id, query_id, batch_id = (held.get(name) for name in _OTHERS)
        return LedgerEntry(
            int(held["next_offset"]),
            None if start is None else int(start),
            None if topic_id is None else str(topic_id),
            None if query_id is None else str(query_id),
            None if batch_id is None else int(batch_id),
        )
    # JSON may have infinite numbers and lists that nest too deeply.
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise MessageFormatError(f"no record of a ledger: {type(error).__name__}") from error


def encode_entry(entry: LedgerEntry | None) -> bytes | None:
    """Return the value of a ledger's record; None, a tombstone, removes the entry."""
    if entry is None:
        return None
    return json.dumps({"next_offset": entry.end} | {name: getattr(entry, name) for name in _OTHERS}).encode()


def ledger_key(name: str, source: TopicPartition) -> bytes:
    """Return the key of the record of a source partition, in the ledger of a sink."""
    return json.dumps([name, *source], separators=(",", ":")).encode()


def ledger_partition(key: bytes) -> int:
    """Return the ledger's partition of a record."""
    return xxh3_64_intdigest(key) % PARTITIONS
