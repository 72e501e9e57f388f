"""Kafka transactions: what several partitions settle, made visible by one commit, or not at all.

Each Kafka transaction carries the target messages, the completions (in `done`) and the half and op positions. The
positions are sent with the coordinator's group metadata, so that the broker refuses a coordinator that lost its
partitions (a zombie) before anything of it becomes visible.

KAFKA-17754: an EndTxn that is delayed on the way can end a *later* transaction of the same producer, and librdkafka
does not have Kafka's newer protection. So after any EndTxn whose outcome is not known, or that `endings` saw repeated,
the producer is discarded and a new one initialised under the same transactional id, which bumps the epoch: a late
EndTxn of the old one is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, cast

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from penstock.config import ClientConfig
from penstock.errors import PenstockError
from penstock.kafka import base_config, client_refused, reason
from penstock.transactions.done_records import Carry, encode_done
from penstock.transactions.endings import CONTEXT, EndWatch, UnknownEndError
from penstock.transactions.pending import size_of
from penstock.transactions.records import Verdict, encode_discarded
from penstock.transactions.settlement import Pending, Share
from penstock.transactions.topics import StoreTopics

#: A coordinator that dies holds readers back no longer than this (and the broker's own round of checks).
TRANSACTION_TIMEOUT_MS = 10_000
_TIMEOUT_S = TRANSACTION_TIMEOUT_MS / 1000
#: Seconds to wait for a predecessor's transaction to end, or for a broker that is starting.
_INIT_TIMEOUT_S = 30.0
#: Seconds for a message to be stored: less than the end may take, so that one that cannot be ends in an abort.
_DELIVERY_S = 5.0
#: Seconds between two looks at what is still on its way: the least that the library can wait.
_LOOK_S = 0.001
#: What fails a send without being the message's fault, or its target's.
_NOBODYS_FAULT = frozenset(
    {
        KafkaError._PURGE_QUEUE,  # noqa: SLF001 - the client library's public constants look so, here and below
        KafkaError._PURGE_INFLIGHT,  # noqa: SLF001 - the library's public constants look so
        KafkaError._TRANSPORT,  # noqa: SLF001 - the library's public constants look so
        KafkaError.INVALID_PRODUCER_EPOCH,
    }
)
#: What the target cannot do for any message, now.
_TARGETS_FAULT = frozenset(
    {
        KafkaError._MSG_TIMED_OUT,  # noqa: SLF001 - the library's public constants look so
        KafkaError._TIMED_OUT,  # noqa: SLF001 - the library's public constants look so
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001 - the library's public constants look so
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001 - the library's public constants look so
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
    }
)
#: Largest batches, in bytes, from step to step: a batch is refused as a whole for one message in it, or for its size.
BATCH_BYTES = (1_000_000, 64_000, 4_000, 1)
#: Completions in one done record: half a megabyte.
_NOTES_PER_RECORD = 8_000
#: Bytes of carried transactions in one done record, about; one that is larger has a record of its own.
_CARRIED_BYTES = 512 << 10


class NotPublishedError(PenstockError):
    """A Kafka transaction did not end in a known commit.

    Args:
        text: why.
        failed: the transactions it was refused for, if it was them.
        targets: topics that could not take any message, each with the reason.
    """

    def __init__(
        self, text: str, failed: Sequence[Pending] = (), targets: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__(text)
        self.failed = failed
        self.targets = targets


class AbortedError(NotPublishedError):
    """A Kafka transaction was aborted for certain."""


class InDoubtError(NotPublishedError):
    """It is not known whether a Kafka transaction was committed; the done log tells, after `close` and `open`."""


class Publisher:
    """A transactional Kafka producer of one coordinator. Used by one thread at a time.

    Args:
        bootstrap_servers: Kafka's addresses.
        config: client settings by librdkafka's names.
        topics: the store's topics.
        transactional_id: an id no other producer uses.
        claim: what is written beside the half positions: who it was that committed them.
    """

    def __init__(
        self, bootstrap_servers: str, config: ClientConfig, topics: StoreTopics, transactional_id: str, claim: str
    ) -> None:
        self._topics = topics
        self._claim = claim
        self._settings: dict[str, Any] = {
            # Nothing is sent before its partition is part of the transaction: by then the batches are full anyhow.
            "linger.ms": 0,
            # What passed the half topic shall not fail here on the client's own limit: the broker's decides.
            "message.max.bytes": 100_000_000,
            "queue.buffering.max.messages": 1_000_000,
            # Transactions are short-lived; a send that cannot finish in time ends in an abort.
            "message.timeout.ms": int(_DELIVERY_S * 1000),
            # The broker answers CONCURRENT_TRANSACTIONS for some milliseconds after each commit, while it writes the
            # markers; the library then waits this long, and its default of 100 ms would be the latency of everything.
            "retry.backoff.ms": 1,
            "retry.backoff.max.ms": 5,
            # A topic deleted a moment ago fails soon, not after the default 30 s.
            "topic.metadata.propagation.max.ms": 3_000,
            **base_config(bootstrap_servers, config),
            "transactional.id": transactional_id,
            "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
            "delivery.report.only.error": True,
        }
        debug = str(self._settings.get("debug", ""))
        self._watch = EndWatch(self._settings["logger"], debugging=bool(debug))
        self._settings["debug"] = f"{debug},{CONTEXT}" if debug else CONTEXT
        self._settings["logger"] = self._watch
        self._producer: Producer | None = None
        # Transactions of the current group that the broker refused.
        self._failed: list[Pending] = []
        self._failure = ""
        # Topics that could take nothing, with the reason; and whether the done log was among them.
        self._targets: dict[str, str] = {}
        self._store_failed = False

    def open(self, batch_bytes: int = BATCH_BYTES[0]) -> None:
        """Make the producer and initialise it. The broker ends what a former producer of this id left open.

        Args:
            batch_bytes: how large its batches are at most.

        Raises:
            ConfigurationError: the client library refused the settings.
            InDoubtError: the broker did not answer in time; try again.
        """
        try:
            producer = Producer({"batch.size": batch_bytes, **self._settings})
        except KafkaException as error:
            raise client_refused(error) from error
        try:
            producer.init_transactions(_INIT_TIMEOUT_S)
        except KafkaException as error:
            raise InDoubtError(f"the coordinator's Kafka producer cannot start: {reason(error)}") from error
        self._producer = producer

    def close(self) -> None:
        """Discard the producer with all it holds."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
            producer.close()

    @property
    def is_open(self) -> bool:
        """Whether there is a producer to publish with."""
        return self._producer is not None

    def publish(self, shares: Mapping[int, Share], group_metadata: Any, produced: Callable[[], None]) -> None:
        """Settle what the partitions' shares hold in one Kafka transaction.

        Args:
            shares: by half partition.
            group_metadata: the coordinator's membership, as the client library gives it.
            produced: called when all is in the client library's hands.

        Raises:
            AbortedError: nothing of it is visible or ever will be; the producer can be used again.
            InDoubtError: nothing is known; close it, open it anew, then ask the done log.
        """
        producer = self._producer
        if producer is None:
            raise InDoubtError("the coordinator's Kafka producer is not open")
        self._failed, self._failure = [], ""
        self._targets, self._store_failed = {}, False
        try:
            # Lines from before, served now: they are not this transaction's.
            producer.poll(0)
            self._watch.begin()
            producer.begin_transaction()
            for partition, share in shares.items():
                self._produce(producer, partition, share)
            produced()
            producer.send_offsets_to_transaction(self._positions(shares), group_metadata, _TIMEOUT_S)
            self._await_delivery(producer)
            if self._failed or self._targets:
                # Committing would fail as well; this way it is certain that no EndTxn was sent.
                self._abort(producer, self._failure)
            self._commit(producer)
        except KafkaException as error:
            self._abort(producer, reason(error), error)
        except BufferError as error:
            self._abort(producer, "the client's buffer is full", error)

    def _await_delivery(self, producer: Producer) -> None:
        """Wait until all is stored, or something is not: the library would wait for the rest, and sends no more.

        Its `flush` looks every 10 ms where only failures are reported; that was most of a small group's time.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while len(producer) and not self._failed and not self._targets and time.monotonic() < deadline:
            producer.poll(_LOOK_S)

    def _commit(self, producer: Producer) -> None:
        """End the transaction with a commit."""
        try:
            self._watch.commit(producer, _TIMEOUT_S)
        except UnknownEndError as error:
            raise InDoubtError(str(error)) from error

    def _abort(self, producer: Producer, cause: str, error: Exception | None = None) -> None:
        """Abort the transaction; always raises."""
        failed = list(self._failed)
        # Where the store itself takes nothing, the targets are not to blame; nor where what timed out stood behind what
        # was refused.
        refused = {half.topic for pending in failed for half in pending.halves}
        targets = {} if self._store_failed else {t: why for t, why in self._targets.items() if t not in refused}
        cause = self._failure or cause
        try:
            self._watch.abort(producer, _TIMEOUT_S)
        except UnknownEndError as unknown:
            raise InDoubtError(f"{unknown}; after: {cause}", failed, targets) from unknown
        raise AbortedError(f"a Kafka transaction was aborted: {cause}", failed, targets) from error

    def _positions(self, shares: Mapping[int, Share]) -> list[TopicPartition]:
        positions = []
        for partition, share in shares.items():
            beside = f"{self._claim} {share.log_ids}".rstrip()
            positions.append(TopicPartition(self._topics.half, partition, share.half_checkpoint, beside))
            positions.append(TopicPartition(self._topics.op, partition, share.op_checkpoint, share.log_ids))
            positions.append(TopicPartition(self._topics.done, partition, share.done_checkpoint, share.log_ids))
        return positions

    def _produce(self, producer: Producer, partition: int, share: Share) -> None:
        for pending in share.decided:
            if pending.verdict is Verdict.COMMIT:
                self._produce_messages(producer, pending)
            elif pending.verdict is Verdict.DISCARD:
                for half in pending.halves:
                    headers = cast("Any", encode_discarded(half, "checks exhausted", pending.check_count))
                    failed = partial(self._refused, pending)
                    producer.produce(self._topics.discarded, half.value, half.key, -1, failed, headers=headers)
        notes = share.notes()
        for start in range(0, len(notes), _NOTES_PER_RECORD):
            value = encode_done(notes[start : start + _NOTES_PER_RECORD])
            producer.produce(self._topics.done, value, None, partition, self._not_written)
        for carries in _in_records(share.carried):
            producer.produce(self._topics.done, encode_done((), carries), None, partition, self._not_written)

    def _produce_messages(self, producer: Producer, pending: Pending) -> None:
        produce = producer.produce
        failed = partial(self._refused, pending)
        for half in pending.halves:
            target = -1 if half.partition is None else half.partition
            try:
                if half.headers:
                    produce(half.topic, half.value, half.key, target, failed, headers=cast("Any", list(half.headers)))
                else:
                    produce(half.topic, half.value, half.key, target, failed)
            except KafkaException as error:
                self._blame(pending, half.topic, error.args[0])
                raise

    def _refused(self, pending: Pending, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._blame(pending, message.topic() or "", error)

    def _blame(self, pending: Pending, topic: str, error: KafkaError) -> None:
        """Find out what it is that failed: this message, its target, or something that concerns all."""
        code = error.code()
        if code in _NOBODYS_FAULT:
            return
        if code in _TARGETS_FAULT:
            self._targets[topic] = reason(error)
            self._failure = self._failure or f"{topic} takes no message: {reason(error)}"
        else:
            self._failed.append(pending)
            self._failure = f"{topic} refused the message of transaction {pending.half.transaction_id}: {reason(error)}"

    def _not_written(self, error: KafkaError | None, _: Message) -> None:
        if error is not None and error.code() not in _NOBODYS_FAULT:
            self._store_failed = True


def _in_records(carries: Sequence[Carry]) -> Iterator[Sequence[Carry]]:
    """Yield what goes into one done record each."""
    group: list[Carry] = []
    size = 0
    for carry in carries:
        carried = sum(size_of(half) for _, _, half in carry.halves)
        if group and size + carried > _CARRIED_BYTES:
            yield group
            group, size = [], 0
        group.append(carry)
        size += carried
    if group:
        yield group


__all__ = [
    "BATCH_BYTES",
    "TRANSACTION_TIMEOUT_MS",
    "AbortedError",
    "InDoubtError",
    "NotPublishedError",
    "Publisher",
]
