"""A ledger in Kafka: a compacted topic with, of each sink, source topic and partition, a record of the next offset.

Rows and the records of their sources change in one Kafka transaction (`kafka_publisher`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress

from confluent_kafka import OFFSET_BEGINNING, IsolationLevel, KafkaError, KafkaException, Message
from confluent_kafka.admin import AdminClient
from xxhash import xxh3_64_intdigest

from penstock import clients
from penstock.clients.kafka_errors import ErrorKind
from penstock.clients.reading import NotReadInTimeError, PartitionReader, Place
from penstock.clients.requests.log_ends import log_ends
from penstock.errors import MessageFormatError, SinkError
from penstock.spark_sink.ledger.kafka_target import Target
from penstock.spark_sink.ledger.rules import LedgerEntry
from penstock.spark_sink.source import plan as planning
from penstock.spark_sink.source.options import GROUP

_log = logging.getLogger("penstock.spark_sink")

#: Partitions of the ledger that are used. A number for ever: it says where a record is found.
PARTITIONS = 16
#: One record of each key is needed. Segments are small, because the one being written is never compacted.
TOPIC_CONFIG = {"cleanup.policy": "compact", "segment.bytes": str(1 << 20), "min.cleanable.dirty.ratio": "0.1"}

#: Seconds after which the broker ends the transaction of a process that died and has no successor.
TRANSACTION_TIMEOUT_S = 30.0
#: Seconds to wait for others' transactions in the ledger: such a one, and the broker's look at it every ten seconds.
_LEDGER_TIMEOUT_S = TRANSACTION_TIMEOUT_S + 30.0
ANSWER_S = 30.0
#: What a record holds beside the next offset; one of a former version has none of it.
_OTHERS = ("start", "topic_id", "query_id", "batch_id")
POLL_S = 0.1


class KafkaLedger:
    """Reads the ledger of one sink; what was read once is not read again. One thread at a time uses it.

    Whoever has used it closes it.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._reader: PartitionReader | None = None
        self._admin: AdminClient | None = None
        self._positions: dict[int, int] = {}
        self._known: dict[bytes, LedgerEntry] = {}

    def read(self, sources: Sequence[planning.TopicPartition]) -> dict[planning.TopicPartition, LedgerEntry]:
        """Return the entries of those source partitions that the ledger knows.

        Waits for transactions that others have open in the same partitions of the ledger: behind them may be what is
        looked for. After a `KafkaException` trying again may help; a `SinkError` says that the ledger could not be read
        to its end, or holds what is no ledger.
        """
        keys = {source: ledger_key(self._target.name, source) for source in sources}
        for partition in sorted({ledger_partition(key) for key in keys.values()}):
            self._catch_up(partition)
        return {source: self._known[key] for source, key in keys.items() if key in self._known}

    def read_all(self) -> dict[str, dict[planning.TopicPartition, LedgerEntry]]:
        """Return the entries of all sinks, by their names. Records by other keys than a ledger's are passed over.

        Raises as `read`.
        """
        for partition in range(PARTITIONS):
            self._catch_up(partition)
        found: dict[str, dict[planning.TopicPartition, LedgerEntry]] = {}
        for key, entry in self._known.items():
            with suppress(ValueError, TypeError):
                name, topic, partition = json.loads(key)
                found.setdefault(name, {})[topic, partition] = entry
        return found

    def close(self) -> None:
        """Let the connection go."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._admin = None

    def _catch_up(self, partition: int) -> None:
        place, position, end = (self._target.ledger, partition), self._positions.get(partition, 0), self._end(partition)
        if position > end:
            # Another topic of that name: what was read of the one before is gone.
            self._known = {key: one for key, one in self._known.items() if ledger_partition(key) != partition}
            position = self._positions[partition] = 0
        if position == end:
            return
        if self._reader is None:
            self._reader = PartitionReader(self._target.servers, self._target.config, GROUP, _not_read)
        try:
            for records in self._reader.read(
                {place: position or OFFSET_BEGINNING}, {place: end}, limit_s=_LEDGER_TIMEOUT_S
            ):
                for record in records:
                    self._take(record)
        except NotReadInTimeError as late:
            raise SinkError(
                f"the ledger {self._target.ledger}[{partition}] was not read to offset {end} within "
                f"{_LEDGER_TIMEOUT_S:g} s: a transaction holds it back at {self._reader.positions[place]}; find its "
                "producer and stop it"
            ) from late
        self._positions[partition] = self._reader.positions[place]

    def _end(self, partition: int) -> int:
        """Return where a partition of the ledger ends: behind what is open in it, too.

        A consumer of committed records would get the last stable offset, before which may lie all of it but the
        record that is looked for.
        """
        if self._admin is None:
            self._admin = clients.admin(self._target.servers, self._target.config)
        place = self._target.ledger, partition
        return log_ends(self._admin, [place], ANSWER_S, IsolationLevel.READ_UNCOMMITTED)[place]

    def _take(self, record: Message) -> None:
        """Note what a record says."""
        key, value = record.key(), record.value()
        if key is not None and value is None:
            self._known.pop(key, None)  # somebody has taken it back: all of that partition applies anew
        elif key is not None:
            try:
                self._known[key] = decode_entry(value)
            except MessageFormatError as bad:
                raise SinkError(
                    f"{self._target.ledger}[{record.partition()}] offset {record.offset()} is no record of a ledger; "
                    "give the sink a ledger_topic of its own"
                ) from bad


def _not_read(kind: ErrorKind, error: KafkaError, _place: Place) -> None:
    if kind in {ErrorKind.MISSING_RIGHT, ErrorKind.FATAL}:
        raise KafkaException(error)
    # The client tries again by itself, or the deadline tells.


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


def ledger_key(name: str, source: planning.TopicPartition) -> bytes:
    """Return the key of the record of a source partition, in the ledger of a sink."""
    return json.dumps([name, *source], separators=(",", ":")).encode()


def ledger_partition(key: bytes) -> int:
    """Return the partition of the ledger that a record stands in."""
    return xxh3_64_intdigest(key) % PARTITIONS
