"""Publishes rows and the next offsets of their sources in one Kafka transaction.

Whoever publishes takes these steps, and starts again at 1 whenever one of them fails or its outcome is not known:

1. A new producer takes the transactional id. Whoever had it before is fenced, and what it left open is ended.
2. The ledger is read, up to where it ended after step 1; rows below it are left out.
3. Rows and new ledger records are written and committed, in one transaction.

After a commit that is known to have ended the producer is kept (`kafka_producers`), and the next rows of its id begin
at step 2: whoever else publishes these rows has taken the id in the meantime, before it read the ledger. So either what
it has published stands in the ledger that is read here, or this producer is fenced, and step 3 fails.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import tenacity
from confluent_kafka import KafkaError, KafkaException

from penstock.clients.kafka_errors import reason
from penstock.clients.rights import MissingRightError, Resource, Right, principal_of
from penstock.clients.transactional.end_watch import UnknownEndError
from penstock.clients.transactional.errors import IdLostError, NotOpenedError
from penstock.clients.transactional.faults import Blamed, blamed
from penstock.errors import PenstockError, SinkError
from penstock.spark_sink.ledger.kafka_ledger import (
    TRANSACTION_TIMEOUT_S,
    KafkaLedger,
    encode_entry,
    ledger_key,
    ledger_partition,
)
from penstock.spark_sink.ledger.kafka_producers import SinkPublisher, SlotProducer, take_id
from penstock.spark_sink.ledger.kafka_target import Row, Target, missing_for, publishing, topics_of
from penstock.spark_sink.ledger.rules import Batch, LedgerEntry, Span, unknown
from penstock.spark_sink.source import plan as planning

_log = logging.getLogger("penstock.spark_sink")

Entries = Mapping[planning.TopicPartition, LedgerEntry | None]

_TRIES = 6
#: Seconds to wait after the first failure, twice as many after each other; by chance between a half and the whole, for
#: two that fence each other shall not do so in step.
_WAIT = tenacity.wait_exponential(multiplier=0.1) + tenacity.wait_random_exponential(multiplier=0.1)
#: Seconds in which some record has to be stored: less than a transaction may take.
_DELIVERY_S = TRANSACTION_TIMEOUT_S - 5.0

#: Trying again does not help against these, nor against what is a record's own fault.
_FINAL = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001 - the client library's public constants look so
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001 - the same
    }
)
#: What a transaction fails with, and the next try may not.
Failure = (KafkaException, UnknownEndError, NotOpenedError, IdLostError)


def publish(target: Target, transactional_id: str, rows: Sequence[Row], publisher: SinkPublisher) -> int:
    """Publish rows and the ledger after them in one transaction.

    Returns how many of the rows were applied before, of those that publish something.
    All rows of an offset come in one call, and per source partition in the order of their offsets. Of rows that end in
    a `SinkError` or a `MissingRightError` none that was not applied before is visible.
    """
    try:
        for attempt in _retrying(target, transactional_id, rows):
            with attempt:
                return _published(target, transactional_id, rows, publisher)
    except Failure as error:
        missing = _missing(target, rows, error)
        if not any(right.resource is Resource.TRANSACTIONAL_ID for right in missing):
            _end_what_is_open(target, transactional_id)
        if missing:
            principal = principal_of(target.config)
            raise MissingRightError(f"sink {target.name}: {_places(rows)}", missing, principal) from error
        raise SinkError(
            f"sink {target.name}: {_places(rows)}: {_why(error)}, tries: {attempt.retry_state.attempt_number}; mend "
            "the topic or the row, or stop the other query of this name, and start the query again"
        ) from error
    raise AssertionError("tenacity ends with a result or an error")


def _missing(target: Target, rows: Sequence[Row], error: BaseException) -> Sequence[Right]:
    """Return the rights for want of which rows were not published."""
    if isinstance(error, NotOpenedError):
        return error.rights
    return missing_for(target, topics_of(rows), error) if isinstance(error, KafkaException) else ()


def _retrying(target: Target, transactional_id: str, rows: Sequence[Row]) -> tenacity.Retrying:
    return tenacity.Retrying(
        stop=tenacity.stop_after_attempt(_TRIES),
        wait=_WAIT,
        retry=tenacity.retry_if_exception(lambda error: _may_pass(target, rows, error)),
        before_sleep=partial(_warn_retry, transactional_id),
        reraise=True,
    )


def _may_pass(target: Target, rows: Sequence[Row], error: BaseException) -> bool:
    """Tell whether another try may help: not where a right is missing, nor against an error that stays."""
    if not isinstance(error, Failure):
        return False
    if isinstance(error, KafkaException):
        cause = error.args[0]
        if cause.code() in _FINAL or blamed(cause) is Blamed.MESSAGE:
            return False
    return not _missing(target, rows, error)


def _why(error: BaseException) -> str:
    return reason(error) if isinstance(error, KafkaException) else str(error)


def _warn_retry(transactional_id: str, state: tenacity.RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome is not None else None
    if error is not None:
        _log.warning("%s: publishing failed and is tried again: %s", transactional_id, _why(error))


def _published(target: Target, transactional_id: str, rows: Sequence[Row], publisher: SinkPublisher) -> int:
    kept = publisher.taken(transactional_id)
    if kept is not None:
        try:
            return _published_by(kept, target, transactional_id, rows, publisher)
        except (*Failure, _OvertakenError):
            # Fenced, as a rule. A new one knows no less.
            _log.debug("%s is taken again", transactional_id, exc_info=True)
    return _published_by(take_id(target, transactional_id), target, transactional_id, rows, publisher)


def begin(
    target: Target, ids: Mapping[planning.TopicPartition, str], entries: Entries, *, overwrite: bool = False
) -> None:
    """Write where a query begins, in source partitions that the ledger does not know; `overwrite` those it knows, too.

    By the transactional id that a partition's rows are published by, so that no copy of the query publishes meanwhile.
    Raises as `Failure` says, or `SinkError` where the ledger cannot be read.
    """
    ledger = KafkaLedger(target)
    try:
        for transactional_id in sorted({ids[part] for part in entries}):
            of_id = [part for part in entries if ids[part] == transactional_id]
            begun = {part: entry for part in of_id if (entry := entries[part]) is not None}
            # A ledger that was made a moment ago may have no leader yet.
            for attempt in _retrying(target, transactional_id, []):
                with attempt:
                    producer = take_id(target, transactional_id)
                    try:
                        known = {} if overwrite else ledger.read(of_id)
                        new: Entries = unknown(known, begun) | {part: None for part in of_id if part not in begun}
                        if new:
                            _in_one_transaction(producer, target, [], new)
                    finally:
                        producer.writer.close()
    finally:
        ledger.close()


class _OvertakenError(Exception):
    """Another producer has published by the id since."""


def _published_by(
    producer: SlotProducer, target: Target, transactional_id: str, rows: Sequence[Row], publisher: SinkPublisher
) -> int:
    is_known = False
    try:
        held = publisher.ledger.read(list(dict.fromkeys(row.source for row in rows)))
        if producer.is_kept and not producer.may_own(held):
            raise _OvertakenError
        batch = _piece(target.batch, rows)
        below = batch.applied_below(held)
        left = [row for row in rows if row.offset >= below.get(row.source, 0)]
        entries = batch.entries_after(held, _spans(rows))
        producer.known |= held
        is_known = not (left or entries) or _in_one_transaction(producer, target, left, entries)
        return publishing(rows) - publishing(left)
    finally:
        if is_known:
            publisher.keep(transactional_id, producer)
        else:
            producer.writer.close()


def _piece(batch: Batch, rows: Iterable[Row]) -> Batch:
    """Return the part of a batch that these rows are: it ends behind the last of them, or where the batch does."""
    ends = {row.source: row.offset + 1 for row in rows}
    planned = {
        source: (batch.planned[source][0], min(end, batch.planned[source][1]))
        for source, end in ends.items()
        if source in batch.planned
    }
    return replace(batch, planned=planned)


def _spans(rows: Iterable[Row]) -> dict[planning.TopicPartition, Span]:
    """Return the lowest and the highest offset of each source partition; its rows come in the order of offsets."""
    spans: dict[planning.TopicPartition, Span] = {}
    for row in rows:
        if row.offset >= 0:  # others are ends of an empty batch
            spans[row.source] = Span(spans.get(row.source, Span(row.offset, row.offset)).first, row.offset)
    return spans


def _in_one_transaction(slot: SlotProducer, target: Target, rows: Sequence[Row], entries: Entries) -> bool:
    """Publish rows and the ledger after them; tell whether the producer may serve again. Raises as `Failure` says."""
    writer = slot.writer
    writer.begin()
    written = (
        (row.target_topic, row.target_partition, row.key, row.value, row.headers)
        for row in rows
        if row.target_topic is not None
    )
    writer.produce("rows", written, room_s=_DELIVERY_S)
    keys = {ledger_key(target.name, source): entry for source, entry in entries.items()}
    ledger = ((target.ledger, ledger_partition(key), key, encode_entry(entry), ()) for key, entry in keys.items())
    writer.produce("ledger", ledger, room_s=_DELIVERY_S)
    if not writer.deliver(_DELIVERY_S):
        raise KafkaException(next(iter(writer.blame.errors.values()), KafkaError(KafkaError._FAIL, writer.blame.cause)))  # noqa: SLF001 - the client library's public constants look so
    try:
        writer.commit()
    except UnknownEndError as error:
        # An order to commit that arrives late, because the client library has repeated it, would end the next one.
        if not error.is_committed:
            raise
        return False
    slot.known |= {source: entry for source, entry in entries.items() if entry is not None}
    return True


def _end_what_is_open(target: Target, transactional_id: str) -> None:
    """End a transaction that was given up, so that readers do not wait for its timeout. As far as possible."""
    try:
        take_id(target, transactional_id).writer.close()
    except PenstockError as error:
        _log.warning("%s: what is open ends by its timeout: %s", transactional_id, error)


def _places(rows: Sequence[Row]) -> str:
    first, last = rows[0], rows[-1]
    return (
        f"rows from {first.source[0]}[{first.source[1]}] offset {first.offset} to {last.source[0]}[{last.source[1]}] "
        f"offset {last.offset} were not published to {', '.join(sorted(topics_of(rows))) or 'the ledger'}"
    )
