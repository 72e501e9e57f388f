"""Fields of JSON records that anybody may have written: taken where they have the shape, refused otherwise. Pure."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.errors import MessageFormatError

#: The header that holds a record's signature.
SIGNATURE = "penstock-signature"
#: Characters of a text.
TEXT = 500

_ID = re.compile(r"[0-9a-f]{32}")
_MOST_NUMBER = 1 << 63


def loaded(value: bytes | None, most_bytes: int, version: int) -> dict[str, Any]:
    """Return the object that a record holds; `MessageFormatError` where it holds none of this version."""
    if value is None or len(value) > most_bytes:
        raise MessageFormatError("a record that is none, or too large; it is passed over")
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise MessageFormatError("a record that is no JSON; it is passed over") from error
    if not isinstance(found, dict) or found.get("version") != version:
        raise MessageFormatError("a record of another version; it is passed over")
    return found


def text(found: Mapping[str, Any], name: str, most: int = TEXT) -> str:
    """Return a text that must be there."""
    value = found.get(name)
    if not isinstance(value, str) or len(value) > most:
        raise MessageFormatError(f"{name} is no text of {most} characters at most; the record is passed over")
    return value


def text_or_none(found: Mapping[str, Any], name: str, most: int = TEXT) -> str | None:
    """Return a text, or None where there is none."""
    return None if found.get(name) is None else text(found, name, most)


def number(found: Mapping[str, Any], name: str) -> int:
    """Return a number from 0 on that must be there."""
    value = found.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST_NUMBER:
        raise MessageFormatError(f"{name} is no number from 0 on; the record is passed over")
    return value


def identity(found: Mapping[str, Any]) -> str:
    """Return a record's id."""
    value = text(found, "id")
    if not _ID.fullmatch(value):
        raise MessageFormatError("id is none of 32 hexadecimal digits; the record is passed over")
    return value


def flat(found: Mapping[str, Any], name: str, most: int) -> dict[str, Any]:
    """Return an object of texts, numbers, booleans and lists of texts."""
    value = found.get(name)
    if not isinstance(value, dict) or len(value) > most or not all(map(_is_plain, value.values())):
        raise MessageFormatError(f"{name} is no object of {most} plain values at most; the record is passed over")
    return value


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return len(value) <= TEXT and all(isinstance(item, str) and len(item) <= TEXT for item in value)
    if isinstance(value, str):
        return len(value) <= TEXT
    return value is None or (isinstance(value, int) and abs(value) < _MOST_NUMBER)


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
