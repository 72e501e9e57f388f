"""The redo log: segments in a folder, appended to by one thread, and how it is opened after whatever ended it.

Opening reads the segments from the floor on; after a clean stop the last one alone, to see that the log ends where it
ended then. What stands torn at the end was never acknowledged and is cut off; what had been acknowledged and is missing
or damaged, at the end or within, makes the opening fail without touching it.
To tell the two apart there is the file `mark`: where the log ended at the last sync that returned. It is written
behind each sync, and never synced itself, so it may be behind the truth after a power cut, but never ahead of it.
"""

from __future__ import annotations

import secrets
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple
from uuid import UUID, uuid4

from penstock.errors import MessageFormatError, StoreDamagedError
from penstock.transactions.stores.file.log.folder import Folder
from penstock.transactions.stores.file.log.frames import (
    HEADER_BYTES,
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
_MARK = struct.Struct(">16sQI")
_END = struct.Struct(">16sQQI")


class NoRoomError(Exception):
    """There is no room on the disk for another segment; the log is as it was, and it may be tried again."""


class _Segment(NamedTuple):
    """A segment of the log."""

    name: str
    header: SegmentHeader
    capacity: int

    @property
    def base(self) -> int:
        return self.header.base


class ReadLog(NamedTuple):
    """What was read of a log: its segments, those that nobody needs any more, and of the last one what it holds."""

    segments: list[_Segment]
    passed: list[_Segment]
    last: Scan
    data: bytes
    #: The place behind the last frame.
    end: int

    def __repr__(self) -> str:
        """Name the place, never what stands there."""
        return f"<ReadLog to {self.end}>"


class RedoLog:
    """The log of one store. One thread opens and appends; any thread reads.

    Each segment has `segment_bytes` of the disk set aside; a frame that is longer gets a segment of its own.
    """

    def __init__(self, folder: Folder, segment_bytes: int) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        # By base, ascending. Written by the appending thread, replaced as a whole; readers take what they find.
        self._segments: tuple[_Segment, ...] = ()
        # The offset in the last segment where the next frame goes, and that frame's number.
        self._offset = 0
        self._sequence = 1
        #: Bytes that were cut off at the end when it was opened: what a crash had left torn.
        self.torn_bytes = 0

    @property
    def store_id(self) -> UUID:
        """The id that the store got when it was made."""
        return self._segments[-1].header.store_id

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
        """What says where the log ends now, to be given to `open`."""
        return _log_end(self._segments, self.end, self._sequence)

    def open(
        self,
        replay: Callable[[Record], None],
        expected: bytes | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> bool:
        """Read the log, replaying its records in order, and make it ready for appending; an absent one is made.

        Where it ends as `expected`, nothing is replayed; where it does not, `begin` is called before it is. Tells
        whether it was replayed.

        Raises `StoreDamagedError` where what had been acknowledged is missing or does not read, and has changed nothing
        then; `NoRoomError` where there is no room for the first segment.
        """
        names = self._folder.names()
        found = segments_of(names)
        mark = self._read_mark(names)
        if not found and mark is not None:
            raise damaged("all segments of its redo log are gone")
        read = read_segments(self._folder, found, expected=expected) if found and expected is not None else None
        is_replayed = read is None
        if read is None:
            begin()
            read = read_segments(self._folder, found, replay) if found else None
        if read is not None:
            self._take_over(read, mark)
        else:
            self._segments = (self._make(uuid4(), 0, 0),)
            self._offset = HEADER_BYTES
        for name in names:
            if name.endswith(SUFFIX + _NEW):
                self._folder.remove(name)
        self._write_mark()
        return is_replayed

    def look(self) -> list[str]:
        """Find the segments of a log that another process has, and return their names; it can be read then."""
        names = segments_of(self._folder.names())
        self._segments = tuple(_segment_of(self._folder, name) for name in names)
        return names

    def _take_over(self, read: ReadLog, mark: tuple[UUID, int] | None) -> None:
        last, header = read.last, read.segments[-1].header
        if mark is not None and mark[0] == header.store_id and mark[1] > read.end:
            raise damaged(f"its redo log had been stored up to place {mark[1]}, but ends at {read.end}")
        self._segments, self._offset, self._sequence = tuple(read.segments), last.end, last.sequence
        acknowledged = mark is not None and mark[1] >= read.end
        self._clean(read.data, last.end if acknowledged else last.last, read.passed)

    def _clean(self, data: bytes, doubtful: int, passed: Sequence[_Segment]) -> None:
        """Cut off what is torn, make durable what may not be, remove the segments that the floor has passed.

        `doubtful` is where in the data of the last segment the frame begins that may not have been acknowledged.
        """
        segment = self._segments[-1]
        torn = data[self._offset :].rstrip(b"\0")
        if torn:
            self.torn_bytes = len(torn)
            self._folder.cut(segment.name, self._offset)
        capacity = max(self._segment_bytes, self._offset)
        self._folder.allocate(segment.name, capacity)
        self._segments = (*self._segments[:-1], segment._replace(capacity=capacity))
        # The last frame may be whole in the system's cache and not on the disk. And if a sync of it failed, the system
        # may believe that it is there: it is written once more, or another sync would do nothing.
        if doubtful < self._offset:
            self._folder.write(segment.name, doubtful, data[doubtful : self._offset])
        self._folder.sync(segment.name)
        # Nor may its name be: who made it was perhaps killed before that.
        self._folder.sync_names()
        for old in passed:
            self._folder.remove(old.name)

    def append(self, records: Sequence[tuple[int, bytes]]) -> list[Record]:
        """Write records, given as kind and payload, in one frame; they are durable on return.

        There must be room: see `needs_segment`. After an `OSError` it is not known what became of the records before
        the log is opened again.
        """
        segment = self._segments[-1]
        frame, offsets = encode_frame(self._sequence, segment.header.seed, records)
        self._folder.write(segment.name, self._offset, frame)
        self._folder.sync(segment.name)
        begin = segment.base + self._offset
        self._offset += len(frame)
        self._sequence += 1
        self._write_mark()
        return [Record(kind, payload, begin + offset) for (kind, payload), offset in zip(records, offsets, strict=True)]

    def needs_segment(self, frame_bytes: int) -> bool:
        """Tell whether a frame of so many bytes needs a new segment."""
        return self._offset + frame_bytes > self._segments[-1].capacity

    def begin_segment(self, frame_bytes: int, floor: int) -> None:
        """Go on in a new segment with room for a frame of so many bytes, and remove the segments below the floor.

        The floor is the lowest place that is still needed. Raises `NoRoomError`.
        """
        bases = (*self.bases, self.end)
        lowest = max(base for base in bases if base <= floor)
        capacity = max(self._segment_bytes, HEADER_BYTES + frame_bytes)
        made = self._make(self.store_id, self.end, lowest, capacity)
        passed = [segment for segment in self._segments if segment.base < lowest]
        self._segments = (*(segment for segment in self._segments if segment.base >= lowest), made)
        self._offset = HEADER_BYTES
        for segment in passed:
            self._folder.remove(segment.name)

    def read(self, place: int, size: int) -> Record:
        """Read one record. Safe from any thread. Raises `StoreDamagedError` where it does not read any more."""
        for segment in reversed(self._segments):
            if segment.base <= place:
                try:
                    data = self._folder.read(segment.name, place - segment.base, size)
                    return decode_record(data, segment.header.seed, place)
                except (MessageFormatError, FileNotFoundError) as error:
                    raise damaged(f"{segment.name} has {error}") from error
        raise damaged(f"place {place} of its redo log is gone")

    def _make(self, store_id: UUID, base: int, floor: int, capacity: int | None = None) -> _Segment:
        """Make a segment under another name first: one with the right name always has a whole header."""
        header = SegmentHeader(store_id, base, self._sequence, floor, secrets.randbits(32))
        name = f"{base:020d}{SUFFIX}"
        capacity = capacity or self._segment_bytes
        try:
            self._folder.allocate(name + _NEW, capacity)
        except OSError as error:
            raise NoRoomError(f"{capacity} bytes for another segment of the redo log: {error.strerror}") from error
        self._folder.write(name + _NEW, 0, encode_header(header))
        self._folder.sync(name + _NEW)
        self._folder.rename(name + _NEW, name)
        self._folder.sync_names()
        return _Segment(name, header, capacity)

    def _read_mark(self, names: Sequence[str]) -> tuple[UUID, int] | None:
        data = self._folder.read(MARK, 0, _MARK.size) if MARK in names else b""
        if len(data) < _MARK.size:
            return None
        raw_id, place, check = _MARK.unpack(data)
        # A mark that is torn says nothing.
        return (UUID(bytes=raw_id), place) if check == zlib.crc32(data[:-4]) else None

    def _write_mark(self) -> None:
        data = _MARK.pack(self.store_id.bytes, self.end, 0)[:-4]
        self._folder.write(MARK, 0, data + struct.pack(">I", zlib.crc32(data)))


def segments_of(names: Iterable[str]) -> list[str]:
    """Return the names of a log's segments, in their order."""
    return sorted(name for name in names if name.endswith(SUFFIX))


def _segment_of(folder: Folder, name: str) -> _Segment:
    """Read what a segment says of itself. Raises `StoreDamagedError`."""
    try:
        return _Segment(name, decode_header(folder.read(name, 0, HEADER_BYTES)), 0)
    except MessageFormatError as error:
        raise damaged(f"{name} of its redo log is {error}") from error


def read_segments(
    folder: Folder,
    names: Sequence[str],
    replay: Callable[[Record], None] = lambda _: None,
    expected: bytes | None = None,
) -> ReadLog | None:
    """Read segments from the floor on, replaying their records in order; nothing is changed.

    With an expected end, the last one alone is read, and nothing is replayed; None: it ends elsewhere. Raises
    `StoreDamagedError` where segments do not fit together.
    """
    segments = [_segment_of(folder, name) for name in names]
    floor = segments[-1].header.floor
    passed = [segment for segment in segments if segment.base < floor]
    kept = segments[len(passed) :]
    if kept[0].base != floor:
        raise damaged(f"the segment that begins at {floor} of its redo log is gone")
    first = kept[0] if expected is None else kept[-1]
    at, sequence, data = first.base, first.header.sequence, b""
    read = [] if expected is None else kept[:-1]
    for segment in kept[len(read) :]:
        if (segment.base, segment.header.sequence) != (at, sequence) or (
            segment.header.store_id != kept[-1].header.store_id
        ):
            raise damaged(f"{segment.name} of its redo log does not follow on what stands before: place {at}")
        data = folder.read(segment.name)
        last = scan(data, segment.header)
        at, sequence = segment.base + last.end, last.sequence
        if last.stray is not None:
            raise damaged(f"{segment.name} of its redo log is damaged from byte {last.end} to {last.stray}")
        read.append(segment._replace(capacity=len(data)))
        if expected is None:
            for record in last.records:
                replay(record)
    if expected not in {None, _log_end(kept, at, sequence)}:
        return None
    return ReadLog(read, passed, last, data, at)


def _log_end(segments: Sequence[_Segment], end: int, sequence: int) -> bytes:
    names = " ".join(segment.name for segment in segments)
    return _END.pack(segments[-1].header.store_id.bytes, end, sequence, zlib.crc32(names.encode()))


def damaged(what: str) -> StoreDamagedError:
    """Return the error of a store that is damaged."""
    return StoreDamagedError(
        f"the file store is damaged: {what}; restore its folder from a backup, or, to go on without what it "
        "held, move the folder away"
    )
