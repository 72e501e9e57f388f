"""The tracker: what of one assigned partition is in flight, and the watermark that may be committed.

Offsets are tracked as they were fetched: transaction markers and compaction leave holes, so `watermark + 1` may not
exist. What one fetch brought is one *block* of a byte an offset; a sorted map holds the blocks that are not wholly
done. Registering a fetch and completing a run cost one lock and one pass in C each, whatever their length.
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
#: Updates that may wait before a thread that completes applies them itself.
_MAX_UPDATES = 1000
#: Offsets that a byte each is made of for a commit. One that is stuck for days has hundreds of millions above it.
_MAX_FLAGS = 250_000
_NOTHING: Mapping[Block, Sequence[int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CommitPoint:
    """What is committed for a partition: one snapshot, so that the offset and its map cannot disagree."""

    #: The next offset to handle; all below it are done.
    offset: int
    #: The offset map of what is done above it, or an empty string.
    metadata: str


class Load(NamedTuple):
    """What one assignment has in flight."""

    #: Registered offsets that are not done, and the bytes of their messages; each counts as the mean of its fetch.
    messages: int
    bytes: int
    #: Those of them that are parked, and the bytes of these.
    parked: int
    parked_bytes: int
    #: Bytes that wait to be sent for such messages, beside those of the messages.
    unsent_bytes: int


class Block:
    """The offsets of one fetch of one partition. Made by `Tracker.register`, changed only by its tracker."""

    __slots__ = ("bytes_left", "done", "left", "offsets", "size_bytes")

    def __init__(self, offsets: Sequence[int], size_bytes: int) -> None:
        contiguous = offsets[-1] - offsets[0] == len(offsets) - 1
        #: The offsets, rising; a range where they have no holes, for it takes no memory.
        self.offsets: Sequence[int] = range(offsets[0], offsets[-1] + 1) if contiguous else offsets
        #: One byte for each offset: 1 when it is done.
        self.done = bytearray(len(offsets))
        #: How many are not done.
        self.left = len(offsets)
        #: Bytes of all messages; those not done count with their share, for the messages are not measured one by one.
        self.size_bytes = size_bytes
        #: The share of those not done, as the tracker has it in its sum.
        self.bytes_left = size_bytes


class Tracker:
    """The offsets in flight of one assignment.

    Thread-safe: one thread registers, any thread completes and reads. `complete` never waits: it queues an update, and
    every reader applies the queued ones, under the lock, before it reads. So a thread that is interrupted in here stops
    no thread that completes. No callback runs while the lock is held.

    Reading starts at `start`: the watermark while nothing was registered. `restored` is what a former owner had done
    above it, as read from the commit metadata, and `owner` whose offset maps it writes, by `owner_of`.
    """

    def __init__(self, start: int, restored: OffsetMap | None = None, owner: bytes = b"") -> None:
        self._owner = owner
        self._lock = threading.Lock()
        self._updates: deque[tuple[Block, Sequence[int]] | tuple[None, tuple[int, int, int]]] = deque()
        self._blocks: SortedDict[int, Block] = SortedDict()
        self._position = start
        self._restored = restored if restored is not None and restored.base == start else None
        self._in_flight = 0
        # The sum of what is left of all blocks: the poll thread reads it at every step, and blocks are thousands.
        self._bytes_in_flight = 0
        self._parked = 0
        self._parked_bytes = 0
        self._unsent_bytes = 0

    def register(self, offsets: Sequence[int], size_bytes: int = 0) -> Block:
        """Take a fetch in, of rising offsets. Those a former owner had done are marked in `block.done`: skip them.

        Raises `ValueError` where the offsets do not lie above those registered before: the log went back, and the
        caller must start a new tracker.
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
        """Mark what a former owner had done; the block is not shared yet."""
        if block.offsets[0] >= restored.end:
            self._restored = None
            return
        for index, offset in enumerate(block.offsets):
            if offset in restored:
                block.done[index] = 1
        block.left = block.done.count(0)
        block.bytes_left = block.size_bytes * block.left // len(block.done)

    def complete(self, block: Block, indexes: Sequence[int]) -> None:
        """Mark a run done: places in a block, each completed once; a `range` is the fastest. Never waits.

        A place that was done already is raised by the next read, as `ValueError`: a message was handled twice, and the
        counts would be wrong.
        """
        updates = self._updates
        updates.append((block, indexes))
        if len(updates) > _MAX_UPDATES:
            self._apply_if_free()

    def park(self, count: int, size_bytes: int) -> None:
        """Count messages in flight as parked; negative numbers take them back. Never waits."""
        self._updates.append((None, (count, size_bytes, 0)))
        if len(self._updates) > _MAX_UPDATES:
            self._apply_if_free()

    def count_unsent(self, size_bytes: int) -> None:
        """Count bytes that wait to be sent for messages in flight; negative numbers take them back. Never waits."""
        self._updates.append((None, (0, 0, size_bytes)))

    def _apply_if_free(self) -> None:
        """Apply what was queued. Readers do it as a rule; this bounds the queue should nobody read."""
        if self._lock.acquire(blocking=False):
            try:
                self._apply_updates()
            finally:
                self._lock.release()

    def _apply_updates(self) -> None:
        """Apply what was queued, block by block; called with the lock held."""
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
        """Mark runs of a block done; return which of them were done before, if any."""
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
        """Note that below `position` is nothing but what was registered: markers and aborted ranges are no messages."""
        with self._lock:
            self._position = max(self._position, position)

    @property
    def position(self) -> int:
        """The next offset to fetch, as far as is known here."""
        return self._position

    def load(self) -> Load:
        """Return what is in flight, as of one moment."""
        with self._lock:
            self._apply_updates()
            return Load(self._in_flight, self._bytes_in_flight, self._parked, self._parked_bytes, self._unsent_bytes)

    @property
    def in_flight(self) -> int:
        """How many registered offsets are not done."""
        return self.load().messages

    @property
    def parked(self) -> tuple[int, int]:
        """How many of those in flight are parked, and their bytes."""
        load = self.load()
        return load.parked, load.parked_bytes

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of the messages that are not done; each counts as the mean of those it was fetched with."""
        return self.load().bytes

    @property
    def watermark(self) -> int:
        """The lowest offset not done; the position when nothing is in flight."""
        with self._lock:
            self._apply_updates()
            return self._watermark()

    def _watermark(self) -> int:
        block: Block
        for block in self._blocks.values():
            # One that is wholly done is here only while `_as_if_done`.
            if (place := block.done.find(0)) != -1:
                return block.offsets[place]
        return self._position

    def gaps(self) -> list[range]:
        """Return the offset ranges that are done above the watermark, rising; holes in the log count as done."""
        with self._lock:
            self._apply_updates()
            return list(self._gaps())

    def _gaps(self) -> Iterator[range]:
        """Walk the blocks from the watermark; called with the lock held."""
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
        """Return a byte for each offset from the watermark to the position, 1 where it is done.

        None where they are too many, or a fetch has holes: bits would be many for each message. Called with the lock
        held.
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
        """Have places in flight marked done meanwhile; called with the lock held, so that nobody else sees it."""
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
        """Return what may be committed now, with the map of what is done above it in `max_chars` at most (I3).

        `with_done` are places in flight that count as done in it: they are if this is committed.
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
            # Done by a former owner and not fetched again yet: it must outlive this owner too.
            gaps += [range(max(done.start, position), done.stop) for done in restored.done if done.stop > position]
            # Where it goes on behind all that was fetched, it is no gap: a map has none at its base.
            if gaps and gaps[0].start <= watermark:
                watermark = gaps.pop(0).stop
        return CommitPoint(watermark, encode(watermark, gaps, max_chars, self._owner))
