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


#: Randomness fetched beforehand. Asking the kernel for each id would give the interpreter lock away each time, and
#: wait for it again: under load that costs more than all the rest of a send. A child process starts with none.
_random: list[int] = []
_BLOCK = 512
os.register_at_fork(after_in_child=_random.clear)


def new_id() -> str:
    """Return a new id: 48 bits of Unix milliseconds, then 74 random bits. Safe from any thread."""
    try:
        # Taking the last item is one step: no two threads get the same.
        random = _random.pop()
    except IndexError:
        block = os.urandom(10 * _BLOCK)
        _random.extend(int.from_bytes(block[at : at + 10], "big") for at in range(0, 10 * (_BLOCK - 1), 10))
        random = int.from_bytes(block[-10:], "big")
    fixed = (time.time_ns() // 1_000_000) << 80 | 7 << 76 | 2 << 62
    text = f"{fixed | (random >> 62 & 0xFFF) << 64 | random & 0x3FFFFFFFFFFFFFFF:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


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
