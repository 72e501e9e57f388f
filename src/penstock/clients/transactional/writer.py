"""One transactional producer: it opens, begins, produces, waits for deliveries, and ends.

A producer whose transaction failed is not used again. Its next one could fail for gaps in its sequence numbers, at any
wait in between (librdkafka 2.16, seen: OUT_OF_ORDER_SEQUENCE_NUMBER up to a second after the abort). The aborts
themselves take milliseconds, as long as one request at a time is under way where each message is a batch.

KAFKA-17754: an EndTxn that is delayed on the way can end a *later* transaction of the same producer, and librdkafka
does not have Kafka's newer protection. So an end that was repeated, or not answered, is in doubt (`end_watch`): then
the producer is discarded, and a new one under the same transactional id bumps the epoch: a late EndTxn is refused.

A transactional id can be lost: a topic whose `max.message.bytes` is smaller than a transaction marker keeps the broker
from ever ending the transactions that touched it, and it answers CONCURRENT_TRANSACTIONS to whatever comes under that
id until it is restarted (Kafka 4.3, seen).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Any, Protocol

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from penstock import clients
from penstock.clients.client_log import client_log
from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.rights import Operation, Right, topic_right
from penstock.clients.transactional.end_watch import EndWatch, UnknownEndError
from penstock.clients.transactional.faults import Blame, GivenUpError, IdLostError, NotOpenedError, is_forbidden
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.clients.transactional.settings import Pace, initialise, producer_settings
from penstock.options import ClientConfig

_log = logging.getLogger("penstock.transactions")

#: A writer that dies in a transaction holds readers back no longer than this, or until its successor opens; on slow
#: brokers it is longer (see `Pace`).
TRANSACTION_S = 10.0
#: Seconds within which some message has to be stored where brokers are well: less than a transaction may take, so that
#: one that cannot be ends in an abort.
DELIVERY_S = 5.0
#: Seconds for the reports of what a failed transaction had on its way.
_PURGE_S = 0.5
#: Seconds of a `flush`, in which nothing lingers, at least and at most. Where only failures are reported it looks at
#: its end, and every 10 ms: that was most of a small group's time. Each wakes the library's threads, too.
_MIN_FLUSH_S = 0.001
_MAX_FLUSH_S = 0.01
#: Messages that are handed to the library in one go.
_BREATH = 64
#: Seconds of one wait for room in the library's buffer.
_ROOM_S = 0.1
#: Seconds for each of the calls that end a transaction, on brokers that are well.
_END_CALL_S = 5.0
#: The call that ignores its time-out while the coordinator of a group is away, and seconds that it is given: it comes
#: last, when a node that is away has cost the transaction some seconds already.
SENDS_POSITIONS = "send_offsets_to_transaction"
_STANDS_S = 1.0
#: Seconds for what is under way when a transaction fails, before it is aborted: one that arrives behind the marker of
#: the abort would begin another transaction, at brokers before 4.0.
_IN_FLIGHT_S = 0.3

#: Called with each message that was stored.
Delivered = Callable[[Message], None]
#: A message as it is written: topic, partition (None: Kafka's partitioner chooses), key, value and headers.
Written = tuple[str, int | None, bytes | None, bytes | None, Sequence[tuple[str, str | bytes | None]]]


class PublicationSpans(Protocol):
    """Makes spans of published messages; called on the writer's thread, and raises nothing."""

    def begin(self) -> None:
        """Begin a Kafka transaction; what was not committed is forgotten."""

    def written(self, topic: str, headers: Sequence[tuple[str, str | bytes | None]]) -> None:
        """Take note of a message."""

    def committed(self) -> None:
        """Report the messages: they are visible."""


class State(Enum):
    """Where a writer stands."""

    #: There is no producer: it was not opened, or closed.
    CLOSED = "closed"
    #: A transaction may begin.
    READY = "ready"
    #: One is under way.
    WRITING = "writing"
    #: Its end with a commit is under way, or has begun: what becomes of it is not the owner's to say any more.
    COMMITTING = "committing"
    #: Its owner gave it up before that: it will not be committed.
    GIVEN_UP = "given up"
    #: A transaction failed: the writer can only be closed.
    FAILED = "failed"


