"""Records of the done log: what one Kafka transaction settled or learned, encoded and decoded.

Pure. Anything that does not decode raises `MessageFormatError` and nothing else. Integers are big-endian. A record
belongs to one half partition. It holds notes (ends of transactions, or counts of answered checks) and snapshots
(pending transactions with their halves, so that the checkpoints can pass them).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import MessageFormatError
from penstock.transactions.wire.half import Half, encode_half, pack_half, unpack_half
from penstock.transactions.wire.ids import id_bytes, id_text, ids_bytes
from penstock.transactions.wire.ops import Verdict

_VERSION = 2
#: Version, notes, snapshots.
_DONE = struct.Struct(">BII")
_NOTE = struct.Struct(">16sQBHQqI")
#: Halves of a snapshotted transaction.
_SNAPSHOT = struct.Struct(">H")
#: Offset, append time and number of headers of a snapshotted half.
_SNAPSHOT_HALF = struct.Struct(">QQI")
#: The verdicts of notes by number: a lookup is cheaper than `Verdict(...)`.
_VERDICTS = {int(verdict): verdict for verdict in Verdict if verdict is not Verdict.TICK}


class Note(NamedTuple):
    """What the done log says of one transaction: its end, or (UNKNOWN) how many checks were answered so far."""

    transaction_id: str
    #: The highest offset of its halves: the note is needed until the half checkpoint has passed it.
    half_offset: int
    verdict: Verdict
    check_count: int
    #: Append time of the last answered check in milliseconds since the epoch; 0 if there was none.
    answered_ms: int
    #: Place of the decision or of the last answer: offset of its op record, and index there. The offset is -1 if there
    #: is none, as in a count without an answer.
    op_offset: int = -1
    op_index: int = 0


class StoredHalf(NamedTuple):
    """A half of a pending transaction, with its place in the half log."""

    offset: int
    #: Append time in milliseconds since the epoch, by the broker's clock.
    birth_ms: int
    half: Half


class UnloadedPayloads(NamedTuple):
    """What is known of the payloads of a transaction that are not in memory."""

    size_bytes: int
    #: The value of `Pending.keys`.
    keys: tuple[int, ...]


class Snapshot(NamedTuple):
    """A pending transaction in the done log, so that the checkpoints can pass it."""

    #: Its note. A verdict other than UNKNOWN is a decision that has not taken effect yet.
    note: Note
    #: Its halves, by offset.
    halves: tuple[StoredHalf, ...]
    #: What is known of its payloads if they were dropped. None: the halves have them.
    dropped: UnloadedPayloads | None = None


class Done(NamedTuple):
    """A record of the done log."""

    notes: list[Note]
    snapshots: Sequence[Snapshot]


def encode_done(notes: Sequence[Note], snapshots: Sequence[Snapshot] = ()) -> bytes:
    """Return the value of a done record."""
    parts = [_DONE.pack(_VERSION, len(notes), len(snapshots))]
    pack = _NOTE.pack
    raw_ids = ids_bytes([note[0] for note in notes])
    parts += [
        pack(raw_id, offset, verdict, checks, answered, place, index)
        for raw_id, (_, offset, verdict, checks, answered, place, index) in zip(raw_ids, notes, strict=True)
    ]
    for snapshot in snapshots:
        parts.append(pack(id_bytes(snapshot.note[0]), *snapshot.note[1:]))
        parts.append(_SNAPSHOT.pack(len(snapshot.halves)))
        for offset, birth_ms, half in snapshot.halves:
            headers = encode_half(half)
            parts.append(_SNAPSHOT_HALF.pack(offset, birth_ms, len(headers)))
            parts.extend(pack_half(half, headers))
    return b"".join(parts)


def last_settled(value: bytes | None) -> tuple[int, int] | None:
    """Return the place of the last decision that a done record settles. None: there is none, or it does not decode.

    A shortcut for readers that follow the log and need nothing else of it.
    """
    content = value or b""
    try:
        version, count, _ = _DONE.unpack_from(content)
        if version == _VERSION:
            # Counts of checks stand behind the ends.
            for number in range(count - 1, -1, -1):
                _, _, verdict, *_, op_offset, op_index = _NOTE.unpack_from(content, _DONE.size + number * _NOTE.size)
                if verdict != Verdict.UNKNOWN:
                    return op_offset, op_index
    except struct.error:
        pass
    return None


def decode_done(value: bytes | None) -> Done:
    """Decode the value of a done record."""
    try:
        return _decode_done(value or b"")
    except (struct.error, ValueError, KeyError) as error:
        raise MessageFormatError(f"a done record that cannot be decoded: {error}; it is ignored") from error


def _decode_done(content: bytes) -> Done:
    version, count, snapshots = _DONE.unpack_from(content)
    start, end = _DONE.size, _DONE.size + count * _NOTE.size
    if version != _VERSION or len(content) < end:
        raise ValueError(f"version {version}, {count} notes, {len(content)} bytes")
    notes = [
        Note(id_text(raw_id), offset, _VERDICTS[verdict], checks, answered, place, index)
        for raw_id, offset, verdict, checks, answered, place, index in _NOTE.iter_unpack(content[start:end])
    ]
    for note in notes:
        _require_place(note)
    decoded = []
    for _ in range(snapshots):
        raw_id, offset, verdict, *more = _NOTE.unpack_from(content, end)
        (count_halves,) = _SNAPSHOT.unpack_from(content, end + _NOTE.size)
        end += _NOTE.size + _SNAPSHOT.size
        halves = []
        for _ in range(count_halves):
            half, end = _decode_snapshot_half(content, end)
            halves.append(half)
        note = Note(id_text(raw_id), offset, _VERDICTS[verdict], *more)
        _require_place(note)
        _require_one_transaction(note, halves)
        decoded.append(Snapshot(note, tuple(halves)))
    if end != len(content):
        raise ValueError(f"it ends at {end} of {len(content)} bytes")
    return Done(notes, decoded)


def _require_place(note: Note) -> None:
    """Raise unless an end has the place of its decision: no coordinator ends a transaction without a decision."""
    if note.op_offset < 0 and note.verdict is not Verdict.UNKNOWN:
        raise ValueError(f"transaction {note.transaction_id} ended without a place of its decision")


def _require_one_transaction(note: Note, halves: Sequence[StoredHalf]) -> None:
    """Raise unless the halves of a snapshot belong to one transaction, which is that of its note."""
    first = halves[0].half if halves else None
    if first is None or any(
        (stored.half.transaction_id, stored.half.group, (stored.half.part or (1, 1))[1])
        != (note.transaction_id, first.group, (first.part or (1, 1))[1])
        or stored.offset > note.half_offset
        for stored in halves
    ):
        raise ValueError(f"a snapshot of transaction {note.transaction_id} with halves that are not its own")
    places, parts = {stored.offset for stored in halves}, {stored.half.part or (1, 1) for stored in halves}
    if not len(halves) == len(places) == len(parts):
        raise ValueError(f"a snapshot of transaction {note.transaction_id} that holds a half twice")


def _decode_snapshot_half(content: bytes, start: int) -> tuple[StoredHalf, int]:
    offset, birth_ms, headers = _SNAPSHOT_HALF.unpack_from(content, start)
    half, end = unpack_half(content, start + _SNAPSHOT_HALF.size, headers)
    if any("\0" in name for name, _ in half.headers):
        raise ValueError("a header's name with a zero byte, which no Kafka client writes")
    return StoredHalf(offset, birth_ms, half), end
