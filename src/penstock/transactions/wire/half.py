"""The half record: a prepared message, invisible to consumers, encoded and decoded.

Pure. Its key, value and headers are those of the message. Further fields are in `penstock-` headers. A check request
and a record of the discarded topic are halves with a few more headers. Anything that does not decode raises
`MessageFormatError` and nothing else: the reader of a forged record only refuses it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from penstock.errors import MessageFormatError
from penstock.message import Headers
from penstock.outgoing import is_topic_name
from penstock.transactions.wire.ids import is_encoded_id, is_id

#: Headers with this prefix are penstock's own. A user's message may not have one.
RESERVED_PREFIX = "penstock-"

TX = "penstock-tx"
GROUP = "penstock-group"
TOPIC = "penstock-topic"
PARTITION = "penstock-partition"
IMMUNITY_MS = "penstock-check-immunity-ms"
DELIVER_AT = "penstock-deliver-at"
PART = "penstock-part"
ORDER = "penstock-order"
RESUMED = "penstock-resumed"

_RARE = frozenset({DELIVER_AT, PART, ORDER, RESUMED})
#: The headers of a half that are penstock's own.
HALF_FIELDS = _RARE | {TX, GROUP, TOPIC, PARTITION, IMMUNITY_MS}

#: Most bytes of a group and a topic that are cached: forged ones must not fill the memory.
_CACHED_BYTES = 1_000
_LENGTH = struct.Struct(">i")
_NULL = -1
_COUNT = struct.Struct(">H")
#: The highest partition, and the highest offset or time.
MAX_INT32 = (1 << 31) - 1
MAX_INT64 = (1 << 63) - 1
#: Most bytes of a producer group's name: it must fit into the group's decisions.
MAX_GROUP_BYTES = 200
#: The most messages in one transaction.
MAX_PARTS = 1_000
_PART = re.compile(rb"([1-9][0-9]{0,3})/([1-9][0-9]{0,3})")

WireHeaders = Sequence[tuple[str, bytes | None]]

#: Producer group and ordering key: with `order="half"`, halves that share both are in one line.
Line = tuple[str, bytes]


class Half(NamedTuple):
    """A half message. A named tuple, because one is made per transaction and frozen dataclasses are slow to make."""

    transaction_id: str
    group: str
    topic: str
    partition: int | None
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    immunity_ms: int | None
    #: When to publish it, in milliseconds since the epoch; None: as soon as it is committed.
    deliver_at_ms: int | None = None
    #: Number of this message in its transaction, from 1, and how many there are; None: it is the only one.
    part: tuple[int, int] | None = None
    #: With `order="half"`: halves of the group with the same key are published in the order of sending.
    order_key: bytes | None = None
    #: Its place in the discarded topic, if it was brought back from there.
    resumed: str | None = None

    def __repr__(self) -> str:
        """Show the transaction, never the key or the value."""
        return f"<Half {self.transaction_id} for {self.topic}>"

    @property
    def line(self) -> Line | None:
        """The line in which halves are published in the order of sending. None: the order does not matter."""
        # The group is part of it. Otherwise a group that is down would hold messages of another with the same keys.
        return None if self.order_key is None else (self.group, self.order_key)


#: Returns the message to publish: topic, partition, key, value and headers. In C, because every transaction needs it.
message_of: Callable[[Half], tuple[str, int | None, bytes | None, bytes | None, Headers]] = itemgetter(slice(2, 7))

#: The fields after the value, as most halves have them.
_PLAIN_REST = ((), None, None, None, None, None)


@lru_cache(maxsize=1024)
def _constant(group: str, topic: str) -> tuple[tuple[str, bytes], tuple[str, bytes]]:
    """Return the headers that halves of one group and topic share."""
    return (GROUP, group.encode()), (TOPIC, topic.encode())


def encode_half(half: Half) -> list[tuple[str, bytes | None]]:
    """Return the headers of a half record. Its key and value are those of the message."""
    headers: list[tuple[str, bytes | None]] = [(TX, half.transaction_id.encode()), *_constant(half.group, half.topic)]
    if half[3] is None and half[6:] == _PLAIN_REST:
        # The usual case.
        return headers
    if half.partition is not None:
        headers.append((PARTITION, str(half.partition).encode()))
    if half.immunity_ms is not None:
        headers.append((IMMUNITY_MS, str(half.immunity_ms).encode()))
    if half.deliver_at_ms is not None:
        headers.append((DELIVER_AT, str(half.deliver_at_ms).encode()))
    if half.part is not None:
        headers.append((PART, b"%d/%d" % half.part))
    if half.order_key is not None:
        headers.append((ORDER, half.order_key))
    if half.resumed is not None:
        headers.append((RESUMED, half.resumed.encode()))
    headers.extend(half.headers)
    return headers


def decode_half(key: bytes | None, value: bytes | None, headers: WireHeaders) -> Half:
    """Decode a half record."""
    if len(headers) == 3:  # noqa: PLR2004 - id, group and topic: the usual case
        (first, raw_id), (second, group), (third, topic) = headers
        if first == TX and second == GROUP and third == TOPIC and raw_id and group and topic:
            names = _names(group, topic) if len(group) + len(topic) < _CACHED_BYTES else None
            if names is not None and is_encoded_id(raw_id):
                usual = (raw_id.decode(), names[0], names[1], None, key, value, (), None, None, None, None, None)
                # The same as `Half(...)` in half the time: thousands are read a second.
                return tuple.__new__(Half, usual)
    fields, rest = split_headers(headers, HALF_FIELDS)
    return half_from(key, value, fields, rest)


def pack_half(half: Half, headers: WireHeaders) -> list[bytes]:
    """Return a half's key, value and encoded headers, each after its length, a big-endian integer (-1: null)."""
    parts: list[bytes] = []
    for content in (half.key, half.value, *(item for name, text in headers for item in (name.encode(), text))):
        parts += (_LENGTH.pack(_NULL if content is None else len(content)), content or b"")
    return parts


