"""JSON that anybody may have written, as records and requests hold it: fields by their kind, and signatures. Pure.

A reader takes what has the shape that it expects, field by field, and refuses the rest.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, get_type_hints

from penstock.errors import MessageFormatError

#: The header that holds a record's signature.
SIGNATURE = "penstock-signature"
#: Characters of a text, and entries of a list of texts.
TEXT = 500
_MOST_TEXTS = 200
MOST_NUMBER = 1 << 63
_MOST_PARAMETERS = 16
_ID = re.compile(r"[0-9a-f]{32}")
#: The version of every record of the fleet.
VERSION = 1


class NewerRecordError(MessageFormatError):
    """A record of a version that this reader does not know."""


@dataclass(frozen=True, slots=True)
class Field:
    """What a value must be.

    Attributes:
        what: in words.
        fits: the test.
        is_needed: whether it must be there.
        cut: characters to which a text is cut when it is written.
        read: returns what a value that fits becomes.
    """

    what: str
    fits: Callable[[Any], bool]
    is_needed: bool = True
    cut: int | None = None
    read: Callable[[Any], Any] = lambda value: value

    @property
    def or_none(self) -> Field:
        """The same, where it may be left out."""
        return replace(self, is_needed=False)


def text(most: int = TEXT, least: int = 0) -> Field:
    """Return the field of a text of so many characters."""

    def fits(value: object) -> bool:
        return isinstance(value, str) and least <= len(value) <= most

    return Field(f"a text of {least} to {most} characters", fits, cut=most)


def choice(*known: str) -> Field:
    """Return the field of one of these texts."""
    return Field(f"one of {', '.join(known)}", lambda value: isinstance(value, str) and value in known)


def value_of(kind: type[Enum]) -> Field:
    """Return the field of one of an enumeration of texts."""
    return replace(choice(*(member.value for member in kind)), read=kind)


def list_of(each: Field, most: int, least: int = 0) -> Field:
    """Return the field of a list of so many values."""

    def fits(value: object) -> bool:
        return isinstance(value, list) and least <= len(value) <= most and all(map(each.fits, value))

    return Field(f"a list of {least} to {most} values, each {each.what}", fits)


def mapping_of(each: Field, most: int) -> Field:
    """Return the field of an object of at most so many values."""

    def fits(value: object) -> bool:
        return isinstance(value, dict) and len(value) <= most and all(map(each.fits, value.values()))

    return Field(f"an object of {most} values at most, each {each.what}", fits)


def _is_number(value: object, kind: type = int) -> bool:
    # NaN is not below anything.
    is_one = isinstance(value, int | kind) and not isinstance(value, bool)
    return is_one and -MOST_NUMBER < value < MOST_NUMBER  # type: ignore[operator] # it is a number


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool) or _is_number(value) or text().fits(value) or TEXTS.fits(value)


NAME = text(least=1)
INTEGER = Field("an integer", _is_number)
NUMBER = Field("a number from 0 on", lambda value: _is_number(value) and value >= 0)
FLOAT = Field("a number", lambda value: _is_number(value, float))
FLAG = Field("true or false", lambda value: isinstance(value, bool))
TEXTS = list_of(NAME, _MOST_TEXTS, 1)
ID = Field("32 hexadecimal digits", lambda value: isinstance(value, str) and _ID.fullmatch(value) is not None)
FLAT = mapping_of(Field("a text, a number, true, false or a list of texts", _is_plain), _MOST_PARAMETERS)


def fields_of(kind: type) -> dict[str, Field]:
    """Return the fields of a record, as its dataclass annotates them: `name: Annotated[type, field]`."""
    return {name: hint.__metadata__[0] for name, hint in get_type_hints(kind, include_extras=True).items()}


def taken(given: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return these fields of a mapping, without those that are left out; None counts as left out.

    `MessageFormatError` names the first that is missing or wrong.
    """
    found = {}
    for name, field in fields.items():
        value = given.get(name)
        if value is None and not field.is_needed:
            continue
        if not field.fits(value):
            raise MessageFormatError(f"{name} must be {field.what}")
        found[name] = field.read(value)
    return found


def loaded(value: bytes | None, most_bytes: int) -> Any:
    """Return what bytes hold as JSON; `MessageFormatError` where they hold none, or are too many."""
    if value is None or len(value) > most_bytes:
        raise MessageFormatError("a record that is none, or too large; it is passed over")
    try:
        return json.loads(value, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise MessageFormatError("a record that is no JSON; it is passed over") from error


def loaded_object(value: bytes | None, most_bytes: int) -> dict[str, Any]:
    """Return the object that bytes hold as JSON; `MessageFormatError` as `loaded`."""
    found = loaded(value, most_bytes)
    if not isinstance(found, dict):
        raise MessageFormatError("a record that is no JSON object; it is passed over")
    return found


def record(value: bytes | None, most_bytes: int, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return the fields of a record; `MessageFormatError` where it is none, `NewerRecordError` for a later version."""
    found = loaded_object(value, most_bytes)
    version = found.get("version")
    if version != VERSION:
        is_newer = isinstance(version, int) and version > VERSION
        kind = NewerRecordError if is_newer else MessageFormatError
        raise kind(f"a record of another version than {VERSION}; it is passed over")
    return taken(found, fields)


def written(given: object, fields: Mapping[str, Field]) -> bytes:
    """Return a record of a value's fields, whose texts are cut to what is read."""
    found: dict[str, Any] = {"version": VERSION}
    for name, field in fields.items():
        value = getattr(given, name)
        if isinstance(value, Enum):
            value = value.value
        found[name] = value[: field.cut] if isinstance(value, str) else value
    return json.dumps(found).encode()


def _no_number(text: str) -> None:
    raise ValueError(text)


def signature(token: str, topic: str, value: bytes) -> bytes:
    """Return what shows that whoever wrote a record to a topic knows the token: HMAC-SHA256 of both (RFC 2104)."""
    return hmac.new(token.encode(), topic.encode() + b"\0" + value, hashlib.sha256).hexdigest().encode()


def is_signed(token: str, topic: str, value: bytes, headers: object) -> bool:
    """Tell whether a record has the signature that the token gives it, in a time that tells nothing of it."""
    given = next((held for name, held in headers if name == SIGNATURE), None) if isinstance(headers, list) else None
    return isinstance(given, bytes) and hmac.compare_digest(given, signature(token, topic, value))


def one_line(text: str) -> str:
    """Return a text from outside as one line for a log, with what a terminal might obey escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape", "replace").decode() for char in text)
