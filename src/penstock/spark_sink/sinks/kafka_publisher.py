"""Publishes rows and the ledger's entries of their sources in one Kafka transaction, for sinks that publish to Kafka.

The publisher takes these steps, and starts again at 1 if a step fails or its outcome is unknown:

1. A new producer takes the transactional id. The id's previous producer is fenced, and its open transaction ended.
2. The ledger is read up to its end after step 1; rows below its entries are left out.
3. Rows and new ledger records are written and committed in one transaction.

After a commit with a known end the producer is kept, and the next rows of its id begin at step 2. If another task
publishes these rows meanwhile, it has taken the id before it read the ledger. So either its rows are in the ledger that
is read here, or this producer is fenced and step 3 fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import tenacity
from confluent_kafka import KafkaError, KafkaException

from penstock import clients
from penstock.clients.kafka_errors import code_of, is_missing_right, is_transient, reason
from penstock.clients.rights import MissingRightError, Operation, Resource, Right, ask_rights, principal_of
from penstock.clients.transactional.end_watch import UnknownEndError
from penstock.clients.transactional.faults import Blamed, IdLostError, NotOpenedError, blamed
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.clients.transactional.writer import TransactionalWriter
from penstock.errors import PenstockError, SinkError
from penstock.spark_sink.ledger.rules import Batch, Span
from penstock.spark_sink.sinks.kafka_ledger import (
    ANSWER_S,
    TRANSACTION_TIMEOUT_S,
    KafkaLedger,
    Target,
    encode_entry,
    ledger_key,
    ledger_partition,
)
from penstock.spark_sink.sinks.sink import Changes, Entries
from penstock.spark_sink.source.plan import TopicPartition

_log = logging.getLogger("penstock.spark_sink")

#: Most producers that a sink keeps in a process: each has threads and connections.
MOST_PRODUCERS = 16

_TRIES = 6
#: Seconds before another try, doubled after each failure; randomised, so that two tasks that fence each other do not
#: stay in step.
_WAIT = tenacity.wait_exponential(multiplier=0.1) + tenacity.wait_random_exponential(multiplier=0.1)
#: Seconds within which some record must be stored: less than a transaction may take.
_DELIVERY_S = TRANSACTION_TIMEOUT_S - 5.0

#: Failures of a transaction after which another try may succeed.
Failure = (KafkaException, UnknownEndError, NotOpenedError, IdLostError, BufferError)


class Row(NamedTuple):
    """A row to publish and its source. Its content is never shown.

    A row without a target topic publishes nothing, but moves the ledger past its offset. For partition -1, the
    partitioner chooses.
    """

    source: TopicPartition
    offset: int
    target_topic: str | None
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    target_partition: int = -1

    def __repr__(self) -> str:
        return f"Row({self.source[0]}:{self.source[1]}@{self.offset} to {self.target_topic})"


def topics_of(rows: Iterable[Row]) -> set[str]:
    """Return the target topics of rows."""
    return {row.target_topic for row in rows if row.target_topic is not None}


def publishing(rows: Iterable[Row]) -> int:
    """Return how many rows publish something."""
    return sum(1 for row in rows if row.target_topic is not None)


#: From the ledger's entries, returns the rows to publish and the new entries.
Decide = Callable[[Entries], tuple[Sequence[Row], Changes]]


class SinkPublisher:
    """Publishes for tasks of one sink: it has the ledger's reader, and producers that have taken ids.

    Used by one task at a time. The next task continues reading the ledger, and uses a producer again if no other
    process has taken its id.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.ledger = KafkaLedger(target)
        #: By transactional id: an idle producer whose last transaction is known to have ended.
        self._idle: dict[str, TransactionalWriter] = {}

    def release(self) -> bool:
        """Return whether another task may use it."""
        return True

    def close(self) -> None:
        """Close the ledger's reader and the producers."""
        self.ledger.close()
        while self._idle:
            self._idle.popitem()[1].close()

    def publish(self, batch: Batch, rows: Sequence[Row]) -> int:
        """Publish rows of a batch and their new ledger entry in one transaction.

        The rows are of one source partition, in order of offset. All rows of an offset come in one call. Returns how
        many rows, of those that publish something, were applied before. If it raises `SinkError` or
        `MissingRightError`, none of the other rows is visible.
        """
        source, last = rows[0].source, rows[-1].offset
        offsets = [row.offset for row in rows if row.offset >= 0]  # a negative one marks the end of an empty batch
        spans = {source: Span(offsets[0], last)} if offsets else {}
        # This part of the batch ends after its last row, or at the batch's end.
        planned = {part: (start, min(last + 1, end)) for part, (start, end) in batch.planned.items() if part == source}
        part_of_batch = replace(batch, planned=planned)

        def decide(held: Entries) -> tuple[Sequence[Row], Changes]:
            if not held and source[0] not in batch.recreated:
                held = self.ledger.read(batch.planned)  # a new partition gets the topic's id from the others
            below = part_of_batch.applied_below(held)
            left = [row for row in rows if row.offset >= below.get(row.source, 0)]
            return left, part_of_batch.entries_after(held, spans)

        return publishing(rows) - publishing(self.write(rows, [source], decide))

    def write(self, rows: Sequence[Row], sources: Sequence[TopicPartition], decide: Decide) -> Sequence[Row]:
        """Read the ledger, let `decide` choose rows and entries, write both, and return the chosen rows.

        The source partitions share one transactional id. Raises `SinkError` or `MissingRightError`.
        """
        target, topics = self._target, topics_of(rows)
        transactional_id = target.transactional_id(sources[0])
        try:
            for attempt in tenacity.Retrying(
                stop=tenacity.stop_after_attempt(_TRIES),
                wait=_WAIT,
                retry=tenacity.retry_if_exception(lambda error: _may_pass(target, topics, error)),
                before_sleep=partial(_warn_retry, transactional_id),
                reraise=True,
            ):
                with attempt:
                    return self._write(transactional_id, sources, decide)
        except Failure as error:
            missing = _missing_rights(target, topics, error)
            what = f"sink {target.name}: {_places(rows) if rows else f'the ledger {target.ledger} was not written'}"
            if missing:
                raise MissingRightError(what, missing, principal_of(target.config)) from error
            raise SinkError(
                f"{what}: {reason(error)}, tries: {attempt.retry_state.attempt_number}; fix the topic or the row, or "
                "stop the other query of this name, and start the query again"
            ) from error
        raise AssertionError("tenacity ends with a result or an error")

    def _write(self, transactional_id: str, sources: Sequence[TopicPartition], decide: Decide) -> Sequence[Row]:
        writer = self._idle.pop(transactional_id, None) or _take_id(self._target, transactional_id)
        is_known = False
        try:
            # Also with a kept producer: another one may have taken the id since, and published.
            rows, entries = decide(self.ledger.read(sources))
            is_known = not (rows or entries) or _in_one_transaction(writer, self._target, rows, entries)
        finally:
            if not is_known:
                writer.close()
        if is_known:
            self._idle[transactional_id] = writer
            if len(self._idle) > MOST_PRODUCERS:
                self._idle.pop(next(iter(self._idle))).close()
        return rows


