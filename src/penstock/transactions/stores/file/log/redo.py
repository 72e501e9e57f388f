"""The redo log: segment files in a folder. One thread appends to them.

Opening finds the end of the last segment. If the state table does not match that end, the caller then reads the
records. Opening changes files only after that. Torn bytes behind the end were never acknowledged and are wiped. If
acknowledged data is missing or damaged, opening fails and changes nothing.

The file `mark` separates the two cases: it holds the log's end at the last successful sync. It is written after each
sync and never synced itself. After a power cut it may be behind the real end, but never ahead.
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
    """The disk has no room for another segment. The log is unchanged, and the caller may try again."""


class NotReadError(OSError):
    """A file of the log cannot be read now, for example because the process has no descriptors left.

    The log is unchanged, and the caller may try again.
    """


class RedoLog:
    """The log of one store. One thread opens and appends; any thread reads.

    Each segment allocates `segment_bytes` on the disk; a longer frame gets a segment of its own. When a segment begins,
    the log asks `floor` for the lowest place that is still needed, and removes all segments below it.
    """

    def __init__(self, folder: Folder, segment_bytes: int, floor: Callable[[], int]) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._floor = floor
        # By base, ascending. The appending thread replaces the whole tuple; readers take the tuple that they find.
        self._segments: tuple[SegmentHeader, ...] = ()
        # Of the last segment: its size, the offset of the next frame, and that frame's sequence number.
        self._capacity = 0
        self._offset = HEADER_BYTES
        self._sequence = 1
        # At opening: the offset of a last frame that may be unacknowledged, or `_offset` if the mark confirms all
        # frames.
        self._unconfirmed = HEADER_BYTES
        #: Torn bytes behind the end, which a crash left, at opening.
        self.torn_bytes = 0

    @property
    def store_id(self) -> UUID:
        """The id of the store, chosen when it was created."""
        return self._segments[-1].store_id

    @property
    def bases(self) -> tuple[int, ...]:
        """The places where the segments begin, ascending."""
        return tuple(segment.base for segment in self._segments)

    @property
    def end(self) -> int:
        """The place behind the last durable frame."""
        return self._segments[-1].base + self._offset

    @property
    def log_end(self) -> bytes:
        """Bytes that identify this end of the log among all others."""
        names = " ".join(map(_name, self._segments))
        return _END.pack(self.store_id.bytes, self.end, self._sequence, zlib.crc32(names.encode()))

    # Opening: first `open`, then `records` if they are needed, then `recover`.

    def open(self) -> None:
        """Find the end of the log. Create the log if it is absent.

        Raises `StoreDamagedError` if acknowledged data is missing or unreadable; nothing was changed then. Raises
        `NoRoomError` if the disk has no room for the first segment.
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
            raise damaged(f"its redo log was acknowledged up to place {mark[1]}, but ends at {self.end}")
        self._unconfirmed = found.end if mark is not None and mark[1] >= self.end else found.last
        self.torn_bytes = len(data[found.end :].rstrip(b"\0"))

    def open_read_only(self) -> None:
        """Find the segments of a log that another process may have open. Raises as `records`."""
        segments = [self._read_header(name) for name in segments_of(self._folder.names())]
        floor = segments[-1].floor
        self._segments = tuple(segment for segment in segments if segment.base >= floor)
        if self._segments[0].base != floor:
            raise damaged(f"the segment that begins at {floor} of its redo log is gone")

    def records(self) -> Iterator[Record]:
        """Yield the records in their order. Raises `StoreDamagedError` if segments do not fit together."""
        first, last = self._segments[0], self._segments[-1]
        at, sequence = first.base, first.sequence
        for segment in self._segments:
            if (segment.base, segment.sequence, segment.store_id) != (at, sequence, last.store_id):
                raise damaged(f"{_name(segment)} of its redo log does not continue the segment before it at place {at}")
            _, found = self._scan_segment(segment)
            at, sequence = segment.base + found.end, found.sequence
            yield from found.records

    def recover(self) -> None:
        """Prepare the log for appending, after the caller has read the records it needs.

        Wipes torn bytes, makes the last frame durable, and removes files that are no longer needed.
        """
        folder, name = self._folder, _name(self._segments[-1])
        folder.write(name, self._offset, bytes(self.torn_bytes))
        self._capacity = max(self._segment_bytes, self._offset)
        folder.allocate(name, self._capacity)
        # The last frame may be whole in the system's cache and not on the disk. After a failed sync, the system may
        # wrongly count it as written, and another sync would do nothing. So the frame is written again.
        if self._unconfirmed < self._offset:
            frame = folder.read(name, self._unconfirmed, self._offset - self._unconfirmed)
            folder.write(name, self._unconfirmed, frame)
        folder.sync(name)
        # The file name may not be durable either: the process that created it may have been killed before `sync_names`.
        folder.sync_names()
        needed = set(map(_name, self._segments))
        for other in folder.names():
            if other.endswith(SUFFIX + _NEW) or (other.endswith(SUFFIX) and other not in needed):
                folder.remove(other)
        self._write_mark()

    def append(self, records: Sequence[tuple[int, bytes]]) -> list[Record]:
        """Write records, given as kind and payload, in one frame. They are durable on return.

        Raises `NoRoomError` if the frame needs a new segment and the disk has no room for it. After an `OSError`, only
        opening the log again shows whether the records are durable.
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
        """Begin a segment with room for a frame of `frame_bytes`, and remove the segments below the floor."""
        floor = self._floor()
        lowest = max(base for base in (*self.bases, self.end) if base <= floor)
        capacity = max(self._segment_bytes, HEADER_BYTES + frame_bytes)
        segment = self._create_segment(self.store_id, self.end, lowest, capacity)
        obsolete = [former for former in self._segments if former.base < lowest]
        self._segments = (*self._segments[len(obsolete) :], segment)
        self._offset, self._capacity = HEADER_BYTES, capacity
        for former in obsolete:
            self._folder.remove(_name(former))

    def read(self, place: int, size: int) -> Record:
        """Read one record. Safe from any thread. Raises `StoreDamagedError` if it is damaged, else `NotReadError`."""
        for segment in reversed(self._segments):
            if segment.base <= place:
                try:
                    data = self._folder.read(_name(segment), place - segment.base, size)
                    return decode_record(data, segment.seed, place)
                except (MessageFormatError, FileNotFoundError) as error:
                    raise damaged(f"{_name(segment)} has {error}") from error
                except OSError as error:
                    raise NotReadError(error.errno, error.strerror, _name(segment)) from error
        raise damaged(f"place {place} of its redo log is gone")

    def _create_segment(self, store_id: UUID, base: int, floor: int, capacity: int) -> SegmentHeader:
        """Create a segment under a temporary name first: a file with the final name always has a whole header."""
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
        data = self._folder.read(_name(segment))
        found = scan(data, segment)
        if found.stray is not None:
            raise damaged(f"{_name(segment)} of its redo log is damaged from byte {found.end} to {found.stray}")
        return data, found

    def _read_mark(self, names: Sequence[str]) -> tuple[UUID, int] | None:
        data = self._folder.read(MARK, 0, _MARK.size + _CHECK.size) if MARK in names else b""
        content, check = data[: _MARK.size], data[_MARK.size :]
        # A torn mark is ignored.
        if check != _CHECK.pack(zlib.crc32(content)):
            return None
        raw_id, place = _MARK.unpack(content)
        return UUID(bytes=raw_id), place

    def _write_mark(self) -> None:
        data = _MARK.pack(self.store_id.bytes, self.end)
        self._folder.write(MARK, 0, data + _CHECK.pack(zlib.crc32(data)))


def segments_of(names: Iterable[str]) -> list[str]:
    """Return the names of a log's segments in their order."""
    return sorted(name for name in names if name.endswith(SUFFIX))


def _name(segment: SegmentHeader) -> str:
    return f"{segment.base:020d}{SUFFIX}"


def damaged(what: str) -> StoreDamagedError:
    """Return the error of a damaged store."""
    return StoreDamagedError(
        f"the file store is damaged: {what}; restore its folder from a backup, or move the folder away to "
        "start without its transactions"
    )
