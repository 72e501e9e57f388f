"""The format of a command: what one or all members of a group are to do, as JSON, bounded. Pure.

Whoever may write the topic commands members, so what is in it may be anybody's: a reader takes what has the shape of a
command, field by field, and refuses the rest. A command holds for a minute by the broker's clock, which stamps it, so
that none is carried out that somebody gave when all was otherwise.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import MessageFormatError
from penstock.fleet.commands.fields import flat, identity, loaded, number, text, text_or_none

#: A command is no larger than this.
MOST_BYTES = 8 << 10
#: What members do by command, and what coordinators do to transactions of their store.
NAMES = ("pause", "resume", "stacks", "give-up", "settle", "resume-transaction")
#: How a transaction may be settled.
DECISIONS = ("commit", "rollback", "discard")

_VERSION = 1
_MOST_PARAMETERS = 16
#: The numbers that a command must have, and those that it may have.
_MUST_HAVE: Mapping[str, tuple[str, ...]] = {"give-up": ("partition", "offset")}
_MAY_HAVE: Mapping[str, tuple[str, ...]] = {"pause": ("partition",), "resume": ("partition",)}
#: Those that are about a topic, and those about a transaction.
_OF_TOPICS = frozenset({"pause", "resume", "give-up"})
_OF_TRANSACTIONS = frozenset({"settle", "resume-transaction"})
#: Characters of a transaction's id at most.
_ID = 100


@dataclass(frozen=True, slots=True)
class Command:
    """What members of a group are to do.

    Attributes:
        name: one of `NAMES`.
        group: whose members.
        member: the one that is meant, by the name under which it reports; all where it is None.
        topic: the topic that it is about; None for `stacks`, and where it is about a transaction.
        partition: the partition of it, where one is meant.
        offset: the message that is to be given up.
        transaction_id: the transaction that is to be settled, or brought back.
        decision: how it is to be settled: one of `DECISIONS`.
        by: who asked, in words.
        asked_ms: when, in milliseconds since the epoch, by the clock of who asked.
        id: tells commands apart: a member carries each out once.
    """

    name: str
    group: str
    member: str | None = None
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    by: str = ""
    asked_ms: int = 0
    transaction_id: str | None = None
    decision: str | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def key(self) -> bytes:
        """The key of its record."""
        return self.group.encode(errors="replace")

    @property
    def parameters(self) -> dict[str, Any]:
        """What it says beside whom it is for; without what it leaves out."""
        told = {
            "topic": self.topic,
            "partition": self.partition,
            "offset": self.offset,
            "transaction_id": self.transaction_id,
            "decision": self.decision,
        }
        return {name: value for name, value in told.items() if value is not None}

    @property
    def place(self) -> str:
        """What it is about, in words."""
        if self.transaction_id is not None:
            return f"transaction {self.transaction_id}" + (f" ({self.decision})" if self.decision else "")
        place = self.topic or ""
        place += "" if self.partition is None else f"[{self.partition}]"
        return place if self.offset is None else f"{place}@{self.offset}"


def encode_command(command: Command) -> bytes:
    """Return the value of a record; `MessageFormatError` where it would not be read as this command."""
    value = json.dumps(
        {
            "version": _VERSION,
            "id": command.id,
            "name": command.name,
            "group": command.group,
            "member": command.member,
            "parameters": command.parameters,
            "by": command.by[:200],
            "asked_ms": command.asked_ms,
        }
    ).encode()
    decode_command(value)
    return value


def decode_command(value: bytes | None) -> Command:
    """Return the command that a record holds; `MessageFormatError` where it is none."""
    found = loaded(value, MOST_BYTES, _VERSION)
    name = text(found, "name")
    if name not in NAMES:
        raise MessageFormatError("a command by a name that this version does not know; it is passed over")
    parameters = flat(found, "parameters", _MOST_PARAMETERS)
    wanted = {parameter: number(parameters, parameter) for parameter in _MUST_HAVE.get(name, ())}
    wanted |= {
        parameter: number(parameters, parameter)
        for parameter in _MAY_HAVE.get(name, ())
        if parameters.get(parameter) is not None
    }
    decision = text(parameters, "decision") if name == "settle" else None
    if decision not in {None, *DECISIONS}:
        raise MessageFormatError(f"decision is none of {', '.join(DECISIONS)}; the command is passed over")
    return Command(
        name=name,
        group=text(found, "group"),
        member=text_or_none(found, "member"),
        topic=text(parameters, "topic") if name in _OF_TOPICS else None,
        partition=wanted.get("partition"),
        offset=wanted.get("offset"),
        by=text(found, "by"),
        asked_ms=number(found, "asked_ms"),
        transaction_id=text(parameters, "transaction_id", _ID) if name in _OF_TRANSACTIONS else None,
        decision=decision,
        id=identity(found),
    )
