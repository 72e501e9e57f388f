"""Publishes rows and the next offsets of their sources in one Kafka transaction, for the sinks that publish to Kafka.

Whoever publishes takes these steps, and starts again at 1 whenever one of them fails or its outcome is not known:

1. A new producer takes the transactional id. Whoever had it before is fenced, and what it left open is ended.
2. The ledger is read, up to where it ended after step 1; rows below it are left out.
3. Rows and new ledger records are written and committed, in one transaction.

After a commit that is known to have ended the producer is kept, and the next rows of its id begin at step 2: whoever
else publishes these rows has taken the id in the meantime, before it read the ledger. So either what it has published
stands in the ledger that is read here, or this producer is fenced, and step 3 fails.
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

#: Producers that a sink keeps in a process at most: each has threads and connections.
MOST_PRODUCERS = 16

_TRIES = 6
#: Seconds to wait after the first failure, twice as many after each other; by chance between a half and the whole, for
#: two that fence each other shall not do so in step.
_WAIT = tenacity.wait_exponential(multiplier=0.1) + tenacity.wait_random_exponential(multiplier=0.1)
#: Seconds in which some record has to be stored: less than a transaction may take.
_DELIVERY_S = TRANSACTION_TIMEOUT_S - 5.0

#: What a transaction fails with, and the next try may not.
Failure = (KafkaException, UnknownEndError, NotOpenedError, IdLostError, BufferError)


class Row(NamedTuple):
    """A row as it is published, and where it comes from. What it holds is never shown.

    One without a target topic publishes nothing: it moves the ledger past its offset. A partition of -1 is left to the
    partitioner.
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
    """Return the topics that rows are published to."""
    return {row.target_topic for row in rows if row.target_topic is not None}


def publishing(rows: Iterable[Row]) -> int:
    """Return how many rows publish something."""
    return sum(1 for row in rows if row.target_topic is not None)


#: Makes of the ledger's entries what a transaction writes: rows, and what is to stand in the ledger.
Decide = Callable[[Entries], tuple[Sequence[Row], Changes]]


class SinkPublisher:
    """What a task publishes by: the reader of its sink's ledger, and producers that have taken an id.

    One task uses it at a time. Another one of the same sink may have it afterwards: then the ledger is read on from
    where it was read to, and a producer serves again whose id nobody else has taken.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.ledger = KafkaLedger(target)
        #: By transactional id: a producer without an open transaction, whose last one is known to have ended.
        self._idle: dict[str, TransactionalWriter] = {}

    def release(self) -> bool:
        """Tell whether another task may use it."""
        return True

    def close(self) -> None:
        """Close the ledger's reader and the producers."""
        self.ledger.close()
        while self._idle:
            self._idle.popitem()[1].close()

    def publish(self, batch: Batch, rows: Sequence[Row]) -> int:
        """Publish rows of a batch and the ledger after them in one transaction.

        They are of one source partition, in the order of their offsets, and all rows of an offset come in one call.
        Returns how many of them were applied before, of those that publish something. Of rows that end in a `SinkError`
        or a `MissingRightError` none that was not applied before is visible.
        """
        source, last = rows[0].source, rows[-1].offset
        offsets = [row.offset for row in rows if row.offset >= 0]  # another one is the end of an empty batch
        spans = {source: Span(offsets[0], last)} if offsets else {}
        # The part of the batch that these rows are ends behind the last of them, or where the batch does.
        planned = {part: (start, min(last + 1, end)) for part, (start, end) in batch.planned.items() if part == source}
        part_of_batch = replace(batch, planned=planned)

        def decide(held: Entries) -> tuple[Sequence[Row], Changes]:
            below = part_of_batch.applied_below(held)
            left = [row for row in rows if row.offset >= below.get(row.source, 0)]
            return left, part_of_batch.entries_after(held, spans)

        return publishing(rows) - publishing(self.write(rows, [source], decide))

    def write(self, rows: Sequence[Row], sources: Sequence[TopicPartition], decide: Decide) -> Sequence[Row]:
        """Write what `decide` makes of the ledger's entries: some of the rows, which are returned, and entries.

        The source partitions are of one transactional id. Raises `SinkError` or `MissingRightError`.
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
            # Of a producer that is kept, too: another one may have taken the id since, and published.
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
    """Return a new producer that has taken an id: whoever had it is fenced, and what it left open is ended.

    Raises `NotOpenedError` or `IdLostError`.
    """
    # Java's partitioner: keys go to the partitions in which Spark's own sink and Java's producers put them.
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
    """Publish rows and the ledger after them; tell whether the producer may serve again. Raises as `Failure` says."""
    writer.begin()
    written = (
        (row.target_topic, row.target_partition, row.key, row.value, row.headers)
        for row in rows
        if row.target_topic is not None
    )
    keys = {ledger_key(target.name, source): entry for source, entry in entries.items()}
    ledger = ((target.ledger, ledger_partition(key), key, encode_entry(entry), ()) for key, entry in keys.items())
    try:
        writer.produce("rows", written, room_s=_DELIVERY_S)
        writer.produce("ledger", ledger, room_s=_DELIVERY_S)
        if not writer.deliver(_DELIVERY_S):
            unknown = KafkaError(KafkaError._FAIL, writer.blame.cause)  # noqa: SLF001 - the client library's public constants look so
            raise KafkaException(next(iter(writer.blame.errors.values()), unknown))  # noqa: TRY301 - as any other failure
    except (KafkaException, BufferError):
        # Else readers would wait for its timeout. One that cannot be ended here is ended by who takes the id next.
        with suppress(KafkaException, UnknownEndError):
            writer.abort()
        raise
    try:
        writer.commit()
    except UnknownEndError as error:
        # An order to commit that arrives late, because the client library has repeated it, would end the next one.
        if not error.is_committed:
            raise
        return False
    return True


def _may_pass(target: Target, topics: Collection[str], error: BaseException) -> bool:
    """Tell whether another try may help: not where a right is missing, nor against what is a record's own fault."""
    if not isinstance(error, Failure):
        return False
    if isinstance(error, KafkaException) and blamed(error.args[0]) is Blamed.MESSAGE:
        return False
    return not _missing_rights(target, topics, error)


def _missing_rights(target: Target, topics: Collection[str], error: BaseException) -> Sequence[Right]:
    """Return the rights for want of which nothing was written; none where something else is wrong.

    The client library reports a topic's missing WRITE as INVALID_TXN_STATE or as purged records, by chance: so the
    brokers are asked wherever an error is none that passes.
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
    # Refused a moment ago, and given by now or not known: then any of them may have been meant.
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
    """Write what `change` makes of the ledger's entries of some partitions.

    By the transactional ids that the partitions' rows are published by, so that no copy of the query publishes
    meanwhile. Its topic exists. Raises `SinkError` or `MissingRightError` where the ledger cannot be read or written.
    """
    by_id: dict[str, list[TopicPartition]] = {}
    for part in parts:
        by_id.setdefault(target.transactional_id(part), []).append(part)
    with closing(SinkPublisher(target)) as publisher:
        for own in by_id.values():

            def decide(held: Entries, own: Collection[TopicPartition] = own) -> tuple[Sequence[Row], Changes]:
                return [], {part: entry for part, entry in change(held).items() if part in own}

            publisher.write([], own, decide)
