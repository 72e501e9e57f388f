"""The audit: who asked for what, from where, and what came of it. Its records, bounded, who writes and who reads them.

Three records tell of an action, under one id: `asked`, before anything is done; an `answer` of each member that was to
do something; and the `outcome`. All texts may be anybody's: they are escaped where they are shown.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

from penstock.clients.rights import Operation
from penstock.clients.topics import TopicSpec
from penstock.errors import MessageFormatError
from penstock.fleet.commands.command import MOST_BYTES as MOST_COMMAND_BYTES
from penstock.fleet.commands.command import Command
from penstock.fleet.topics import RecordWriter, TopicFollower, make_topics, stamped_topic
from penstock.fleet.wire import FLAT, ID, NUMBER, TEXT, fields_of, record, text, value_of, written
from penstock.fleet_member import CommandSettings, Outcome
from penstock.options import ClientConfig

if TYPE_CHECKING:
    from confluent_kafka import Message

#: A record is no larger than this, of which the details may take so many characters.
MOST_BYTES = 256 << 10
MOST_DETAILS = 48_000
_HOUR_MS = 3600 * 1000


class Kind(Enum):
    """What a record tells of an action."""

    ASKED = "asked"
    ANSWER = "answer"
    OUTCOME = "outcome"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of an action, in one sentence, with more text, as the stacks of a member."""

    outcome: Outcome
    said: str
    details: str | None = None


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One record.

    Attributes:
        kind: what it tells.
        id: of the action.
        name: of the action.
        parameters: what it was asked with.
        by: who asked, in words; of an answer the member.
        host: the machine that writes the record.
        at_ms: when, by the clock of that machine, in milliseconds since the epoch.
        outcome: what came of it; None for `asked`.
        said: one sentence.
        details: more text, as the stacks of a member.
    """

    kind: Annotated[Kind, value_of(Kind)]
    id: Annotated[str, ID]
    name: Annotated[str, text()]
    parameters: Annotated[Mapping[str, Any], FLAT]
    by: Annotated[str, text()]
    host: Annotated[str, text()]
    at_ms: Annotated[int, NUMBER]
    outcome: Annotated[Outcome | None, value_of(Outcome).or_none] = None
    said: Annotated[str, text(4 * TEXT)] = ""
    details: Annotated[str | None, text(MOST_DETAILS).or_none] = field(default=None, repr=False)

    @classmethod
    def of(cls, kind: Kind, command: Command, by: str, answer: Answer | None = None) -> AuditRecord:
        """Return a record of a command, written here and now."""
        came = () if answer is None else (answer.outcome, answer.said, answer.details)
        about = (command.id, command.name, command.asked, by)
        return cls(kind, *about, socket.gethostname(), int(time.time() * 1000), *came)


_FIELDS = fields_of(AuditRecord)


def encode_audit(record: AuditRecord) -> bytes:
    """Return the value of a record; texts are cut to what is read."""
    value = written(record, _FIELDS)
    # A character may take six bytes.
    return value if len(value) <= MOST_BYTES else written(replace(record, details=None), _FIELDS)


def decode_audit(value: bytes | None) -> AuditRecord:
    """Return what a record holds; `MessageFormatError` where that is none of the audit."""
    return AuditRecord(**record(value, MOST_BYTES, _FIELDS))


def prepare_topics(bootstrap_servers: str, config: ClientConfig, settings: CommandSettings, *, read: bool) -> None:
    """Make the topics that are absent; `MissingRightError` names the rights of who commands, or of who `read`s."""
    commands, audit = (Operation.READ, Operation.WRITE) if read else (Operation.WRITE, Operation.READ)
    needs = [(commands_spec(settings.topic), commands), (audit_spec(settings.audit_topic), audit)]
    make_topics(bootstrap_servers, config, needs)


def commands_spec(name: str) -> TopicSpec:
    """Return the topic of commands as it is created: they hold for a minute, so an hour is enough."""
    bounds = {"max.message.bytes": str(4 * MOST_COMMAND_BYTES), "segment.ms": str(_HOUR_MS)}
    return stamped_topic(name, _HOUR_MS, bounds)


def audit_spec(name: str) -> TopicSpec:
    """Return the topic of the audit as it is created: kept for a year."""
    return stamped_topic(name, 365 * 24 * _HOUR_MS, {"max.message.bytes": str(2 * MOST_BYTES)})


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
