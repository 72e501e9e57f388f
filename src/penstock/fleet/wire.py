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
from typing import Any

from penstock.errors import MessageFormatError

#: The header that holds a record's signature.
SIGNATURE = "penstock-signature"
#: Characters of a text, and entries of a list of texts.
TEXT = 500
_MOST_TEXTS = 200
MOST_NUMBER = 1 << 63
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Field:
    """What a value must be, in words and as a test, and whether it must be there."""

    what: str
    fits: Callable[[Any], bool]
    is_needed: bool = True

    @property
    def or_none(self) -> Field:
        """The same, where it may be left out."""
        return replace(self, is_needed=False)


def text(most: int = TEXT, least: int = 0) -> Field:
    """Return the field of a text of so many characters."""
    return Field(
        f"a text of {least} to {most} characters", lambda value: isinstance(value, str) and least <= len(value) <= most
    )


def choice(*known: str) -> Field:
    """Return the field of one of these texts."""
    return Field(f"one of {', '.join(known)}", lambda value: isinstance(value, str) and value in known)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_NUMBER


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and 0 < len(value) <= _MOST_TEXTS and all(map(NAME.fits, value))


def _is_flat(value: object) -> bool:
    """Tell whether it is an object of few texts, numbers, booleans and lists of texts."""
    if not isinstance(value, dict) or len(value) > _MOST_PARAMETERS:
        return False
    return all(
        held is None or _are_texts(held) or _SAID.fits(held) or (isinstance(held, int) and abs(held) < MOST_NUMBER)
        for held in value.values()
    )


_MOST_PARAMETERS = 16
_SAID = text()
NAME = text(least=1)
NUMBER = Field("a number from 0 on", _is_number)
FLAG = Field("true or false", lambda value: isinstance(value, bool))
TEXTS = Field(f"a list of 1 to {_MOST_TEXTS} texts of 1 to {TEXT} characters", _are_texts)
ID = Field("32 hexadecimal digits", lambda value: isinstance(value, str) and _ID.fullmatch(value) is not None)
FLAT = Field(f"an object of {_MOST_PARAMETERS} plain values at most", _is_flat)


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
        found[name] = value
    return found


def loaded(value: bytes | None, most_bytes: int) -> dict[str, Any]:
    """Return the object that bytes hold; `MessageFormatError` where they hold none, or are too many."""
    if value is None or len(value) > most_bytes:
        raise MessageFormatError("a record that is none, or too large; it is passed over")
    try:
        found = json.loads(value, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise MessageFormatError("a record that is no JSON; it is passed over") from error
    if not isinstance(found, dict):
        raise MessageFormatError("a record that is no JSON object; it is passed over")
    return found


def record(value: bytes | None, most_bytes: int, version: int, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return the fields of a record of this version; `MessageFormatError` where it is none."""
    found = loaded(value, most_bytes)
    if found.get("version") != version:
        raise MessageFormatError("a record of another version; it is passed over")
    return taken(found, fields)


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
