"""The topics of the fleet: creating, writing and following them, and the thread of a service that uses one.

Brokers stamp the records: the age of a record must not depend on the clock of its writer.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from confluent_kafka import KafkaError, KafkaException

from penstock import clients
from penstock.clients.answers import CONNECT_TIMEOUT_S, asked_until_ready
from penstock.clients.kafka_errors import ErrorKind, is_missing_right, reason
from penstock.clients.reading import PartitionReader, Place
from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right
from penstock.clients.topics import TopicSpec, ensure_topics, require_topics
from penstock.errors import BrokerConnectionError, MessageFormatError, PenstockError
from penstock.fleet.wire import SIGNATURE, is_signed, signature
from penstock.message import Record, readable_headers
from penstock.options import ClientConfig

if TYPE_CHECKING:
    from confluent_kafka import Message

_log = logging.getLogger(__name__)

#: The client library requires a group name; no request uses it.
_GROUP = "penstock-fleet"
#: Seconds without a record after which the brokers are asked whether they are alive, and the timeout of that question.
#: If the only member died, no record arrives: the question lets `penstock status` see its silence in time.
_ASK_AFTER_S = 1.0
_ANSWER_S = 2.0
_SETTINGS = {
    "linger.ms": 0,
    "enable.idempotence": False,
    "acks": "all",
    "message.timeout.ms": 8_000,
    "compression.type": "zstd",
}
#: The settings of the user that are only for the user's own producers.
_NOT_TAKEN = ("transactional.id", "transaction.timeout.ms", "delivery.timeout.ms", "on_delivery", "stats_cb")
#: The write timeout of a record in seconds, a little longer than the client's own.
_WRITE_S = 10.0
_POLL_S = 0.05
#: Seconds between a failure of a service and its next attempt.
_RETRY_DELAY_S = 5.0
#: The codes of errors that mean: no broker accepted a record.
_GONE = {KafkaError._MSG_TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}  # noqa: SLF001 - public codes of the library


def stamped_topic(name: str, kept_ms: int, more: Mapping[str, str]) -> TopicSpec:
    """Return the specification of a fleet topic: one partition, this retention, and timestamps of the brokers."""
    kept = {"cleanup.policy": "delete", "retention.ms": str(kept_ms), "message.timestamp.type": "LogAppendTime"}
    return TopicSpec(name, 1, {**kept, **more})


def make_topics(bootstrap_servers: str, config: ClientConfig, needs: Sequence[tuple[TopicSpec, Operation]]) -> None:
    """Create absent topics; `MissingRightError` names the permissions in `needs` that this user lacks."""
    ensure_topics(
        clients.admin(bootstrap_servers, config),
        [spec for spec, _ in needs],
        needs={spec.name: (operation,) for spec, operation in needs},
    )


def signed_value(message: Message, token: str | None) -> bytes | None:
    """Return the value of a record; `MessageFormatError` if there is a token and its signature is wrong."""
    value, record = message.value(), cast("Record", message)
    if token is None or is_signed(token, message.topic() or "", value or b"", readable_headers(record)):
        return value
    raise MessageFormatError("a record that was not signed with the token; it is ignored")


class TopicFollower(PartitionReader):
    """Follows all partitions of a topic, in no group. For one thread; `close` ends it.

    Args:
        topic: name of the topic.
        positions: the start offset by partition; `back` applies to the other partitions.
        back: the number of records before the end of each partition to start at; None: start at its beginning.

    Raises:
        BrokerConnectionError: no broker answered.
        TopicNotFoundError: there is no such topic.
        MissingRightError: this user may not read the topic; `poll` raises it too.
        PenstockError: raised by `poll`: the topic is gone, or the client failed. Make a new follower.
        ConfigurationError: the client library refused a setting.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        config: ClientConfig,
        topic: str,
        positions: Mapping[Place, int] | None = None,
        *,
        back: int | None = 0,
    ) -> None:
        self._servers = bootstrap_servers
        self._topic = topic
        self._principal = principal_of(config)
        admin = clients.admin(bootstrap_servers, config)
        self._count = require_topics(admin, [topic])[topic]
        super().__init__(
            bootstrap_servers,
            config,
            _GROUP,
            self._not_read,
            isolation="read_uncommitted",
            given={"fetch.wait.max.ms": 100, "auto.offset.reset": "latest" if back is not None else "earliest"},
        )
        try:
            starts, ends = {}, {}
            for place, (start, end) in self._first_bounds().items():
                at = (positions or {}).get(place, start if back is None else max(start, end - back))
                # A recreated topic has other offsets.
                starts[place], ends[place] = at if start <= at <= end else end, end
            self.start(starts, ends)
        except BaseException:
            self.close()
            raise

    @property
    def has_caught_up(self) -> bool:
        """Whether all records were read that existed at the start."""
        return not self.behind

    def require_caught_up(self) -> None:
        """Raise `BrokerConnectionError` if records that existed at the start are missing and nothing arrives."""
        if not self.has_caught_up and time.monotonic() - self.heard_at > CONNECT_TIMEOUT_S:
            raise self._silent(self.trouble or f"nothing of {self._topic} arrived for {CONNECT_TIMEOUT_S:g} s")

    def ask(self) -> bool:
        """Ask brokers that were silent for a while for the ends of the topic; return whether all records were read.

        If they do not answer, `trouble` has the reason.
        """
        if time.monotonic() - self.heard_at <= _ASK_AFTER_S:
            return False
        try:
            bounds = self._bounds(_ANSWER_S)
        except KafkaException as error:
            self.trouble = str(self.consumer.words.cause or f"{self._topic}: {reason(error)}")
            return False
        if any(self.positions[place] < end for place, (_, end) in bounds.items()):
            return False  # there are unread records
        self.note_answer()
        return True

    def _bounds(self, limit_s: float) -> dict[Place, tuple[int, int]]:
        """Return the first and the end offsets of the partitions; `KafkaException` if brokers do not answer."""
        found = self.bounds(self._topic, range(self._count), limit_s)
        return {(self._topic, number): bounds for number, bounds in found.items()}

    def _first_bounds(self) -> dict[Place, tuple[int, int]]:
        try:
            return asked_until_ready(lambda: self._bounds(CONNECT_TIMEOUT_S), CONNECT_TIMEOUT_S)
        except KafkaException as error:
            if is_missing_right(error):
                raise self._missing() from error
            raise self._silent(reason(error)) from error

    def _not_read(self, kind: ErrorKind, error: KafkaError, _place: Place) -> None:
        if kind is ErrorKind.MISSING_RIGHT:
            raise self._missing()
        if kind not in {ErrorKind.PASSING, ErrorKind.GROUP}:
            raise PenstockError(f"{self._topic} cannot be followed: {reason(error)}")

    def _silent(self, why: str) -> BrokerConnectionError:
        return BrokerConnectionError(f"no broker answered at {self._servers}: {why}")

    def _missing(self) -> MissingRightError:
        right = topic_right(Operation.READ, self._topic)
        return MissingRightError(f"{self._topic} may not be read", [right], self._principal)


