"""What sinks that publish to Kafka share: rows and the ledger in transactions of a source partition, or of a batch."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from confluent_kafka import KafkaException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name under which everybody knows it

from penstock import clients
from penstock.clients import require_travelling
from penstock.clients.kafka_errors import reason
from penstock.clients.requests.granted_rights import require_rights
from penstock.clients.requests.topics import TopicSpec, ensure_topics, partition_counts, require_topics, topic_setting
from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right
from penstock.errors import ConfigurationError, SinkError
from penstock.options import ClientConfig, not_empty, reserved
from penstock.spark_sink.ledger.kafka_ledger import PARTITIONS, TOPIC_CONFIG, KafkaLedger
from penstock.spark_sink.ledger.kafka_producers import PublisherPool, SinkPublisher, slot_id
from penstock.spark_sink.ledger.kafka_publisher import Failure, begin, publish
from penstock.spark_sink.ledger.kafka_target import Row, Target, missing_for, publishing
from penstock.spark_sink.ledger.rules import Batch, LedgerEntry, OffsetStatistics, warn_left_out
from penstock.spark_sink.sinks.position import POSITION
from penstock.spark_sink.source.plan import TopicPartition

T = TypeVar("T")

#: Topic of the ledger, where a sink names none.
LEDGER_TOPIC = "penstock.spark-ledger"

#: A transaction takes rows of one source partition up to so many, or so many bytes of keys and values.
PIECE_ROWS = 10_000
PIECE_BYTES = 8 * 1024 * 1024

#: Column of a row that says only where a batch ends, and all that such a row has.
IS_END = "penstock_end"
_MARK = (*POSITION, IS_END)

#: What this process's tasks publish by.
_publishers = PublisherPool()

_OWNED = {
    "transactional.id": "it is made of the sink's name; give the sink another name",
    "transaction.timeout.ms": "it is part of how the ledger is read",
    "message.timeout.ms": "it follows the transaction's",
    "enable.idempotence": "a transaction needs it",
    "isolation.level": "the ledger is read as committed",
}


class WriterCommitMessage(NamedTuple):
    """What a task tells the driver of the rows of one source partition."""

    topic: str
    partition: int
    rows: int
    applied: int
    last: int
    failure: str | None
    lacks_right: bool = False


#: Its columns, as Spark's DDL.
COMMIT_MESSAGE_DDL = (
    "topic string, partition int, rows bigint, applied bigint, last bigint, failure string, lacks_right boolean"
)


def require_settings(sink: str, bootstrap_servers: str, name: str, ledger_topic: str, config: ClientConfig) -> None:
    """Raise `ConfigurationError` where settings cannot be those of a sink of this kind."""
    not_empty("bootstrap_servers", bootstrap_servers)
    not_empty("name", name)
    not_empty("ledger_topic", ledger_topic)
    reserved(config, _OWNED, sink)
    for key, value in config.items():
        require_travelling(key, value)


def require_target(target: Target, topics: Sequence[str]) -> None:
    """Check rights and topics; make the ledger's.

    Raises:
        MissingRightError: the client may not publish to a topic, or not keep the ledger.
        TopicNotFoundError: a topic does not exist.
        BrokerConnectionError: no broker answered.
        ConfigurationError: the ledger's topic cannot be used, or the client library refuses the settings.
    """
    admin = clients.admin(target.servers, target.config)
    principal = principal_of(target.config)
    require_rights(admin, f"sink {target.name} cannot publish", target.rights(topics), principal)
    spec = TopicSpec(target.ledger, PARTITIONS, TOPIC_CONFIG)
    count = ensure_topics(admin, target.servers, [spec], principal=principal)[target.ledger]
    if count < PARTITIONS:
        raise ConfigurationError(
            f"topic {target.ledger} has {count} partitions, a ledger needs {PARTITIONS}; give another "
            "ledger_topic, which is made as it has to be"
        )
    policy = topic_setting(admin, [target.ledger], "cleanup.policy").get(target.ledger, "compact")
    if policy != "compact":
        raise ConfigurationError(
            f"topic {target.ledger} has cleanup.policy={policy}: Kafka deletes the ledger with time, and all is "
            "published again; set it to compact, or give another ledger_topic, which is made as it has to be"
        )
    if topics:
        require_topics(admin, target.servers, topics, principal=principal)


def ledger_of(target: Target, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, LedgerEntry]:
    """Return the entry of each partition that the ledger of a sink knows. Raises as `ledgers_of`."""
    found = list(partitions)
    return _read(target, lambda ledger: ledger.read(found))


def ledgers_of(target: Target) -> dict[str, dict[TopicPartition, LedgerEntry]]:
    """Return the entries of all sinks that keep theirs in the same topic, by the sinks' names.

    Raises:
        MissingRightError: the client may not read the ledger.
        SinkError: the ledger cannot be read.
        BrokerConnectionError: no broker answered.
    """
    return _read(target, KafkaLedger.read_all)


def _read(target: Target, read: Callable[[KafkaLedger], dict[T, Any]]) -> dict[T, Any]:
    admin = clients.admin(target.servers, target.config)
    # A topic that may not be seen looks like one that is not there, and the query would begin anew.
    reading = [topic_right(Operation.READ, target.ledger)]
    require_rights(admin, f"the ledger of sink {target.name} cannot be read", reading, principal_of(target.config))
    if target.ledger not in partition_counts(admin, target.servers):
        return {}
    ledger = KafkaLedger(target)
    try:
        return read(ledger)
    except KafkaException as error:
        raise SinkError(
            f"the ledger {target.ledger} of sink {target.name} could not be read: {reason(error)}; check the brokers"
        ) from error
    finally:
        ledger.close()


def begin_ledger(
    target: Target,
    entries: Mapping[TopicPartition, LedgerEntry | None],
    *,
    whole: bool,
    overwrite: bool = False,
) -> None:
    """Write where a query begins, in partitions that the ledger does not know, or in all. Its topic exists.

    Raises `SinkError` or `MissingRightError` where the ledger cannot be read or written. `whole` is whether a batch is
    one transaction.
    """
    ids = {part: whole_id(target.name) if whole else slot_id(target.name, part) for part in entries}
    try:
        begin(target, ids, entries, overwrite=overwrite)
    except Failure as error:
        of_kafka = error if isinstance(error, KafkaException) else None
        if missing := missing_for(target, (), of_kafka) if of_kafka else getattr(error, "rights", ()):
            what = f"the ledger of sink {target.name} cannot be written"
            raise MissingRightError(what, missing, principal_of(target.config)) from error
        raise SinkError(
            f"the ledger {target.ledger} of sink {target.name} could not be written: "
            f"{reason(of_kafka) if of_kafka else error}; check the brokers, and whether another query of this name runs"
        ) from error


def whole_id(name: str) -> str:
    """Return the transactional id by which a sink publishes batches as a whole."""
    return f"{name}/whole"


def ledger_options(topic: str) -> str:
    """Return the options by which `penstock sink` finds a ledger."""
    return f"--kafka --ledger-topic {shlex.quote(topic)}"


def with_ends(rows: DataFrame, batch: Batch) -> DataFrame:
    """Return rows to publish, and one for each partition where Spark has planned the batch to end.

    That one publishes nothing: the ledger moves there, whatever a filter has dropped.
    """
    ends = [
        F.struct(*(F.lit(value).alias(name) for name, value in zip(_MARK, (*part, end - 1, True), strict=True)))
        for part, (start, end) in sorted(batch.planned.items())
        if start != end
    ]
    if not ends:
        return rows
    marks = rows.sparkSession.range(0, 1, 1, 1).select(F.inline(F.array(*ends)))
    columns = [
        (F.col(one.name) if one.name in _MARK else F.lit(None)).cast(one.dataType).alias(one.name)
        for one in rows.schema.fields
    ]
    return rows.unionByName(marks.select(*columns))


def publish_by_source(
    target: Target, rows: Iterable[Row], publishers: PublisherPool | None = None
) -> Iterator[WriterCommitMessage]:
    """Publish rows, sorted by source partition and offset; tell what came of each partition.

    By a publisher of `publishers`, or of what this process keeps. No two tasks at a time have rows of one slot.
    A failure is in the commit message: an exception would reach the driver as the text of a worker's stack.
    """
    with (_publishers if publishers is None else publishers).lend(target) as publisher:
        try:
            for source, of_source in groupby(rows, key=lambda row: row.source):
                yield _published(target, source, of_source, publisher)
        except SinkError as error:
            publisher.has_failed = True
            yield WriterCommitMessage("", -1, 0, 0, -1, str(error))


def _published(
    target: Target, source: TopicPartition, rows: Iterable[Row], publisher: SinkPublisher
) -> WriterCommitMessage:
    """Publish the rows of one source partition, piece by piece, up to the first that fails."""
    count = applied = 0
    last = -1
    try:
        for piece in pieces(rows):
            applied += publish(target, slot_id(target.name, source), piece, publisher)
            count += publishing(piece)
            last = piece[-1].offset
    except (SinkError, ConfigurationError, MissingRightError) as error:
        publisher.has_failed = True
        return WriterCommitMessage(*source, count, applied, last, str(error), isinstance(error, MissingRightError))
    return WriterCommitMessage(*source, count, applied, last, None)


def pieces(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Cut rows of one source partition into what one transaction takes, never between rows of one offset."""
    piece: list[Row] = []
    size = 0
    for row in rows:
        if piece and row.offset != piece[-1].offset and (len(piece) >= PIECE_ROWS or size >= PIECE_BYTES):
            yield piece
            piece, size = [], 0
        piece.append(row)
        size += len(row.key or b"") + len(row.value or b"")
    if piece:
        yield piece


