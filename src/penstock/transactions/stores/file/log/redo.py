"""The redo log: segments in a folder, appended to by one thread, and how it is opened after whatever ended it.

Opening finds the end in the last segment, has the records read where the state table does not fit that end, and only
then changes something. What stands torn at the end was never acknowledged and is wiped; what had been acknowledged
and is missing or damaged, at the end or within, makes the opening fail without touching it.
To tell the two apart there is the file `mark`: where the log ended at the last sync that returned. It is written
behind each sync, and never synced itself, so it may be behind the truth after a power cut, but never ahead of it.
"""

from __future__ import annotations

import secrets
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from uuid import UUID, uuid4

from penstock.errors import MessageFormatError, StoreDamagedError
from penstock.transactions.stores.file.log.folder import Folder
from penstock.transactions.stores.file.log.frames import (
    FRAME_BYTES,
    HEADER_BYTES,
    RECORD_BYTES,
    Record,
    Scan,
    SegmentHeader,
    decode_header,
    decode_record,
    encode_frame,
    encode_header,
    scan,
)

SUFFIX = ".redo"
_NEW = ".new"
MARK = "mark"
_MARK = struct.Struct(">16sQ")
_CHECK = struct.Struct(">I")
_END = struct.Struct(">16sQQI")


class NoRoomError(Exception):
    """There is no room on the disk for another segment; the log is as it was, and it may be tried again."""


