"""The format of the audit: who asked for what, from where, and what came of it, as JSON, bounded. Pure.

Three records tell of an action, under one id: `asked`, before anything is done; an `answer` of each member that was to
do something; and the `outcome`. All texts may be anybody's: they are escaped where they are shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from penstock.errors import MessageFormatError
from penstock.fleet.commands.fields import TEXT, flat, identity, loaded, number, text, text_or_none
from penstock.fleet_member import Outcome

#: A record is no larger than this, of which the details may take so many characters.
MOST_BYTES = 256 << 10
MOST_DETAILS = 48_000

_VERSION = 1
_MOST_PARAMETERS = 16


class Kind(Enum):
    """What a record tells of an action."""

    ASKED = "asked"
    ANSWER = "answer"
    OUTCOME = "outcome"


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


def encode_audit(record: AuditRecord) -> bytes:
    """Return the value of a record; texts are cut to what is read."""
    told = asdict(record)
    told |= {name: str(told[name])[:TEXT] for name in ("name", "by", "host")}
    told |= {
        "version": _VERSION,
        "kind": record.kind.value,
        "outcome": None if record.outcome is None else record.outcome.value,
        "said": record.said[: 4 * TEXT],
        "details": None if record.details is None else record.details[:MOST_DETAILS],
    }
    value = json.dumps(told).encode()
    # A character may take six bytes.
    return value if len(value) <= MOST_BYTES else json.dumps(told | {"details": None}).encode()


def decode_audit(value: bytes | None) -> AuditRecord:
    """Return what a record holds; `MessageFormatError` where that is none of the audit."""
    found = loaded(value, MOST_BYTES, _VERSION)
    outcome = text_or_none(found, "outcome")
    try:
        kind = Kind(text(found, "kind"))
        ended = None if outcome is None else Outcome(outcome)
    except ValueError as error:
        raise MessageFormatError("a kind or an outcome that is none; the record is passed over") from error
    return AuditRecord(
        kind=kind,
        id=identity(found),
        name=text(found, "name"),
        parameters=flat(found, "parameters", _MOST_PARAMETERS),
        by=text(found, "by"),
        host=text(found, "host"),
        at_ms=number(found, "at_ms"),
        outcome=ended,
        said=text(found, "said", 4 * TEXT),
        details=text_or_none(found, "details", MOST_DETAILS),
    )