class RecordWriter:
    """Writes single records and waits for their acknowledgement. For one thread.

    Args:
        token: the token for signatures, or None.
    """

    def __init__(self, bootstrap_servers: str, config: ClientConfig, token: str | None = None) -> None:
        taken = {name: value for name, value in config.items() if name not in _NOT_TAKEN}
        self._producer = clients.producer(bootstrap_servers, {**taken, **_SETTINGS})
        self._servers = bootstrap_servers
        self._principal = principal_of(config)
        self._token = token

    def write(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        timeout: float = _WRITE_S,
        *,
        headers: Sequence[tuple[str, str | bytes | None]] = (),
    ) -> None:
        """Write a record, signed if there is a token.

        Raises:
            BrokerConnectionError: no broker acknowledged it in time; it may still arrive later.
            MissingRightError: this user may not write to the topic.
            PenstockError: the record was refused.
        """
        reported: list[KafkaError | None] = []

        def delivered(error: KafkaError | None, _message: Message) -> None:
            reported.append(error)

        signed = [] if self._token is None else [(SIGNATURE, signature(self._token, topic, value or b""))]
        try:
            self._producer.produce(topic, value, key=key, headers=[*headers, *signed], on_delivery=delivered)
            deadline = time.monotonic() + timeout
            while not reported and time.monotonic() < deadline:
                self._producer.poll(_POLL_S)
        except (KafkaException, BufferError) as error:
            raise PenstockError(f"nothing could be written to {topic}: {type(error).__name__}") from error
        if not reported:
            raise BrokerConnectionError(f"no broker at {self._servers} took a record for {topic} in {timeout:g} s")
        if (failure := reported[0]) is None:
            return
        if is_missing_right(failure):
            right = topic_right(Operation.WRITE, topic)
            raise MissingRightError(f"nothing can be written to {topic}", [right], self._principal)
        kind = BrokerConnectionError if failure.code() in _GONE else PenstockError
        raise kind(f"nothing could be written to {topic}: {reason(failure)}")


class TopicService(ABC):
    """A daemon thread that serves a process by a topic until it is stopped. Call `start` and `stop` from one thread.

    The app never waits for it. A failure, such as a missing topic, permission or broker, is logged once until the
    service works again.

    Args:
        name: name of the thread.
        failing: the consequence of a failure, for the log.
        last_s: seconds that its last work may take when it is stopped.
    """

    def __init__(self, name: str, failing: str, last_s: float = 0.0) -> None:
        self._failing = failing
        self._last_s = last_s
        self._stopping = threading.Event()
        #: Set while the service works; its thread writes it.
        self.is_listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Only its thread uses it.
        self._trouble: str | None = None

    @abstractmethod
    def _work(self) -> None:
        """Work until `_stopping` is set. After an exception, which is logged, it is called again."""

    def start(self) -> None:
        """Start the thread; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, within a second and `last_s`. A hanging call of the client is abandoned with the thread."""
        self._stopping.set()
        if self.is_listening.is_set():
            self._thread.join(1.0 + self._last_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._work()
            except MissingRightError as error:
                # A user may lack two permissions: the error names the second after the first was granted.
                if str(error) != self._trouble:
                    self._trouble = None
                self._failed(str(error))
            except PenstockError as error:
                self._failed(str(error))
            except KafkaException as error:
                self._failed(reason(error))
            except Exception as error:  # noqa: BLE001 - a service must never end the app
                self._failed(f"unexpected {type(error).__name__}")
            self.is_listening.clear()
            self._stopping.wait(_RETRY_DELAY_S)

    def _works(self) -> None:
        self.is_listening.set()
        if self._trouble is not None:
            _log.info("%s works again, after: %s", self._thread.name, self._trouble)
            self._trouble = None

    def _failed(self, why: str) -> None:
        if self._trouble is None:
            _log.warning("%s; it is tried again: %s", self._failing, why)
        self._trouble = why