def publish_whole(target: Target, rows: Sequence[Row]) -> list[WriterCommitMessage]:
    """Publish a batch in one transaction, its rows sorted by source partition and offset. Raises as `publish`."""
    if not rows:
        return []
    with _publishers.lend(target) as publisher:
        applied = publish(target, whole_id(target.name), rows, publisher)
    return [WriterCommitMessage(*rows[0].source, publishing(rows), applied, rows[-1].offset, None)]


def conclude(batch_id: int, name: str, messages: Sequence[WriterCommitMessage]) -> None:
    """Warn of rows that were left out, and raise `SinkError` or `MissingRightError` where some were not published."""
    failures = [one.failure for one in messages if one.failure]
    statistics = OffsetStatistics(rows=sum(one.rows for one in messages))
    for one in messages:
        if one.applied:
            part = one.topic, one.partition
            statistics.applied[part] = statistics.applied.get(part, 0) + one.applied
    warn_left_out(batch_id, f"sink {name}", statistics)
    if failures:
        forbidden = [one.failure for one in messages if one.failure and one.lacks_right]
        text = f"batch {batch_id}: {(forbidden or failures)[0]} ({len(failures)} of {len(messages)} parts failed)"
        raise MissingRightError.from_text(text) if forbidden else SinkError(text)
