"""The records of the half, op, done, check and discarded topics: bytes and headers to values, and back.

Pure. Whatever does not decode raises `MessageFormatError` and nothing else, so that a forged record costs its
reader one refusal. Integers are big-endian.

- **half**: key, value and headers of the message, and the `penstock-` headers below.
- **check request**: a half with the place of the half and the number of the check.
- **discarded**: a half with the reason and the number of answered checks.
- **op**: version, verdict, author, check number, half partition, id, half offsets, group.
- **done**: version, and what one Kafka transaction settled or learned of each transaction in one half partition.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from penstock.errors import MessageFormatError
from penstock.transactions.ids import ID_LENGTH, is_id

#: Headers that begin so are penstock's own; a user's message may not carry one.
RESERVED_PREFIX = "penstock-"

TX = "penstock-tx"
GROUP = "penstock-group"
TOPIC = "penstock-topic"
PARTITION = "penstock-partition"
IMMUNITY_MS = "penstock-check-immunity-ms"
HALF_PARTITION = "penstock-half-partition"
HALF_OFFSET = "penstock-half-offset"
CHECK_NUMBER = "penstock-check-number"
REASON = "penstock-reason"

_HALF_FIELDS = frozenset({TX, GROUP, TOPIC, PARTITION, IMMUNITY_MS})
_CHECK_FIELDS = _HALF_FIELDS | {HALF_PARTITION, HALF_OFFSET, CHECK_NUMBER}

_VERSION = 1
_OP = struct.Struct(f">BBBHi{ID_LENGTH}sHH")
_OFFSET = struct.Struct(">q")
_DONE = struct.Struct(">BI")
_NOTE = struct.Struct(f">{ID_LENGTH}sqBHq")
_MAX_INT32 = (1 << 31) - 1
_MAX_INT64 = (1 << 63) - 1
_MAX_CHECK_NUMBER = (1 << 16) - 1
#: A Kafka topic name (`Topic.LEGAL_CHARS`), bar `.` and `..`.
_TOPIC_NAME = re.compile(r"(?!\.{1,2}\Z)[a-zA-Z0-9._-]{1,249}")

WireHeaders = Sequence[tuple[str, bytes | None]]


class Verdict(IntEnum):
    """What an op record says of a transaction."""

    COMMIT = 1
    ROLLBACK = 2
    #: No decision: a check was answered UNKNOWN.
    UNKNOWN = 3
    #: The checks are exhausted: to the discarded topic.
    DISCARD = 4


class Author(IntEnum):
    """Who wrote an op record."""

    PRODUCER = 1
    CHECK = 2
    OPERATOR = 3
    COORDINATOR = 4


class Half(NamedTuple):
    """A half message. A named tuple: one is made for every transaction, and frozen dataclasses are slow to make."""

    transaction_id: str
    group: str
    topic: str
    partition: int | None
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    immunity_ms: int | None


class Op(NamedTuple):
    """A record of the op log. `half_offsets` is empty where the author does not know whether the half was stored."""

    transaction_id: str
    verdict: Verdict
    author: Author
    group: str
    half_partition: int
    half_offsets: tuple[int, ...]
    check_number: int


class CheckRequest(NamedTuple):
    """The question of the coordinator to a producer group."""

    half: Half
    half_partition: int
    half_offset: int
    #: 1 for the first; an answer repeats it, so that no check is counted twice.
    check_number: int


class Note(NamedTuple):
    """What the done log says of one transaction: its end, or (UNKNOWN) how many checks were answered so far."""

    transaction_id: str
    #: The highest offset among its halves: the note is needed until the half checkpoint has passed it.
    half_offset: int
    verdict: Verdict
    check_count: int
    #: Append time of the last answered check in milliseconds since the epoch; 0 when there was none.
    answered_ms: int


def is_topic_name(name: str) -> bool:
    """Tell whether Kafka takes a name for a topic."""
    return _TOPIC_NAME.fullmatch(name) is not None


def encode_half(half: Half) -> list[tuple[str, bytes | None]]:
    """Return the headers of a half record; its key and value are those of the message."""
    headers: list[tuple[str, bytes | None]] = [
        (TX, half.transaction_id.encode()),
        (GROUP, half.group.encode()),
        (TOPIC, half.topic.encode()),
    ]
    if half.partition is not None:
        headers.append((PARTITION, str(half.partition).encode()))
    if half.immunity_ms is not None:
        headers.append((IMMUNITY_MS, str(half.immunity_ms).encode()))
    headers.extend(half.headers)
    return headers


def decode_half(key: bytes | None, value: bytes | None, headers: WireHeaders) -> Half:
    """Read a half record.

    Raises:
        MessageFormatError: a field is missing, repeated, unknown or not what it must be.
    """
    fields, rest = _split(headers, _HALF_FIELDS)
    return _half(key, value, fields, rest)


def encode_check_request(request: CheckRequest) -> list[tuple[str, bytes | None]]:
    """Return the headers of a check request; its key and value are those of the message."""
    return [
        (HALF_PARTITION, str(request.half_partition).encode()),
        (HALF_OFFSET, str(request.half_offset).encode()),
        (CHECK_NUMBER, str(request.check_number).encode()),
        *encode_half(request.half),
    ]


def decode_check_request(key: bytes | None, value: bytes | None, headers: WireHeaders) -> CheckRequest:
    """Read a check request.

    Raises:
        MessageFormatError: a field is missing, repeated, unknown or not what it must be.
    """
    fields, rest = _split(headers, _CHECK_FIELDS)
    partition = _number(fields, HALF_PARTITION, _MAX_INT32)
    offset = _number(fields, HALF_OFFSET, _MAX_INT64)
    number = _number(fields, CHECK_NUMBER, _MAX_CHECK_NUMBER)
    if partition is None or offset is None or number is None:
        raise MessageFormatError("a check request without its half's place or its number; it is skipped")
    return CheckRequest(_half(key, value, fields, rest), partition, offset, number)


def encode_discarded(half: Half, reason: str, check_count: int) -> list[tuple[str, bytes | None]]:
    """Return the headers of a record in the discarded topic; its key and value are those of the message."""
    return [(REASON, reason.encode()), (CHECK_NUMBER, str(check_count).encode()), *encode_half(half)]


def encode_op(op: Op) -> bytes:
    """Return the value of an op record; its key is the transaction id."""
    group = op.group.encode()
    head = _OP.pack(
        _VERSION,
        op.verdict,
        op.author,
        op.check_number,
        op.half_partition,
        op.transaction_id.encode(),
        len(op.half_offsets),
        len(group),
    )
    return b"".join((head, *map(_OFFSET.pack, op.half_offsets), group))


def decode_op(value: bytes | None) -> Op:
    """Read the value of an op record.

    Raises:
        MessageFormatError: it is cut, too long, of another version, or a field is not what it must be.
    """
    try:
        version, verdict, author, number, partition, raw_id, offsets, group_bytes = _OP.unpack_from(value or b"")
        end = _OP.size + offsets * _OFFSET.size
        group = (value or b"")[end:].decode()
        transaction_id = raw_id.decode("ascii")
        places = struct.unpack_from(f">{offsets}q", value or b"", _OP.size)
        op = Op(transaction_id, Verdict(verdict), Author(author), group, partition, places, number)
    except (struct.error, ValueError) as error:
        raise MessageFormatError(f"an op record that does not read: {error}; it is refused") from error
    if version != _VERSION or len(value or b"") != end + group_bytes or not group or not is_id(transaction_id):
        raise MessageFormatError(f"an op record of version {version} with wrong lengths, group or id; it is refused")
    if partition < 0 or any(place < 0 for place in places):
        raise MessageFormatError("an op record that names a negative place; it is refused")
    return op


def encode_done(notes: Sequence[Note]) -> bytes:
    """Return the value of a done record."""
    parts = [_DONE.pack(_VERSION, len(notes))]
    pack = _NOTE.pack
    parts.extend(pack(note[0].encode(), note[1], note[2], note[3], note[4]) for note in notes)
    return b"".join(parts)


def decode_done(value: bytes | None) -> list[Note]:
    """Read the value of a done record.

    Raises:
        MessageFormatError: it is cut, too long, of another version, or a field is not what it must be.
    """
    try:
        version, count = _DONE.unpack_from(value or b"")
        notes = [
            Note(raw_id.decode("ascii"), offset, Verdict(verdict), checks, answered)
            for raw_id, offset, verdict, checks, answered in _NOTE.iter_unpack((value or b"")[_DONE.size :])
        ]
    except (struct.error, ValueError) as error:
        raise MessageFormatError(f"a done record that does not read: {error}; it is ignored") from error
    if version != _VERSION or count != len(notes):
        raise MessageFormatError(f"a done record of version {version} with {len(notes)} notes; it is ignored")
    return notes


def _split(
    headers: WireHeaders, known: Iterable[str]
) -> tuple[dict[str, bytes | None], tuple[tuple[str, bytes | None], ...]]:
    """Part penstock's headers from the user's."""
    fields: dict[str, bytes | None] = {}
    rest: list[tuple[str, bytes | None]] = []
    for header in headers:
        name = header[0]
        if not name.startswith(RESERVED_PREFIX):
            rest.append(header)
        elif name in fields or name not in known:
            # A field of a newer version may change what the half means: to publish it regardless would be a guess.
            raise MessageFormatError("a half with a repeated or unknown penstock header; it is refused")
        else:
            fields[name] = header[1]
    return fields, tuple(rest)


def _half(
    key: bytes | None,
    value: bytes | None,
    fields: dict[str, bytes | None],
    headers: tuple[tuple[str, bytes | None], ...],
) -> Half:
    transaction_id, group, topic = _text(fields, TX), _text(fields, GROUP), _text(fields, TOPIC)
    if not is_id(transaction_id):
        raise MessageFormatError(f"a half whose {TX} is not a UUID of version 7; it is refused")
    if not is_topic_name(topic):
        raise MessageFormatError(f"a half whose {TOPIC} is no topic name; it is refused")
    partition = _number(fields, PARTITION, _MAX_INT32)
    return Half(transaction_id, group, topic, partition, key, value, headers, _number(fields, IMMUNITY_MS, _MAX_INT64))


def _text(fields: dict[str, bytes | None], name: str) -> str:
    content = fields.get(name)
    if not content:
        raise MessageFormatError(f"a half without {name}; it is refused")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise MessageFormatError(f"a half whose {name} is not UTF-8; it is refused") from error


def _number(fields: dict[str, bytes | None], name: str, highest: int) -> int | None:
    """Return a field of digits, or None where there is none."""
    if name not in fields:
        return None
    content = fields[name] or b""
    if not content.isdigit() or len(content) > len(str(highest)) or int(content) > highest:
        raise MessageFormatError(f"a half whose {name} is not a number from 0 to {highest}; it is refused")
    return int(content)


__all__ = [
    "RESERVED_PREFIX",
    "Author",
    "CheckRequest",
    "Half",
    "Note",
    "Op",
    "Verdict",
    "WireHeaders",
    "decode_check_request",
    "decode_done",
    "decode_half",
    "decode_op",
    "encode_check_request",
    "encode_discarded",
    "encode_done",
    "encode_half",
    "encode_op",
    "is_topic_name",
]