def _take_id(target: Target, transactional_id: str) -> TransactionalWriter:
    """Return a new producer that has taken an id. The previous producer is fenced, and its open transaction ended.

    Raises `NotOpenedError` or `IdLostError`.
    """
    # Java's partitioner: keys go to the same partitions as with Spark's own sink and Java producers.
    config = {"partitioner": "murmur2_random", **target.config}
    writer = TransactionalWriter(
        target.servers,
        config,
        transactional_id,
        log_topic=target.ledger,
        ids_right=target.ids_right,
        rights=MissingRights(config),
        transaction_s=TRANSACTION_TIMEOUT_S,
    )
    try:
        writer.open(ANSWER_S, ANSWER_S)
    except PenstockError:
        writer.close()
        raise
    return writer


def _in_one_transaction(writer: TransactionalWriter, target: Target, rows: Sequence[Row], entries: Changes) -> bool:
    """Publish rows and entries; return whether the producer can be used again. Raises the errors in `Failure`."""
    writer.begin()
    written = (
        (row.target_topic, row.target_partition, row.key, row.value, row.headers)
        for row in rows
        if row.target_topic is not None
    )
    keys = {ledger_key(target.name, source): entry for source, entry in entries.items()}
    ledger = ((target.ledger, ledger_partition(key), key, encode_entry(entry), ()) for key, entry in keys.items())
    try:
        writer.produce([("rows", written), ("ledger", ledger)], room_s=_DELIVERY_S)
        if not writer.deliver(_DELIVERY_S):
            unknown = KafkaError(KafkaError._FAIL, writer.blame.cause)  # noqa: SLF001 - the client library's public constants look so
            raise KafkaException(next(iter(writer.blame.errors.values()), unknown))  # noqa: TRY301 - as any other failure
    except (KafkaException, BufferError):
        # Otherwise readers would wait for its time-out. If the abort fails, the next producer of the id ends it.
        with suppress(KafkaException, UnknownEndError):
            writer.abort()
        raise
    try:
        writer.commit()
    except UnknownEndError as error:
        # The library may have repeated the EndTxn. If it arrives late, it would end the next transaction.
        if not error.is_committed:
            raise
        return False
    return True


