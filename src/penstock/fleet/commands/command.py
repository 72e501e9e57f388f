"""The actions: the table of all of them, and one that somebody asks for, which members get as a record. Pure.

Whoever may write the topic commands members, so what is in it may be anybody's: a reader takes what has the shape of a
command, and refuses the rest. A command holds for a minute by the broker's clock, which stamps it, so that none is
carried out that somebody gave when all was otherwise.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Annotated, Any

from penstock.errors import MessageFormatError
from penstock.fleet.wire import (
    FLAG,
    FLAT,
    ID,
    NAME,
    NUMBER,
    TEXTS,
    Field,
    choice,
    fields_of,
    record,
    taken,
    text,
    written,
)
from penstock.transactions.wire.ids import is_id

#: A command is no larger than this.
MOST_BYTES = 8 << 10
#: How a transaction may be settled.
DECISIONS = ("commit", "rollback", "discard")


class Doer(Enum):
    """Who carries an action out."""

    #: Each member of a group that is meant.
    MEMBERS = auto()
    #: The member of a group that can: the others refuse.
    HOLDER = auto()
    #: The coordinator that group and member name, or, in Kafka, who asks: then the store's prefix is named.
    STORE = auto()
    #: Who asks.
    ASKER = auto()


@dataclass(frozen=True, slots=True)
class Action:
    """A row of the table.

    Attributes:
        doer: who carries it out.
        parameters: what it is asked with, beside the group and the member.
        would: what would be done, by `{whom}`, with what `{place}` names.
    """

    doer: Doer
    parameters: Mapping[str, Field]
    would: str = ""


_PLACE = {"topic": NAME, "partition": NUMBER.or_none}
_MESSAGE = {"topic": NAME, "partition": NUMBER, "offset": NUMBER}
_TRANSACTION = {
    "transaction_id": Field(
        "the id of a transaction, as `penstock tx ls` names them", lambda value: isinstance(value, str) and is_id(value)
    )
}
ACTIONS: Mapping[str, Action] = {
    "pause": Action(
        Doer.MEMBERS,
        _PLACE,
        "{place} would be paused for {whom}: what was taken in is finished, and nothing more fetched until it is "
        "resumed, or the process starts again",
    ),
    "resume": Action(Doer.MEMBERS, _PLACE, "{place} would go on for {whom}"),
    "stacks": Action(Doer.MEMBERS, {}, "the stacks of all threads of {whom} would be shown, which names its functions"),
    "give-up": Action(
        Doer.HOLDER, _MESSAGE, "{place} would be given up by {whom}: it goes to its dead letters, and its key goes on"
    ),
    "offsets": Action(Doer.ASKER, {"group": NAME, "to": NAME, "topics": TEXTS.or_none, "keep_done": FLAG.or_none}),
    "replay": Action(Doer.ASKER, _MESSAGE),
    "settle": Action(
        Doer.STORE,
        {**_TRANSACTION, "decision": choice(*DECISIONS)},
        "{place} would be decided by {whom}, in its store",
    ),
    "resume-transaction": Action(
        Doer.STORE, _TRANSACTION, "{place} would be brought back by {whom}, undecided; its group is asked again"
    ),
}
_HEARD = [name for name, action in ACTIONS.items() if action.doer is not Doer.ASKER]


@dataclass(frozen=True, slots=True)
class Command:
    """An action that somebody asks for.

    Attributes:
        name: one of `ACTIONS`.
        group: whose members do it; empty where none do.
        member: the one that is meant, by the name under which it reports; all where it is None.
        parameters: what the table says, without what is left out; of a transaction in Kafka `prefix`, too.
        by: who asked, in words.
        asked_ms: when, in milliseconds since the epoch, by the clock of who asked.
        id: tells commands apart: a member carries each out once.
    """

    name: Annotated[str, choice(*_HEARD)]
    group: Annotated[str, NAME]
    member: Annotated[str | None, NAME.or_none] = None
    parameters: Annotated[Mapping[str, Any], FLAT] = field(default_factory=dict)
    by: Annotated[str, text(200)] = ""
    asked_ms: Annotated[int, NUMBER] = 0
    id: Annotated[str, ID] = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def is_for_members(self) -> bool:
        """Whether members or coordinators do it, which are asked by the topic of commands."""
        return bool(self.group)

    @property
    def subject(self) -> str:
        """What it is about: the key of its records."""
        parameters = self.parameters
        return self.group or str(parameters.get("group") or parameters.get("prefix") or parameters.get("topic"))

    @property
    def key(self) -> bytes:
        """The key of its record."""
        return self.subject.encode(errors="replace")

    @property
    def asked(self) -> dict[str, Any]:
        """What the audit says of it."""
        whom = {"group": self.group or None, "member": self.member}
        return {name: value for name, value in whom.items() if value is not None} | dict(self.parameters)

    @property
    def place(self) -> str:
        """What it is about, in words."""
        parameters = self.parameters
        if "transaction_id" in parameters:
            decision = f" ({parameters['decision']})" if "decision" in parameters else ""
            return f"transaction {parameters['transaction_id']}{decision}"
        place = str(parameters.get("topic", ""))
        place += f":{parameters['partition']}" if "partition" in parameters else ""
        return f"{place}@{parameters['offset']}" if "offset" in parameters else place


_RECORD = fields_of(Command)


def command_of(name: str, given: Mapping[str, Any], by: str, asked_ms: int) -> Command:
    """Return the action that somebody asks for by name, with a group, a member and parameters in one mapping.

    `MessageFormatError` says what is missing, wrong, or not a parameter: one that is misspelt must not count as left
    out.
    """
    action = ACTIONS[name]
    whom: dict[str, Field] = {}
    if action.doer in {Doer.MEMBERS, Doer.HOLDER}:
        whom = {"group": NAME, "member": NAME.or_none}
    elif action.doer is Doer.STORE:
        # One coordinator: a second that does it, too, would be refused.
        whom = {"prefix": NAME} if given.get("group") is None else {"group": NAME, "member": NAME}
    found = taken(given, whom | dict(action.parameters))
    if unknown := sorted(str(name)[:100] for name in given if name not in whom and name not in action.parameters):
        raise MessageFormatError(f"{unknown[0]!r} is no parameter of this action")
    is_heard = action.doer is not Doer.ASKER
    group = found.pop("group", "") if is_heard else ""
    return Command(name, group, found.pop("member", None) if is_heard else None, found, by, asked_ms)


def encode_command(command: Command) -> bytes:
    """Return the value of a record; `MessageFormatError` where it would not be read as this command."""
    value = written(command, _RECORD)
    decode_command(value)
    return value


def decode_command(value: bytes | None) -> Command:
    """Return the command that a record holds; `MessageFormatError` where it is none."""
    found = record(value, MOST_BYTES, _RECORD)
    parameters = taken(found.pop("parameters"), ACTIONS[found["name"]].parameters)
    return Command(**found, parameters=parameters)
