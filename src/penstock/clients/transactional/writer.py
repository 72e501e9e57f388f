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
from collections.abc import Callable
from enum import Enum
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from penstock import clients
from penstock.clients.client_log import client_log
from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.rights import Operation, Right, topic_right
from penstock.clients.transactional.end_watch import CONTEXT, EndWatch, UnknownEndError
from penstock.clients.transactional.faults import GivenUpError, IdLostError, NotOpenedError, is_forbidden
from penstock.clients.transactional.messages import Pace, PublicationSpans, TransactionMessages
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.options import ClientConfig

_log = logging.getLogger("penstock.transactions")

#: Seconds to wait for a connection.
_CONNECT_S = 1.0


def initialise(producer: Producer, topic: str, timeout_s: float) -> None:
    """Call `init_transactions` with a connection that stands. `topic` is one that is there; without one it may not yet.

    The library looks for the transaction coordinator when it is asked to, and where no connection stands by then, half
    a second later (librdkafka 2.16, seen in one of eight starts). Raises `KafkaException` as `init_transactions`.
    """
    if topic:
        with contextlib.suppress(KafkaException):
            producer.list_topics(topic, timeout=min(timeout_s, _CONNECT_S))
    producer.init_transactions(timeout_s)


#: A writer that dies in a transaction holds readers back no longer than this, or until its successor opens; on slow
#: brokers it is longer (see `Pace`).
TRANSACTION_S = 10.0
#: Seconds within which some message has to be stored where brokers are well: less than a transaction may take, so that
#: one that cannot be ends in an abort.
DELIVERY_S = 5.0


def producer_settings(
    config: ClientConfig, transactional_id: str, timeout_s: float, *, apart: bool, reports_all: bool
) -> dict[str, Any]:
    """Return the settings of a transactional producer, for the client library.

    No other running producer uses the id. The broker ends a transaction after `timeout_s` seconds. Where it writes
    `apart`, each message is a batch, so that what the broker refuses is named. With `reports_all`, deliveries that
    succeeded are reported, too.
    """
    debug = str(config.get("debug", ""))
    settings: dict[str, Any] = {
        # All is handed over before the first of it is sent, for who waits for deliveries flushes: a transaction is one
        # request or two. What is handed over while a request is under way would have the library ask for its answer
        # again and again without a pause, which took up to a third of a full core.
        "linger.ms": 50,
        # What was taken from its producer shall not fail here on the client's own limit: the broker's decides.
        "message.max.bytes": 100_000_000,
        "queue.buffering.max.messages": 1_000_000,
        # Transactions are short-lived; who waits for deliveries gives up before.
        "message.timeout.ms": int(timeout_s * 1000),
        # The broker answers CONCURRENT_TRANSACTIONS for some milliseconds after each commit, while it writes the
        # markers; the library then waits this long, and its default of 100 ms would be the latency of everything.
        "retry.backoff.ms": 1,
        "retry.backoff.max.ms": 5,
        # A topic deleted a moment ago fails soon, not after the default 30 s.
        "topic.metadata.propagation.max.ms": 3_000,
        "batch.size": 1 if apart else 1_000_000,
        **config,
        "transactional.id": transactional_id,
        "transaction.timeout.ms": int(timeout_s * 1000),
        "delivery.report.only.error": not reports_all,
        "debug": f"{debug},{CONTEXT}" if debug else CONTEXT,
    }
    if apart:
        # A topic made a moment ago knows nothing of this producer and takes any sequence number first: of two
        # requests under way, the second may pass the first, whose messages are then lost as "duplicates". And the
        # abort of a refused message waits for seconds where others are under way behind it.
        settings["max.in.flight"] = 1
    return settings


#: Seconds for each of the calls that end a transaction, on brokers that are well.
_END_CALL_S = 5.0
#: The call that ignores its time-out while the coordinator of a group is away, and seconds that it is given: it comes
#: last, when a node that is away has cost the transaction some seconds already.
SENDS_POSITIONS = "send_offsets_to_transaction"
_STANDS_S = 1.0
#: Seconds for what is under way when a transaction fails, before it is aborted: one that arrives behind the marker of
#: the abort would begin another transaction, at brokers before 4.0.
_IN_FLIGHT_S = 0.3


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


class TransactionalWriter(TransactionMessages):
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
        super().__init__(
            transactional_id,
            log_topic=log_topic,
            rights=rights,
            apart=apart,
            now=now,
            pace=pace or Pace(),
            spans=spans,
        )
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
                self._serve_log()
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
        self._begin()
        self._state = State.WRITING
        producer.begin_transaction()

    @property
    def is_spent(self) -> bool:
        """Whether it can only be closed."""
        return self._state is State.FAILED

    def not_let_in(self) -> dict[str, str]:
        """Return the topics that the broker did not let into the transaction, with the reason; without the own log."""
        self._serve_log()
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

    def _serve_log(self) -> None:
        with contextlib.suppress(KafkaException):
            self.producer.poll(0)