class TransactionalWriter:
    """A producer under one transactional id, for as long as none of its transactions fails.

    Made, used and closed by one thread, which may be abandoned in any call; `give_up` is called by its owner's.

    Args:
        transactional_id: an id that no other running producer uses.
        log_topic: the topic in which it writes down what it settled: what it refuses is no target's fault.
        apart: whether each message is a batch, so that what the broker refuses is named.
        reports_all: whether deliveries are reported that succeeded.
        now: the time in seconds that only rise.
        pace: what limits follow, and what is measured is noted in; without one it is this writer's own.
        transaction_s: seconds that the broker gives a transaction, where brokers are well.
        spans: gets what is written and committed, where telemetry is on.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        config: ClientConfig,
        transactional_id: str,
        *,
        ids_right: Right,
        rights: MissingRights,
        log_topic: str = "",
        apart: bool = False,
        reports_all: bool = False,
        now: Callable[[], float] = time.monotonic,
        pace: Pace | None = None,
        transaction_s: float = TRANSACTION_S,
        spans: PublicationSpans | None = None,
    ) -> None:
        self.transactional_id = transactional_id
        self._log_topic = log_topic
        self._rights = rights
        self._pace = pace or Pace()
        self._now = now
        self._spans = spans
        self._apart = apart
        #: Why the transaction under way failed, as far as is known. Filled by delivery reports.
        self.blame = Blame(log_topic)
        # When the transaction under way began, and how many messages of it were handed to the library.
        self._begun = 0.0
        self._handed = 0
        self._producer: Producer | None = None
        #: What it does, a call of the library as a rule, or did last, and since when. Read by its owner's thread, too.
        self.doing, self.doing_since = "", 0.0
        self._bootstrap_servers = bootstrap_servers
        self._ids_right = ids_right
        self._watch = EndWatch(config.get("logger", client_log), debugging=bool(config.get("debug")))
        # Where brokers are slower by the time, the broker ends one transaction too soon; the next writer has longer.
        timeout_s = self._pace.limit(transaction_s)
        self._settings = producer_settings(config, transactional_id, timeout_s, apart=apart, reports_all=reports_all)
        self._settings["logger"] = self._watch
        # Guards `state`, which its thread moves on and `give_up` may turn to GIVEN_UP.
        self._lock = threading.Lock()
        self._state = State.CLOSED

    @property
    def producer(self) -> Producer:
        """The producer, which is open."""
        if self._producer is None:
            raise NotOpenedError(f"the Kafka producer of {self.transactional_id} is not open")
        return self._producer

    def step(self, name: str) -> None:
        """Note that a call begins that may wait; an empty name: none is made any more."""
        self.doing_since, self.doing = self._now(), name

    @property
    def is_stuck(self) -> bool:
        """Whether it is in the call that ignores its time-out while a group has no coordinator (librdkafka#5456)."""
        # One request, which takes no longer than the slowest of whole transactions did.
        limit_s = self._pace.limit(_STANDS_S, 1.0)
        return self.doing == SENDS_POSITIONS and self._now() - self.doing_since > limit_s

    def open(self, limit_s: float, try_s: float) -> None:
        """Make the producer and initialise it. The broker ends what a former producer of this id left open.

        After `limit_s` seconds it is not tried again; a try takes `try_s`, and an id that the broker cannot free by
        then is lost. Both are for brokers that are well.

        Raises:
            ConfigurationError: the client library refused the settings.
            IdLostError: this id is of no use any more.
            NotOpenedError: the broker did not answer in time, or refused it; try again.
        """
        self.step("Producer")
        self._watch.begin()
        producer = self._producer = self._make_producer(self._settings)
        deadline = self._now() + self._pace.limit(limit_s)
        while True:
            self.step("init_transactions")
            try:
                initialise(producer, self._log_topic, self._pace.limit(try_s))
            except KafkaException as error:
                self._watch.serve(producer)
                if error.args[0].code() == KafkaError.CONCURRENT_TRANSACTIONS or self._watch.is_concurrent:
                    raise IdLostError(
                        f"the broker cannot end a Kafka transaction of {self.transactional_id}: {reason(error)}; a "
                        "topic may be unable to take the marker that ends it"
                    ) from error
                what = f"the Kafka producer of {self.transactional_id} cannot start"
                if is_missing_right(error):
                    text = self._rights.refused(what, self._ids_right)
                    raise NotOpenedError(text, [self._ids_right]) from error
                if self._now() > deadline or not error.args[0].retriable():
                    raise NotOpenedError(f"{what}: {reason(error)}") from error
            else:
                self._rights.granted(self._ids_right)
                self._state = State.READY
                return

    def _make_producer(self, settings: dict[str, Any]) -> Producer:
        return clients.producer(self._bootstrap_servers, settings)

    def close(self) -> None:
        """Discard the producer with all it holds; whoever opens its id next ends what it left open."""
        producer, self._producer = self._producer, None
        self._state = State.CLOSED
        if producer is not None:
            self.step("close")
            # Its destructor closes it; `close()` would try to abort first, and warn of what is to be expected.
            try:
                producer.purge()
            except KafkaException as error:
                _log.info("what a Kafka producer held could not be dropped: %s", reason(error))

    def give_up(self) -> bool:
        """Forbid the commit of what is under way; tell whether it had not begun: then it comes to nothing."""
        with self._lock:
            if self._state is not State.WRITING:
                return False
            self._state = State.GIVEN_UP
            return True

    def begin(self) -> None:
        """Begin a transaction, or raise `KafkaException`; `NotOpenedError` where the writer is not open."""
        producer = self.producer
        self.step("begin_transaction")
        # Lines from before, served now: they are not this transaction's.
        producer.poll(0)
        self._watch.begin()
        self.blame = Blame(self._log_topic)
        self._begun, self._handed = self._now(), 0
        if self._spans is not None:
            self._spans.begin()
        self._state = State.WRITING
        producer.begin_transaction()

    def produce(
        self,
        transaction_id: str,
        messages: Iterable[Written],
        delivered: Delivered | None = None,
        *,
        room_s: float = 0.0,
    ) -> None:
        """Hand the messages of a transaction to the client library.

        The transaction is blamed where one is refused, which raises `KafkaException`. Where there is no room in the
        library's buffer within `room_s` seconds, `BufferError` is raised. `delivered` is called for each that was
        stored, where that is reported.
        """
        produce, reported = self.producer.produce, partial(self._reported, transaction_id, delivered)
        for count, (topic, partition, key, value, headers) in enumerate(messages, 1):
            if not count % _BREATH:
                # Other threads get Python's lock here: handlers that wake would wait for it until all is handed over.
                self.producer.poll(0)
            to = -1 if partition is None else partition
            self._handed += 1
            if self._spans is not None:
                self._spans.written(topic, headers)
            try:
                if headers:
                    produce(topic, value, key, to, reported, headers=list(headers))
                else:
                    produce(topic, value, key, to, reported)
            except BufferError:
                self._await_room(partial(produce, topic, value, key, to, reported, headers=list(headers or ())), room_s)
            except KafkaException as error:
                self._refused(transaction_id, topic, error.args[0])
                raise

    def produce_log(self, partition: int, value: bytes, delivered: Delivered | None = None) -> None:
        """Hand a record for the log of what was settled to the client library; errors as `produce`, without a wait."""
        self._handed += 1
        self.producer.produce(self._log_topic, value, None, partition, partial(self._reported, "", delivered))

    def _await_room(self, produce: Callable[[], None], room_s: float) -> None:
        """Hand a message over once there is room in the library's buffer, or raise `BufferError`."""
        deadline = self._now() + room_s
        while True:
            if self._now() >= deadline:
                raise BufferError(f"the client's buffer is full since {room_s:g} s (queue.buffering.max.kbytes)")
            self.step("produce")
            self.producer.poll(_ROOM_S)
            with contextlib.suppress(BufferError):
                return produce()

    def _reported(
        self, transaction_id: str, delivered: Delivered | None, error: KafkaError | None, message: Message
    ) -> None:
        if error is not None:
            self._refused(transaction_id, message.topic() or "", error)
        elif delivered is not None:
            delivered(message)

    def _refused(self, transaction_id: str, topic: str, error: KafkaError) -> None:
        is_lacking = is_missing_right(error)
        why = self._rights.lacks(topic_right(Operation.WRITE, topic)) if is_lacking else reason(error)
        self.blame.add(transaction_id, topic, error, why)

    def deliver(self, limit_s: float) -> bool:
        """Wait until all is stored, and tell whether it is; else `blame` says what failed, as far as is known.

        It waits as long as something is stored every `limit_s` seconds, where brokers are well.
        """
        producer = self.producer
        self.step("delivery")
        limit_s, begun, waited_s = self._pace.limit(limit_s), self._now(), 0.0
        left, stored_s = len(producer), 0.0
        while left and not self.blame.cause:
            producer.flush(min(max(_MIN_FLUSH_S, waited_s / 4), _MAX_FLUSH_S))
            waited_s = self._now() - begun
            if (still := len(producer)) < left:
                # Brokers answer the requests of a connection one after the other.
                left, stored_s = still, waited_s
                self.step("delivery")
            if waited_s - stored_s > limit_s and not self.blame.cause:
                self._stalled(f"nothing more was stored within {limit_s:g} s", left)
        if self.blame.silent and stored_s > waited_s / 2:
            # It went on, and was too slow as a whole.
            self.blame.silent.clear()
            self._pace.note(self._now() - self._begun)
        return not self.blame.cause

    def _stalled(self, why: str, left: int) -> None:
        """Say whose fault it is that `left` messages are not stored: of their topics, where the own log was stored."""
        blame = self.blame
        blame.cause = why
        if left >= self._handed and not self._apart:
            # Nothing was stored at all, which is no topic's fault: so long it takes at least.
            self._pace.note(self._now() - self._begun)
        self._take_back(self.producer)
        if self._log_topic not in blame.purged:
            blame.silent.update(dict.fromkeys(blame.purged, why))

    def _take_back(self, producer: Producer) -> None:
        try:
            producer.purge()
            self._drain(producer, _PURGE_S)
        except KafkaException as error:
            _log.debug("a failed producer could not be purged: %s", reason(error))

    def _drain(self, producer: Producer, limit_s: float) -> None:
        until = self._now() + limit_s
        while len(producer) and self._now() < until:
            producer.flush(_MIN_FLUSH_S)

    @property
    def is_spent(self) -> bool:
        """Whether it can only be closed."""
        return self._state is State.FAILED

    def not_let_in(self) -> dict[str, str]:
        """Return the topics that the broker did not let into the transaction, with the reason; without the own log."""
        self._watch.serve(self.producer)
        return {
            topic: self._rights.lacks(topic_right(Operation.WRITE, topic)) if is_forbidden(why) else why
            for topic, why in self._watch.refused.items()
            if topic != self._log_topic
        }

    @property
    def is_log_forbidden(self) -> bool:
        """Whether the right is missing to write into the log of what was settled."""
        return is_forbidden(self._watch.refused.get(self._log_topic, ""))

    def send_positions(self, positions: list[TopicPartition], group_metadata: Any) -> None:
        """Make positions of a consumer group part of the transaction, or raise `KafkaException`."""
        self.step(SENDS_POSITIONS)
        try:
            self.producer.send_offsets_to_transaction(positions, group_metadata, self._pace.limit(_END_CALL_S))
        finally:
            self._pace.note(self._now() - self._begun)

    def commit(self) -> None:
        """End the transaction with a commit, and return once it is known to be committed.

        Raises `GivenUpError` where its owner gave it up, `KafkaException` where no end was sent, or the broker refused
        it, and `UnknownEndError` where nobody knows, or the writer can only be closed.
        """
        with self._lock:
            if self._state is State.GIVEN_UP:
                raise GivenUpError("it took too long, and its owner gave it up")
            self._state = State.COMMITTING
        self.step("commit_transaction")
        try:
            self._watch.commit(self.producer, self._pace.limit(_END_CALL_S))
        except (KafkaException, UnknownEndError):
            self._state = State.FAILED
            raise
        finally:
            self._pace.note(self._now() - self._begun)
        self._state = State.READY
        if self._spans is not None:
            self._spans.committed()
        self._rights.granted(topic_right(Operation.WRITE, self._log_topic))

    def abort(self) -> None:
        """End a transaction that failed, so that it holds no readers back; then the writer can only be closed.

        Raises `UnknownEndError` where nobody knows how it ends, or a late end may come.
        """
        producer, self._state = self.producer, State.FAILED
        self.step("delivery")
        with contextlib.suppress(KafkaException):  # it was shut out meanwhile, which the abort tells
            self._drain(producer, _IN_FLIGHT_S)
        self.step("abort_transaction")
        self._watch.abort(producer, self._pace.limit(_END_CALL_S))

    def fail(self) -> None:
        """Learn by a purge what else is not stored, and leave the transaction to whoever opens its id next."""
        producer, self._state = self.producer, State.FAILED
        self._take_back(producer)
