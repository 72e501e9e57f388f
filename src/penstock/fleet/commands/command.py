"""The table of all actions, and a command: one requested action, as a record. Pure.

Anyone with write permission on the topic can command members, and can write anything into it. So a reader accepts only
records that have the shape of a command, and refuses the rest. A command is valid for a minute by the broker's clock,
which stamps it. So no member executes a command that was given in another situation.
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
    decode_record,
    encode_record,
    fields_of,
    read_fields,
    text,
)
from penstock.transactions.wire.ids import is_id

#: The size limit of a command.
MOST_BYTES = 8 << 10
#: The decisions on a transaction.
DECISIONS = ("commit", "rollback", "discard")


class Executor(Enum):
    """The process that executes an action."""

    #: Each member of the group, or the named one.
    MEMBERS = auto()
    #: The member that holds the message; the others refuse.
    HOLDER = auto()
    #: The coordinator named by group and member. For a store in Kafka: the caller, and the command names the prefix.
    STORE = auto()
    #: The process of the caller.
    CALLER = auto()


@dataclass(frozen=True, slots=True)
class Action:
    """A row of the table.

    Attributes:
        executor: the process that executes it.
        parameters: its parameters, without group and member.
        would: the sentence of a dry run, with `{whom}` and `{place}`.
    """

    executor: Executor
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
        Executor.MEMBERS,
        _PLACE,
        "{place} would be paused for {whom}: what was taken in is finished, and nothing more fetched until it is "
        "resumed, or the process starts again",
    ),
    "resume": Action(Executor.MEMBERS, _PLACE, "{place} would go on for {whom}"),
    "stacks": Action(
        Executor.MEMBERS, {}, "the stacks of all threads of {whom} would be shown, which names its functions"
    ),
    "give-up": Action(
        Executor.HOLDER,
        _MESSAGE,
        "{place} would be given up by {whom}: it goes to its dead letters, and its key goes on",
    ),
    "offsets": Action(Executor.CALLER, {"group": NAME, "to": NAME, "topics": TEXTS.or_none, "keep_done": FLAG.or_none}),
    "replay": Action(Executor.CALLER, _MESSAGE),
    "settle": Action(
        Executor.STORE,
        {**_TRANSACTION, "decision": choice(*DECISIONS)},
        "{place} would be decided by {whom}, in its store",
    ),
    "resume-transaction": Action(
        Executor.STORE, _TRANSACTION, "{place} would be brought back by {whom}, undecided; its group is asked again"
    ),
}
_SENT_TO_MEMBERS = [name for name, action in ACTIONS.items() if action.executor is not Executor.CALLER]


@dataclass(frozen=True, slots=True)
class Command:
    """One requested action.

    Attributes:
        name: one of `ACTIONS`.
        group: the group whose members execute it; empty if no member does.
        member: the member that executes it, by its name in reports; None for all.
        parameters: the parameters of the table, without those left out. For a transaction in Kafka also `prefix`.
        by: the caller, in words.
        asked_ms: the time of the request by the caller's clock, in milliseconds since the epoch.
        id: the unique id; a member executes each id once.
    """

    name: Annotated[str, choice(*_SENT_TO_MEMBERS)]
    group: Annotated[str, NAME]
    member: Annotated[str | None, NAME.or_none] = None
    parameters: Annotated[Mapping[str, Any], FLAT] = field(default_factory=dict)
    by: Annotated[str, text(200)] = ""
    asked_ms: Annotated[int, NUMBER] = 0
    id: Annotated[str, ID] = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def is_for_members(self) -> bool:
        """Whether members or coordinators execute it; they receive it through the topic of commands."""
        return bool(self.group)

    @property
    def key(self) -> bytes:
        """The key of its records: the group, the store's prefix or the topic."""
        parameters = self.parameters
        subject = self.group or parameters.get("group") or parameters.get("prefix") or parameters.get("topic", "")
        return str(subject).encode(errors="replace")

    @property
    def all_parameters(self) -> dict[str, Any]:
        """The group, the member and the parameters, as the audit has them."""
        target = {"group": self.group or None, "member": self.member}
        return {name: value for name, value in target.items() if value is not None} | dict(self.parameters)

    @property
    def place(self) -> str:
        """The transaction, the message, the partition or the topic, in words."""
        parameters = self.parameters
        if "transaction_id" in parameters:
            decision = f" ({parameters['decision']})" if "decision" in parameters else ""
            return f"transaction {parameters['transaction_id']}{decision}"
        place = str(parameters.get("topic", ""))
        place += f":{parameters['partition']}" if "partition" in parameters else ""
        return f"{place}@{parameters['offset']}" if "offset" in parameters else place


_FIELDS = fields_of(Command)


def command_of(name: str, arguments: Mapping[str, Any], by: str, asked_ms: int) -> Command:
    """Return the command for an action; `arguments` has the group, the member and the parameters.

    `MessageFormatError` names the first argument that is missing, wrong or unknown. A misspelt parameter is unknown, so
    it is never treated as left out.
    """
    action = ACTIONS[name]
    target: dict[str, Field] = {}
    if action.executor in {Executor.MEMBERS, Executor.HOLDER}:
        target = {"group": NAME, "member": NAME.or_none}
    elif action.executor is Executor.STORE:
        # Exactly one coordinator: a second one would only answer with a refusal.
        target = {"prefix": NAME} if arguments.get("group") is None else {"group": NAME, "member": NAME}
    found = read_fields(arguments, target | dict(action.parameters))
    if unknown := sorted(str(name)[:100] for name in arguments if name not in target and name not in action.parameters):
        raise MessageFormatError(f"{unknown[0]!r} is no parameter of this action")
    if action.executor is Executor.CALLER:
        return Command(name, "", None, found, by, asked_ms)
    return Command(name, found.pop("group", ""), found.pop("member", None), found, by, asked_ms)


def encode_command(command: Command) -> bytes:
    """Return the value of the record; `MessageFormatError` if a reader would refuse it."""
    value = encode_record(command, _FIELDS)
    decode_command(value)
    return value


def decode_command(value: bytes | None) -> Command:
    """Return the command in a record's value; `MessageFormatError` if it is not a command."""
    found = decode_record(value, MOST_BYTES, _FIELDS)
    parameters = read_fields(found.pop("parameters"), ACTIONS[found["name"]].parameters)
    return Command(**found, parameters=parameters)
