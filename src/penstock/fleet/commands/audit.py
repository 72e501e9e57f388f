"""The audit log of actions: its records, bounded in size, their writer and their reader.

An action has records under one id: `asked`, before anything is done; an `answer` of each member that received it; and
the `outcome`. All texts may be forged: they are escaped when they are shown.
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
from penstock.fleet.wire import FLAT, ID, NUMBER, TEXT, decode_record, encode_record, fields_of, text, value_of
from penstock.fleet_member import CommandSettings, Outcome
from penstock.options import ClientConfig
from penstock.transactions.wire.topics import KEPT

if TYPE_CHECKING:
    from confluent_kafka import Message

#: The size limit of a record in bytes, and of its details in characters.
MOST_BYTES = 256 << 10
MOST_DETAILS = 48_000
_HOUR_MS = 3600 * 1000


class Kind(Enum):
    """The step of an action that a record is about."""

    ASKED = "asked"
    ANSWER = "answer"
    OUTCOME = "outcome"


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of an action: one sentence, and further text such as the stacks of a member."""

    outcome: Outcome
    said: str
    details: str | None = None


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One record.

    Attributes:
        kind: the step of the action.
        id: id of the action.
        name: name of the action.
        parameters: the group, the member and the parameters of the action.
        by: the caller, in words; for an answer the member.
        host: the machine that writes the record.
        at_ms: the time by the clock of that machine, in milliseconds since the epoch.
        outcome: the result; None for `asked`.
        said: the result in one sentence.
        details: further text, such as the stacks of a member.
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
        """Return a record about a command, by this host and with the present time."""
        result = () if answer is None else (answer.outcome, answer.said, answer.details)
        action = (command.id, command.name, command.all_parameters, by)
        return cls(kind, *action, socket.gethostname(), int(time.time() * 1000), *result)


_FIELDS = fields_of(AuditRecord)


def encode_audit(record: AuditRecord) -> bytes:
    """Return the value of a record; texts are cut to the lengths that a reader accepts."""
    value = encode_record(record, _FIELDS)
    # One character can take six bytes.
    return value if len(value) <= MOST_BYTES else encode_record(replace(record, details=None), _FIELDS)


def decode_audit(value: bytes | None) -> AuditRecord:
    """Return the audit record in a value; `MessageFormatError` if it is not an audit record."""
    return AuditRecord(**decode_record(value, MOST_BYTES, _FIELDS))


def prepare_topics(bootstrap_servers: str, config: ClientConfig, settings: CommandSettings, *, read: bool) -> None:
    """Create absent topics; `MissingRightError` names missing permissions: of a listener (`read`), else of a sender."""
    commands, audit = (Operation.READ, Operation.WRITE) if read else (Operation.WRITE, Operation.READ)
    needs = [(commands_spec(settings.topic), commands), (audit_spec(settings.audit_topic), audit)]
    make_topics(bootstrap_servers, config, needs)


def commands_spec(name: str) -> TopicSpec:
    """Return the specification of the topic of commands: a command is valid for a minute, so it keeps an hour."""
    bounds = {"max.message.bytes": str(4 * MOST_COMMAND_BYTES), "segment.ms": str(_HOUR_MS)}
    return stamped_topic(name, _HOUR_MS, bounds)


def audit_spec(name: str) -> TopicSpec:
    """Return the specification of the topic of the audit: it keeps everything, as a store that shares it relies on."""
    return stamped_topic(name, -1, {**KEPT, "max.message.bytes": str(2 * MOST_BYTES)})


class AuditWriter(RecordWriter):
    """Writes to the topic of the audit. For one thread; raises the errors of `write`."""

    def __init__(self, bootstrap_servers: str, config: ClientConfig, settings: CommandSettings) -> None:
        super().__init__(bootstrap_servers, config, settings.token)
        self._topic = settings.audit_topic

    def append(self, record: AuditRecord, key: bytes) -> None:
        """Write a record of the audit; `key` is that of the command."""
        self.write(self._topic, encode_audit(record), key)


def audit_records(
    bootstrap_servers: str, config: ClientConfig, topic: str, last: int, *, follow: bool = False
) -> Iterator[AuditRecord | None]:
    """Yield the last records of the audit, and with `follow` the later ones; None for anything else in the topic.

    Raises the errors of `TopicFollower`; `BrokerConnectionError` if existing records do not arrive.
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
