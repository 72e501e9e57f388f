"""The tracker: the offsets in flight of one assigned partition, and the watermark that may be committed.

Offsets are tracked as they were fetched: transaction markers and compaction leave holes, so `watermark + 1` may not
exist. One fetch is one *block*, with a byte for each offset. A sorted map holds the blocks that are not wholly done.
Registering a fetch and completing a run take one lock and one pass in C each, whatever their length.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from sortedcontainers import SortedDict

from penstock.offsets.metadata import MAX_METADATA_CHARS, OffsetMap, encode, encode_flags

_DONE = b"\x01"
#: With more updates queued, a completing thread applies them itself.
_MAX_UPDATES = 1000
#: Most offsets that a commit expands to a byte each. An offset that is stuck for days has hundreds of millions above
#: it.
_MAX_FLAGS = 250_000
_NOTHING: Mapping[Block, Sequence[int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CommitPoint:
    """The commit of a partition: one snapshot, so that the offset and its map agree."""

    #: The next offset to handle; all below it are done.
    offset: int
    #: The offset map of the done offsets above it, or an empty text.
    metadata: str


class Load(NamedTuple):
    """The messages in flight of one assignment."""

    #: Registered offsets that are not done, and the bytes of their messages; each counts as the mean of its fetch.
    messages: int
    bytes: int
    #: The parked ones among them, and their bytes.
    parked: int
    parked_bytes: int
    #: Bytes that wait to be sent for these messages, in addition to their own bytes.
    unsent_bytes: int


class Block:
    """The offsets of one fetch of one partition. Made by `Tracker.register`, changed only by its tracker."""

    __slots__ = ("bytes_left", "done", "left", "offsets", "size_bytes")

    def __init__(self, offsets: Sequence[int], size_bytes: int) -> None:
        contiguous = offsets[-1] - offsets[0] == len(offsets) - 1
        #: The offsets, rising; a range, which takes no memory, if they have no holes.
        self.offsets: Sequence[int] = range(offsets[0], offsets[-1] + 1) if contiguous else offsets
        #: One byte for each offset: 1 is done.
        self.done = bytearray(len(offsets))
        #: Number of offsets that are not done.
        self.left = len(offsets)
        #: Bytes of all messages. Messages are not measured one by one: each counts as the mean.
        self.size_bytes = size_bytes
        #: The share of `size_bytes` that is not done; the tracker's sum contains it.
        self.bytes_left = size_bytes


class Tracker:
    """The offsets in flight of one assignment.

    Thread-safe: one thread registers, any thread completes and reads. `complete` never waits: it queues an update, and
    every reader applies the queued updates, under the lock, before it reads. So a thread that is interrupted here does
    not stop threads that complete. No callback runs under the lock.

    Args:
        start: the first offset; the watermark while nothing is registered.
        restored: the offsets above it that a former owner has done, from the commit metadata.
        owner: the owner of the offset maps that it writes, by `owner_of`.
    """

    def __init__(self, start: int, restored: OffsetMap | None = None, owner: bytes = b"") -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self._updates: deque[tuple[Block, Sequence[int]] | tuple[None, tuple[int, int, int]]] = deque()
        self._blocks: SortedDict[int, Block] = SortedDict()
        self._position = start
        self._restored = restored if restored is not None and restored.base == start else None
        self._in_flight = 0
        # The sum of `bytes_left` of all blocks: the poll thread reads it at every step, and there are thousands of
        # blocks.
        self._bytes_in_flight = 0
        self._parked = 0
        self._parked_bytes = 0
        self._unsent_bytes = 0

    def register(self, offsets: Sequence[int], size_bytes: int = 0) -> Block:
        """Register a fetch of rising offsets. Offsets that a former owner has done are set in `block.done`: skip them.

        Raises `ValueError` if the offsets are not above all registered ones: the log went back, and the caller must
        start a new tracker.
        """
        if not offsets or offsets[0] < self._position:
            raise ValueError(f"offsets must rise above {self._position}, got {offsets[0] if offsets else 'none'}")
        block = Block(offsets, size_bytes)
        restored = self._restored
        if restored is not None:
            self._apply_restored(restored, block)
        with self._lock:
            self._position = offsets[-1] + 1
            if block.left:
                self._blocks[offsets[0]] = block
                self._in_flight += block.left
                self._bytes_in_flight += block.bytes_left
        return block

    def _apply_restored(self, restored: OffsetMap, block: Block) -> None:
        """Mark the offsets that a former owner has done. The block is not shared yet."""
        if block.offsets[0] >= restored.end:
            self._restored = None
            return
        for index, offset in enumerate(block.offsets):
            if offset in restored:
                block.done[index] = 1
        block.left = block.done.count(0)
        block.bytes_left = block.size_bytes * block.left // len(block.done)

    def complete(self, block: Block, indexes: Sequence[int]) -> None:
        """Mark indexes of a block as done, each once; a `range` is fastest. Never waits.

        If an index was done before, the next read raises `ValueError`: a message was handled twice, and the counts
        would be wrong.
        """
        updates = self._updates
        updates.append((block, indexes))
        if len(updates) > _MAX_UPDATES:
            self._apply_if_free()

    def park(self, count: int, size_bytes: int) -> None:
        """Count messages in flight as parked; negative numbers undo that. Never waits."""
        self._updates.append((None, (count, size_bytes, 0)))
        if len(self._updates) > _MAX_UPDATES:
            self._apply_if_free()

    def count_unsent(self, size_bytes: int) -> None:
        """Count bytes that wait to be sent for messages in flight; negative numbers undo that. Never waits."""
        self._updates.append((None, (0, 0, size_bytes)))

    def _apply_if_free(self) -> None:
        """Apply the queued updates. Readers usually do so; this bounds the queue if nobody reads."""
        if self._lock.acquire(blocking=False):
            try:
                self._apply_updates()
            finally:
                self._lock.release()

    def _apply_updates(self) -> None:
        """Apply the queued updates, block by block. Called under the lock."""
        updates = self._updates
        completed: dict[Block, list[Sequence[int]]] = {}
        while updates:
            block, what = updates.popleft()
            if block is None:
                self._parked += what[0]
                self._parked_bytes += what[1]
                self._unsent_bytes += what[2]
            elif block in completed:
                completed[block].append(what)
            else:
                completed[block] = [what]
        repeated = [found for block, runs in completed.items() if (found := self._mark(block, runs))]
        if repeated:
            raise ValueError("; ".join(repeated))

    def _mark(self, block: Block, runs: Sequence[Sequence[int]]) -> str | None:
        """Mark runs of a block as done; return an error text if some were done before."""
        done = block.done
        named = 0
        for indexes in runs:
            named += len(indexes)
            if isinstance(indexes, range) and indexes.step == 1:
                done[indexes.start : indexes.stop] = _DONE * len(indexes)
            else:
                for index in indexes:
                    done[index] = 1
        left = done.count(0)
        changed = block.left - left
        block.left = left
        self._in_flight -= changed
        bytes_left = block.size_bytes * left // len(done)
        self._bytes_in_flight += bytes_left - block.bytes_left
        block.bytes_left = bytes_left
        if not left and changed:
            del self._blocks[block.offsets[0]]
        if changed != named:
            return f"{named - changed} of {named} offsets from {block.offsets[0]} were done before"
        return None

    def advance(self, position: int) -> None:
        """Note that all messages below `position` are registered: the rest are markers and aborted ranges."""
        with self._lock:
            self._position = max(self._position, position)

    @property
    def position(self) -> int:
        """The next offset to fetch, as far as known here."""
        return self._position

    def load(self) -> Load:
        """Return a snapshot of the messages in flight."""
        with self._lock:
            self._apply_updates()
            return Load(self._in_flight, self._bytes_in_flight, self._parked, self._parked_bytes, self._unsent_bytes)

    @property
    def in_flight(self) -> int:
        """Number of registered offsets that are not done."""
        return self.load().messages

    @property
    def parked(self) -> tuple[int, int]:
        """Number and bytes of the parked messages in flight."""
        load = self.load()
        return load.parked, load.parked_bytes

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of the messages that are not done; each counts as the mean of its fetch."""
        return self.load().bytes

    @property
    def watermark(self) -> int:
        """The lowest offset that is not done; the position if nothing is in flight."""
        with self._lock:
            self._apply_updates()
            return self._watermark()

    def _watermark(self) -> int:
        block: Block
        for block in self._blocks.values():
            # Wholly done blocks are here only within `_as_if_done`.
            if (place := block.done.find(0)) != -1:
                return block.offsets[place]
        return self._position

    def gaps(self) -> list[range]:
        """Return the ranges that are done above the watermark, rising. Holes in the log count as done."""
        with self._lock:
            self._apply_updates()
            return list(self._gaps())

    def _gaps(self) -> Iterator[range]:
        """Walk the blocks from the watermark. Called under the lock."""
        gap_start: int | None = None
        for block in self._blocks.values():
            done, offsets = block.done, block.offsets
            place = done.find(0)
            while place != -1:
                if gap_start is not None and offsets[place] > gap_start:
                    yield range(gap_start, offsets[place])
                next_done = done.find(1, place)
                last_open = (len(done) if next_done == -1 else next_done) - 1
                gap_start = offsets[last_open] + 1
                place = -1 if next_done == -1 else done.find(0, next_done)
        if gap_start is not None and gap_start < self._position:
            yield range(gap_start, self._position)

    def _flags(self, watermark: int) -> bytes | None:
        """Return a byte for each offset from the watermark to the position; 1 is done. Called under the lock.

        None if there are too many, or a fetch has holes: many bits would stand for no message.
        """
        if self._position - watermark > _MAX_FLAGS:
            return None
        parts: list[bytes | bytearray] = []
        at = watermark
        for block in self._blocks.values():
            if not isinstance(block.offsets, range) or block.offsets.step != 1:
                return None
            if block.offsets.stop <= at:
                continue
            start = max(at, block.offsets.start)
            parts += (_DONE * (start - at), block.done[start - block.offsets.start :])
            at = block.offsets.stop
        parts.append(_DONE * (self._position - at))
        return b"".join(parts)

    @contextmanager
    def _as_if_done(self, places: Mapping[Block, Iterable[int]]) -> Iterator[None]:
        """Mark indexes in flight as done within the block. Called under the lock, so no other thread sees it."""
        marked = {block: [index for index in indexes if not block.done[index]] for block, indexes in places.items()}
        for block, indexes in marked.items():
            for index in indexes:
                block.done[index] = 1
        try:
            yield
        finally:
            for block, indexes in marked.items():
                for index in indexes:
                    block.done[index] = 0

    def commit_point(
        self, max_chars: int = MAX_METADATA_CHARS, *, with_done: Mapping[Block, Iterable[int]] = _NOTHING
    ) -> CommitPoint:
        """Return the offset that may be committed now, with a map of at most `max_chars` characters (I3).

        `with_done` has indexes in flight that count as done: they are done once this is committed.
        """
        with self._lock:
            self._apply_updates()
            with self._as_if_done(with_done):
                watermark = self._watermark()
                if not max_chars:
                    return CommitPoint(watermark, "")
                restored = self._restored
                flags = self._flags(watermark) if restored is None else None
                gaps = list(self._gaps()) if flags is None else []
                position = self._position
        if flags is not None:
            return CommitPoint(watermark, encode_flags(watermark, flags, max_chars, self._owner))
        if restored is not None:
            # Done by a former owner and not fetched again yet: the next map must keep these.
            gaps += [range(max(done.start, position), done.stop) for done in restored.done if done.stop > position]
            # A range at the watermark itself moves the watermark: a map has no range at its base.
            if gaps and gaps[0].start <= watermark:
                watermark = gaps.pop(0).stop
        return CommitPoint(watermark, encode(watermark, gaps, max_chars, self._owner))
