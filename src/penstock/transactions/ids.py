"""Transaction ids: UUIDs of version 7 (RFC 9562, section 5.7), which sort by the time they were made."""

from __future__ import annotations

import os
import re
import time

#: Characters of an id in its text form.
ID_LENGTH = 36
#: Bytes of an id.
ID_BYTES = 16
#: What stands in place of an id where there is no transaction.
NO_ID = "00000000-0000-0000-0000-000000000000"
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def new_id() -> str:
    """Return a new id: 48 bits of Unix milliseconds, then 74 random bits. Safe from any thread."""
    random = int.from_bytes(os.urandom(10), "big")
    milliseconds = f"{time.time_ns() // 1_000_000:012x}"
    tail = f"{0x8000 | random >> 48 & 0x3FFF:04x}-{random & 0xFFFFFFFFFFFF:012x}"
    return f"{milliseconds[:8]}-{milliseconds[8:]}-7{random >> 62 & 0xFFF:03x}-{tail}"


def is_id(text: str) -> bool:
    """Tell whether a text is an id as `new_id` makes them."""
    return _ID.fullmatch(text) is not None


def id_bytes(text: str) -> bytes:
    """Return the 16 bytes of an id.

    Raises:
        ValueError: the text is no id.
    """
    raw = bytes.fromhex(text.replace("-", ""))
    if len(raw) != ID_BYTES:
        raise ValueError(f"an id has {ID_BYTES} bytes, but this one has {len(raw)}")
    return raw


def id_text(raw: bytes) -> str:
    """Return the text form of the 16 bytes of an id."""
    text = raw.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


__all__ = ["ID_BYTES", "ID_LENGTH", "NO_ID", "id_bytes", "id_text", "is_id", "new_id"]
