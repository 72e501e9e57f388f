"""The state table: a record of 24 bytes for each transaction that is not settled, in a file that is mapped into memory.

It is the index of a file store: where the halves of a transaction stand in the redo log, how it stands, and when
something is due. What opening after a clean stop, the scan for checks, statistics and `penstock tx` read is this.
Integers are big-endian; records count from 1, for the place of the first one has the header.

- **record** (24 bytes): place of the halves in the redo log 8, their size 4, timestamp 4, hash of the producer group 4,
  state 4 (state, author of the decision and a flag, answered checks). Timestamps are quarters of a second since 2020.
- **key** (24 bytes, in a second file under the same number): transaction id 16, and the timestamp of its delivery (0:
  at once), or, once it is decided, its place in the order of the decisions.

Neither file is synced while the store is open: after a crash both are made again from the redo log. A clean stop syncs
them and writes their checksums into a third file, with where the log ended. If any of that does not fit, it is a crash.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from enum import IntEnum
from heapq import nsmallest
from pathlib import Path
from typing import Any, NamedTuple

from penstock.transactions.wire.ids import ID_BYTES
from penstock.transactions.wire.ops import Verdict

ROWS, KEYS, STOPPED = "table", "table.keys", "table.stopped"
RECORD_BYTES = 24
#: The flag of those that stay in memory: they stand in a line, or were brought back.
STAYS = 0x80
_ROW = struct.Struct(">QIIIBBH")
_PLACE, _TICK, _STATE = struct.Struct(">QI"), struct.Struct(">I"), struct.Struct(">BBH")
_TICK_AT, _STATE_AT = 12, 20
_KEY, _ORDER = struct.Struct(f">{ID_BYTES}sQ"), struct.Struct(">Q")
_NOTHING, _NO_ID = bytes(RECORD_BYTES), bytes(ID_BYTES)
_HEADER = struct.Struct(">7sB16s")
_MAGIC, _VERSION = b"PENTABL", 2
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: Records that a file has room for at first.
_ROOM = 1_024
_SEAL, _CHECK = struct.Struct(">BIQQII"), struct.Struct(">I")
#: What timestamps count: quarters of a second since the begin of 2020.
_EPOCH_MS = 1_577_836_800_000
TICK_MS = 250
_LAST_TICK = (1 << 32) - 1
#: What the index by id has for a transaction that is gone: what was entered after it is found still.
_TOMBSTONE = (1 << 32) - 1


class State(IntEnum):
    """How a transaction stands, and what its timestamp is."""

    FREE = 0
    #: Undecided: when it was prepared; asked about; when that was answered; before when nobody is asked.
    BORN = 1
    ASKED = 2
    ANSWERED = 3
    IMMUNE = 4
    #: Committed, and it has a time of delivery: when that is.
    DELAYED = 5
    #: Decided, and to be published: one of the above.
    COMMITTED = 6
    DISCARDED = 7


UNDECIDED = frozenset({State.BORN, State.ASKED, State.ANSWERED, State.IMMUNE})
#: As numbers, which are quicker.
_DELAYED, _COMMITTED, _DISCARDED = 5, 6, 7


class Row(NamedTuple):
    """A record of the table."""

    place: int
    size: int
    tick: int
    group: int
    state: int
    #: The author of the decision, and `STAYS`.
    flags: int
    checks: int


def tick_of(ms: float) -> int:
    """Return the first timestamp that is not before a time in milliseconds since the epoch."""
    return min(_LAST_TICK, max(0, -int((_EPOCH_MS - ms) // TICK_MS)))


def ms_of(tick: int) -> int:
    """Return a timestamp in milliseconds since the epoch."""
    return _EPOCH_MS + tick * TICK_MS


class StateTable:
    """The table of one store, once it was cleared or unsealed.

    Not thread-safe: its store guards it, save for single records and scans, which any thread may read. `map_file`
    returns so many bytes of a file to change, with what it had before; it raises `OSError` where the disk is full.
    """

    def __init__(self, map_file: Callable[[str, int], Any]) -> None:
        self._map_file = map_file
        #: The highest numbers that were given out, of transactions and of decisions.
        self.number = 0
        self.decided = 0
        self._rows: Any = b""
        self._keys: Any = b""
        self._capacity = 0
        # Records that are free, below the first that was never used.
        self._free = array("I")
        self._top = 1
        # The index by id, of those that are entered: open addressing, a record, 0 or `_TOMBSTONE`; how many are not 0.
        self._slots = array("I")
        self._filled_slots = 0

    @property
    def used(self) -> int:
        """How many transactions there are."""
        return self._top - 1 - len(self._free)

    def clear(self) -> None:
        """Begin with an empty table; the files are gone. Raises `OSError`."""
        self.number = self.decided = 0
        self._read_files(0)

    def attach(self, rows: Any, keys: Any) -> None:
        """Show what files have that another process changes; what is there is found by its number alone."""
        self._rows, self._keys = rows, keys
        self._top = min(len(rows), len(keys)) // RECORD_BYTES

    def _read_files(self, records: int) -> None:
        """Take in what the files have in the first so many records."""
        self._map(records)
        self._free, self._top = array("I"), records + 1
        states = self._states()
        self._free.extend(number for number in range(1, self._top) if not states[number - 1])
        self._rebuild_index([number for number in range(1, self._top) if states[number - 1]])

    def _map(self, records: int) -> None:
        capacity = _size_for(records)
        self._rows = self._map_file(ROWS, capacity * RECORD_BYTES)
        self._keys = self._map_file(KEYS, capacity * RECORD_BYTES)
        self._capacity = capacity

    def write_header(self) -> None:
        """Write the header: from now on the files show what is pending, as long as this machine runs."""
        _HEADER.pack_into(self._rows, 0, _MAGIC, _VERSION, _boot_id())

    # Reading.

    def __iter__(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the records in use, as they were when it began, with their numbers. Quick: there may be a million."""
        # The first one is the header.
        rows = memoryview(bytes(self._rows[: self._top * RECORD_BYTES]))[RECORD_BYTES:]
        return ((number, row) for number, row in enumerate(_ROW.iter_unpack(rows), 1) if row[4])

    def count(self, state: State) -> int:
        """Return how many transactions stand so. Quick: there may be a million."""
        return self._states().count(state)

    def _states(self) -> bytes:
        return bytes(self._rows[RECORD_BYTES + _STATE_AT : self._top * RECORD_BYTES : RECORD_BYTES])

    def row(self, number: int) -> Row:
        """Return a record."""
        return Row._make(_ROW.unpack_from(self._rows, number * RECORD_BYTES))

    def key(self, number: int) -> tuple[bytes, int]:
        """Return id and order of a record."""
        raw_id, order = _KEY.unpack_from(self._keys, number * RECORD_BYTES)
        return raw_id, order

    def oldest(self, most: int) -> list[int]:
        """Return the records of the transactions that were begun first, by the times in their ids; at most so many."""
        return [number for _, number in nsmallest(most, self._ids())]

    def oldest_ms(self) -> int:
        """Return when the oldest transaction was begun, by its id, in milliseconds since the epoch."""
        return int.from_bytes(min(self._ids(), default=(b"", 0))[0][:6], "big")

    def _ids(self) -> Iterator[tuple[bytes, int]]:
        keys = bytes(self._keys[: self._top * RECORD_BYTES])
        return ((raw_id, number) for number, (raw_id, _) in enumerate(_KEY.iter_unpack(keys)) if raw_id != _NO_ID)

    # Changing.

    def reserve(self, records: int) -> None:
        """Have room for so many more. Raises `OSError` where the disk is full."""
        if self._top + records > self._capacity:
            self._map(self._top + records)

    def add(self, raw_id: bytes, due: int, row: Row) -> int:
        """Take a transaction in, and return its number. There must be room: see `reserve`.

        `due` is the timestamp of its delivery, 0 where that is at once.
        """
        if self._free:
            number = self._free.pop()
        else:
            self.reserve(1)
            number, self._top = self._top, self._top + 1
        self.put(number, raw_id, due, row)
        return number

    def put(self, number: int, raw_id: bytes, due: int, row: Row) -> None:
        """Write the record of a transaction that is not decided."""
        _KEY.pack_into(self._keys, number * RECORD_BYTES, raw_id, due)
        _ROW.pack_into(self._rows, number * RECORD_BYTES, *row)

    def move(self, number: int, place: int, size: int) -> None:
        """Take in that the halves of a transaction stand elsewhere."""
        _PLACE.pack_into(self._rows, number * RECORD_BYTES, place, size)

    def decide(self, number: int, verdict: Verdict, author: int, order: int) -> None:
        """Take a decision in. A COMMIT, which is the first of its transaction, has it wait for its delivery."""
        at = number * RECORD_BYTES
        _, flags, checks = _STATE.unpack_from(self._rows, at + _STATE_AT)
        state = _DISCARDED
        if verdict is Verdict.COMMIT:
            _, due = self.key(number)
            state = _DELAYED if due else _COMMITTED
            if due:
                _TICK.pack_into(self._rows, at + _TICK_AT, due)
        _STATE.pack_into(self._rows, at + _STATE_AT, state, flags & STAYS | author, checks)
        _ORDER.pack_into(self._keys, at + ID_BYTES, order)

    def set_wait(self, number: int, state: State, tick: int, checks: int | None = None) -> None:
        """Let an undecided transaction wait from a time on, or until then."""
        at = number * RECORD_BYTES
        _, flags, former = _STATE.unpack_from(self._rows, at + _STATE_AT)
        _TICK.pack_into(self._rows, at + _TICK_AT, tick)
        _STATE.pack_into(self._rows, at + _STATE_AT, state, flags, former if checks is None else checks)

    def mark_due(self, number: int) -> None:
        """Take in that the time of a transaction has come, if it waits for that."""
        at = number * RECORD_BYTES
        if self._rows[at + _STATE_AT] == _DELAYED:
            self._rows[at + _STATE_AT] = _COMMITTED

    def free(self, number: int) -> None:
        """Forget a transaction that is settled, and not entered."""
        at = number * RECORD_BYTES
        self._rows[at : at + RECORD_BYTES] = _NOTHING
        self._keys[at : at + RECORD_BYTES] = _NOTHING
        self._free.append(number)

    # The index by id.

    def find(self, raw_id: bytes) -> int:
        """Return the record of a transaction that is entered, or 0."""
        return self._slots[self._find_slot(raw_id)]

    def add_to_index(self, number: int) -> None:
        """Let a transaction be found by its id."""
        if 3 * self._filled_slots >= 2 * len(self._slots):
            self._rebuild_index([other for other in self._slots if other not in {0, _TOMBSTONE}])
        self._filled_slots += 1
        self._slots[self._find_slot(self.key(number)[0])] = number

    def remove_from_index(self, number: int) -> None:
        """Let a transaction that is entered not be found any more."""
        self._slots[self._find_slot(self.key(number)[0])] = _TOMBSTONE

    def _rebuild_index(self, entered: Collection[int]) -> None:
        """Make the index of these."""
        self._slots, self._filled_slots = array("I", bytes(4 * _size_for(2 * len(entered)))), len(entered)
        for number in entered:
            self._slots[self._find_slot(self.key(number)[0])] = number

    def _find_slot(self, raw_id: bytes) -> int:
        """Return where a transaction stands in the index, or could stand."""
        slots, keys = self._slots, self._keys
        mask = len(slots) - 1
        slot = hash(raw_id) & mask
        while number := slots[slot]:
            at = number * RECORD_BYTES
            if number != _TOMBSTONE and keys[at : at + ID_BYTES] == raw_id:
                break
            slot = (slot + 1) & mask
        return slot

    # A clean stop.

    def seal(self, log_end: bytes) -> bytes:
        """Return what says of the table that it is whole, and where the log ends that it belongs to."""
        sums = self._checksums(self._top)
        content = _SEAL.pack(_VERSION, self._top - 1, self.number, self.decided, *sums) + log_end
        return content + _CHECK.pack(zlib.crc32(content))

    def unseal(self, seal: bytes, log_end: bytes) -> bool:
        """Take in what the files have, if `seal` fits them and the end of the log; tell whether it does."""
        content = seal[: -_CHECK.size]
        if _CHECK.pack(zlib.crc32(content)) != seal[-_CHECK.size :] or content[_SEAL.size :] != log_end:
            return False
        version, records, number, decided, *sums = _SEAL.unpack_from(content)
        if version != _VERSION:
            return False
        self._map(records)
        if tuple(sums) != self._checksums(records + 1):
            return False
        self._read_files(records)
        self.number, self.decided = number, decided
        return True

    def _checksums(self, top: int) -> tuple[int, int]:
        # Not of the header, which changes when the store is opened.
        used = slice(RECORD_BYTES, top * RECORD_BYTES)
        return zlib.crc32(self._rows[used]), zlib.crc32(self._keys[used])


def is_current(rows: Any) -> bool:
    """Tell whether the file of a table shows what is pending: it was opened since this machine was started."""
    return len(rows) >= RECORD_BYTES and _HEADER.unpack_from(rows) == (_MAGIC, _VERSION, _boot_id())


def in_memory() -> Callable[[str, int], bytearray]:
    """Return what a table is made with that is in memory alone."""
    files = defaultdict[str, bytearray](bytearray)

    def map_file(name: str, size: int) -> bytearray:
        files[name].extend(bytes(size - len(files[name])))
        return files[name]

    return map_file


def _size_for(records: int) -> int:
    """Return the next power of two above a number of records."""
    return max(_ROOM, 1 << records.bit_length())


def _boot_id() -> bytes:
    """Return what tells this run of the machine from others: as long as it lasts, what was written is there."""
    return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))
