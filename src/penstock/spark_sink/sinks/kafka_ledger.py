"""A ledger in Kafka: a compacted topic with, of each sink, source topic and partition, a record of the next offset.

Rows and the records of their sources change in one Kafka transaction (`kafka_publisher`).
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

#: Topic of the ledger, where a sink names none.
LEDGER_TOPIC = "penstock.spark-ledger"
#: Partitions of the ledger that are used. A number for ever: it says where a record is found.
PARTITIONS = 16
#: One record of each key is needed. Segments are small, because the one being written is never compacted.
TOPIC_CONFIG = {"cleanup.policy": "compact", "segment.bytes": str(1 << 20), "min.cleanable.dirty.ratio": "0.1"}

#: Transactional ids of a sink. A number for ever: with another one a task that was given up for lost would go by
#: another id than its successor, and be shut out by nobody.
SLOTS = 64

#: Seconds after which the broker ends the transaction of a process that died and has no successor.
TRANSACTION_TIMEOUT_S = 30.0
#: Seconds to wait for others' transactions in the ledger: such a one, and the broker's look at it every ten seconds.
_LEDGER_TIMEOUT_S = TRANSACTION_TIMEOUT_S + 30.0
ANSWER_S = 30.0
#: What a record holds besides the next offset; one of a former version has none of it.
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
    """Where a sink publishes, and which rights that takes. Picklable."""

    servers: str
    config: ClientConfig = field(repr=False)
    name: str
    ledger: str

    def transactional_id(self, source: TopicPartition) -> str:
        """Return the id by which rows of a source partition are published.

        It never changes: who publishes rows of a source partition has taken it, and has shut out who had it before.
        """
        return f"{self.name}/{slot_of(source)}"

    @property
    def ids_right(self) -> Right:
        """The right that its transactional ids take."""
        return transactional_right(f"{self.name}/")

    def rights(self, topics: Iterable[str]) -> list[Right]:
        """Return the rights on topics that it takes to publish to some, and to keep the ledger."""
        on_ledger = [topic_right(operation, self.ledger) for operation in (Operation.READ, Operation.WRITE)]
        return [topic_right(Operation.WRITE, topic) for topic in sorted(set(topics))] + on_ledger

    def least_rights(self, topics: Iterable[str], made: Iterable[str] = ()) -> list[Right]:
        """Return all that it takes to publish to topics, of which some, as the ledger, are made by who starts first."""
        making = [topic_right(Operation.CREATE, name) for name in (self.ledger, *made)]
        return [*self.rights([*topics, *made]), *making, self.ids_right]


def slot_of(source: TopicPartition) -> int:
    """Return the slot of a source partition; `kafka_sink.slot_column` is the same for Spark."""
    return zlib.crc32(f"{source[0]}/{source[1]}".encode()) % SLOTS


def require_settings(sink: str, target: Target) -> None:
    """Raise `ConfigurationError` where settings cannot be those of a sink of this kind."""
    not_empty("bootstrap_servers", target.servers)
    not_empty("name", target.name)
    not_empty("ledger_topic", target.ledger)
    reserved(target.config, _OWNED, sink)
    for key, value in target.config.items():
        require_travelling(key, value)


def require_target(target: Target, topics: Collection[str], made: Mapping[str, Collection[str]]) -> None:
    """Check rights and topics to publish to; make the ledger's, and those for dead letters, each of some topics.

    Raises:
        MissingRightError: the client may not publish to a topic, or not keep the ledger.
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
    """Reads the ledger of one sink; what was read once is not read again. One thread at a time uses it.

    Whoever has used it closes it.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._admin = clients.admin(target.servers, target.config)
        self._reader = PartitionReader(target.servers, target.config, GROUP)
        #: How far each partition of the ledger was read, and what of all sinks was found there.
        self._positions: dict[Place, int] = {}
        self._known: dict[str, Entries] = {}

    def read(self, sources: Collection[TopicPartition]) -> Entries:
        """Return the entries of those source partitions that the ledger knows.

        Waits for transactions that others have open in the same partitions of the ledger: behind them may be what is
        looked for. After a `KafkaException` trying again may help; a `SinkError` says that the ledger could not be read
        to its end, or holds what is no ledger.
        """
        self._catch_up({ledger_partition(ledger_key(self._target.name, source)) for source in sources})
        known = self._known.get(self._target.name, {})
        return {source: known[source] for source in sources if source in known}

    def read_all(self) -> dict[str, Entries]:
        """Return the entries of all sinks, by their names; nothing where the ledger has no topic yet.

        Raises `SinkError` where it cannot be read, `MissingRightError` where it may not, `BrokerConnectionError`.
        """
        target, topic = self._target, self._target.ledger
        # A topic that may not be seen looks like one that is not there, and the query would begin again.
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
        # Behind what is open in it, too: before the last stable offset may lie all but the record that is looked for.
        ends = log_ends(self._admin, places, ANSWER_S, IsolationLevel.READ_UNCOMMITTED) if places else {}
        if any(self._positions.get(place, 0) > end for place, end in ends.items()):
            # Another topic of that name: what was read of the one before is gone.
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
            return  # by another key than a ledger's
        if (value := record.value()) is None:
            entries.pop((topic, partition), None)  # somebody has removed it: all of that partition applies again
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
    # A number may be infinite, and lists may nest too deep to be read.
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise MessageFormatError(f"no record of a ledger: {type(error).__name__}") from error


def encode_entry(entry: LedgerEntry | None) -> bytes | None:
    """Return the value of a ledger's record; None, which Kafka's compaction takes for a removal, for no entry."""
    if entry is None:
        return None
    return json.dumps({"next_offset": entry.end} | {name: getattr(entry, name) for name in _OTHERS}).encode()


def ledger_key(name: str, source: TopicPartition) -> bytes:
    """Return the key of the record of a source partition, in the ledger of a sink."""
    return json.dumps([name, *source], separators=(",", ":")).encode()


def ledger_partition(key: bytes) -> int:
    """Return the partition of the ledger that a record stands in."""
    return xxh3_64_intdigest(key) % PARTITIONS
