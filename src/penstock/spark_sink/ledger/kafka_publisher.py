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
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import tenacity
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from penstock.clients.kafka_errors import reason
from penstock.clients.rights import MissingRightError, Resource, principal_of
from penstock.errors import SinkError
from penstock.spark_sink.ledger.kafka_ledger import (
    POLL_S,
    TRANSACTION_TIMEOUT_S,
    KafkaLedger,
    encode_entry,
    ledger_key,
    ledger_partition,
)
from penstock.spark_sink.ledger.kafka_producers import SinkPublisher, SlotProducer, take_id
from penstock.spark_sink.ledger.kafka_target import Row, Target, missing_for, publishing, topics_of
from penstock.spark_sink.ledger.rules import LedgerEntry, Span, unknown
from penstock.spark_sink.source.offsets import planning

_log = logging.getLogger("penstock.spark_sink")

Entries = Mapping[planning.TopicPartition, LedgerEntry | None]

_TRIES = 6
#: Seconds to wait after the first failure, twice as many after each other; by chance between a half and the whole, for
#: two that fence each other shall not do so in step.
_WAIT = tenacity.wait_exponential(multiplier=0.1) + tenacity.wait_random_exponential(multiplier=0.1)

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
#: Records that are sent between two looks at what became of those before.
_POLL_EVERY = 100
#: What befalls records because of another one, or because the producer was shut out.
_PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001 - the same


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


def publish(target: Target, transactional_id: str, rows: Sequence[Row], publisher: SinkPublisher) -> int:
    """Publish rows and the ledger after them in one transaction.

    Returns how many of the rows were applied before, of those that publish something.
    All rows of an offset come in one call, and per source partition in the order of their offsets. Of rows that end in
    a `SinkError` or a `MissingRightError` none that was not applied before is visible.
    """
    try:
        for attempt in tenacity.Retrying(
            stop=tenacity.stop_after_attempt(_TRIES),
            wait=_WAIT,
            retry=tenacity.retry_if_exception(lambda error: _may_pass(target, rows, error)),
            before_sleep=partial(_warn_retry, transactional_id),
            reraise=True,
        ):
            with attempt:
                return _published(target, transactional_id, rows, publisher)
    except KafkaException as error:
        missing = missing_for(target, topics_of(rows), error)
        if not any(right.resource is Resource.TRANSACTIONAL_ID for right in missing):
            _end_what_is_open(target, transactional_id)
        if missing:
            principal = principal_of(target.config)
            raise MissingRightError(f"sink {target.name}: {_places(rows)}", missing, principal) from error
        raise _refused(target, rows, error, tries=attempt.retry_state.attempt_number) from error
    raise AssertionError("tenacity ends with a result or an error")


def _may_pass(target: Target, rows: Sequence[Row], error: BaseException) -> bool:
    """Tell whether another try may help: not where a right is missing, nor against an error that stays."""
    if not isinstance(error, KafkaException):
        return False
    cause = error.args[0]
    if isinstance(cause, KafkaError) and cause.code() in _FINAL:
        return False
    return not missing_for(target, topics_of(rows), error)


