"""A ledger in Kafka: rows and the next offsets of their sources change in one Kafka transaction.

The ledger is a compacted topic: per sink, source topic and partition one record that says which offset is next. Whoever
publishes takes these steps, and starts again at 1 whenever one of them fails or its outcome is not known:

1. A new producer takes the transactional id. Whoever had it before is shut out, and what it left open is ended.
2. The ledger is read, up to where it ended after step 1; rows below it are left out.
3. Rows and new ledger records are written and committed, in one transaction.

A producer serves for one transaction: an order to commit that arrives late, of which the client library knows nothing,
finds another epoch and ends nothing (KAFKA-17754).
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined] # not in its __all__
from xxhash import xxh3_64_intdigest

from penstock import clients
from penstock.clients import kafka
from penstock.clients.rights import MissingRightError, Resource, principal_of
from penstock.errors import MessageFormatError, SinkError
from penstock.spark_sink.ledger.kafka_target import Row, Target, missing_for
from penstock.spark_sink.ledger.sql_ledger import refuse_late
from penstock.spark_sink.source import planning

_log = logging.getLogger("penstock.spark_sink")

#: Partitions of the ledger that are used. A number for ever: it says where a record is found.
PARTITIONS = 16
#: One record of each key is needed. Segments are small, because the one being written is never compacted.
TOPIC_CONFIG = {"cleanup.policy": "compact", "segment.bytes": str(1 << 20), "min.cleanable.dirty.ratio": "0.1"}

#: Seconds after which the broker ends the transaction of a process that died and has no successor.
TRANSACTION_TIMEOUT_S = 30.0
#: Seconds to wait for others' transactions in the ledger: such a one, and the broker's look at it every ten seconds.
_LEDGER_TIMEOUT_S = TRANSACTION_TIMEOUT_S + 30.0
_ANSWER_S = 30.0
_POLL_S = 0.1
_TRIES = 6
#: Seconds to wait after the first failure, twice as many after each other; by chance between a half and the whole, for
#: two that shut each other out shall not do so in step.
_WAIT_S = 0.2

#: Trying again does not help against these.
_FINAL = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.POLICY_VIOLATION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.INVALID_TRANSACTION_TIMEOUT,
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001 - the client library's public constants look so
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001 - the same
    }
)
#: What befalls records because of another one, or because the producer was shut out.
_PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001 - the same


class Entry(NamedTuple):
    """What the ledger says of a source partition: the next offset, and which batch moved it, where that is known."""

    next_offset: int = 0
    batch: str = ""


class Ledger:
    """Reads the ledger of one sink; what was read once is not read again. One thread uses it, and closes it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._consumer: Consumer | None = None
        self._admin: AdminClient | None = None
        self._positions: dict[int, int] = {}
        self._known: dict[bytes, Entry] = {}

    def read(self, sources: Sequence[planning.TopicPartition]) -> dict[planning.TopicPartition, Entry]:
        """Return the entry of each source partition.

        Waits for transactions that others have open in the same partitions of the ledger: behind them may be what is
        looked for.

        Raises:
            KafkaException: the broker did not answer; trying again may help.
            SinkError: the ledger could not be read to its end, or holds what is no ledger.
        """
        keys = {source: _key(self._target.name, source) for source in sources}
        for partition in sorted({_home(key) for key in keys.values()}):
            self._catch_up(partition)
        return {source: self._known.get(key, Entry()) for source, key in keys.items()}

    def close(self) -> None:
        """Let the connection go."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
        self._admin = None

    def _catch_up(self, partition: int) -> None:
        position, end = self._positions.get(partition, 0), self._end(partition)
        if position >= end:
            return
        if self._consumer is None:
            self._consumer = clients.consumer(self._target.servers, _consumer_config(self._target))
        self._consumer.assign([TopicPartition(self._target.ledger, partition, position or OFFSET_BEGINNING)])
        deadline = time.monotonic() + _LEDGER_TIMEOUT_S
        while position < end:
            if time.monotonic() > deadline:
                raise SinkError(
                    f"the ledger {self._target.ledger}[{partition}] was not read to offset {end} within "
                    f"{_LEDGER_TIMEOUT_S:g} s: a transaction holds it back at {position}; find its producer and stop it"
                )
            for record in _fetched(self._consumer):
                position = max(position, self._taken(record, partition))
        self._positions[partition] = position

    def _end(self, partition: int) -> int:
        """Return where a partition of the ledger ends: behind what is open in it, too.

        A consumer of committed records would be told the last stable offset, before which may lie all of it but the
        record that is looked for.
        """
        if self._admin is None:
            self._admin = kafka.admin_client(self._target.servers, self._target.config)
        where = TopicPartition(self._target.ledger, partition)
        asked = {where: OffsetSpec.latest()}  # type: ignore[no-untyped-call] # untyped in the library
        answer = self._admin.list_offsets(
            asked, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=_ANSWER_S
        )
        return kafka.told_offset(kafka.answered(answer[where], _ANSWER_S))

    def _taken(self, record: Message, partition: int) -> int:
        """Note what a record says, and return the position after it; 0 where it says nothing of this partition's."""
        error = record.error()
        if error is not None and error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - the library's name for it
            if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED or error.fatal():
                raise KafkaException(error)
            return 0  # the client tries again by itself, or the deadline tells
        if record.partition() != partition:
            return 0  # one that comes late, of the partition that was read before
        if error is not None:
            return record.offset() or 0
        key, value, offset = record.key(), record.value(), record.offset() or 0
        if key is not None and value is None:
            self._known.pop(key, None)  # somebody has taken it back: all of that partition applies anew
        elif key is not None:
            try:
                self._known[key] = decode_entry(value)
            except MessageFormatError as bad:
                raise SinkError(
                    f"{self._target.ledger}[{record.partition()}] offset {offset} is no record of a ledger; give the "
                    "sink a ledger_topic of its own"
                ) from bad
        return offset + 1