def _may_pass(target: Target, topics: Collection[str], error: BaseException) -> bool:
    """Tell whether another try may help: not if a permission is missing or a record is at fault."""
    if not isinstance(error, Failure):
        return False
    if isinstance(error, KafkaException) and blamed(error.args[0]) is Blamed.MESSAGE:
        return False
    return not _missing_rights(target, topics, error)


def _missing_rights(target: Target, topics: Collection[str], error: BaseException) -> Sequence[Right]:
    """Return the missing permissions that caused a failure; empty if the cause is another.

    The client library reports a missing WRITE of a topic as INVALID_TXN_STATE or as purged records, unpredictably. So
    the brokers are asked after every permanent error.
    """
    if isinstance(error, NotOpenedError):
        return error.rights
    if not isinstance(error, KafkaException) or is_transient(error):
        return []
    code = code_of(error)
    if code == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
        return [target.ids_right]
    if code == KafkaError.CLUSTER_AUTHORIZATION_FAILED:
        return [Right(Operation.IDEMPOTENT_WRITE, Resource.CLUSTER)]
    needed = target.rights(topics)
    missing = ask_rights(clients.admin(target.servers, target.config), needed).missing
    # Refused a moment ago, and given by now or unknown: then any of them may be the cause.
    return missing or (needed if is_missing_right(error) else [])


def _warn_retry(transactional_id: str, state: tenacity.RetryCallState) -> None:
    if state.outcome is not None and (error := state.outcome.exception()) is not None:
        _log.warning("%s: publishing failed and is tried again: %s", transactional_id, reason(error))


def _places(rows: Sequence[Row]) -> str:
    first, last = rows[0], rows[-1]
    return (
        f"rows from {first.source[0]}:{first.source[1]}@{first.offset} to {last.source[0]}:{last.source[1]}@"
        f"{last.offset} were not published to {', '.join(sorted(topics_of(rows))) or 'the ledger'}"
    )


def change_ledger(target: Target, parts: Iterable[TopicPartition], change: Callable[[Entries], Changes]) -> None:
    """Apply `change` to the ledger's entries of some partitions. The ledger's topic exists.

    It takes the transactional ids of the partitions, so that no copy of the query publishes meanwhile. Raises
    `SinkError` or `MissingRightError` if the ledger cannot be read or written.
    """
    by_id: dict[str, list[TopicPartition]] = {}
    for part in parts:
        by_id.setdefault(target.transactional_id(part), []).append(part)
    with closing(SinkPublisher(target)) as publisher:
        for own in by_id.values():

            def decide(held: Entries, own: Collection[TopicPartition] = own) -> tuple[Sequence[Row], Changes]:
                return [], {part: entry for part, entry in change(held).items() if part in own}

            publisher.write([], own, decide)
