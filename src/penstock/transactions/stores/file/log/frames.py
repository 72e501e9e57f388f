"""The bytes of the redo log: segment headers, frames, records, and the scan that finds the end of a log.

Pure. A *frame* holds the records of one disk sync. A frame is written only after the sync of the frame before it. So an
unreadable frame is the torn end of the log, unless a later frame follows. If one follows, the unreadable frame was
durable and has been damaged since. Integers are big-endian.

- **segment header** (64 bytes): magic, version, store id, base, first sequence, floor, seed, checksum. Base is the
  segment's place in the whole log. Data below the floor is no longer needed.
- **frame**: magic, length, sequence, checksum of these three, checksum of the records; then the records.
- **record**: length, kind, checksum, payload. `entries.py` gives them their meaning.

All checksums are CRC-32, started with the segment's random seed. So bytes of another segment, and user data that looks
like a frame, fail the checksum.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple
from uuid import UUID

from penstock.errors import MessageFormatError

#: Bytes of a segment's header.
HEADER_BYTES = 64

_VERSION = 1
_SEGMENT_MAGIC = b"PENSTOCK"
_HEADER = struct.Struct(">8sH16sQQQI")
_CHECKSUM = struct.Struct(">I")
_FRAME_MAGIC = b"\xf5PTX"
_FRAME = struct.Struct(">4sIQ")
_FRAME_CHECKS = struct.Struct(">II")
#: Bytes of a frame before its records.
FRAME_BYTES = _FRAME.size + _FRAME_CHECKS.size
_RECORD = struct.Struct(">IBI")
#: Bytes of a record before its payload.
RECORD_BYTES = _RECORD.size


class SegmentHeader(NamedTuple):
    """The header of a segment."""

    store_id: UUID
    #: The place of its first byte in the whole log.
    base: int
    #: The sequence number of its first frame.
    sequence: int
    #: The base of the oldest segment that was needed when this one was made.
    floor: int
    #: The start value of its checksums.
    seed: int


class Record(NamedTuple):
    """One record of the log and its place."""

    kind: int
    payload: bytes
    #: The place of its first byte in the whole log.
    place: int

    def __repr__(self) -> str:
        """Return the place, never the payload."""
        return f"<Record {self.kind} at {self.place}>"

    @property
    def size(self) -> int:
        """Its bytes, header and payload."""
        return RECORD_BYTES + len(self.payload)


class Scan(NamedTuple):
    """The content of a segment."""

    #: Read lazily.
    records: Iterator[Record]
    #: The offset of the last good frame; equal to `end` if there is none.
    last: int
    #: The offset behind the last good frame.
    end: int
    #: The sequence number of the next frame.
    sequence: int
    #: The offset of a good frame behind `end`, or None. If there is one, the bytes between them were damaged.
    stray: int | None


def encode_header(header: SegmentHeader) -> bytes:
    """Return a segment's header."""
    _, *numbers = header
    head = _HEADER.pack(_SEGMENT_MAGIC, _VERSION, header.store_id.bytes, *numbers)
    return (head + _CHECKSUM.pack(zlib.crc32(head))).ljust(HEADER_BYTES, b"\0")


def decode_header(data: bytes) -> SegmentHeader:
    """Read a segment's header. Raises `MessageFormatError`."""
    end = _HEADER.size + _CHECKSUM.size
    if len(data) < HEADER_BYTES or _CHECKSUM.unpack_from(data, _HEADER.size)[0] != zlib.crc32(data[: _HEADER.size]):
        raise MessageFormatError("a segment whose header is cut or does not match its checksum")
    magic, version, store_id, *numbers = _HEADER.unpack_from(data)
    if magic != _SEGMENT_MAGIC or version != _VERSION or any(data[end:HEADER_BYTES]):
        raise MessageFormatError(f"a segment of version {version}; this penstock reads version {_VERSION}")
    return SegmentHeader(UUID(bytes=store_id), *numbers)


def encode_frame(sequence: int, seed: int, records: Sequence[tuple[int, bytes]]) -> tuple[bytes, list[int]]:
    """Return a frame of records, given as kind and payload, and the offset of each record in the frame."""
    parts: list[bytes] = []
    offsets, at = [], FRAME_BYTES
    for kind, payload in records:
        offsets.append(at)
        parts += (_RECORD.pack(len(payload), kind, _record_check(kind, payload, seed)), payload)
        at += _RECORD.size + len(payload)
    body = b"".join(parts)
    head = _FRAME.pack(_FRAME_MAGIC, len(body), sequence)
    return b"".join((head, _FRAME_CHECKS.pack(zlib.crc32(head, seed), zlib.crc32(body, seed)), body)), offsets


def decode_record(data: bytes, seed: int, place: int) -> Record:
    """Read one record that fills all of `data`. Raises `MessageFormatError`."""
    if len(data) < _RECORD.size:
        raise MessageFormatError(f"a record that is cut at place {place} of the redo log")
    length, kind, check = _RECORD.unpack_from(data)
    payload = data[_RECORD.size :]
    if length != len(payload) or check != _record_check(kind, payload, seed):
        raise MessageFormatError(f"a record that does not match its checksum at place {place} of the redo log")
    return Record(kind, payload, place)


def scan(data: bytes, header: SegmentHeader) -> Scan:
    """Read a segment up to the first unreadable frame, and look for a later good frame behind it."""
    frames: list[tuple[int, int]] = []
    last = at = HEADER_BYTES
    sequence = header.sequence
    while (frame := _frame_at(data, at, header.seed)) is not None and frame[0] == sequence:
        frames.append((at + FRAME_BYTES, frame[1]))
        last, at, sequence = at, frame[1], sequence + 1
    records = chain.from_iterable(_records(data, begin, end, header) for begin, end in frames)
    return Scan(records, last, at, sequence, _stray(data, at, sequence, header.seed))


def _stray(data: bytes, end: int, sequence: int, seed: int) -> int | None:
    """Return the offset of a good frame behind the end of the log."""
    at = data.find(_FRAME_MAGIC, end)
    while at >= 0:
        frame = _frame_at(data, at, seed)
        if frame is not None and frame[0] > sequence:
            return at
        at = data.find(_FRAME_MAGIC, at + 1)
    return None


def _frame_at(data: bytes, at: int, seed: int) -> tuple[int, int] | None:
    """Return sequence number and end of the frame at an offset, or None if there is no whole frame."""
    body = at + FRAME_BYTES
    if body > len(data):
        return None
    magic, length, sequence = _FRAME.unpack_from(data, at)
    if magic != _FRAME_MAGIC or body + length > len(data):
        return None
    head_check, body_check = _FRAME_CHECKS.unpack_from(data, at + _FRAME.size)
    # The header's checksum comes first: a user's payload full of frame magics then costs no checksum of the bytes
    # behind it.
    if head_check != zlib.crc32(data[at : at + _FRAME.size], seed):
        return None
    if body_check != zlib.crc32(memoryview(data)[body : body + length], seed):
        return None
    return sequence, body + length


def _records(data: bytes, at: int, end: int, header: SegmentHeader) -> Iterator[Record]:
    while at < end:
        length, kind, _ = _RECORD.unpack_from(data, at)
        payload = at + _RECORD.size
        yield Record(kind, data[payload : payload + length], header.base + at)
        at = payload + length


def _record_check(kind: int, payload: bytes, seed: int) -> int:
    return zlib.crc32(payload, seed ^ kind)
