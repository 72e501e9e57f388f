"""The life of one transactional producer: open, begin, produce, wait for deliveries, end.

A producer whose transaction failed is not used again. Its next transaction could fail for gaps in its sequence numbers,
however long it waits (librdkafka 2.16, seen: OUT_OF_ORDER_SEQUENCE_NUMBER up to a second after the abort). The abort
itself takes milliseconds, if one request at a time is under way while each message is a batch.

KAFKA-17754: a delayed EndTxn can end a *later* transaction of the same producer, and librdkafka lacks Kafka's newer
protection. So an end that was repeated or not answered is in doubt (`end_watch`). The producer is then discarded. A new
one under the same transactional id bumps the epoch, so a late EndTxn is refused.

A transactional id can be lost. If `max.message.bytes` of a topic is smaller than a transaction marker, the broker can
never end the transactions that touched it. It answers CONCURRENT_TRANSACTIONS to all requests of that id until it is
restarted (Kafka 4.3, seen).
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

#: Seconds for which a writer that dies in a transaction holds readers back at most. A successor that opens ends this
#: sooner. On slow brokers it is longer (see `Pace`).
TRANSACTION_S = 10.0
#: Seconds within which healthy brokers must store some message. Less than `TRANSACTION_S`, so that a transaction that
#: cannot be stored ends in an abort.
DELIVERY_S = 5.0
#: Seconds for the delivery reports of a failed transaction.
_PURGE_S = 0.5
#: Least and most seconds of one `flush`. During it no message lingers. If only failures are reported, `flush` notices
#: its end every 10 ms only, which was most of a small group's time. Each call wakes the library's threads, too.
_MIN_FLUSH_S = 0.001
_MAX_FLUSH_S = 0.01
#: Messages that are handed to the library without a pause.
_BREATH = 64
#: Seconds of one wait for room in the library's buffer.
_ROOM_S = 0.1
#: Seconds for each of the calls that end a transaction, on healthy brokers.
_END_CALL_S = 5.0
#: The call that ignores its time-out while the coordinator of a group is away, and the seconds that it gets. It comes
#: late in a transaction, which may have lost some seconds to an unreachable node by then.
SENDS_POSITIONS = "send_offsets_to_transaction"
_STANDS_S = 1.0
#: Seconds to wait for requests under way before a failed transaction is aborted. At brokers before 4.0, a request that
#: arrives after the abort's marker would begin another transaction.
_IN_FLIGHT_S = 0.3

#: Called with each message that was stored.
Delivered = Callable[[Message], None]
#: A message as it is written: topic, partition (None: Kafka's partitioner chooses), key, value and headers.
Written = tuple[str, int | None, bytes | None, bytes | None, Sequence[tuple[str, str | bytes | None]]]


class PublicationSpans(Protocol):
    """Makes spans of published messages. Called on the writer's thread; must not raise."""

    def begin(self) -> None:
        """Begin a Kafka transaction, and forget messages that were not committed."""

    def written(self, topic: str, headers: Sequence[tuple[str, str | bytes | None]]) -> None:
        """Note a message."""

    def committed(self) -> None:
        """Report the messages: they are visible."""


class State(Enum):
    """The states of a writer."""

    #: There is no producer: it was not opened, or it was closed.
    CLOSED = "closed"
    #: A transaction may begin.
    READY = "ready"
    #: A transaction is under way.
    WRITING = "writing"
    #: Its commit has begun: the owner can no longer give it up.
    COMMITTING = "committing"
    #: The owner gave the transaction up before its commit began: it will not be committed.
    GIVEN_UP = "given up"
    #: A transaction failed. The writer can only be closed.
    FAILED = "failed"


