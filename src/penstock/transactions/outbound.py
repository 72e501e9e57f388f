"""Exactly-once publication into Kafka from a store that is not in Kafka: a database, a file.

Such a store cannot put "published" and the messages into one transaction. So each Kafka transaction carries, beside the
messages, the ids of what it publishes, in a log of its own: `done`. What the store still holds as committed is
published unless `done` has it; and nobody else can be writing there, since whoever opens an `Outbound` fences its
predecessor, whose open transaction is ended by then. The order that makes this hold is the store's to keep:

1. `open()`: the predecessor is shut out, and what it published, and the store may not know of, is returned.
2. The store marks those as published, durably.
3. Only now it reads what is to be published, making sure in the same step that it still owns the shard.
4. `publish()`, then the store marks what was published, durably; now and then `forget()`.
5. After `InDoubtError`: make sure of the ownership, and start again at 1.

A process that dies anywhere leaves the next one at 1. One that was thought dead and goes on after another has opened is
refused by the broker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from penstock.config import ClientConfig
from penstock.errors import PenstockError
from penstock.kafka import base_config, client_refused, reason
from penstock.transactions.done_log import DoneLog, encode_ids
from penstock.transactions.endings import CONTEXT, EndWatch, UnknownEndError
from penstock.transactions.records import Line

_log = logging.getLogger("penstock.transactions")

#: A process that dies in a transaction holds readers back no longer than this, or until its successor opens.
_TIMEOUT_S = 10.0
#: Less, so that a topic that does not answer is known before the transaction times out.
_SEND_TIMEOUT_S = 6.0
_OPEN_TIMEOUT_S = 30.0
_POLL_S = 0.1
#: Seconds before an abort, seen with librdkafka 2.16.
_CLEARING_S = 0.3
#: Ids in one record of the done log: an eighth of a megabyte.
_IDS_PER_RECORD = 8_000
#: The whole topic is to blame for these, whatever the message.
_TOPICS_FAULT = frozenset(
    {
        KafkaError._MSG_TIMED_OUT,  # noqa: SLF001 - the client library's public constants look so, here and below
        KafkaError._TIMED_OUT,  # noqa: SLF001 - the same
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001 - the same
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001 - the same
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    }
)
#: What befalls messages because another one failed, or because the producer was fenced.
_NOBODYS_FAULT = frozenset(
    {
        KafkaError._PURGE_QUEUE,  # noqa: SLF001 - the library's public constants look so
        KafkaError._PURGE_INFLIGHT,  # noqa: SLF001 - the same
        KafkaError._TRANSPORT,  # noqa: SLF001 - the same
        KafkaError._FENCED,  # noqa: SLF001 - the same
        KafkaError._STATE,  # noqa: SLF001 - the same
        KafkaError.INVALID_PRODUCER_EPOCH,
    }
)


class InDoubtError(PenstockError):
    """It is not known what became of a Kafka transaction, or who publishes now: make sure of that and `open` again."""


class OutboundMessage(NamedTuple):
    """A message as it is published."""

    topic: str
    #: None: Kafka's partitioner chooses.
    partition: int | None
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class Publishable(NamedTuple):
    """A transaction to publish: all its messages or none."""

    transaction_id: str
    messages: Sequence[OutboundMessage]
    #: Of those that share it, a later one is not published before an earlier one. None: order does not matter.
    line: Line | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of transactions that were to be published. Each is in one of the three.

    Attributes:
        published: ids of those that are visible, in their order.
        refused: those that cannot be published now, by id, each with the reason. Nothing of them is visible.
        held: ids of those that wait, for one that was refused or because the broker has trouble. Nothing of them is
            visible.
    """

    published: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Blame:
    """Why a Kafka transaction was aborted: by transaction id, and by topic where all of a topic is to blame."""

    ids: dict[str, str] = field(default_factory=dict)
    topics: dict[str, str] = field(default_factory=dict)
    cause: str = ""


_Group = list[tuple[int, Publishable]]


@dataclass(slots=True)
class _Order:
    """Which lines stand still, and from which place on."""

    stopped: dict[Line, int] = field(default_factory=dict)
    #: Whether the last group was aborted without a refusal, and is being tried again.
    tried_again: bool = False

    def stop(self, place: int, entry: Publishable) -> None:
        if entry.line is not None:
            self.stopped[entry.line] = min(place, self.stopped.get(entry.line, place))

    def allows(self, place: int, entry: Publishable, outcome: Outcome) -> bool:
        """Tell whether an entry may go; one that waits behind another is noted as held."""
        if entry.line is None or self.stopped.get(entry.line, place) >= place:
            return True
        outcome.held.append(entry.transaction_id)
        return False


