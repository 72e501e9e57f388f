"""Acknowledged sends: one idempotent Kafka producer that many threads batch, and a thread that serves its reports.

Thousands of records may be under way; each is reported to the function that was given with it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, cast

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from penstock import clients
from penstock.clients.bounded_calls import CLOSE_S, end_within
from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.renewal import ClientRenewal
from penstock.clients.rights import Operation, lacking_text, principal_of, topic_right
from penstock.errors import MessageFormatError, PenstockError, StoppedError, raised
from penstock.message import Record, headers_of
from penstock.options import ClientConfig, reserved
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.wire.half import WireHeaders

_log = logging.getLogger("penstock.transactions")

#: Seconds the delivery thread waits for reports before it looks whether it shall stop.
_POLL_S = 0.1
#: Seconds for the reports of what was not acknowledged before a stop.
_PURGE_S = 5.0
#: Seconds between two replacements of a producer that a fatal error ended.
_RENEW_EVERY_S = 1.0
_LAST_TRIES = 3
#: Seconds between two looks at topics that may not be seen, and for one.
_VISIBILITY_INTERVAL_S = 1.0
#: What befalls records because their producer has ended.
_OF_PRODUCER = frozenset({KafkaError._FATAL, KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001 - the library's public constants look so

#: The client's own limit on a message, for those who send on what was stored: the broker's limit decides alone.
ANY_SIZE: ClientConfig = {"message.max.bytes": 100_000_000}

#: How many forks lie between this process and the first one: an object that knows another number is the parent's. To
#: ask the system for the process's id at each send takes longer than the rest of that look.
_generation = 0


def _count_fork() -> None:
    global _generation  # noqa: PLW0603 - it belongs to the process
    _generation += 1


os.register_at_fork(after_in_child=_count_fork)

_OWNED = {
    "transactional.id": "these sends are idempotent, not transactional; leave it out",
    "enable.idempotence": "it is always on, so that a retry cannot store a record twice; leave it out",
    "acks": "it is always 'all': a half must be durable; leave it out",
}


def wire_headers(message: Message) -> WireHeaders:
    """Return the headers of a fetched record in wire order; `MessageFormatError` where a name is not UTF-8."""
    try:
        # The client library returns a list of pairs of text and bytes; its type covers what may be produced, too.
        return cast("WireHeaders", headers_of(cast("Record", message)) or ())
    except UnicodeDecodeError as error:
        raise MessageFormatError("a record with a header whose name is not UTF-8; it is refused") from error


Report = Callable[[KafkaError | None, Message], None]


class AckedProducer:
    """Idempotent sends whose deliveries are reported. Thread-safe.

    A send that is not acknowledged within `send_timeout_s` seconds counts as failed. A setting that is wrong, or
    belongs to penstock, raises `ConfigurationError`.
    """

    def __init__(self, bootstrap_servers: str, config: ClientConfig, send_timeout_s: float, name: str) -> None:
        reserved(config, _OWNED, "the transactional producer")
        settings = {
            # Nagle's rule: nothing is held back while the line is free, and what comes while a request is under way
            # goes together. One caller pays no linger for half and op; many callers fill batches by themselves. With
            # two requests under way batches were half as large, at more cost for everybody than the wait it saves.
            "linger.ms": 0,
            "max.in.flight": 1,
            "message.timeout.ms": int(send_timeout_s * 1000),
            **config,
            "enable.idempotence": True,
            "acks": "all",
        }
        self._principal = principal_of(config)
        # Topics that were refused. Added by any thread, taken out by the delivery thread: single steps on a set.
        self._forbidden: set[str] = set()
        self._looked_at = float("-inf")
        # The client's threads are of this process: in a child that was forked, nobody sends and nobody reports.
        self._pid, self._generation = os.getpid(), _generation
        # Producers that a fatal error ended; the delivery thread serves their last reports.
        self._ended: deque[Producer] = deque()
        self._clients: ClientRenewal[Producer] = ClientRenewal(
            lambda: clients.producer(bootstrap_servers, settings),
            self._retire,
            _RENEW_EVERY_S,
            time.monotonic,
            at_once=True,
        )
        self._send_timeout_s = send_timeout_s
        self._name = name
        self._ration = RationedLog()
        #: Called by the delivery thread after each round of reports; set before `start`.
        self.after_reports: Callable[[], None] = lambda: None
        # Set by stop(), read by senders.
        self._refusing = False
        # Set by stop(), read by the delivery thread.
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"penstock-delivery-{name}", daemon=True)
        # The delivery thread, once it runs; written by itself.
        self._delivering = 0

    def start(self) -> None:
        """Start the delivery thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> int:
        """Wait for open sends, at most `timeout_s` seconds, end the thread and return how many stayed open.

        Those are reported as failed, and what is sent from now on is refused: nobody waits for what cannot come. Where
        the client library hangs, or what a delivery report calls, that is abandoned after some seconds more.
        """
        self._refusing = True
        if self.is_inherited:
            return 0
        limit_s = timeout_s + _PURGE_S + CLOSE_S
        left = end_within(limit_s, f"the last sends of {self._name}", partial(self._end, timeout_s))
        return len(self._clients.client) if left is None else left

    def _end(self, timeout_s: float) -> int:
        left = self._flush(timeout_s)
        self._stopping.set()
        self._thread.join()
        # What is purged from here on is so for the stop.
        self._clients.failure = None
        self._clients.client.purge()
        self._flush(_PURGE_S)
        return left

    def _flush(self, timeout_s: float) -> int:
        """Wait until all is reported; return how many records are not. A fatal error may come out of it, once."""
        try:
            return int(self._clients.client.flush(timeout_s))
        except KafkaException as error:
            _log.warning("the Kafka producer of %s ended while it was stopped: %s", self._name, reason(error))
            return len(self._clients.client)

    @property
    def is_inherited(self) -> bool:
        """Whether it belongs to the process that this one was forked from."""
        return self._generation != _generation

    def require_own(self) -> None:
        """Raise `StoppedError` where it belongs to the process that this one was forked from."""
        if self.is_inherited:
            raise StoppedError(
                f"{self._name} belongs to process {self._pid}, from which this one was forked: Kafka's clients do not "
                "outlive a fork; make a producer in this process"
            )

    @property
    def in_delivery_thread(self) -> bool:
        """Whether the caller is the delivery thread, which may not wait for its own reports."""
        return threading.get_ident() == self._delivering

    def store(
        self, topic: str, partition: int, key: bytes | None, value: bytes | None, headers: Any = None, *, limit_s: float
    ) -> int:
        """Have a record stored and return its offset, waiting for that at most `limit_s` seconds.

        Raises `PenstockError` where it is not known to be stored, and as `post` does.
        """
        reports: SimpleQueue[tuple[KafkaError | None, int]] = SimpleQueue()
        self.post(
            topic,
            partition,
            key,
            value,
            headers=headers,
            report=lambda error, message: reports.put((error, message.offset() or 0)),
        )
        try:
            error, offset = reports.get(timeout=limit_s)
        except Empty:
            raise PenstockError(f"no answer within {limit_s:g} s") from None
        if error is not None:
            raise PenstockError(self.why(topic, error))
        return offset

    def try_post(
        self, topic: str, partition: int, key: bytes | None, value: bytes | None, *, headers: Any = None, report: Report
    ) -> bool:
        """Hand a record to the client library if it has room, and tell whether it had. Never waits.

        `report` is called once, by the delivery thread; it neither raises nor waits. Raises `KafkaException` where the
        library refuses the record (it is too large, say), and `StoppedError` where this was stopped.
        """
        if self._refusing or self._generation != _generation:
            self.require_own()
            raise StoppedError(f"nothing is sent to {topic}:{partition} any more: {self._name} was stopped")
        producer = self._clients.client
        try:
            producer.produce(topic, value, key, partition, report, headers=headers)
        except BufferError:
            return False
        except KafkaException as error:
            if not self._renew(producer, error):
                raise
            return False
        return True

    def post(
        self, topic: str, partition: int, key: bytes | None, value: bytes | None, *, headers: Any, report: Report
    ) -> None:
        """Do what `try_post` does, waiting for room where the client library's buffer is full.

        Raises `StoppedError`, too, where that stayed full for the whole send timeout.
        """
        deadline = 0.0
        while not self.try_post(topic, partition, key, value, headers=headers, report=report):
            now = time.monotonic()
            deadline = deadline or now + self._send_timeout_s
            if now >= deadline:
                raise StoppedError(
                    f"the send buffer stayed full for {self._send_timeout_s:g} s while sending to {topic}:{partition}; "
                    "the broker does not keep up or is not there"
                )
            # The delivery thread makes room. Where this is that thread, nobody else does.
            if self.in_delivery_thread:
                self._clients.client.poll(0.01)
            else:
                time.sleep(0.001)

    def why(self, topic: str, error: KafkaError) -> str:
        """Return why a record for a topic was not stored, with the right that is missing if that is the reason."""
        fatal = self._clients.failure
        cause = fatal if error.code() in _OF_PRODUCER and fatal is not None else error
        if not is_missing_right(cause):
            return reason(cause)
        self._forbidden.add(topic)
        # Who may write to any topic may do so idempotently; Kafka asks for a right of its own below 2.8 only (KIP-679).
        return f"{reason(cause)}: {lacking_text([topic_right(Operation.WRITE, topic)], self._principal)}"

    def _renew(self, producer: Producer, error: KafkaException) -> bool:
        """Tell whether there is a new producer instead of one that an error of it has ended for ever.

        An idempotent producer that cannot tell any more what was stored refuses everything from then on, and so does
        one that may not write anywhere. What it had under way is reported as failed. It is replaced once a second at
        most: until then it goes on refusing.
        """
        return self._clients.note_failure(error) and self._clients.replace(producer)

    def _retire(self, producer: Producer) -> None:
        self._ration.warn(
            "fatal",
            "the Kafka producer of %s ended with a fatal error and is replaced; what it had under way counts as not "
            "stored: %s",
            self._name,
            "no reason given" if self._clients.failure is None else reason(self._clients.failure),
        )
        self._ended.append(producer)

    def _serve(self) -> None:
        self._delivering = threading.get_ident()
        while not self._stopping.is_set():
            try:
                self._poll(self._clients.client)
                self.after_reports()
                self._look_again()
                while self._ended:
                    self._serve_last(self._ended.popleft())
            except:  # noqa: E722 - see `raised`; the other reports are served
                # A report must not raise; but if this thread ended, every sender would wait for ever.
                _log.error("a delivery report of %s failed", self._name, exc_info=raised())

    def _poll(self, producer: Producer) -> None:
        """Serve reports for a while. A fatal error comes out of it, once."""
        try:
            producer.poll(_POLL_S)
        except KafkaException as error:
            if not self._clients.note_failure(error):
                raise
            self._clients.replace(producer)

    def _look_again(self) -> None:
        """Have the client look at topics again that it may not have seen: it would remember that for minutes."""
        now = time.monotonic()
        if not self._forbidden or now - self._looked_at < _VISIBILITY_INTERVAL_S:
            return
        self._looked_at = now
        # A copy of a set is one step under the interpreter lock.
        for topic in self._forbidden.copy():
            try:
                found = self._clients.client.list_topics(topic, timeout=_VISIBILITY_INTERVAL_S).topics.get(topic)
            except KafkaException:
                continue
            if found is not None and found.error is None:
                self._forbidden.discard(topic)

    def _serve_last(self, ended: Producer) -> None:
        """Serve the last reports of a producer that was replaced."""
        ended.purge()
        for _ in range(_LAST_TRIES):
            try:
                ended.flush(_POLL_S)
            except KafkaException as error:
                # What ended it comes out of the first call, where the sender saw it before the delivery thread did.
                self._clients.note_failure(error)
            else:
                break