def _warn_retry(transactional_id: str, state: tenacity.RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome is not None else None
    if isinstance(error, KafkaException):
        _log.warning("%s: publishing failed and is tried again: %s", transactional_id, reason(error))


def _published(target: Target, transactional_id: str, rows: Sequence[Row], publisher: SinkPublisher) -> int:
    kept = publisher.taken(transactional_id)
    if kept is not None:
        try:
            return _published_by(kept, target, transactional_id, rows, publisher)
        except (KafkaException, _OvertakenError):
            # Fenced, as a rule. A new one knows no less.
            _log.debug("%s: taken anew", transactional_id, exc_info=True)
    return _published_by(take_id(target, transactional_id), target, transactional_id, rows, publisher)


def begin(
    target: Target, ids: Mapping[planning.TopicPartition, str], entries: Entries, *, overwrite: bool = False
) -> None:
    """Write where a query begins, in source partitions that the ledger does not know; `overwrite` those it knows, too.

    By the transactional id that a partition's rows are published by, so that no copy of the query publishes meanwhile.
    Raises `KafkaException`, or `SinkError` where the ledger cannot be read.
    """
    ledger = KafkaLedger(target)
    try:
        for transactional_id in sorted({ids[part] for part in entries}):
            producer = take_id(target, transactional_id)
            try:
                of_id: dict[planning.TopicPartition, Any] = {
                    part: entry for part, entry in entries.items() if ids[part] == transactional_id
                }
                new = of_id if overwrite else unknown(ledger.read(list(of_id)), of_id)
                if new:
                    _in_one_transaction(producer, target, [], new)
            finally:
                producer.discard()
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
        below = target.batch.applied_below(held)
        left = [row for row in rows if row.offset >= below.get(row.source, 0)]
        entries = target.batch.entries_after(held, _spans(rows))
        producer.known |= held
        is_known = _in_one_transaction(producer, target, left, entries) if left else True
        return publishing(rows) - publishing(left)
    finally:
        if is_known:
            publisher.keep(transactional_id, producer)
        else:
            producer.discard()


def _spans(rows: Iterable[Row]) -> dict[planning.TopicPartition, Span]:
    """Return the lowest and the highest offset of each source partition; its rows come in the order of offsets."""
    spans: dict[planning.TopicPartition, Span] = {}
    for row in rows:
        spans[row.source] = Span(spans.get(row.source, Span(row.offset, row.offset)).first, row.offset)
    return spans


def _in_one_transaction(slot: SlotProducer, target: Target, rows: Sequence[Row], entries: Entries) -> bool:
    """Publish rows and the ledger after them; tell whether the producer may serve again."""
    attempt, producer = _Attempt(), slot.client
    slot.watch.begin()
    producer.begin_transaction()
    for number, row in enumerate(rows):
        if row.target_topic is not None:
            place = row.target_partition
            _send(producer, attempt, row.target_topic, row.value, row.key, partition=place, headers=row.headers)
        if number % _POLL_EVERY == 0:
            producer.poll(0)  # where records are refused, `attempt` hears of it, and no more are sent
    for source, entry in entries.items():
        key = ledger_key(target.name, source)
        _send(producer, attempt, target.ledger, encode_entry(entry), key, partition=ledger_partition(key))
    deadline = time.monotonic() + TRANSACTION_TIMEOUT_S
    while len(producer) and not attempt.has_cause and time.monotonic() < deadline:
        producer.flush(POLL_S)
    if attempt.error is not None:
        raise KafkaException(attempt.error)
    is_known = slot.commit()
    slot.known |= {source: entry for source, entry in entries.items() if entry is not None}
    return is_known


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
            producer.produce(topic, value, key, partition, attempt.reported, headers=cast("Any", headers or None))
        except BufferError:
            producer.poll(POLL_S)
        else:
            return


def _end_what_is_open(target: Target, transactional_id: str) -> None:
    """End a transaction that was given up, so that readers do not wait for its timeout. As far as possible."""
    try:
        take_id(target, transactional_id).discard()
    except KafkaException as error:
        _log.warning("%s: what is open ends by its timeout: %s", transactional_id, reason(error))


def _places(rows: Sequence[Row]) -> str:
    first, last = rows[0], rows[-1]
    return (
        f"rows from {first.source[0]}[{first.source[1]}] offset {first.offset} to {last.source[0]}[{last.source[1]}] "
        f"offset {last.offset} were not published to {', '.join(sorted(topics_of(rows))) or 'the ledger'}"
    )


def _refused(target: Target, rows: Sequence[Row], error: KafkaException, *, tries: int) -> SinkError:
    return SinkError(
        f"sink {target.name}: {_places(rows)}: {reason(error)}, tries: {tries}; mend the topic or the row, or "
        "stop the other query of this name, and start the query anew"
    )
