"""`AuditWriter` puts records into the topic of the audit and knows that they are there; `audit_records` reads it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException

from penstock import clients
from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.requests.topics import TopicSpec, ensure_topics
from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right
from penstock.errors import BrokerConnectionError, MessageFormatError, PenstockError
from penstock.fleet.commands.audit import MOST_BYTES as MOST_AUDIT_BYTES
from penstock.fleet.commands.audit import AuditRecord, decode_audit, encode_audit
from penstock.fleet.commands.command import MOST_BYTES as MOST_COMMAND_BYTES
from penstock.fleet.following import TopicFollower
from penstock.fleet.wire import SIGNATURE, signature
from penstock.fleet_member import CommandSettings
from penstock.options import ClientConfig

if TYPE_CHECKING:
    from confluent_kafka import Message

_SETTINGS = {"linger.ms": 0, "enable.idempotence": False, "acks": "all", "message.timeout.ms": 8_000}
#: Of the user's settings, those that are for his own producers alone.
_NOT_TAKEN = ("transactional.id", "transaction.timeout.ms", "delivery.timeout.ms", "on_delivery", "stats_cb")
#: Seconds that a record may take, a little longer than the client tries.
_WRITE_S = 10.0
_POLL_S = 0.05
_DAY_MS = 24 * 3600 * 1000


def prepare_topics(bootstrap_servers: str, config: ClientConfig, settings: CommandSettings, *, read: bool) -> None:
    """Make the topics that are absent; `MissingRightError` names the rights of who commands, or of who `read`s."""
    needs = (Operation.READ, Operation.WRITE) if read else (Operation.WRITE, Operation.READ)
    ensure_topics(
        clients.admin(bootstrap_servers, config),
        bootstrap_servers,
        [commands_spec(settings.topic), audit_spec(settings.audit_topic)],
        needs={settings.topic: needs[:1], settings.audit_topic: needs[1:]},
        principal=principal_of(config),
    )


def commands_spec(name: str) -> TopicSpec:
    """Return the topic of commands as it is created: they hold for a minute, so an hour is enough."""
    return TopicSpec(
        name,
        1,
        {
            "cleanup.policy": "delete",
            "retention.ms": str(3600 * 1000),
            "segment.ms": str(3600 * 1000),
            "max.message.bytes": str(4 * MOST_COMMAND_BYTES),
            "message.timestamp.type": "LogAppendTime",
        },
    )


def audit_spec(name: str) -> TopicSpec:
    """Return the topic of the audit as it is created: kept for a year, stamped by the broker."""
    return TopicSpec(
        name,
        1,
        {
            "cleanup.policy": "delete",
            "retention.ms": str(365 * _DAY_MS),
            "max.message.bytes": str(2 * MOST_AUDIT_BYTES),
            "message.timestamp.type": "LogAppendTime",
        },
    )


class RecordWriter:
    """Writes single records and waits until brokers have them. For one thread."""

    def __init__(self, bootstrap_servers: str, config: ClientConfig, settings: CommandSettings) -> None:
        taken = {name: value for name, value in config.items() if name not in _NOT_TAKEN}
        self._producer = clients.producer(bootstrap_servers, {**taken, **_SETTINGS})
        self._servers = bootstrap_servers
        self._principal = principal_of(config)
        self._settings = settings

    def write(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        timeout: float = _WRITE_S,
        *,
        headers: Sequence[tuple[str, str | bytes | None]] = (),
    ) -> None:
        """Write a record, signed where there is a token.

        Raises:
            BrokerConnectionError: no broker has it in time; whether it comes to be there is not known.
            MissingRightError: this user may not write there.
            PenstockError: it was refused.
        """
        told: list[KafkaError | None] = []

        def delivered(error: KafkaError | None, _message: Message) -> None:
            told.append(error)

        token = self._settings.token
        signed = [] if token is None else [(SIGNATURE, signature(token, topic, value or b""))]
        try:
            self._producer.produce(topic, value, key=key, headers=[*headers, *signed], on_delivery=delivered)
            deadline = time.monotonic() + timeout
            while not told and time.monotonic() < deadline:
                self._producer.poll(_POLL_S)
        except (KafkaException, BufferError) as error:
            raise PenstockError(f"nothing could be written to {topic}: {type(error).__name__}") from error
        if not told:
            raise BrokerConnectionError(f"no broker at {self._servers} took a record for {topic} in {timeout:g} s")
        if (failure := told[0]) is None:
            return
        if is_missing_right(failure):
            right = topic_right(Operation.WRITE, topic)
            raise MissingRightError(f"nothing can be written to {topic}", [right], self._principal)
        gone = {KafkaError._MSG_TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}  # noqa: SLF001 - public codes of the library
        kind = BrokerConnectionError if failure.code() in gone else PenstockError
        raise kind(f"nothing could be written to {topic}: {reason(failure)}")


class AuditWriter(RecordWriter):
    """Writes to the topic of the audit. For one thread; raises as `write`."""

    def tell(self, record: AuditRecord, group: str = "") -> None:
        """Write a record of the audit, by the group that the action is about."""
        self.write(self._settings.audit_topic, encode_audit(record), group.encode(errors="replace"))


def audit_records(
    bootstrap_servers: str, config: ClientConfig, topic: str, last: int, *, follow: bool = False
) -> Iterator[AuditRecord | None]:
    """Yield the last records of the audit, and with `follow` what comes later; None for what is no record of it.

    Raises as `TopicFollower`; `BrokerConnectionError` where nothing comes that is there.
    """
    follower = TopicFollower(bootstrap_servers, config, topic, back=last)
    try:
        while follow or not follower.has_caught_up:
            if records := follower.poll(0.5):
                yield from map(_read, records)
            else:
                follower.require_caught_up()
    finally:
        follower.close()


def _read(message: Message) -> AuditRecord | None:
    try:
        return decode_audit(message.value())
    except MessageFormatError:
        return None