def unpack_half(packed: bytes, at: int, headers: int) -> tuple[Half, int]:
    """Decode what `pack_half` wrote, given the number of headers. Return the half and where it ends.

    Raises also `ValueError` and `struct.error`: the reader of the whole record adds what the record is.
    """
    if headers * 2 * _LENGTH.size > len(packed):
        raise ValueError(f"{headers} headers in {len(packed)} bytes")
    items: list[bytes | None] = []
    for _ in range(2 + 2 * headers):
        (length,) = _LENGTH.unpack_from(packed, at)
        at += _LENGTH.size
        if length == _NULL:
            items.append(None)
            continue
        if not 0 <= length <= len(packed) - at:
            raise ValueError(f"{length} bytes where {len(packed) - at} are left")
        items.append(packed[at : at + length])
        at += length
    named = [((name or b"").decode(), text) for name, text in zip(items[2::2], items[3::2], strict=True)]
    return decode_half(items[0], items[1], named), at


def pack_halves(halves: Iterable[Half]) -> bytes:
    """Return the halves of a transaction as bytes: for each half the number of its headers, then its contents."""
    parts: list[bytes] = []
    for half in halves:
        headers = encode_half(half)
        parts += (_COUNT.pack(len(headers)), *pack_half(half, headers))
    return b"".join(parts)


def unpack_halves(packed: bytes, at: int = 0) -> list[Half]:
    """Decode what `pack_halves` wrote, to the end. Raises as `unpack_half`."""
    halves: list[Half] = []
    while at < len(packed):
        (headers,) = _COUNT.unpack_from(packed, at)
        half, at = unpack_half(packed, at + _COUNT.size, headers)
        halves.append(half)
    return halves


@lru_cache(maxsize=1024)
def _names(group: bytes, topic: bytes) -> tuple[str, str] | None:
    """Return group and topic as text, or None if one is not valid."""
    try:
        names = group.decode(), topic.decode()
    except UnicodeDecodeError:
        return None
    return names if is_topic_name(names[1]) and len(group) <= MAX_GROUP_BYTES else None


def split_headers(
    headers: WireHeaders, known: Iterable[str]
) -> tuple[dict[str, bytes | None], tuple[tuple[str, bytes | None], ...]]:
    """Separate penstock's headers from the user's."""
    fields: dict[str, bytes | None] = {}
    rest: list[tuple[str, bytes | None]] = []
    for header in headers:
        name = header[0]
        if not name.startswith(RESERVED_PREFIX):
            rest.append(header)
        elif name in fields or name not in known:
            # A field of a newer version may change the half's meaning: publishing it anyway would be a guess.
            raise MessageFormatError("a half with a repeated or unknown penstock header; it is refused")
        else:
            fields[name] = header[1]
    return fields, tuple(rest)


