"""What the redo log's records say: the changes of transactions, to bytes and back.

Pure. A change is written once it is known to hold (the first decision, not the second), so replaying the log needs
no judgement. Integers are big-endian.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from penstock.errors import MessageFormatError
from penstock.transactions.wire.half import Half, encode_half, pack_half, unpack_half
from penstock.transactions.wire.ids import ID_BYTES, id_bytes, id_text
from penstock.transactions.wire.ops import Author, Verdict


class Kind(IntEnum):
    """The kinds of records."""

    PREPARED = 1
    DECIDED = 2
    CHECKED = 3
    SETTLED = 4


class Prepared(NamedTuple):
    """The halves of a transaction, with what is known of it. Written again with all that when its segment goes away."""

    #: Rises from transaction to transaction: the order in which they were prepared.
    number: int
    #: When it was first stored, in milliseconds since the epoch.
    birth_ms: int
    #: Answered checks, and when the last was answered (milliseconds since the epoch, 0: never).
    check_count: int
    answered_ms: int
    #: The decision; UNKNOWN while there is none.
    verdict: Verdict
    #: Rises from decision to decision; 0 while there is none.
    decided: int
    halves: tuple[Half, ...]


class Decided(NamedTuple):
    """The first decision of a transaction."""

    transaction_id: str
    verdict: Verdict
    author: Author
    decided: int
    #: Who it was by name, where a person decided.
    actor: str


class Checked(NamedTuple):
    """A check that was answered UNKNOWN."""

    transaction_id: str
    check_count: int
    answered_ms: int


class Settled(NamedTuple):
    """Transactions that are over: published, rolled back or discarded."""

    transaction_ids: tuple[str, ...]


Entry = Prepared | Decided | Checked | Settled

_PREPARED = struct.Struct(">QQHQBQH")
_DECIDED = struct.Struct(f">{ID_BYTES}sBBQ")
_CHECKED = struct.Struct(f">{ID_BYTES}sHQ")
_COUNT = struct.Struct(">H")


def encode_entry(entry: Entry) -> tuple[int, bytes]:
    """Return the kind and the payload of a record."""
    if isinstance(entry, Prepared):
        head = _PREPARED.pack(*entry[:6], len(entry.halves))
        return Kind.PREPARED, b"".join((head, *(part for half in entry.halves for part in _parts(half))))
    if isinstance(entry, Decided):
        head = _DECIDED.pack(id_bytes(entry.transaction_id), entry.verdict, entry.author, entry.decided)
        return Kind.DECIDED, head + entry.actor.encode()
    if isinstance(entry, Checked):
        return Kind.CHECKED, _CHECKED.pack(id_bytes(entry.transaction_id), entry.check_count, entry.answered_ms)
    return Kind.SETTLED, b"".join(map(id_bytes, entry.transaction_ids))


def decode_entry(kind: int, payload: bytes) -> Entry:
    """Read a record. Raises `MessageFormatError`."""
    try:
        if kind == Kind.PREPARED:
            return _prepared(payload)
        if kind == Kind.DECIDED:
            raw_id, verdict, author, decided = _DECIDED.unpack_from(payload)
            actor = payload[_DECIDED.size :].decode()
            return Decided(id_text(raw_id), Verdict(verdict), Author(author), decided, actor)
        if kind == Kind.CHECKED:
            raw_id, count, answered_ms = _CHECKED.unpack(payload)
            return Checked(id_text(raw_id), count, answered_ms)
        if kind == Kind.SETTLED and len(payload) % ID_BYTES == 0:
            starts = range(0, len(payload), ID_BYTES)
            return Settled(tuple(id_text(payload[start : start + ID_BYTES]) for start in starts))
    except (struct.error, ValueError) as error:
        raise MessageFormatError(f"a record of kind {kind} that does not read: {error}") from error
    raise MessageFormatError(f"a record of kind {kind} with {len(payload)} bytes, as this penstock writes none")


def _prepared(payload: bytes) -> Prepared:
    number, birth_ms, checks, answered_ms, verdict, decided, count = _PREPARED.unpack_from(payload)
    at, halves = _PREPARED.size, []
    for _ in range(count):
        (headers,) = _COUNT.unpack_from(payload, at)
        half, at = unpack_half(payload, at + _COUNT.size, headers)
        halves.append(half)
    if at != len(payload) or not halves:
        raise ValueError(f"{count} halves end at {at} of {len(payload)} bytes")
    return Prepared(number, birth_ms, checks, answered_ms, Verdict(verdict), decided, tuple(halves))


def _parts(half: Half) -> list[bytes]:
    headers = encode_half(half)
    return [_COUNT.pack(len(headers)), *pack_half(half, headers)]