class TransactionalWriter:
    """A producer under one transactional id, usable until one of its transactions fails.

    One thread makes, uses and closes it, and may be abandoned in any call. The owner's thread calls `give_up`.

    Args:
        transactional_id: an id that no other running producer uses.
        log_topic: the topic of the records of what was settled. A refusal by it is no target's fault.
        apart: whether each message is a batch, so that the broker names the one it refuses.
        reports_all: whether successful deliveries are reported, too.
        now: returns monotonic seconds.
        pace: measures transactions and adapts the limits; default: one of this writer alone.
        transaction_s: the broker's limit for a transaction, in seconds, on healthy brokers.
        spans: receives written and committed messages, if telemetry is on.
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
        #: Why the transaction under way failed, as far as known. Filled by delivery reports.
        self.blame = Blame(log_topic)
        # When the transaction under way began, and how many of its messages were handed to the library.
        self._begun = 0.0
        self._handed = 0
        self._producer: Producer | None = None
        #: Its present or last step, usually a call of the library, and since when. Read by the owner's thread, too.
        self.doing, self.doing_since = "", 0.0
        self._bootstrap_servers = bootstrap_servers
        self._ids_right = ids_right
        self._watch = EndWatch(config.get("logger", client_log), debugging=bool(config.get("debug")))
        # If brokers get slower later, the broker ends one transaction too soon. The next writer gets a longer limit.
        timeout_s = self._pace.limit(transaction_s)
        self._settings = producer_settings(config, transactional_id, timeout_s, apart=apart, reports_all=reports_all)
        self._settings["logger"] = self._watch
        # Guards `_state`: the writer's thread moves it on, and `give_up` may set GIVEN_UP.
        self._lock = threading.Lock()
        self._state = State.CLOSED

    @property
    def producer(self) -> Producer:
        """The open producer; `NotOpenedError` if there is none."""
        if self._producer is None:
            raise NotOpenedError(f"the Kafka producer of {self.transactional_id} is not open")
        return self._producer

    def step(self, name: str) -> None:
        """Note the begin of a call that may wait; an empty name: none is under way."""
        self.doing_since, self.doing = self._now(), name

    @property
    def is_stuck(self) -> bool:
        """Whether it hangs in the call that ignores its time-out while a group has no coordinator (librdkafka#5456)."""
        # One request: it takes no longer than the slowest transaction did.
        limit_s = self._pace.limit(_STANDS_S, 1.0)
        return self.doing == SENDS_POSITIONS and self._now() - self.doing_since > limit_s

    def open(self, limit_s: float, try_s: float) -> None:
        """Make the producer and initialise it. The broker ends the open transaction of a former producer of this id.

        Args:
            limit_s: seconds after which it does not try again, on healthy brokers.
            try_s: seconds of one try, on healthy brokers. An id that the broker cannot free by then is lost.

        Raises:
            ConfigurationError: the client library refused the settings.
            IdLostError: this id can no longer be used.
            NotOpenedError: the broker did not answer in time, or refused; try again.
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
        """Discard the producer and its messages. The next producer of its id ends its open transaction."""
        producer, self._producer = self._producer, None
        self._state = State.CLOSED
        if producer is not None:
            self.step("close")
            # Its destructor closes it. `close()` would try to abort first, and log expected warnings.
            try:
                producer.purge()
            except KafkaException as error:
                _log.info("what a Kafka producer held could not be dropped: %s", reason(error))

    def give_up(self) -> bool:
        """Forbid the commit of the transaction under way; return False if the commit has begun."""
        with self._lock:
            if self._state is not State.WRITING:
                return False
            self._state = State.GIVEN_UP
            return True

    def begin(self) -> None:
        """Begin a transaction, or raise `KafkaException`; `NotOpenedError` if the writer is not open."""
        producer = self.producer
        self.step("begin_transaction")
        # Serve older log lines first: they do not belong to this transaction.
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
        transactions: Iterable[tuple[str, Iterable[Written]]],
        delivered: Delivered | None = None,
        *,
        room_s: float = 0.0,
    ) -> None:
        """Hand messages to the client library, given by the id of their transaction.

        A refused message raises `KafkaException`, and its transaction gets the blame. Raises `BufferError` if the
        library's buffer has no room for `room_s` seconds. `delivered` is called for each stored message, if successful
        deliveries are reported.
        """
        produce, spans = self.producer.produce, self._spans
        for transaction_id, messages in transactions:
            reported = partial(self._reported, transaction_id, delivered)
            for count, (topic, partition, key, value, headers) in enumerate(messages, 1):
                if not count % _BREATH:
                    # This releases the interpreter lock: other threads would wait for it until all is handed over.
                    self.producer.poll(0)
                to = -1 if partition is None else partition
                self._handed += 1
                if spans is not None:
                    spans.written(topic, headers)
                try:
                    if headers:
                        produce(topic, value, key, to, reported, headers=list(headers))
                    else:
                        produce(topic, value, key, to, reported)
                except BufferError:
                    again = partial(produce, topic, value, key, to, reported, headers=list(headers or ()))
                    self._await_room(again, room_s)
                except KafkaException as error:
                    self._refused(transaction_id, topic, error.args[0])
                    raise

    def produce_log(self, partition: int, value: bytes, delivered: Delivered | None = None) -> None:
        """Hand a record for the log topic to the client library. Never waits; errors as `produce`."""
        self._handed += 1
        self.producer.produce(self._log_topic, value, None, partition, partial(self._reported, "", delivered))

    def _await_room(self, produce: Callable[[], None], room_s: float) -> None:
        """Wait for room in the library's buffer and hand a message over, or raise `BufferError`."""
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
        """Wait until all is stored; False: something failed, and `blame` has the cause, as far as known.

        It waits as long as something is stored every `limit_s` seconds, on healthy brokers.
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
            # Messages were still stored: the brokers are slow as a whole, no topic is silent.
            self.blame.silent.clear()
            self._pace.note(self._now() - self._begun)
        return not self.blame.cause

    def _stalled(self, why: str, left: int) -> None:
        """Set the blame for `left` messages that are not stored: their topics, if the log topic was stored."""
        blame = self.blame
        blame.cause = why
        if left >= self._handed and not self._apart:
            # Nothing was stored at all, which is no topic's fault: a transaction takes at least this long now.
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
        """Whether the writer can only be closed."""
        return self._state is State.FAILED

    def not_let_in(self) -> dict[str, str]:
        """Return the topics that the broker kept out of the transaction, with the reason; without the log topic."""
        self._watch.serve(self.producer)
        return {
            topic: self._rights.lacks(topic_right(Operation.WRITE, topic)) if is_forbidden(why) else why
            for topic, why in self._watch.refused.items()
            if topic != self._log_topic
        }

    @property
    def is_log_forbidden(self) -> bool:
        """Whether the permission to write to the log topic is missing."""
        return is_forbidden(self._watch.refused.get(self._log_topic, ""))

    def send_positions(self, positions: list[TopicPartition], group_metadata: Any) -> None:
        """Add positions of a consumer group to the transaction, or raise `KafkaException`."""
        self.step(SENDS_POSITIONS)
        try:
            self.producer.send_offsets_to_transaction(positions, group_metadata, self._pace.limit(_END_CALL_S))
        finally:
            self._pace.note(self._now() - self._begun)

    def commit(self) -> None:
        """Commit the transaction, and return when it is known to be committed.

        Raises `GivenUpError` if the owner gave it up, `KafkaException` if no end was sent or the broker refused it, and
        `UnknownEndError` if its end is unknown or the writer can only be closed.
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
        """Abort a failed transaction, so that it does not hold readers back. Afterwards the writer can only be closed.

        Raises `UnknownEndError` if its end is unknown, or a late end may come.
        """
        producer, self._state = self.producer, State.FAILED
        self.step("delivery")
        with contextlib.suppress(KafkaException):  # it was fenced meanwhile, which the abort reports
            self._drain(producer, _IN_FLIGHT_S)
        self.step("abort_transaction")
        self._watch.abort(producer, self._pace.limit(_END_CALL_S))

    def fail(self) -> None:
        """Purge to learn which other messages are not stored. The next producer of the id ends the transaction."""
        producer, self._state = self.producer, State.FAILED
        self._take_back(producer)