def decode_entry(value: bytes | None) -> Entry:
    """Read the value of a ledger's record.

    Raises:
        MessageFormatError: it is none.
    """
    try:
        held = json.loads(value or b"")
        return Entry(int(held["next_offset"]), str(held.get("batch", "")))
    # A number may be infinite, and lists may nest too deep to be read.
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise MessageFormatError(f"no record of a ledger: {type(error).__name__}") from error


@dataclass(slots=True)
class _Attempt:
    """What went wrong in one transaction. Written by callbacks, in the thread that polls."""

    error: KafkaError | None = None

    def reported(self, error: KafkaError | None, _record: Message) -> None:
        if error is not None and not self.has_cause:
            self.error = error

    @property
    def has_cause(self) -> bool:
        """Whether it is known what went wrong, not only that something did."""
        return self.error is not None and self.error.code() not in _PURGED


def publish(target: Target, transactional_id: str, rows: Sequence[Row], ledger: Ledger) -> int:
    """Publish rows and the ledger after them in one transaction, and return how many of the rows were applied before.

    All rows of an offset come in one call, and per source partition in the order of their offsets.

    Raises:
        ConfigurationError: the client library refuses the settings.
        MissingRightError: the client may not; as with `SinkError`.
        SinkError: they cannot be published; none of those that were not applied before is visible.
    """
    wait_s = _WAIT_S
    for attempt in range(1, _TRIES + 1):
        try:
            return _published(target, transactional_id, rows, ledger)
        except KafkaException as error:
            cause = error.args[0]
            missing = missing_for(target, {row.to for row in rows}, error)
            if missing:
                if not any(right.resource is Resource.TRANSACTIONAL_ID for right in missing):
                    _end_what_is_open(target, transactional_id)
                raise MissingRightError(
                    f"sink {target.name}: {_places(rows)}", missing, principal_of(target.config)
                ) from error
            final = isinstance(cause, KafkaError) and cause.code() in _FINAL
            if final or attempt == _TRIES:
                _end_what_is_open(target, transactional_id)
                raise _refused(target, rows, error, tries=attempt) from error
            _log.warning("%s: publishing failed and is tried again: %s", transactional_id, kafka.reason(error))
        time.sleep(wait_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret hangs on it
        wait_s *= 2
    raise AssertionError


def _published(target: Target, transactional_id: str, rows: Sequence[Row], ledger: Ledger) -> int:
    producer = _producer(target, transactional_id)
    try:
        producer.init_transactions(_ANSWER_S)
        held = ledger.read(list(dict.fromkeys(row.source for row in rows)))
        left = [row for row in rows if row.offset >= held[row.source].next_offset]
        _refuse_late(target, held, {row.source for row in rows if row.offset < held[row.source].next_offset})
        if left:
            _in_one_transaction(producer, target, left)
        return len(rows) - len(left)
    finally:
        producer.purge()
        producer.close()


def _refuse_late(
    target: Target, held: Mapping[planning.TopicPartition, Entry], below: Iterable[planning.TopicPartition]
) -> None:
    """Refuse rows below the ledger that an earlier batch of this run went past: no repetition explains them.

    Of this very batch there may be some: a task that was tried again finds what the one before it has published.
    """
    run, _, number = target.batch.partition("/")
    if run:
        others = {source: held[source].batch for source in below if held[source].batch != target.batch}
        refuse_late(others, others, run, int(number), f"sink {target.name}")


def _in_one_transaction(producer: Producer, target: Target, rows: Sequence[Row]) -> None:
    attempt = _Attempt()
    producer.begin_transaction()
    offsets: planning.Offsets = {}
    for row in rows:
        _send(producer, attempt, row.to, row.value, row.key, headers=row.headers)
        offsets[row.source] = row.offset + 1
    for source, offset in offsets.items():
        key = _key(target.name, source)
        text = json.dumps(Entry(offset, target.batch)._asdict()).encode()
        _send(producer, attempt, target.ledger, text, key, partition=_home(key))
    deadline = time.monotonic() + TRANSACTION_TIMEOUT_S
    while len(producer) and not attempt.has_cause and time.monotonic() < deadline:
        producer.flush(_POLL_S)
    if attempt.error is not None:
        raise KafkaException(attempt.error)
    producer.commit_transaction(_ANSWER_S)


def _send(
    producer: Producer,
    attempt: _Attempt,
    topic: str,
    value: bytes | None,
    key: bytes | None,
    *,
    partition: int = -1,
    headers: Sequence[tuple[str, bytes | None]] = (),
) -> None:
    """Hand a record to the client library; wait for room in its buffer."""
    while attempt.error is None:
        try:
            producer.produce(topic, value, key, partition, attempt.reported, headers=cast("Any", list(headers)))
        except BufferError:
            producer.poll(_POLL_S)
        else:
            producer.poll(0)
            return


def _end_what_is_open(target: Target, transactional_id: str) -> None:
    """End a transaction that was given up, so that readers do not wait for its timeout. As far as possible."""
    try:
        producer = _producer(target, transactional_id)
        producer.init_transactions(_ANSWER_S)
        producer.close()
    except KafkaException as error:
        _log.warning("%s: what is open ends by its timeout: %s", transactional_id, kafka.reason(error))


def _places(rows: Sequence[Row]) -> str:
    first, last = rows[0], rows[-1]
    return (
        f"rows from {first.source[0]}[{first.source[1]}] offset {first.offset} to {last.source[0]}[{last.source[1]}] "
        f"offset {last.offset} were not published to {', '.join(sorted({row.to for row in rows}))}"
    )


def _refused(target: Target, rows: Sequence[Row], error: KafkaException, *, tries: int) -> SinkError:
    return SinkError(
        f"sink {target.name}: {_places(rows)}: {kafka.reason(error)}, tries: {tries}; mend the topic or the row, or "
        "stop the other query of this name, and start the query anew"
    )


def _producer(target: Target, transactional_id: str) -> Producer:
    settings = {
        "linger.ms": 5,
        "message.max.bytes": 100_000_000,
        # Java's: keys go to the partitions in which Spark's own sink and Java's producers put them.
        "partitioner": "murmur2_random",
        # The waits after CONCURRENT_TRANSACTIONS would be the latency of everything.
        "retry.backoff.ms": 5,
        "retry.backoff.max.ms": 100,
        "topic.metadata.propagation.max.ms": 5_000,
        **target.config,
        "transactional.id": transactional_id,
        "transaction.timeout.ms": int(TRANSACTION_TIMEOUT_S * 1000),
        # The client library wants it to be no longer than the transaction's.
        "message.timeout.ms": int(TRANSACTION_TIMEOUT_S * 1000) - 5_000,
    }
    return clients.producer(target.servers, settings)


def _consumer_config(target: Target) -> dict[str, Any]:
    return {
        **target.config,
        # The library wants a group name; partitions are assigned by hand, so no group is ever joined.
        "group.id": "penstock-spark",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        # An empty answer tells the end: the broker shall not hold it back for half a second.
        "fetch.wait.max.ms": 20,
        "fetch.queue.backoff.ms": 5,
    }


def _fetched(consumer: Consumer) -> list[Message]:
    # The first call waits for one record, the second takes what is there.
    return consumer.consume(1, _POLL_S) + consumer.consume(1_000, 0)


def _key(name: str, source: planning.TopicPartition) -> bytes:
    return json.dumps([name, *source], separators=(",", ":")).encode()


def _home(key: bytes) -> int:
    return xxh3_64_intdigest(key) % PARTITIONS


__all__ = ["PARTITIONS", "TOPIC_CONFIG", "Entry", "Ledger", "decode_entry", "publish"]
