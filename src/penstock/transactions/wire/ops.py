"""The op record: a batch of decisions of one group for one half partition, encoded and decoded.

Pure. The order in a batch counts: the place of a decision is the offset of its record and its index there. In a plain
batch each decision names one half and no actor. Plain decisions have a fixed size, because thousands are read a second.
Integers are big-endian. Anything that does not decode raises `MessageFormatError` and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from penstock.errors import MessageFormatError
from penstock.transactions.wire.ids import id_bytes, id_text, ids_bytes

_VERSION = 2
#: Version, 1 for a plain batch, decisions, half partition, bytes of the group's name.
_OPS = struct.Struct(">BBIiH")
#: Id, verdict, author, check number, offset of the half.
_PLAIN = struct.Struct(">16sBBHQ")
#: Bytes of a decision in a plain batch.
DECISION_BYTES = _PLAIN.size
#: Id, verdict, author, check number, half offsets, bytes of the actor's name.
_DECISION = struct.Struct(">16sBBHHH")
_OFFSET = struct.Struct(">Q")


class Verdict(IntEnum):
    """The verdict of an op on its transaction."""

    COMMIT = 1
    ROLLBACK = 2
    #: No decision: a check was answered UNKNOWN.
    UNKNOWN = 3
    #: The message goes to the discarded topic: its checks are exhausted, or an operator says so.
    DISCARD = 4
    #: The coordinator's own mark, for no transaction: it has read all ops up to there.
    TICK = 5


class Author(IntEnum):
    """The author of an op."""

    PRODUCER = 1
    CHECK = 2
    OPERATOR = 3
    COORDINATOR = 4


#: By number: a lookup is cheaper than `Verdict(...)`.
_VERDICTS = {int(verdict): verdict for verdict in Verdict}
_AUTHORS = {int(author): author for author in Author}


class Op(NamedTuple):
    """A decision.

    `half_offsets` are in the order of the transaction's parts. They are empty if the author does not know whether the
    halves were stored.
    """

    transaction_id: str
    verdict: Verdict
    author: Author
    group: str
    half_partition: int
    half_offsets: tuple[int, ...]
    check_number: int
    #: The name of the operator, if one decided.
    actor: str = ""


def encode_op(op: Op) -> bytes:
    """Return the value of an op record with one decision."""
    return encode_ops((op,))


def encode_ops(ops: Sequence[Op]) -> bytes:
    """Return the value of an op record: decisions of one group for one half partition, in their order."""
    first = ops[0]
    group = first.group.encode()
    plain = not [op for op in ops if len(op.half_offsets) != 1 or op.actor]
    parts = [_OPS.pack(_VERSION, plain, len(ops), first.half_partition, len(group)), group]
    if plain:
        pack = _PLAIN.pack
        raw_ids = ids_bytes([op[0] for op in ops])
        parts += [pack(raw_id, op[1], op[2], op[6], op[5][0]) for raw_id, op in zip(raw_ids, ops, strict=True)]
    else:
        for op in ops:
            actor = op.actor.encode()
            head = (op.verdict, op.author, op.check_number, len(op.half_offsets), len(actor))
            parts.append(_DECISION.pack(id_bytes(op.transaction_id), *head))
            parts.extend(map(_OFFSET.pack, op.half_offsets))
            parts.append(actor)
    return b"".join(parts)


def decode_ops(value: bytes | None) -> list[Op]:
    """Decode the value of an op record: one decision or more, of one group for one half partition."""
    try:
        ops = _decode_ops(value or b"")
    except (struct.error, ValueError, KeyError) as error:
        raise MessageFormatError(f"an op record that cannot be decoded: {error}; it is refused") from error
    if ops[0].half_partition < 0 or not ops[0].group:
        raise MessageFormatError("an op record without a group or a half partition; it is refused")
    return ops


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
    make = tuple.__new__
    return [
        # The same as `Op(...)` in half the time: thousands are read a second.
        make(Op, (id_text(raw_id), _VERDICTS[verdict], _AUTHORS[author], group, partition, (place,), number, ""))
        # A copy, not a memoryview: the error of a bad byte keeps this frame. In CPython 3.11 the garbage collector
        # cannot clear such a cycle with a view that the iterator still holds, and the process ends with SIGSEGV.
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
