"""The records of the done log: what one Kafka transaction settled or learned, to bytes and back.

Pure. Whatever does not decode raises `MessageFormatError` and nothing else. Integers are big-endian. A record is of one
half partition and holds notes (what was settled, or how many checks were answered) and snapshots (pending halves,
written again so that the checkpoints can pass them).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import MessageFormatError
from penstock.transactions.wire.half import Half, encode_half, pack_half, unpack_half
from penstock.transactions.wire.ids import id_bytes, id_text
from penstock.transactions.wire.ops import Verdict

_VERSION = 2
#: Version, notes, snapshots.
_DONE = struct.Struct(">BII")
_NOTE = struct.Struct(">16sQBHQqI")
#: Halves of a snapshotted transaction.
_SNAPSHOT = struct.Struct(">H")
#: Offset and append time of a snapshotted half, and its headers.
_SNAPSHOT_HALF = struct.Struct(">QQI")
#: What a note may say, by number, for looking them up is cheaper than making them.
_VERDICTS = {int(verdict): verdict for verdict in Verdict if verdict is not Verdict.TICK}


class Note(NamedTuple):
    """What the done log says of one transaction: its end, or (UNKNOWN) how many checks were answered so far."""

    transaction_id: str
    #: The highest offset among its halves: the note is needed until the half checkpoint has passed it.
    half_offset: int
    verdict: Verdict
    check_count: int
    #: Append time of the last answered check in milliseconds since the epoch; 0 when there was none.
    answered_ms: int
    #: Place of the decision, or of the last answer: offset of its op record and index there. An offset of -1: there is
    #: none, as in a count without an answer.
    op_offset: int = -1
    op_index: int = 0


class SnapshotHalf(NamedTuple):
    """A pending half that was written down again, with its own place and birth."""

    offset: int
    #: Append time in milliseconds since the epoch, by the broker's clock.
    birth_ms: int
    half: Half


class UnloadedPayloads(NamedTuple):
    """What is known of the payloads of a transaction that are not in memory."""

    size_bytes: int
    #: As `Pending.keys` gives them.
    keys: tuple[int, ...]


class Snapshot(NamedTuple):
    """A pending transaction that was written down again, so that the checkpoints can pass it."""

    #: What is known of it. A verdict other than UNKNOWN is a decision that has not taken effect yet.
    note: Note
    #: Its halves that were stored, by offset.
    halves: tuple[SnapshotHalf, ...]
    #: What is known of the payloads where they were dropped; None: its halves have them.
    dropped: UnloadedPayloads | None = None


class Done(NamedTuple):
    """A record of the done log."""

    notes: list[Note]
    snapshots: Sequence[Snapshot]


def encode_done(notes: Sequence[Note], snapshots: Sequence[Snapshot] = ()) -> bytes:
    """Return the value of a done record."""
    parts = [_DONE.pack(_VERSION, len(notes), len(snapshots))]
    pack = _NOTE.pack
    parts += [pack(id_bytes(note[0]), *note[1:]) for note in notes]
    for snapshot in snapshots:
        parts.append(pack(id_bytes(snapshot.note[0]), *snapshot.note[1:]))
        parts.append(_SNAPSHOT.pack(len(snapshot.halves)))
        for offset, birth_ms, half in snapshot.halves:
            headers = encode_half(half)
            parts.append(_SNAPSHOT_HALF.pack(offset, birth_ms, len(headers)))
            parts.extend(pack_half(half, headers))
    return b"".join(parts)


def last_settled(value: bytes | None) -> tuple[int, int] | None:
    """Return the place of the decision that a done record settles last; None: it settles none, or does not read.

    A glance for those who follow the log and want no more of it.
    """
    content = value or b""
    try:
        version, count, _ = _DONE.unpack_from(content)
        if version == _VERSION:
            # Counts of checks stand behind what is settled.
            for number in range(count - 1, -1, -1):
                _, _, verdict, *_, op_offset, op_index = _NOTE.unpack_from(content, _DONE.size + number * _NOTE.size)
                if verdict != Verdict.UNKNOWN:
                    return op_offset, op_index
    except struct.error:
        pass
    return None


def decode_done(value: bytes | None) -> Done:
    """Read the value of a done record."""
    try:
        return _decode_done(value or b"")
    except (struct.error, ValueError, KeyError) as error:
        raise MessageFormatError(f"a done record that does not read: {error}; it is ignored") from error


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
    snapshotted = []
    for _ in range(snapshots):
        raw_id, offset, verdict, *more = _NOTE.unpack_from(content, end)
        (halves,) = _SNAPSHOT.unpack_from(content, end + _NOTE.size)
        end += _NOTE.size + _SNAPSHOT.size
        read = []
        for _ in range(halves):
            half, end = _decode_snapshot_half(content, end)
            read.append(half)
        note = Note(id_text(raw_id), offset, _VERDICTS[verdict], *more)
        _require_place(note)
        _require_whole(note, read)
        snapshotted.append(Snapshot(note, tuple(read)))
    if end != len(content):
        raise ValueError(f"it ends at {end} of {len(content)} bytes")
    return Done(notes, snapshotted)


def _require_place(note: Note) -> None:
    """Raise unless an end says where it was decided: no coordinator ends a transaction without a decision."""
    if note.op_offset < 0 and note.verdict is not Verdict.UNKNOWN:
        raise ValueError(f"transaction {note.transaction_id} ended without a place of its decision")


def _require_whole(note: Note, halves: Sequence[SnapshotHalf]) -> None:
    """Raise unless the halves of a snapshot are those of one transaction: the one that its note speaks of."""
    first = halves[0].half if halves else None
    if first is None or any(
        (halve.half.transaction_id, halve.half.group, (halve.half.part or (1, 1))[1])
        != (note.transaction_id, first.group, (first.part or (1, 1))[1])
        or halve.offset > note.half_offset
        for halve in halves
    ):
        raise ValueError(f"a snapshot of transaction {note.transaction_id} with halves that are not its own")
    places, parts = {halve.offset for halve in halves}, {halve.half.part or (1, 1) for halve in halves}
    if not len(halves) == len(places) == len(parts):
        raise ValueError(f"a snapshot of transaction {note.transaction_id} with a half that stands in it twice")


def _decode_snapshot_half(content: bytes, start: int) -> tuple[SnapshotHalf, int]:
    offset, birth_ms, headers = _SNAPSHOT_HALF.unpack_from(content, start)
    half, end = unpack_half(content, start + _SNAPSHOT_HALF.size, headers)
    if any("\0" in name for name, _ in half.headers):
        raise ValueError("a header's name with a zero byte, which no Kafka client writes")
    return SnapshotHalf(offset, birth_ms, half), end
