"""The check request: the question of the coordinator to a producer group. A half with its place and a number. Pure."""

from __future__ import annotations

from typing import NamedTuple

from penstock.errors import MessageFormatError
from penstock.transactions.wire.half import (
    HALF_FIELDS,
    MAX_INT32,
    MAX_INT64,
    Half,
    WireHeaders,
    encode_half,
    half_from,
    number_from,
    split_headers,
)

HALF_PARTITION = "penstock-half-partition"
HALF_OFFSET = "penstock-half-offset"
CHECK_NUMBER = "penstock-check-number"
_FIELDS = HALF_FIELDS | {HALF_PARTITION, HALF_OFFSET, CHECK_NUMBER}

#: The most checks that can be counted.
MAX_CHECK_NUMBER = (1 << 16) - 1


class CheckRequest(NamedTuple):
    """The question of the coordinator to a producer group."""

    half: Half
    half_partition: int
    half_offset: int
    #: 1 for the first; an answer repeats it, so that no check is counted twice.
    check_number: int


def encode_check_request(request: CheckRequest) -> list[tuple[str, bytes | None]]:
    """Return the headers of a check request; its key and value are those of the message."""
    return [
        (HALF_PARTITION, str(request.half_partition).encode()),
        (HALF_OFFSET, str(request.half_offset).encode()),
        (CHECK_NUMBER, str(request.check_number).encode()),
        *encode_half(request.half),
    ]


def decode_check_request(key: bytes | None, value: bytes | None, headers: WireHeaders) -> CheckRequest:
    """Read a check request. Raises `MessageFormatError`."""
    fields, rest = split_headers(headers, _FIELDS)
    partition = number_from(fields, HALF_PARTITION, MAX_INT32)
    offset = number_from(fields, HALF_OFFSET, MAX_INT64)
    number = number_from(fields, CHECK_NUMBER, MAX_CHECK_NUMBER)
    if partition is None or offset is None or number is None:
        raise MessageFormatError("a check request without its half's place or its number; it is skipped")
    return CheckRequest(half_from(key, value, fields, rest), partition, offset, number)
