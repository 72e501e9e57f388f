"""Kafka transactions: what several partitions settle, made visible by one commit, or not at all.

Each Kafka transaction carries the target messages, the completions (in `done`) and the half and op positions. The
positions are sent with the coordinator's group metadata, so that the broker refuses a coordinator that lost its
partitions (a zombie) before anything of it becomes visible. One that is tried apart from the others moves no positions:
it sends one that nobody reads, for the sake of that refusal.

A producer whose transaction failed is not used again: the client library clears a failed transaction away in its own
time (0.01 to 1.5 s, or not at all), and the next one may fail for gaps in its sequence numbers (librdkafka 2.16, seen).
Its successor, initialised under the same transactional id, has the broker end what was left open, at once.

KAFKA-17754: an EndTxn that is delayed on the way can end a *later* transaction of the same producer, and librdkafka
does not have Kafka's newer protection. So after any EndTxn whose outcome is not known, or that `endings` saw repeated,
the producer is discarded and a new one initialised under the same transactional id, which bumps the epoch: a late
EndTxn of the old one is refused.

A transactional id can be lost: a topic whose `max.message.bytes` is smaller than a transaction marker keeps the broker
from ever ending the transactions that touched it, and it answers CONCURRENT_TRANSACTIONS to whatever comes under that
id until it is restarted (Kafka 4.3, seen). What became of them is settled by then, so the next producer takes another.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn, cast

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from penstock import clients
from penstock.clients.kafka import reason
from penstock.clients.rights import Operation, Right, group_right, is_missing_right, topic_right, transactional_right
from penstock.errors import PenstockError
from penstock.options import ClientConfig
from penstock.transactions.coordinator.state.pending import size_of
from penstock.transactions.coordinator.state.state_machine import CommitBatch, Pending
from penstock.transactions.wire.discarded import encode_discarded
from penstock.transactions.wire.done_records import Snapshot, encode_done
from penstock.transactions.wire.ops import Verdict
from penstock.transactions.wire.topics import StoreTopics
from penstock.transactions.writing.end_watch import CONTEXT, EndWatch, UnknownEndError
from penstock.transactions.writing.faults import AddWatch, is_forbidden
from penstock.transactions.writing.missing_rights import MissingRights

_log = logging.getLogger("penstock.transactions")

#: A coordinator that dies holds readers back no longer than this (and the broker's own round of checks).
TRANSACTION_TIMEOUT_MS = 10_000
#: Seconds for each of the calls that end a transaction. Its owner holds a bound of its own, on all of them.
_TIMEOUT_S = 5.0
#: Seconds for the reports of what a failed transaction had on its way.
_PURGE_S = 0.5
#: Seconds that initialising a producer may take, and for which an id that the broker cannot free is asked for.
_INIT_TIMEOUT_S = 15.0
_FREE_TIMEOUT_S = 4.0
#: Seconds for a message to be stored: less than a transaction may take, so that one that cannot be ends in an abort.
_DELIVERY_S = 5.0
#: Seconds after which messages that are not stored count as refused, where others of the group are: their topics are
#: tried apart, with more patience.
_IMPATIENT_S = 1.0
#: Seconds between two looks at what is still on its way: the least that the library can wait.
_LOOK_S = 0.001
#: What fails a send without being the message's fault, or its target's.
_NOBODYS_FAULT = frozenset(
    {
        KafkaError._TRANSPORT,  # noqa: SLF001 - the client library's public constants look so, here and below
        KafkaError._FENCED,  # noqa: SLF001 - the library's public constants look so
        KafkaError._STATE,  # noqa: SLF001 - the library's public constants look so
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
        KafkaError.OPERATION_NOT_ATTEMPTED,
    }
)
_TOO_LARGE = frozenset({KafkaError.MSG_SIZE_TOO_LARGE})
#: What a purge reports of messages that were on their way, or had nowhere to go yet.
_PURGED = frozenset(
    {
        KafkaError._PURGE_QUEUE,  # noqa: SLF001 - the library's public constants look so
        KafkaError._PURGE_INFLIGHT,  # noqa: SLF001 - the library's public constants look so
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
#: Completions in one done record: half a megabyte.
_NOTES_PER_RECORD = 8_000
#: Bytes of snapshotted transactions in one done record, about; one that is larger has a record of its own.
_SNAPSHOT_BYTES = 512 << 10


class NotPublishedError(PenstockError):
    """A Kafka transaction did not end in a known commit.

    Args:
        text: why.
        failed: ids of the transactions it was refused for, if it was them, each with the reason.
        targets: topics that could not take any message, each with the reason.
        too_large: ids of those that were refused for their size.
        rights: what the coordinator lacks for its own topics, group and ids, if that was the reason.
    """

    def __init__(
        self,
        text: str,
        failed: Mapping[str, str] = MappingProxyType({}),
        targets: Mapping[str, str] = MappingProxyType({}),
        too_large: Collection[str] = (),
        rights: Collection[Right] = (),
    ) -> None:
        super().__init__(text)
        self.too_large = too_large
        self.rights = rights
        self.failed = failed
        self.targets = targets


class AbortedError(NotPublishedError):
    """Nothing of a Kafka transaction is visible or ever will be: no end was sent that could commit it."""


class TooLargeError(AbortedError):
    """What was to be published together does not fit into the client's buffer."""


