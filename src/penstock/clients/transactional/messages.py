"""The messages of one Kafka transaction: handed to the client library, waited for, and blamed where they fail.

How slow the brokers are is measured (`Pace`). A limit that fits brokers which are well gives up on slow ones what would
have come: it takes a topic for one that takes no message, a producer for one that hangs, and does the same work again.
So limits grow with what is measured, within a bound that the user sets, and shrink again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.rights import Operation, topic_right
from penstock.clients.transactional.faults import Blame, NotOpenedError
from penstock.clients.transactional.missing_rights import MissingRights

_log = logging.getLogger("penstock.transactions")

#: The most seconds that a limit grows to, unless the user sets another.
MOST_S = 30.0
#: A limit is so many times the slowest transaction of late.
_TIMES = 4.0
#: What is left of the slowest with each that was quicker.
_KEPT = 0.9


class Pace:
    """The seconds that Kafka transactions take on one cluster, from their begin to the answer of their end.

    Noted by every thread that publishes, asked by any: it is one number, and a note that is lost to another one at the
    same moment is as good as that one.

    Args:
        most_s: seconds that no limit grows beyond; a limit that is longer anyway stays what it is.
    """

    def __init__(self, most_s: float = MOST_S) -> None:
        self._most_s = most_s
        self._slow_s = 0.0

    def note(self, took_s: float) -> None:
        """Take note of how long a transaction took, or has taken by now; one that was given up, too."""
        self._slow_s = max(took_s, self._slow_s * _KEPT)

    def limit(self, well_s: float, times: float = _TIMES) -> float:
        """Return the limit in seconds of what may take `well_s` on brokers that are well.

        It grows to so many `times` the slowest transaction of late.
        """
        return max(well_s, min(times * self._slow_s, self._most_s))


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


class TransactionMessages:
    """Writes the messages of one transaction after the other with the producer of a `TransactionalWriter`.

    On the writer's thread, whose arguments these are.
    """

    def __init__(
        self,
        transactional_id: str,
        *,
        log_topic: str,
        rights: MissingRights,
        apart: bool,
        now: Callable[[], float],
        pace: Pace,
        spans: PublicationSpans | None,
    ) -> None:
        self.transactional_id = transactional_id
        self._log_topic = log_topic
        self._rights = rights
        self._pace = pace
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

    @property
    def producer(self) -> Producer:
        """The producer, which is open."""
        if self._producer is None:
            raise NotOpenedError(f"the Kafka producer of {self.transactional_id} is not open")
        return self._producer

    def step(self, name: str) -> None:
        """Note that a call begins that may wait; an empty name: none is made any more."""
        self.doing_since, self.doing = self._now(), name

    def _begin(self) -> None:
        self.blame = Blame(self._log_topic)
        self._begun, self._handed = self._now(), 0
        if self._spans is not None:
            self._spans.begin()

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
        self.blame.add(transaction_id, topic, error, self.why(topic, error))

    def why(self, topic: str, error: KafkaError) -> str:
        """Return the broker's reason, or the right that is missing."""
        return self._rights.lacks(topic_right(Operation.WRITE, topic)) if is_missing_right(error) else reason(error)

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