def half_from(
    key: bytes | None,
    value: bytes | None,
    fields: dict[str, bytes | None],
    headers: tuple[tuple[str, bytes | None], ...],
) -> Half:
    """Return the half that a record's fields describe."""
    transaction_id, group, topic = _text(fields, TX), _text(fields, GROUP), _text(fields, TOPIC)
    if not is_id(transaction_id):
        raise MessageFormatError(f"a half whose {TX} is not a UUID of version 7; it is refused")
    if len(fields[GROUP] or b"") > MAX_GROUP_BYTES:
        raise MessageFormatError(f"a half whose {GROUP} has more than {MAX_GROUP_BYTES} bytes; it is refused")
    if not is_topic_name(topic):
        raise MessageFormatError(f"a half whose {TOPIC} is no topic name; it is refused")
    partition = number_from(fields, PARTITION, MAX_INT32)
    immunity_ms = number_from(fields, IMMUNITY_MS, MAX_INT64)
    if not fields.keys() & _RARE:
        return Half(transaction_id, group, topic, partition, key, value, headers, immunity_ms)
    return Half(
        transaction_id,
        group,
        topic,
        partition,
        key,
        value,
        headers,
        immunity_ms,
        number_from(fields, DELIVER_AT, MAX_INT64),
        _part(fields[PART]) if PART in fields else None,
        (fields[ORDER] or b"") if ORDER in fields else None,
        _text(fields, RESUMED) if RESUMED in fields else None,
    )


def _part(content: bytes | None) -> tuple[int, int]:
    """Decode a half's part number and how many parts there are."""
    found = _PART.fullmatch(content or b"")
    number, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= count <= MAX_PARTS:
        raise MessageFormatError(f"a half whose {PART} is not 1/n to n/n, n up to {MAX_PARTS}; it is refused")
    return number, count


def _text(fields: dict[str, bytes | None], name: str) -> str:
    content = fields.get(name)
    if not content:
        raise MessageFormatError(f"a half without {name}; it is refused")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise MessageFormatError(f"a half whose {name} is not UTF-8; it is refused") from error


def number_from(fields: dict[str, bytes | None], name: str, highest: int) -> int | None:
    """Return a field of digits, or None if it is absent."""
    if name not in fields:
        return None
    content = fields[name] or b""
    if not content.isdigit() or len(content) > len(str(highest)) or int(content) > highest:
        raise MessageFormatError(f"a half whose {name} is not a number from 0 to {highest}; it is refused")
    return int(content)


HALF_PARTITION = "penstock-half-partition"
HALF_OFFSET = "penstock-half-offset"
CHECK_NUMBER = "penstock-check-number"
_CHECK_FIELDS = HALF_FIELDS | {HALF_PARTITION, HALF_OFFSET, CHECK_NUMBER}

#: The most checks that can be counted.
MAX_CHECK_NUMBER = (1 << 16) - 1


class CheckRequest(NamedTuple):
    """The coordinator's question to a producer group about an undecided half."""

    half: Half
    half_partition: int
    half_offset: int
    #: 1 for the first. The answer repeats it, so that no check is counted twice.
    check_number: int


def encode_check_request(request: CheckRequest) -> list[tuple[str, bytes | None]]:
    """Return the headers of a check request. Its key and value are those of the message."""
    return [
        (HALF_PARTITION, str(request.half_partition).encode()),
        (HALF_OFFSET, str(request.half_offset).encode()),
        (CHECK_NUMBER, str(request.check_number).encode()),
        *encode_half(request.half),
    ]


def decode_check_request(key: bytes | None, value: bytes | None, headers: WireHeaders) -> CheckRequest:
    """Decode a check request. Raises `MessageFormatError`."""
    fields, rest = split_headers(headers, _CHECK_FIELDS)
    partition = number_from(fields, HALF_PARTITION, MAX_INT32)
    offset = number_from(fields, HALF_OFFSET, MAX_INT64)
    number = number_from(fields, CHECK_NUMBER, MAX_CHECK_NUMBER)
    if partition is None or offset is None or number is None:
        raise MessageFormatError("a check request without its half's place or its number; it is skipped")
    return CheckRequest(half_from(key, value, fields, rest), partition, offset, number)


REASON = "penstock-reason"
_DISCARDED_FIELDS = HALF_FIELDS | {REASON, CHECK_NUMBER}

#: Reasons for a discard, as written in the discarded topic.
EXHAUSTED = "checks exhausted"
BY_OPERATOR = "by an operator"


class DiscardedHalf(NamedTuple):
    """A record of the discarded topic."""

    half: Half
    reason: str
    check_count: int


def encode_discarded(half: Half, reason: str, check_count: int) -> list[tuple[str, bytes | None]]:
    """Return the headers of a record in the discarded topic. Its key and value are those of the message."""
    return [(REASON, reason.encode()), (CHECK_NUMBER, str(check_count).encode()), *encode_half(half)]


def decode_discarded(key: bytes | None, value: bytes | None, headers: WireHeaders) -> DiscardedHalf:
    """Decode a record of the discarded topic. Raises `MessageFormatError`."""
    fields, rest = split_headers(headers, _DISCARDED_FIELDS)
    count = number_from(fields, CHECK_NUMBER, MAX_CHECK_NUMBER)
    reason = (fields.get(REASON) or b"").decode(errors="replace")
    return DiscardedHalf(half_from(key, value, fields, rest), reason, count or 0)