class Outbound:
    """Publishes what one shard of a store holds. Used by one thread at a time.

    Args:
        bootstrap_servers: Kafka's addresses.
        config: client settings by librdkafka's names.
        transactional_id: the same for every owner of the shard, and no other's.
        done: the shard's own done log.
    """

    def __init__(self, bootstrap_servers: str, config: ClientConfig, *, transactional_id: str, done: DoneLog) -> None:
        base = base_config(bootstrap_servers, config)
        debug = str(base.get("debug", ""))
        self._watch = EndWatch(base["logger"], debugging=bool(debug))
        self._settings: dict[str, Any] = {
            "linger.ms": 1,
            "message.max.bytes": 100_000_000,
            "queue.buffering.max.messages": 1_000_000,
            "message.timeout.ms": int(_SEND_TIMEOUT_S * 1000),
            # As in `publisher`: the waits after CONCURRENT_TRANSACTIONS would be the latency of everything.
            "retry.backoff.ms": 1,
            "retry.backoff.max.ms": 5,
            "topic.metadata.propagation.max.ms": 3_000,
            **base,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": int(_TIMEOUT_S * 1000),
            "debug": f"{debug},{CONTEXT}" if debug else CONTEXT,
            "logger": self._watch,
        }
        self._done = done
        self._name = transactional_id
        self._producer: Producer | None = None
        # All of the done log below this offset may go once the store has marked it.
        self._known_to = 0
        # Of the transaction under way: written by delivery callbacks, which the thread that publishes serves.
        self._blame = _Blame()
        self._done_offset: int | None = None
        #: Kafka transactions committed.
        self.groups = 0
        #: Times it was opened.
        self.opened = 0

    @property
    def is_open(self) -> bool:
        """Whether there is a producer to publish with."""
        return self._producer is not None

    def open(self) -> frozenset[str]:
        """Shut every other publisher of the shard out, and return the ids that were published and not forgotten yet.

        Raises:
            ConfigurationError: the client library refused the settings.
            InDoubtError: the broker did not answer in time; nothing is open, try again.
        """
        self.close()
        try:
            producer = Producer(self._settings)
        except KafkaException as error:
            raise client_refused(error) from error
        try:
            # What the predecessor left open is ended, and its markers are written, when this returns.
            producer.init_transactions(_OPEN_TIMEOUT_S)
            self._known_to, found = self._done.read()
        except (KafkaException, TimeoutError) as error:
            _discard(producer)
            cause = reason(error) if isinstance(error, KafkaException) else error
            raise InDoubtError(f"{self._name} cannot open: {cause}; trying again helps") from error
        except BaseException:
            _discard(producer)
            raise
        self._producer = producer
        self.opened += 1
        return found

    def close(self) -> None:
        """Discard the producer with all it holds."""
        producer, self._producer = self._producer, None
        if producer is not None:
            _discard(producer)

    def publish(self, entries: Iterable[Publishable]) -> Outcome:
        """Publish transactions in their order, in as few Kafka transactions as it takes.

        What a topic refuses is set apart, and what shares its order key waits behind it; the others are published.

        Raises:
            InDoubtError: nothing is known of some of them, and it is closed; `open` tells what was published.
        """
        outcome = Outcome()
        order = _Order()
        groups = [list(enumerate(entries))]
        while groups:
            group = [(place, entry) for place, entry in groups.pop() if order.allows(place, entry, outcome)]
            if group:
                groups.extend(reversed(self._publish_group(group, outcome, order)))
        return outcome

    def forget(self) -> None:
        """Let the done log go as far as it is known: all that `open` and `publish` returned is marked durably."""
        self._done.forget(self._known_to)

    def _publish_group(self, group: _Group, outcome: Outcome, order: _Order) -> list[_Group]:
        """Publish a group in one Kafka transaction; where it was aborted, return what to try next, in order."""
        try:
            blame = self._transaction([entry for _, entry in group])
        except InDoubtError:
            self.close()
            raise
        if blame is None:
            order.tried_again = False
            outcome.published.extend(entry.transaction_id for _, entry in group)
            return []
        left: _Group = []
        for place, entry in group:
            why = blame.ids.get(entry.transaction_id) if len(group) == 1 else None
            why = why or next((blame.topics[m.topic] for m in entry.messages if m.topic in blame.topics), None)
            if why is None:
                left.append((place, entry))
            else:
                outcome.refused[entry.transaction_id] = why
                order.stop(place, entry)
        if len(left) < len(group):
            return [left]
        if blame.ids and len(group) > 1:
            # The client library fails whole batches for one message: who is to blame is found by halving.
            middle = len(group) // 2
            return [group[:middle], group[middle:]]
        if not blame.ids and not order.tried_again:
            # After a refusal the library may fail one more transaction, for gaps in its sequence numbers.
            order.tried_again = True
            return [group]
        _log.warning("%s: a Kafka transaction was aborted: %s; it is tried again", self._name, blame.cause)
        for place, entry in group:
            outcome.held.append(entry.transaction_id)
            order.stop(place, entry)
        return []

    def _transaction(self, group: list[Publishable]) -> _Blame | None:
        """Run one Kafka transaction; return None when it is committed, or why it was aborted."""
        producer = self._producer
        if producer is None:
            raise InDoubtError(f"{self._name} is not open")
        self._blame, self._done_offset = _Blame(), None
        try:
            producer.poll(0)
            self._watch.begin()
            producer.begin_transaction()
            for entry in group:
                self._produce(producer, entry)
            self._produce_done(producer, [entry.transaction_id for entry in group])
            self._await_delivery(producer)
            if not self._blame.cause:
                self._commit(producer)
                return None
        except KafkaException as error:
            self._blame.cause = self._blame.cause or reason(error)
        self._abort(producer)
        return self._blame

    def _await_delivery(self, producer: Producer) -> None:
        """Wait until all is delivered or something failed: what comes behind a failed message would time out."""
        deadline = time.monotonic() + _SEND_TIMEOUT_S
        while len(producer) and not self._blame.cause:
            producer.poll(_POLL_S)
            if time.monotonic() > deadline + 1:
                self._blame.cause = f"{len(producer)} messages were not delivered within {_SEND_TIMEOUT_S:g} s"

    def _produce(self, producer: Producer, entry: Publishable) -> None:
        for message in entry.messages:
            reported = partial(self._reported, entry.transaction_id)
            try:
                _send(producer, message, reported)
            except KafkaException as error:
                self._refused(entry.transaction_id, message.topic, error.args[0])
                raise

    def _produce_done(self, producer: Producer, ids: list[str]) -> None:
        for start in range(0, len(ids), _IDS_PER_RECORD):
            value = encode_ids(ids[start : start + _IDS_PER_RECORD])
            _send(
                producer, OutboundMessage(self._done.topic, self._done.partition, None, value, ()), self._done_reported
            )

    def _reported(self, transaction_id: str, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._refused(transaction_id, str(message.topic()), error)

    def _done_reported(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self._done_offset = message.offset()
        else:
            self._blame.cause = self._blame.cause or f"{self._done.topic}: {reason(error)}"

    def _refused(self, transaction_id: str, topic: str, error: KafkaError) -> None:
        if error.code() in _NOBODYS_FAULT:
            return
        text = f"{topic}: {reason(error)}"
        (self._blame.topics if error.code() in _TOPICS_FAULT else self._blame.ids)[
            topic if error.code() in _TOPICS_FAULT else transaction_id
        ] = text
        self._blame.cause = text

    def _commit(self, producer: Producer) -> None:
        try:
            self._watch.commit(producer, _TIMEOUT_S)
        except UnknownEndError as error:
            raise InDoubtError(f"{self._name}: {error}") from error
        self.groups += 1
        if self._done_offset is not None:
            self._known_to = self._done_offset + 1

    def _abort(self, producer: Producer) -> None:
        # What was refused takes the library a moment to clear away; an abort in that moment waits for time-outs.
        until = time.monotonic() + _CLEARING_S
        while (left := until - time.monotonic()) > 0:
            producer.poll(left)
        try:
            self._watch.abort(producer, _TIMEOUT_S)
        except UnknownEndError as error:
            raise InDoubtError(f"{self._name}: {error}, after: {self._blame.cause}") from error


def _send(producer: Producer, message: OutboundMessage, reported: Callable[[KafkaError | None, Message], None]) -> None:
    """Hand a message to the client library; wait for room in its buffer."""
    partition = -1 if message.partition is None else message.partition
    headers = cast("Any", list(message.headers))
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            producer.produce(message.topic, message.value, message.key, partition, reported, headers=headers)
        except BufferError:
            if time.monotonic() > deadline:
                raise KafkaException(KafkaError(KafkaError._QUEUE_FULL)) from None  # noqa: SLF001 - the library's public constants look so
            producer.poll(_POLL_S)
        else:
            return


def _discard(producer: Producer) -> None:
    producer.purge()
    producer.close()


__all__ = ["InDoubtError", "Outbound", "OutboundMessage", "Outcome", "Publishable"]
