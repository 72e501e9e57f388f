"""`AuditWriter` puts records into the topic of the audit and knows that they are there; `audit_records` reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from penstock import clients
from penstock.clients.rights import Operation, principal_of
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.errors import MessageFormatError
from penstock.fleet.commands.audit import MOST_BYTES as MOST_AUDIT_BYTES
from penstock.fleet.commands.audit import AuditRecord, decode_audit, encode_audit
from penstock.fleet.commands.command import MOST_BYTES as MOST_COMMAND_BYTES
from penstock.fleet.topics import RecordWriter, TopicFollower
from penstock.fleet_member import CommandSettings
from penstock.options import ClientConfig

if TYPE_CHECKING:
    from confluent_kafka import Message

_HOUR_MS = 3600 * 1000


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
    return _spec(name, _HOUR_MS, 4 * MOST_COMMAND_BYTES, {"segment.ms": str(_HOUR_MS)})


def audit_spec(name: str) -> TopicSpec:
    """Return the topic of the audit as it is created: kept for a year."""
    return _spec(name, 365 * 24 * _HOUR_MS, 2 * MOST_AUDIT_BYTES, {})


def _spec(name: str, kept_ms: int, most_bytes: int, more: Mapping[str, str]) -> TopicSpec:
    """Return a topic that the broker stamps: its clock says how old a record is."""
    kept = {"cleanup.policy": "delete", "retention.ms": str(kept_ms), "max.message.bytes": str(most_bytes)}
    return TopicSpec(name, 1, {**kept, **more, "message.timestamp.type": "LogAppendTime"})


class AuditWriter(RecordWriter):
    """Writes to the topic of the audit. For one thread; raises as `write`."""

    def __init__(self, bootstrap_servers: str, config: ClientConfig, settings: CommandSettings) -> None:
        super().__init__(bootstrap_servers, config, settings.token)
        self._topic = settings.audit_topic

    def tell(self, record: AuditRecord, group: str = "") -> None:
        """Write a record of the audit, by the group that the action is about."""
        self.write(self._topic, encode_audit(record), group.encode(errors="replace"))


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
