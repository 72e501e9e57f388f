"""The parser of untrusted JSON in records and requests: fields with their types and bounds, and signatures. Pure.

A reader accepts only fields of the expected type and size, and refuses the rest.
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
#: The length limit of a text in characters, and of a list of texts.
TEXT = 500
_MOST_TEXTS = 200
MOST_NUMBER = 1 << 63
_MOST_PARAMETERS = 16
_ID = re.compile(r"[0-9a-f]{32}")
#: The version of every record of the fleet.
VERSION = 1


class NewerRecordError(MessageFormatError):
    """The record has a later version than this reader knows."""


@dataclass(frozen=True, slots=True)
class Field:
    """The type and the bounds of a value.

    Attributes:
        what: the description, for errors.
        fits: the test.
        is_needed: whether the value is required.
        cut: the length in characters to which an encoder cuts a text.
        read: converts a value that fits.
    """

    what: str
    fits: Callable[[Any], bool]
    is_needed: bool = True
    cut: int | None = None
    read: Callable[[Any], Any] = lambda value: value

    @property
    def or_none(self) -> Field:
        """The same field, not required."""
        return replace(self, is_needed=False)


def text(most: int = TEXT, least: int = 0) -> Field:
    """Return the field of a text with these bounds in characters."""

    def fits(value: object) -> bool:
        return isinstance(value, str) and least <= len(value) <= most

    return Field(f"a text of {least} to {most} characters", fits, cut=most)


def choice(*known: str) -> Field:
    """Return the field of one of these texts."""
    return Field(f"one of {', '.join(known)}", lambda value: isinstance(value, str) and value in known)


def value_of(kind: type[Enum]) -> Field:
    """Return the field of a member of an enumeration of texts."""
    return replace(choice(*(member.value for member in kind)), read=kind)


def list_of(each: Field, most: int, least: int = 0) -> Field:
    """Return the field of a list with these bounds of its length."""

    def fits(value: object) -> bool:
        return isinstance(value, list) and least <= len(value) <= most and all(map(each.fits, value))

    return Field(f"a list of {least} to {most} values, each {each.what}", fits)


def mapping_of(each: Field, most: int) -> Field:
    """Return the field of an object with at most `most` values."""

    def fits(value: object) -> bool:
        return isinstance(value, dict) and len(value) <= most and all(map(each.fits, value.values()))

    return Field(f"an object of {most} values at most, each {each.what}", fits)


def _is_number(value: object, kind: type = int) -> bool:
    is_of_type = isinstance(value, int | kind) and not isinstance(value, bool)
    # The comparison is false for NaN.
    return is_of_type and -MOST_NUMBER < value < MOST_NUMBER  # type: ignore[operator] # it is a number


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
    """Return the fields of a record by the annotations of its dataclass: `name: Annotated[type, field]`."""
    return {name: hint.__metadata__[0] for name, hint in get_type_hints(kind, include_extras=True).items()}


def read_fields(values: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return the values of these fields, without absent ones; None counts as absent.

    `MessageFormatError` names the first field that is missing or wrong.
    """
    found = {}
    for name, field in fields.items():
        value = values.get(name)
        if value is None and not field.is_needed:
            continue
        if not field.fits(value):
            raise MessageFormatError(f"{name} must be {field.what}")
        found[name] = field.read(value)
    return found


def parse_json(value: bytes | None, most_bytes: int) -> Any:
    """Return the JSON value in bytes; `MessageFormatError` if they are no JSON or too large."""
    if value is None or len(value) > most_bytes:
        raise MessageFormatError("a record that is empty or too large; it is ignored")
    try:
        return json.loads(value, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise MessageFormatError("a record that is no JSON; it is ignored") from error


def parse_object(value: bytes | None, most_bytes: int) -> dict[str, Any]:
    """Return the JSON object in bytes; `MessageFormatError` if they are no JSON object or too large."""
    found = parse_json(value, most_bytes)
    if not isinstance(found, dict):
        raise MessageFormatError("a record that is no JSON object; it is ignored")
    return found


def decode_record(value: bytes | None, most_bytes: int, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return the fields of a record; `MessageFormatError` if it is invalid, `NewerRecordError` for a later version."""
    found = parse_object(value, most_bytes)
    version = found.get("version")
    if version != VERSION:
        is_newer = isinstance(version, int) and version > VERSION
        kind = NewerRecordError if is_newer else MessageFormatError
        raise kind(f"a record of another version than {VERSION}; it is ignored")
    return read_fields(found, fields)


def encode_record(record: object, fields: Mapping[str, Field]) -> bytes:
    """Return a record with these fields; texts are cut to the length that a reader accepts."""
    found: dict[str, Any] = {"version": VERSION}
    for name, field in fields.items():
        value = getattr(record, name)
        if isinstance(value, Enum):
            value = value.value
        found[name] = value[: field.cut] if isinstance(value, str) else value
    return json.dumps(found).encode()


def _no_number(text: str) -> None:
    raise ValueError(text)


def signature(token: str, topic: str, value: bytes) -> bytes:
    """Return the signature of a record and its topic by the token: HMAC-SHA256 (RFC 2104)."""
    return hmac.new(token.encode(), topic.encode() + b"\0" + value, hashlib.sha256).hexdigest().encode()


def is_signed(token: str, topic: str, value: bytes, headers: object) -> bool:
    """Return whether a record's header has the right signature. The comparison takes constant time."""
    found = (
        next((content for name, content in headers if name == SIGNATURE), None) if isinstance(headers, list) else None
    )
    return isinstance(found, bytes) and hmac.compare_digest(found, signature(token, topic, value))
