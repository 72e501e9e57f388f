"""Acknowledged sends: one idempotent Kafka producer for many threads, and the thread that serves its delivery reports.

Thousands of records may be under way. The report of each one goes to the function that was passed with it.
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
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from penstock import clients
from penstock.clients.bounded_calls import CLOSE_S, end_within
from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.renewal import ClientRenewal
from penstock.clients.rights import Operation, lacking_text, principal_of, topic_right
from penstock.errors import MessageFormatError, PenstockError, StoppedError, raised
from penstock.message import headers_of
from penstock.options import ClientConfig, reserved
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.wire.half import WireHeaders

_log = logging.getLogger("penstock.transactions")

#: Seconds that the delivery thread waits for reports before it looks whether to stop.
_POLL_S = 0.1
#: Seconds for the reports of records that are purged at a stop.
_PURGE_S = 5.0
#: Seconds between two replacements of a producer after fatal errors.
_RENEW_EVERY_S = 1.0
#: Calls of `flush` that serve the last reports of a replaced producer.
_LAST_TRIES = 3
#: Seconds between two looks at forbidden topics, and the time limit of one look.
_VISIBILITY_INTERVAL_S = 1.0
#: The errors of records whose producer has ended.
_OF_PRODUCER = frozenset({KafkaError._FATAL, KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001 - the library's public constants look so

#: Lifts the client's own limit, for records that were stored before: only the broker's limit counts.
ANY_SIZE: ClientConfig = {"message.max.bytes": 100_000_000}

#: Forks between the first process and this one. An object with another number belongs to the parent process.
#: `os.getpid()` at each send would take longer than the whole check.
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
    """Return the headers of a fetched record in wire order; `MessageFormatError` if a name is not UTF-8."""
    # The client library returns a list of text and bytes. Its type also covers all that `produce` accepts.
    record: Any = message
    try:
        return headers_of(record) or ()
    except UnicodeDecodeError as error:
        raise MessageFormatError("a record with a header whose name is not UTF-8; it is refused") from error


#: Called once for each record, with the error or None.
Report = Callable[[KafkaError | None, Message], None]


class AckedProducer:
    """Idempotent sends with delivery reports. Thread-safe.

    A send without an acknowledgement within `send_timeout_s` seconds counts as failed. A wrong setting, or one that
    belongs to penstock, raises `ConfigurationError`.
    """

    def __init__(self, bootstrap_servers: str, config: ClientConfig, send_timeout_s: float, name: str) -> None:
        reserved(config, _OWNED, "the transactional producer")
        settings = {
            # Nagle's rule: a free line sends at once, and records that come during a request go together in the next
            # one. One caller pays no linger for half and op; many callers fill batches by themselves. With two requests
            # under way the batches were half as large, which cost all callers more than the shorter wait saved.
            "linger.ms": 0,
            "max.in.flight": 1,
            "message.timeout.ms": int(send_timeout_s * 1000),
            # Added partitions are noticed within seconds; by default the client refuses them for five minutes.
            "topic.metadata.refresh.interval.ms": 10_000,
            **config,
            "enable.idempotence": True,
            "acks": "all",
        }
        self._principal = principal_of(config)
        # Topics without permission. Any thread adds, the delivery thread removes; each step on a set is atomic.
        self._forbidden: set[str] = set()
        self._looked_at = float("-inf")
        # The client's threads exist in this process only: in a forked child no thread sends or reports.
        self._pid, self._generation = os.getpid(), _generation
        # Producers that ended with a fatal error; the delivery thread serves their last reports.
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
        #: The delivery thread calls it after each round of reports; set it before `start`.
        self.after_reports: Callable[[], None] = lambda: None
        # Set by stop(), read by senders.
        self._refusing = False
        # Set by stop(), read by the delivery thread.
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"penstock-delivery-{name}", daemon=True)
        #: The id of the delivery thread, which writes it, while it runs. It must not wait for its own reports.
        self.delivering = 0

    def start(self) -> None:
        """Start the delivery thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> int:
        """Wait for open sends, at most `timeout_s` seconds, end the thread and return how many stayed open.

        These are reported as failed, and later sends are refused: no caller waits for a report that cannot come. A
        hanging client library or delivery report is abandoned after some more seconds.
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
        # From here on, records are purged because of the stop, not because of an earlier failure.
        self._clients.failure = None
        self._clients.client.purge()
        self._flush(_PURGE_S)
        return left

    def _flush(self, timeout_s: float) -> int:
        """Wait until all records are reported; return how many are not. The client raises a fatal error here once."""
        try:
            return int(self._clients.client.flush(timeout_s))
        except KafkaException as error:
            _log.warning("the Kafka producer of %s ended while it was stopped: %s", self._name, reason(error))
            return len(self._clients.client)

    @property
    def is_inherited(self) -> bool:
        """Whether this object belongs to the parent process, which forked this one."""
        return self._generation != _generation

    def require_own(self) -> None:
        """Raise `StoppedError` if this object belongs to the parent process, which forked this one."""
        if self._generation != _generation:
            raise StoppedError(
                f"{self._name} belongs to process {self._pid}, from which this one was forked: Kafka's clients do not "
                "outlive a fork; make a producer in this process"
            )

    def store(
        self, topic: str, partition: int, key: bytes | None, value: bytes | None, headers: Any = None, *, limit_s: float
    ) -> int:
        """Store a record and return its offset, within `limit_s` seconds.

        Raises `PenstockError` if the record is not known to be stored, and as `post` does.
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
        """Pass a record to the client library, and return False if the library has no room. Never waits.

        The delivery thread calls `report` once; it must neither raise nor wait. Raises `KafkaException` if the library
        refuses the record (too large, for example), and `StoppedError` after a stop.
        """
        if self._refusing or self._generation != _generation:
            self.require_own()
            raise StoppedError(f"nothing was sent to {topic}:{partition}: {self._name} was stopped")
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
        """Do what `try_post` does, and wait for room if the client library's buffer is full.

        Also raises `StoppedError` if the buffer stays full for the whole send timeout.
        """
        deadline = 0.0
        while not self.try_post(topic, partition, key, value, headers=headers, report=report):
            now = time.monotonic()
            deadline = deadline or now + self._send_timeout_s
            if now >= deadline:
                raise StoppedError(
                    f"the send buffer stayed full for {self._send_timeout_s:g} s while sending to {topic}:{partition}; "
                    "the broker is too slow or down"
                )
            # Serving reports makes room. That is the delivery thread's work; it may be this thread.
            if threading.get_ident() == self.delivering:
                self._clients.client.poll(0.01)
            else:
                time.sleep(0.001)

    def why(self, topic: str, error: KafkaError) -> str:
        """Return the reason why a record was not stored, with the missing permission if there is one."""
        fatal = self._clients.failure
        cause = fatal if error.code() in _OF_PRODUCER and fatal is not None else error
        if not is_missing_right(cause):
            return reason(cause)
        self._forbidden.add(topic)
        # Write permission on a topic includes idempotent writes; before Kafka 2.8 that was a separate one (KIP-679).
        return f"{reason(cause)}: {lacking_text([topic_right(Operation.WRITE, topic)], self._principal)}"

    def _renew(self, producer: Producer, error: KafkaException) -> bool:
        """Replace a producer that ended with a fatal error, and return whether it was replaced.

        An idempotent producer that no longer knows which records are stored refuses all others, and so does one without
        any write permission. Its records under way are reported as failed. It is replaced once a second at most; until
        then it still refuses.
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
        self.delivering = threading.get_ident()
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
        # A later thread may get the same id.
        self.delivering = 0

    def _poll(self, producer: Producer) -> None:
        """Serve reports for a while. The client raises a fatal error here once."""
        try:
            producer.poll(_POLL_S)
        except KafkaException as error:
            if not self._clients.note_failure(error):
                raise
            self._clients.replace(producer)

    def _look_again(self) -> None:
        """Make the client look at forbidden topics again: by itself it remembers a refusal for minutes."""
        now = time.monotonic()
        if not self._forbidden or now - self._looked_at < _VISIBILITY_INTERVAL_S:
            return
        self._looked_at = now
        # Copying a set is atomic.
        for topic in self._forbidden.copy():
            try:
                metadata = self._clients.client.list_topics(topic, timeout=_VISIBILITY_INTERVAL_S).topics.get(topic)
            except KafkaException:
                continue
            if metadata is not None and metadata.error is None:
                self._forbidden.discard(topic)

    def _serve_last(self, ended: Producer) -> None:
        """Serve the last reports of a producer that was replaced."""
        ended.purge()
        for _ in range(_LAST_TRIES):
            try:
                ended.flush(_POLL_S)
            except KafkaException as error:
                # The first call raises the fatal error if a sender saw it before the delivery thread.
                self._clients.note_failure(error)
            else:
                break