class RedoLog:
    """The log of one store. One thread opens and appends; any thread reads.

    Each segment has `segment_bytes` of the disk set aside; a frame that is longer gets a segment of its own. `floor`
    returns the lowest place that is still needed, when a segment is begun; segments below it are removed.
    """

    def __init__(self, folder: Folder, segment_bytes: int, floor: Callable[[], int]) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._floor = floor
        # By base, ascending. Written by the appending thread, replaced as a whole; readers take what they find.
        self._segments: tuple[SegmentHeader, ...] = ()
        # Bytes that the last one has room for, the offset in it where the next frame goes, and that frame's number.
        self._capacity = 0
        self._offset = HEADER_BYTES
        self._sequence = 1
        # The offset of the frame that may not have been acknowledged when it was opened.
        self._unconfirmed = HEADER_BYTES
        #: Bytes behind the end when it was opened, which a crash had left torn.
        self.torn_bytes = 0

    @property
    def store_id(self) -> UUID:
        """The id that the store got when it was made."""
        return self._segments[-1].store_id

    @property
    def bases(self) -> tuple[int, ...]:
        """Where the segments begin, ascending."""
        return tuple(segment.base for segment in self._segments)

    @property
    def end(self) -> int:
        """The place behind the last durable frame."""
        return self._segments[-1].base + self._offset

    @property
    def log_end(self) -> bytes:
        """What tells where the log ends now from any other end."""
        names = " ".join(map(_name, self._segments))
        return _END.pack(self.store_id.bytes, self.end, self._sequence, zlib.crc32(names.encode()))

    # Opening: `open`, `records` where they are wanted, `recover`.

    def open(self) -> None:
        """Find where the log ends; an absent one is made.

        Raises `StoreDamagedError` where what had been acknowledged is missing or does not read, and has changed nothing
        then; `NoRoomError` where there is no room for the first segment.
        """
        names = self._folder.names()
        mark = self._read_mark(names)
        if not segments_of(names):
            if mark is not None:
                raise damaged("all segments of its redo log are gone")
            self._segments = (self._create_segment(uuid4(), 0, 0, self._segment_bytes),)
            return
        self.open_read_only()
        last = self._segments[-1]
        data, found = self._scan_segment(last)
        self._offset, self._sequence = found.end, found.sequence
        if mark is not None and mark[0] == last.store_id and mark[1] > self.end:
            raise damaged(f"its redo log had been stored up to place {mark[1]}, but ends at {self.end}")
        self._unconfirmed = found.end if mark is not None and mark[1] >= self.end else found.last
        self.torn_bytes = len(data[found.end :].rstrip(b"\0"))

    def open_read_only(self) -> None:
        """Find the segments of a log, which another process may have: it can be read then. Raises as `records`."""
        segments = [self._read_header(name) for name in segments_of(self._folder.names())]
        floor = segments[-1].floor
        self._segments = tuple(segment for segment in segments if segment.base >= floor)
        if self._segments[0].base != floor:
            raise damaged(f"the segment that begins at {floor} of its redo log is gone")

    def records(self) -> Iterator[Record]:
        """Yield the records in their order. Raises `StoreDamagedError` where segments do not fit together."""
        first, last = self._segments[0], self._segments[-1]
        at, sequence = first.base, first.sequence
        for segment in self._segments:
            if (segment.base, segment.sequence, segment.store_id) != (at, sequence, last.store_id):
                raise damaged(f"{_name(segment)} of its redo log does not follow on what stands before: place {at}")
            _, found = self._scan_segment(segment)
            at, sequence = segment.base + found.end, found.sequence
            yield from found.records

    def recover(self) -> None:
        """Make it ready for appending, once all that is wanted of it was read.

        What is torn is wiped, what may not be durable is made so, and what nobody needs any more is removed.
        """
        folder, name = self._folder, _name(self._segments[-1])
        folder.write(name, self._offset, bytes(self.torn_bytes))
        self._capacity = max(self._segment_bytes, self._offset)
        folder.allocate(name, self._capacity)
        # The last frame may be whole in the system's cache and not on the disk. And if a sync of it failed, the system
        # may believe that it is there: it is written once more, or another sync would do nothing.
        if self._unconfirmed < self._offset:
            frame = folder.read(name, self._unconfirmed, self._offset - self._unconfirmed)
            folder.write(name, self._unconfirmed, frame)
        folder.sync(name)
        # Nor may its name be: who made it was perhaps killed before that.
        folder.sync_names()
        needed = set(map(_name, self._segments))
        for other in folder.names():
            if other.endswith(SUFFIX + _NEW) or (other.endswith(SUFFIX) and other not in needed):
                folder.remove(other)
        self._write_mark()

    def append(self, records: Sequence[tuple[int, bytes]]) -> list[Record]:
        """Write records, given as kind and payload, in one frame; they are durable on return.

        Raises `NoRoomError` where the frame needs a segment, and there is no room for it. After an `OSError` it is not
        known what became of the records before the log is opened again.
        """
        size = FRAME_BYTES + sum(RECORD_BYTES + len(payload) for _, payload in records)
        if self._offset + size > self._capacity:
            self._begin_segment(size)
        segment = self._segments[-1]
        frame, offsets = encode_frame(self._sequence, segment.seed, records)
        name, begin = _name(segment), self.end
        self._folder.write(name, self._offset, frame)
        self._folder.sync(name)
        self._offset += len(frame)
        self._sequence += 1
        self._write_mark()
        return [Record(kind, payload, begin + offset) for (kind, payload), offset in zip(records, offsets, strict=True)]

    def _begin_segment(self, frame_bytes: int) -> None:
        """Go on in a new segment with room for a frame of so many bytes, and remove the segments below the floor."""
        floor = self._floor()
        lowest = max(base for base in (*self.bases, self.end) if base <= floor)
        capacity = max(self._segment_bytes, HEADER_BYTES + frame_bytes)
        made = self._create_segment(self.store_id, self.end, lowest, capacity)
        passed = [segment for segment in self._segments if segment.base < lowest]
        self._segments = (*self._segments[len(passed) :], made)
        self._offset, self._capacity = HEADER_BYTES, capacity
        for segment in passed:
            self._folder.remove(_name(segment))

    def read(self, place: int, size: int) -> Record:
        """Read one record. Safe from any thread. Raises `StoreDamagedError` where it does not read any more."""
        for segment in reversed(self._segments):
            if segment.base <= place:
                try:
                    data = self._folder.read(_name(segment), place - segment.base, size)
                    return decode_record(data, segment.seed, place)
                except (MessageFormatError, FileNotFoundError) as error:
                    raise damaged(f"{_name(segment)} has {error}") from error
        raise damaged(f"place {place} of its redo log is gone")

    def _create_segment(self, store_id: UUID, base: int, floor: int, capacity: int) -> SegmentHeader:
        """Make a segment under another name first: one with the right name always has a whole header."""
        header = SegmentHeader(store_id, base, self._sequence, floor, secrets.randbits(32))
        name = _name(header)
        try:
            self._folder.allocate(name + _NEW, capacity)
        except OSError as error:
            raise NoRoomError(f"{capacity} bytes for another segment of the redo log: {error.strerror}") from error
        self._folder.write(name + _NEW, 0, encode_header(header))
        self._folder.sync(name + _NEW)
        self._folder.rename(name + _NEW, name)
        self._folder.sync_names()
        return header

    def _read_header(self, name: str) -> SegmentHeader:
        try:
            header = decode_header(self._folder.read(name, 0, HEADER_BYTES))
        except MessageFormatError as error:
            raise damaged(f"{name} of its redo log is {error}") from error
        if _name(header) != name:
            raise damaged(f"{name} of its redo log is a segment that begins at {header.base}")
        return header

    def _scan_segment(self, segment: SegmentHeader) -> tuple[bytes, Scan]:
        """Return the bytes of a segment, and what it holds."""
        data = self._folder.read(_name(segment))
        found = scan(data, segment)
        if found.stray is not None:
            raise damaged(f"{_name(segment)} of its redo log is damaged from byte {found.end} to {found.stray}")
        return data, found

    def _read_mark(self, names: Sequence[str]) -> tuple[UUID, int] | None:
        data = self._folder.read(MARK, 0, _MARK.size + _CHECK.size) if MARK in names else b""
        content, check = data[: _MARK.size], data[_MARK.size :]
        # A mark that is torn says nothing.
        if check != _CHECK.pack(zlib.crc32(content)):
            return None
        raw_id, place = _MARK.unpack(content)
        return UUID(bytes=raw_id), place

    def _write_mark(self) -> None:
        data = _MARK.pack(self.store_id.bytes, self.end)
        self._folder.write(MARK, 0, data + _CHECK.pack(zlib.crc32(data)))


def segments_of(names: Iterable[str]) -> list[str]:
    """Return the names of a log's segments, in their order."""
    return sorted(name for name in names if name.endswith(SUFFIX))


def _name(segment: SegmentHeader) -> str:
    return f"{segment.base:020d}{SUFFIX}"


def damaged(what: str) -> StoreDamagedError:
    """Return the error of a store that is damaged."""
    return StoreDamagedError(
        f"the file store is damaged: {what}; restore its folder from a backup, or, to go on without what it "
        "held, move the folder away"
    )
