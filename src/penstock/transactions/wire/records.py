"""The records of the half, op, check and discarded topics: bytes and headers to values, and back.

Pure. Whatever does not decode raises `MessageFormatError` and nothing else, so that a forged record costs its
reader one refusal. Integers are big-endian.

- **half**: key, value and headers of the message, and the `penstock-` headers below.
- **check request**: a half with the place of the half and the number of the check.
- **discarded**: a half with the reason and the number of answered checks.
- **op**: a batch of decisions of one group for one half partition; their order in it counts, so the place of a
  decision is the offset of its record and its index there. A batch is plain (each decision names one half, and nobody
  by name) or not: plain ones are fixed-size, for thousands are read a second.

Op records are of version 2; those of version 1 are read as well. The done log's records are in `done_records`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from penstock.errors import MessageFormatError
from penstock.transactions.wire.ids import ID_LENGTH, id_bytes, id_text, is_id

#: Headers that begin so are penstock's own; a user's message may not carry one.
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
HALF_PARTITION = "penstock-half-partition"
HALF_OFFSET = "penstock-half-offset"
CHECK_NUMBER = "penstock-check-number"
REASON = "penstock-reason"

_HALF_FIELDS = frozenset({TX, GROUP, TOPIC, PARTITION, IMMUNITY_MS, DELIVER_AT, PART, ORDER, RESUMED})
_RARE = frozenset({DELIVER_AT, PART, ORDER, RESUMED})
_CHECK_FIELDS = _HALF_FIELDS | {HALF_PARTITION, HALF_OFFSET, CHECK_NUMBER}
_DISCARDED_FIELDS = _HALF_FIELDS | {REASON, CHECK_NUMBER}

_VERSION = 2
_OP_1 = struct.Struct(f">BBBHi{ID_LENGTH}sHH")
#: Version, 1 for a plain batch, decisions, half partition, bytes of the group's name.
_OPS = struct.Struct(">BBIiH")
#: Id, verdict, author, check number, offset of the half.
_PLAIN = struct.Struct(">16sBBHQ")
#: Bytes of a decision in a plain batch.
DECISION_BYTES = _PLAIN.size
#: Id, verdict, author, check number, half offsets, bytes of the actor's name.
_DECISION = struct.Struct(">16sBBHHH")
_OFFSET = struct.Struct(">Q")
_REMEMBERED_BYTES = 1_000
_MAX_INT32 = (1 << 31) - 1
_MAX_INT64 = (1 << 63) - 1
#: The most checks that can be counted.
MAX_CHECK_NUMBER = (1 << 16) - 1
#: Bytes of a producer group's name: decisions of the group must be able to say it.
MAX_GROUP_BYTES = 200
#: The most messages in one transaction.
MAX_PARTS = 1_000
_PART = re.compile(rb"([1-9][0-9]{0,3})/([1-9][0-9]{0,3})")
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
    #: Of no transaction: the coordinator's own mark, by which it sees that it has read all ops up to there.
    TICK = 5


#: Reasons of a discard, as the discarded topic has them.
EXHAUSTED = "checks exhausted"
BY_OPERATOR = "by an operator"


class Author(IntEnum):
    """Who wrote an op record."""

    PRODUCER = 1
    CHECK = 2
    OPERATOR = 3
    COORDINATOR = 4


#: By number, for looking them up is cheaper than making them.
_VERDICTS = {int(verdict): verdict for verdict in Verdict}
_AUTHORS = {int(author): author for author in Author}


#: Producer group and ordering key: with `order="half"`, those that share both stand in one line.
Line = tuple[str, bytes]


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
    #: When to publish it, in milliseconds since the epoch; None: when it commits.
    deliver_at_ms: int | None = None
    #: Number of this message in its transaction, from 1, and how many there are; None: it is the only one.
    part: tuple[int, int] | None = None
    #: With `order="half"`: the key within which halves of the group are published in the order they were sent.
    order_key: bytes | None = None
    #: It comes back from the discarded topic: where it stood there.
    resumed: str | None = None

    def __repr__(self) -> str:
        """Name the transaction, never the key or the value."""
        return f"<Half {self.transaction_id} for {self.topic}>"

    @property
    def line(self) -> Line | None:
        """Within what halves are published in the order they were sent; None where order does not matter."""
        # Without the group, one that is down would hold the messages of another that happens to have the same keys.
        return None if self.order_key is None else (self.group, self.order_key)


class Op(NamedTuple):
    """A decision. `half_offsets` is empty where the author does not know whether the halves were stored.

    They stand in the order of the transaction's parts.
    """

    transaction_id: str
    verdict: Verdict
    author: Author
    group: str
    half_partition: int
    half_offsets: tuple[int, ...]
    check_number: int
    #: Who it was by name, where a person decided.
    actor: str = ""


class CheckRequest(NamedTuple):
    """The question of the coordinator to a producer group."""

    half: Half
    half_partition: int
    half_offset: int
    #: 1 for the first; an answer repeats it, so that no check is counted twice.
    check_number: int


class DiscardedHalf(NamedTuple):
    """A half as it lies in the discarded topic."""

    half: Half
    reason: str
    check_count: int


@lru_cache(maxsize=1024)
def is_topic_name(name: str) -> bool:
    """Tell whether Kafka takes a name for a topic."""
    return _TOPIC_NAME.fullmatch(name) is not None


@lru_cache(maxsize=1024)
def _constant(group: str, topic: str) -> tuple[tuple[str, bytes], tuple[str, bytes]]:
    """Return the headers that most halves of a group batch."""
    return (GROUP, group.encode()), (TOPIC, topic.encode())


def encode_half(half: Half) -> list[tuple[str, bytes | None]]:
    """Return the headers of a half record; its key and value are those of the message."""
    headers: list[tuple[str, bytes | None]] = [(TX, half.transaction_id.encode()), *_constant(half.group, half.topic)]
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
    """Read a half record.

    Raises:
        MessageFormatError: a field is missing, repeated, unknown or not what it must be.
    """
    if len(headers) == 3:  # noqa: PLR2004 - id, group and topic: nearly all halves are so
        (first, raw_id), (second, group), (third, topic) = headers
        if first == TX and second == GROUP and third == TOPIC and raw_id and group and topic:
            # What is remembered of forged ones is small.
            names = _names(group, topic) if len(group) + len(topic) < _REMEMBERED_BYTES else None
            transaction_id = raw_id.decode("ascii", "replace")
            if names is not None and is_id(transaction_id):
                return Half(transaction_id, *names, None, key, value, (), None)
    fields, rest = _split(headers, _HALF_FIELDS)
    return _half(key, value, fields, rest)


@lru_cache(maxsize=1024)
def _names(group: bytes, topic: bytes) -> tuple[str, str] | None:
    """Return group and topic as text, or None where they are not what they must be."""
    try:
        names = group.decode(), topic.decode()
    except UnicodeDecodeError:
        return None
    return names if is_topic_name(names[1]) and len(group) <= MAX_GROUP_BYTES else None


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
    number = _number(fields, CHECK_NUMBER, MAX_CHECK_NUMBER)
    if partition is None or offset is None or number is None:
        raise MessageFormatError("a check request without its half's place or its number; it is skipped")
    return CheckRequest(_half(key, value, fields, rest), partition, offset, number)


def encode_discarded(half: Half, reason: str, check_count: int) -> list[tuple[str, bytes | None]]:
    """Return the headers of a record in the discarded topic; its key and value are those of the message."""
    return [(REASON, reason.encode()), (CHECK_NUMBER, str(check_count).encode()), *encode_half(half)]


def decode_discarded(key: bytes | None, value: bytes | None, headers: WireHeaders) -> DiscardedHalf:
    """Read a record of the discarded topic.

    Raises:
        MessageFormatError: a field of the half is missing, repeated, unknown or not what it must be.
    """
    fields, rest = _split(headers, _DISCARDED_FIELDS)
    count = _number(fields, CHECK_NUMBER, MAX_CHECK_NUMBER)
    reason = (fields.get(REASON) or b"").decode(errors="replace")
    return DiscardedHalf(_half(key, value, fields, rest), reason, count or 0)


def encode_op(op: Op) -> bytes:
    """Return the value of an op record with one decision."""
    return encode_ops((op,))


def encode_ops(ops: Sequence[Op]) -> bytes:
    """Return the value of an op record: decisions of one group for one half partition, in their order."""
    first = ops[0]
    group = first.group.encode()
    plain = all(len(op.half_offsets) == 1 and not op.actor for op in ops)
    parts = [_OPS.pack(_VERSION, plain, len(ops), first.half_partition, len(group)), group]
    if plain:
        pack = _PLAIN.pack
        parts.extend(pack(id_bytes(op[0]), op[1], op[2], op.check_number, op.half_offsets[0]) for op in ops)
    else:
        for op in ops:
            actor = op.actor.encode()
            head = (op.verdict, op.author, op.check_number, len(op.half_offsets), len(actor))
            parts.append(_DECISION.pack(id_bytes(op.transaction_id), *head))
            parts.extend(map(_OFFSET.pack, op.half_offsets))
            parts.append(actor)
    return b"".join(parts)


def decode_ops(value: bytes | None) -> list[Op]:
    """Read the value of an op record: one decision or more, of one group for one half partition.

    Raises:
        MessageFormatError: it is cut, too long, of another version, or a field is not what it must be.
    """
    content = value or b""
    try:
        ops = [_decode_op_1(content)] if content[:1] == b"\x01" else _decode_ops(content)
    except (struct.error, ValueError, KeyError) as error:
        raise MessageFormatError(f"an op record that does not read: {error}; it is refused") from error
    if ops[0].half_partition < 0 or not ops[0].group:
        raise MessageFormatError("an op record without a group or a half partition; it is refused")
    return ops


def _decode_op_1(content: bytes) -> Op:
    _, verdict, author, number, partition, raw_id, offsets, group_bytes = _OP_1.unpack_from(content)
    end = _OP_1.size + offsets * _OFFSET.size
    transaction_id = raw_id.decode("ascii")
    places = struct.unpack_from(f">{offsets}Q", content, _OP_1.size)
    if len(content) != end + group_bytes or not is_id(transaction_id):
        raise ValueError("wrong lengths or id")
    return Op(transaction_id, Verdict(verdict), Author(author), content[end:].decode(), partition, places, number)


def _decode_ops(content: bytes) -> list[Op]:
    version, plain, count, partition, group_bytes = _OPS.unpack_from(content)
    start = _OPS.size + group_bytes
    if version != _VERSION or plain > 1 or count == 0 or len(content) < start:
        raise ValueError(f"version {version}, {count} decisions, {len(content)} bytes")
    group = content[_OPS.size : start].decode()
    if not plain:
        return _decode_decisions(content, start, count, group, partition)
    if len(content) != start + count * _PLAIN.size:
        raise ValueError(f"{count} decisions in {len(content)} bytes")
    return [
        Op(id_text(raw_id), _VERDICTS[verdict], _AUTHORS[author], group, partition, (place,), number)
        # A copy, no memoryview: the error of a bad byte keeps this frame, and in CPython 3.11 the collector of such a
        # cycle cannot clear a view that the iterator still holds, and the process ends with SIGSEGV.
        for raw_id, verdict, author, number, place in _PLAIN.iter_unpack(content[start:])
    ]


def _decode_decisions(content: bytes, start: int, count: int, group: str, partition: int) -> list[Op]:
    ops = []
    for _ in range(count):
        raw_id, verdict, author, number, offsets, actor_bytes = _DECISION.unpack_from(content, start)
        start += _DECISION.size
        places = struct.unpack_from(f">{offsets}Q", content, start)
        start += offsets * _OFFSET.size
        actor = content[start : start + actor_bytes].decode()
        start += actor_bytes
        ops.append(Op(id_text(raw_id), Verdict(verdict), Author(author), group, partition, places, number, actor))
    if start != len(content):
        raise ValueError(f"{count} decisions end at {start} of {len(content)} bytes")
    return ops


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
    if len(fields[GROUP] or b"") > MAX_GROUP_BYTES:
        raise MessageFormatError(f"a half whose {GROUP} has more than {MAX_GROUP_BYTES} bytes; it is refused")
    if not is_topic_name(topic):
        raise MessageFormatError(f"a half whose {TOPIC} is no topic name; it is refused")
    partition = _number(fields, PARTITION, _MAX_INT32)
    immunity_ms = _number(fields, IMMUNITY_MS, _MAX_INT64)
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
        _number(fields, DELIVER_AT, _MAX_INT64),
        _part(fields[PART]) if PART in fields else None,
        (fields[ORDER] or b"") if ORDER in fields else None,
        _text(fields, RESUMED) if RESUMED in fields else None,
    )


def _part(content: bytes | None) -> tuple[int, int]:
    """Read which part of how many a half is."""
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


def _number(fields: dict[str, bytes | None], name: str, highest: int) -> int | None:
    """Return a field of digits, or None where there is none."""
    if name not in fields:
        return None
    content = fields[name] or b""
    if not content.isdigit() or len(content) > len(str(highest)) or int(content) > highest:
        raise MessageFormatError(f"a half whose {name} is not a number from 0 to {highest}; it is refused")
    return int(content)


__all__ = [
    "BY_OPERATOR",
    "EXHAUSTED",
    "MAX_CHECK_NUMBER",
    "MAX_GROUP_BYTES",
    "MAX_PARTS",
    "RESERVED_PREFIX",
    "Author",
    "CheckRequest",
    "DiscardedHalf",
    "Half",
    "Op",
    "Verdict",
    "WireHeaders",
    "decode_check_request",
    "decode_discarded",
    "decode_half",
    "decode_ops",
    "encode_check_request",
    "encode_discarded",
    "encode_half",
    "encode_op",
    "encode_ops",
    "is_topic_name",
]