class InDoubtError(NotPublishedError):
    """It is not known whether a Kafka transaction was committed; the done log tells once a successor was opened."""


class IdLostError(PenstockError):
    """The broker cannot end what was left open under a transactional id; all of that is settled, take another id."""


class Publisher:
    """A transactional Kafka producer of one coordinator, for as long as none of its transactions fails.

    Made, used and closed by one thread, which may be left behind in any call.

    Args:
        bootstrap_servers: Kafka's addresses.
        config: client settings by librdkafka's names.
        topics: the store's topics.
        transactional_id: an id that no other producer uses.
        claim: returns what is written beside the half positions: who it was that committed them.
        rights: where it is noted what the coordinator lacks.
        apart: whether it tries what failed before, apart from the others: it produces the targets' messages first, and
            has nothing to do with the store's topics before those are stored; and each message is a batch, so that
            what the broker refuses is named.
    """

    def __init__(  # noqa: PLR0917 - all of them are what a producer is made of
        self,
        bootstrap_servers: str,
        config: ClientConfig,
        topics: StoreTopics,
        transactional_id: str,
        claim: Callable[[], str],
        rights: MissingRights,
        apart: bool = False,
    ) -> None:
        self.transactional_id = transactional_id
        self._bootstrap_servers = bootstrap_servers
        self._topics = topics
        self._claim = claim
        self._rights = rights
        self._apart = apart
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
            "batch.size": 1 if apart else 1_000_000,
            **config,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
            "delivery.report.only.error": True,
        }
        if apart:
            # A topic made a moment ago knows nothing of this producer and takes any sequence number first: of two
            # requests under way, the second may pass the first, whose messages are then lost as "duplicates".
            self._settings["max.in.flight"] = 1
        debug = str(self._settings.get("debug", ""))
        self._watch = EndWatch(clients.log_of(config), debugging=bool(debug))
        self._settings["debug"] = f"{debug},{CONTEXT}" if debug else CONTEXT
        self._added = self._settings["logger"] = AddWatch(self._watch)
        self._producer: Producer | None = None
        #: What it is doing now, for the log, and since when in monotonic seconds. Written by its thread, read by any.
        self.doing = ""
        self.since = 0.0
        # The right to end the transaction under way with a commit, a single token: its thread takes it before it does
        # so, or its owner takes it away. A list, for taking the last item of one is a single step.
        self._may_commit: list[None] = []
        # Transactions of the current group that the broker refused, by id; the first reason is the one to tell.
        self._failed: dict[str, Pending] = {}
        self._failure = ""
        # Topics that could take nothing, with the reason; and whether the store's own were among them.
        self._targets: dict[str, str] = {}
        self._store_failed = False
        self._why: dict[str, str] = {}
        self._too_large: set[str] = set()
        # Where messages were that a purge took back.
        self._late: set[str] = set()

    def open(self) -> None:
        """Make the producer and initialise it. The broker ends what a former producer of this id left open.

        Raises:
            ConfigurationError: the client library refused the settings.
            IdLostError: it cannot, and this id is of no use any more.
            InDoubtError: the broker did not answer in time; try again.
        """
        self._do("Producer")
        self._producer = clients.producer(self._bootstrap_servers, self._settings)
        self._do("init_transactions")
        deadline = time.monotonic() + _INIT_TIMEOUT_S
        while True:
            try:
                self._producer.init_transactions(_FREE_TIMEOUT_S)
            except KafkaException as error:
                if error.args[0].code() == KafkaError.CONCURRENT_TRANSACTIONS:
                    raise IdLostError(
                        f"the broker cannot end a Kafka transaction of {self.transactional_id}: {reason(error)}; a "
                        "topic may be unable to take the marker that ends it"
                    ) from error
                what = "the coordinator's Kafka producer cannot start"
                if is_missing_right(error):
                    right = transactional_right(f"{self._topics.coordinators}.")
                    raise InDoubtError(self._rights.refused(what, right), rights=[right]) from error
                if time.monotonic() > deadline or not error.args[0].retriable():
                    raise InDoubtError(f"{what}: {reason(error)}") from error
            else:
                self._rights.granted(transactional_right(f"{self._topics.coordinators}."))
                self.doing = ""
                return

    def _do(self, what: str) -> None:
        """Note what is done now."""
        self.since = time.monotonic()
        self.doing = what

    def forbid_commit(self) -> bool:
        """Take away the right to commit what is under way; tell whether it was not used: then it comes to nothing."""
        try:
            self._may_commit.pop()
        except IndexError:
            return False
        return True

    def close(self) -> None:
        """Discard the producer with all it holds, and end what it left open, if nobody has done so by now."""
        producer, self._producer = self._producer, None
        if producer is not None:
            self._do("close")
            producer.purge()
            # Its destructor closes it; `close()` would try to abort first, and warn of what is to be expected.
            del producer
            self.doing = ""

    def publish(self, batches: Mapping[int, CommitBatch], group_metadata: Any, produced: Callable[[], None]) -> None:
        """Settle what the partitions' batches hold in one Kafka transaction. After an error it can only be closed.

        Args:
            batches: by half partition.
            group_metadata: the coordinator's membership, as the client library gives it.
            produced: called when all is in the client library's hands.

        Raises:
            AbortedError: nothing of it is visible or ever will be.
            InDoubtError: nothing is known; open a successor, then ask the done log.
        """
        producer = self._producer
        if producer is None:
            raise InDoubtError("the coordinator's Kafka producer is not open")
        self._failed, self._failure, self._why, self._too_large = {}, "", {}, set()
        self._targets, self._store_failed, self._late = {}, False, set()
        try:
            self._do("begin_transaction")
            # Lines from before, served now: they are not this transaction's.
            producer.poll(0)
            self._watch.begin()
            self._added.begin()
            self._may_commit = [None]
            producer.begin_transaction()
            for batch in batches.values():
                self._produce_decided(producer, batch)
            if self._apart:
                produced()
                self._await_delivery(producer, _DELIVERY_S)
            for partition, batch in batches.items():
                self._produce_done(producer, partition, batch)
            produced()
            self._do("send_offsets_to_transaction")
            producer.send_offsets_to_transaction(self._positions(batches), group_metadata, _TIMEOUT_S)
            self._await_delivery(producer, _DELIVERY_S if self._apart else _IMPATIENT_S)
        except KafkaException as error:
            self._failed_with(producer, reason(error), error)
        except BufferError as error:
            raise TooLargeError("the client's buffer is full (queue.buffering.max.kbytes)") from error
        self._commit(producer)

    def _await_delivery(self, producer: Producer, patience_s: float) -> None:
        """Wait until all is stored. Where something is not, raise: committing would fail as well.

        The library's `flush` looks every 10 ms where only failures are reported; that was most of a small group's time.
        """
        self._do("delivery")
        deadline = time.monotonic() + patience_s
        while len(producer) and not self._failure:
            producer.poll(_LOOK_S)
            if time.monotonic() > deadline and not self._failure:
                self._failure = f"not all was stored within {patience_s:g} s"
        if self._failure:
            self._failed_with(producer, self._failure)

    def _commit(self, producer: Producer) -> None:
        """End the transaction with a commit."""
        if not self.forbid_commit():
            raise AbortedError("it took too long, and its owner gave it up")
        self._do("commit_transaction")
        try:
            self._watch.commit(producer, _TIMEOUT_S)
        except UnknownEndError as error:
            raise InDoubtError(str(error)) from error
        except KafkaException as error:
            # The broker refused the end, or none was sent.
            self._failed_with(producer, reason(error), error)
        self.doing = ""
        topics = self._topics
        self._rights.granted(
            topic_right(Operation.WRITE, topics.done),
            group_right(topics.coordinators),
            *(topic_right(Operation.READ, log) for log in self._positioned()),
        )

    def _failed_with(self, producer: Producer, cause: str, error: Exception | None = None) -> NoReturn:
        """Tell that the transaction came to nothing, and what it failed for."""
        self._name_forbidden(producer)
        lacked = self._lacked(error)
        if lacked:
            text = self._rights.refused("what is decided cannot be published", *lacked)
            raise AbortedError(text, rights=lacked) from error
        is_refused = bool(self._failed or self._targets)
        self._name_the_rest(producer)
        text = f"a Kafka transaction came to nothing: {self._failure or cause}"
        if self._store_failed:
            # The targets are not to blame.
            raise AbortedError(text) from error
        if not is_refused and error is None and self._topics.done not in self._late:
            # Others were stored in time.
            raise AbortedError(text, {}, dict.fromkeys(self._late, "it did not store a message in time")) from error
        # What timed out stood behind what was refused.
        refused = {half.topic for pending in self._failed.values() for half in pending.halves}
        targets = {topic: why for topic, why in self._targets.items() if topic not in refused}
        raise AbortedError(text, self._why, targets, self._too_large) from error

    def _name_forbidden(self, producer: Producer) -> None:
        """Learn from the client library's log which targets the broker did not let into the transaction."""
        with contextlib.suppress(KafkaException):
            # Serves the log.
            producer.poll(0)
        for topic, why in self._added.refused.items():
            if topic != self._topics.done:
                named = self._targets[topic] = self._forbidden(topic) if is_forbidden(why) else why
                self._failure = f"{topic} takes no message: {named}"

    def _forbidden(self, topic: str) -> str:
        return self._rights.lacks(topic_right(Operation.WRITE, topic))

    def _lacked(self, error: Exception | None) -> list[Right]:
        """Return what the coordinator has no right to among what is its own; what is of targets is no matter here."""
        done = self._topics.done
        if is_forbidden(self._added.refused.get(done, "")):
            return [topic_right(Operation.WRITE, done)]
        if self._added.refused or not isinstance(error, KafkaException) or not is_missing_right(error):
            return []
        code = error.args[0].code()
        if code == KafkaError.GROUP_AUTHORIZATION_FAILED:
            return [group_right(self._topics.coordinators)]
        if code == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            return [transactional_right(f"{self._topics.coordinators}.")]
        if self.doing == "send_offsets_to_transaction":
            # Who commits a position in a topic has to be allowed to read it. Which one it was stands in the text alone.
            logs = self._positioned()
            named = [log for log in logs if f"{log}(" in reason(error)]
            return [topic_right(Operation.READ, log) for log in named or logs]
        return []

    def _positioned(self) -> list[str]:
        """Return the topics in which it commits positions."""
        topics = self._topics
        return [topics.discarded] if self._apart else [topics.half, topics.op, topics.done]

    def _name_the_rest(self, producer: Producer) -> None:
        """Learn what else is not stored: a purge reports it, each message by its name."""
        try:
            producer.purge()
            until = time.monotonic() + _PURGE_S
            while len(producer) and time.monotonic() < until:
                producer.poll(_LOOK_S)
        except KafkaException as error:
            _log.debug("a failed producer could not be purged: %s", reason(error))

    def _positions(self, batches: Mapping[int, CommitBatch]) -> list[TopicPartition]:
        if self._apart:
            return [TopicPartition(self._topics.discarded, partition, 0) for partition in batches]
        positions, claim = [], self._claim()
        for partition, batch in batches.items():
            beside = f"{claim} {batch.log_ids}".rstrip()
            positions.append(TopicPartition(self._topics.half, partition, batch.half_checkpoint, beside))
            positions.append(TopicPartition(self._topics.op, partition, batch.op_checkpoint, batch.log_ids))
            positions.append(TopicPartition(self._topics.done, partition, batch.done_checkpoint, batch.log_ids))
        return positions

    def _produce_decided(self, producer: Producer, batch: CommitBatch) -> None:
        for pending in batch.decided:
            if pending.verdict is Verdict.COMMIT:
                self._produce_messages(producer, pending)
            elif pending.verdict is Verdict.DISCARD:
                for half in pending.halves:
                    headers = cast("Any", encode_discarded(half, pending.discard_reason, pending.check_count))
                    failed = partial(self._refused, pending)
                    producer.produce(self._topics.discarded, half.value, half.key, -1, failed, headers=headers)

    def _produce_done(self, producer: Producer, partition: int, batch: CommitBatch) -> None:
        notes = batch.notes()
        for start in range(0, len(notes), _NOTES_PER_RECORD):
            value = encode_done(notes[start : start + _NOTES_PER_RECORD])
            producer.produce(self._topics.done, value, None, partition, self._not_written)
        for snapshots in _in_records(batch.snapshots):
            producer.produce(self._topics.done, encode_done((), snapshots), None, partition, self._not_written)

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
            self._failure = self._failure or reason(error)
            return
        if code in _PURGED:
            self._late.add(topic)
            return
        if code in _TARGETS_FAULT:
            text = self._forbidden(topic) if is_missing_right(error) else reason(error)
            self._targets.setdefault(topic, text)
            self._failure = self._failure or f"{topic} takes no message: {text}"
            return
        why = f"{topic}: {reason(error)}"
        if code in _TOO_LARGE:
            self._too_large.add(pending.half.transaction_id)
        self._failed[pending.half.transaction_id] = pending
        self._why[pending.half.transaction_id] = why
        self._failure = self._failure or f"the message of transaction {pending.half.transaction_id} is refused: {why}"

    def _not_written(self, error: KafkaError | None, _: Message) -> None:
        if error is None:
            return
        if error.code() in _PURGED:
            self._late.add(self._topics.done)
            return
        self._store_failed = self._store_failed or error.code() not in _NOBODYS_FAULT
        self._failure = self._failure or f"{self._topics.done} was not written: {reason(error)}"


def _in_records(snapshots: Sequence[Snapshot]) -> Iterator[Sequence[Snapshot]]:
    """Yield what goes into one done record each."""
    group: list[Snapshot] = []
    size = 0
    for snapshot in snapshots:
        snapshotted = sum(size_of(half) for _, _, half in snapshot.halves)
        if group and size + snapshotted > _SNAPSHOT_BYTES:
            yield group
            group, size = [], 0
        group.append(snapshot)
        size += snapshotted
    if group:
        yield group


__all__ = [
    "TRANSACTION_TIMEOUT_MS",
    "AbortedError",
    "IdLostError",
    "InDoubtError",
    "NotPublishedError",
    "Publisher",
    "TooLargeError",
]
