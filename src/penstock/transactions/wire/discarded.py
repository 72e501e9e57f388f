"""The record of the discarded topic: a half with the reason and the number of answered checks. Pure."""

from __future__ import annotations

from typing import NamedTuple

from penstock.transactions.wire.check_request import CHECK_NUMBER, MAX_CHECK_NUMBER
from penstock.transactions.wire.half import (
    HALF_FIELDS,
    Half,
    WireHeaders,
    encode_half,
    half_from,
    number_from,
    split_headers,
)

REASON = "penstock-reason"
_FIELDS = HALF_FIELDS | {REASON, CHECK_NUMBER}

#: Reasons of a discard, as the discarded topic has them.
EXHAUSTED = "checks exhausted"
BY_OPERATOR = "by an operator"


class DiscardedHalf(NamedTuple):
    """A half as it lies in the discarded topic."""

    half: Half
    reason: str
    check_count: int


def encode_discarded(half: Half, reason: str, check_count: int) -> list[tuple[str, bytes | None]]:
    """Return the headers of a record in the discarded topic; its key and value are those of the message."""
    return [(REASON, reason.encode()), (CHECK_NUMBER, str(check_count).encode()), *encode_half(half)]


def decode_discarded(key: bytes | None, value: bytes | None, headers: WireHeaders) -> DiscardedHalf:
    """Read a record of the discarded topic. Raises `MessageFormatError`."""
    fields, rest = split_headers(headers, _FIELDS)
    count = number_from(fields, CHECK_NUMBER, MAX_CHECK_NUMBER)
    reason = (fields.get(REASON) or b"").decode(errors="replace")
    return DiscardedHalf(half_from(key, value, fields, rest), reason, count or 0)
