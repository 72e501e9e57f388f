"""The format of the audit: who asked for what, from where, and what came of it, as JSON, bounded. Pure.

Three records tell of an action, under one id: `asked`, before anything is done; an `answer` of each member that was to
do something; and the `outcome`. All texts may be anybody's: they are escaped where they are shown.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from penstock.fleet.commands.command import Command
from penstock.fleet.wire import FLAT, ID, NUMBER, TEXT, record, text, value_of, written
from penstock.fleet_member import Outcome

#: A record is no larger than this, of which the details may take so many characters.
MOST_BYTES = 256 << 10
MOST_DETAILS = 48_000


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

    kind: Kind
    id: str
    name: str
    parameters: Mapping[str, Any]
    by: str
    host: str
    at_ms: int
    outcome: Outcome | None = None
    said: str = ""
    details: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, kind: Kind, command: Command, by: str, answer: Answer | None = None) -> AuditRecord:
        """Return a record of a command, written here and now."""
        came = () if answer is None else (answer.outcome, answer.said, answer.details)
        about = (command.id, command.name, command.asked, by)
        return cls(kind, *about, socket.gethostname(), int(time.time() * 1000), *came)


_FIELDS = {
    "kind": value_of(Kind),
    "id": ID,
    "name": text(),
    "parameters": FLAT,
    "by": text(),
    "host": text(),
    "at_ms": NUMBER,
    "outcome": value_of(Outcome).or_none,
    "said": text(4 * TEXT),
    "details": text(MOST_DETAILS).or_none,
}


def encode_audit(record: AuditRecord) -> bytes:
    """Return the value of a record; texts are cut to what is read."""
    value = written(record, _FIELDS)
    # A character may take six bytes.
    return value if len(value) <= MOST_BYTES else written(replace(record, details=None), _FIELDS)


def decode_audit(value: bytes | None) -> AuditRecord:
    """Return what a record holds; `MessageFormatError` where that is none of the audit."""
    return AuditRecord(**record(value, MOST_BYTES, _FIELDS))
