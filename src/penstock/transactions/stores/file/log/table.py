"""The state table: a record of 24 bytes for each unsettled transaction, in a memory-mapped file.

It is the index of a file store: the place of the halves in the redo log, the state, and the time of the next step.
Opening after a clean stop, the scan for checks, statistics and `penstock tx` read it. Integers are big-endian. Records
count from 1; the header takes the place of record 0.

- **record** (24 bytes): place of the halves in the redo log 8, their size 4, timestamp 4, hash of the producer group 4,
  state 4 (state, author of the decision and a flag, answered checks). Timestamps are quarters of a second since 2020.
- **key** (24 bytes, in a second file under the same number): transaction id 16; then 8 bytes with the timestamp of its
  delivery (0: at once), or, once it is decided, with the order number of the decision.

Neither file is synced while the store is open: after a crash both are rebuilt from the redo log. A clean stop syncs
them. It also writes a third file with their checksums and the log's end. If these do not match, opening treats it as a
crash.
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
#: The flag of transactions that stay in memory: they have an order key, or were resumed.
STAYS = 0x80
_ROW = struct.Struct(">QIIIBBH")
_PLACE, _TICK, _STATE = struct.Struct(">QI"), struct.Struct(">I"), struct.Struct(">BBH")
_TICK_AT, _STATE_AT = 12, 20
_KEY, _ORDER = struct.Struct(f">{ID_BYTES}sQ"), struct.Struct(">Q")
_NOTHING, _NO_ID = bytes(RECORD_BYTES), bytes(ID_BYTES)
_HEADER = struct.Struct(">7sB16s")
_MAGIC, _VERSION = b"PENTABL", 2
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: Least number of records that a file has room for.
_ROOM = 1_024
_SEAL, _CHECK = struct.Struct(">BIQQII"), struct.Struct(">I")
#: Timestamps count quarters of a second since the begin of 2020.
_EPOCH_MS = 1_577_836_800_000
TICK_MS = 250
_LAST_TICK = (1 << 32) - 1
#: The index slot of a removed transaction. The search for other transactions goes on behind it.
_TOMBSTONE = (1 << 32) - 1


class State(IntEnum):
    """The state of a transaction. It tells the meaning of the timestamp."""

    FREE = 0
    #: Undecided. The timestamp is the time of the prepare, of the last check, of its answer, or the end of the
    #: immunity.
    BORN = 1
    ASKED = 2
    ANSWERED = 3
    IMMUNE = 4
    #: Committed, with a delivery time: the timestamp.
    DELAYED = 5
    #: Decided, to be published now. The timestamp is unchanged.
    COMMITTED = 6
    DISCARDED = 7


UNDECIDED = frozenset({State.BORN, State.ASKED, State.ANSWERED, State.IMMUNE})
#: Plain numbers are faster than members of an enumeration.
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
    """Return the first timestamp at or after a time in milliseconds since the epoch."""
    return min(_LAST_TICK, max(0, -int((_EPOCH_MS - ms) // TICK_MS)))


def ms_of(tick: int) -> int:
    """Return a timestamp in milliseconds since the epoch."""
    return _EPOCH_MS + tick * TICK_MS


class StateTable:
    """The table of one store. Usable after `clear` or `unseal`.

    Not thread-safe: the store's lock guards it. Any thread may read single records, and scan, without the lock.
    `map_file` maps a file of so many bytes for writing and keeps its content; it raises `OSError` if the disk is full.
    """

    def __init__(self, map_file: Callable[[str, int], Any]) -> None:
        self._map_file = map_file
        #: The highest transaction number and the highest decision number so far.
        self.number = 0
        self.decided = 0
        self._rows: Any = b""
        self._keys: Any = b""
        self._capacity = 0
        # Free records below `_top`, the first record that was never used.
        self._free = array("I")
        self._top = 1
        # The index by id: open addressing. A slot holds a record number, 0 or `_TOMBSTONE`; `_filled_slots` counts
        # slots that are not 0.
        self._slots = array("I")
        self._filled_slots = 0

    @property
    def used(self) -> int:
        """The number of transactions."""
        return self._top - 1 - len(self._free)

    def clear(self) -> None:
        """Begin with an empty table, after the files were removed. Raises `OSError`."""
        self.number = self.decided = 0
        self._read_files(0)

    def attach(self, rows: Any, keys: Any) -> None:
        """Show the files that another process changes. Here records are found by number only."""
        self._rows, self._keys = rows, keys
        self._top = min(len(rows), len(keys)) // RECORD_BYTES

    def _read_files(self, records: int) -> None:
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
        """Write the header: from now on, until this machine restarts, the files show the pending transactions."""
        _HEADER.pack_into(self._rows, 0, _MAGIC, _VERSION, _boot_id())

    # Reading.

    def __iter__(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the numbers and records in use, from a copy. Must be fast for a million records."""
        # The first record is the header.
        rows = memoryview(bytes(self._rows[: self._top * RECORD_BYTES]))[RECORD_BYTES:]
        return ((number, row) for number, row in enumerate(_ROW.iter_unpack(rows), 1) if row[4])

    def count(self, state: State) -> int:
        """Return the number of transactions in a state. Must be fast for a million records."""
        return self._states().count(state)

    def _states(self) -> bytes:
        return bytes(self._rows[RECORD_BYTES + _STATE_AT : self._top * RECORD_BYTES : RECORD_BYTES])

    def row(self, number: int) -> Row:
        """Return a record."""
        return Row._make(_ROW.unpack_from(self._rows, number * RECORD_BYTES))

    def key(self, number: int) -> tuple[bytes, int]:
        """Return id and order number of a record."""
        raw_id, order = _KEY.unpack_from(self._keys, number * RECORD_BYTES)
        return raw_id, order

    def oldest(self, most: int) -> list[int]:
        """Return the numbers of the oldest transactions by the times in their ids, at most `most`."""
        return [number for _, number in nsmallest(most, self._ids())]

    def oldest_ms(self) -> int:
        """Return the start of the oldest transaction by its id, in milliseconds since the epoch."""
        return int.from_bytes(min(self._ids(), default=(b"", 0))[0][:6], "big")

    def _ids(self) -> Iterator[tuple[bytes, int]]:
        keys = bytes(self._keys[: self._top * RECORD_BYTES])
        return ((raw_id, number) for number, (raw_id, _) in enumerate(_KEY.iter_unpack(keys)) if raw_id != _NO_ID)

    # Changing.

    def reserve(self, records: int) -> None:
        """Make room for `records` more. Raises `OSError` if the disk is full."""
        highest = self._top + records - len(self._free)
        if highest > self._capacity:
            self._map(highest)

    def add(self, raw_id: bytes, due: int, row: Row) -> int:
        """Add a transaction, and return its number. Call `reserve` before.

        `due` is the timestamp of its delivery, 0 if it has none.
        """
        if self._free:
            number = self._free.pop()
        else:
            self.reserve(1)
            number, self._top = self._top, self._top + 1
        self.put(number, raw_id, due, row)
        return number

    def put(self, number: int, raw_id: bytes, due: int, row: Row) -> None:
        """Write the record of an undecided transaction."""
        _KEY.pack_into(self._keys, number * RECORD_BYTES, raw_id, due)
        _ROW.pack_into(self._rows, number * RECORD_BYTES, *row)

    def move(self, number: int, place: int, size: int) -> None:
        """Store a new place of a transaction's halves."""
        _PLACE.pack_into(self._rows, number * RECORD_BYTES, place, size)

    def decide(self, number: int, verdict: Verdict, author: int, order: int) -> None:
        """Store a decision. After a COMMIT, always a first decision, the transaction waits for its delivery time."""
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
        """Store that an undecided transaction waits since `tick`, or until then if it is immune."""
        at = number * RECORD_BYTES
        _, flags, former = _STATE.unpack_from(self._rows, at + _STATE_AT)
        _TICK.pack_into(self._rows, at + _TICK_AT, tick)
        _STATE.pack_into(self._rows, at + _STATE_AT, state, flags, former if checks is None else checks)

    def mark_due(self, number: int) -> None:
        """Store that the delivery time of a transaction has come, if it waits for one."""
        at = number * RECORD_BYTES
        if self._rows[at + _STATE_AT] == _DELAYED:
            self._rows[at + _STATE_AT] = _COMMITTED

    def free(self, number: int) -> None:
        """Free the record of a settled transaction that is not in the index."""
        at = number * RECORD_BYTES
        self._rows[at : at + RECORD_BYTES] = _NOTHING
        self._keys[at : at + RECORD_BYTES] = _NOTHING
        self._free.append(number)

    # The index by id.

    def find(self, raw_id: bytes) -> int:
        """Return the record number of a transaction in the index, or 0."""
        return self._slots[self._find_slot(raw_id)]

    def add_to_index(self, number: int) -> None:
        """Let `find` find a transaction."""
        if 3 * self._filled_slots >= 2 * len(self._slots):
            self._rebuild_index([other for other in self._slots if other not in {0, _TOMBSTONE}])
        self._filled_slots += 1
        self._slots[self._find_slot(self.key(number)[0])] = number

    def remove_from_index(self, number: int) -> None:
        """Let `find` no longer find a transaction."""
        self._slots[self._find_slot(self.key(number)[0])] = _TOMBSTONE

    def _rebuild_index(self, entered: Collection[int]) -> None:
        self._slots, self._filled_slots = array("I", bytes(4 * _size_for(2 * len(entered)))), len(entered)
        for number in entered:
            self._slots[self._find_slot(self.key(number)[0])] = number

    def _find_slot(self, raw_id: bytes) -> int:
        """Return the slot of a transaction, or the free slot for it."""
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
        """Return the content of the third file: checksums of the table, and the log's end."""
        sums = self._checksums(self._top)
        content = _SEAL.pack(_VERSION, self._top - 1, self.number, self.decided, *sums) + log_end
        return content + _CHECK.pack(zlib.crc32(content))

    def unseal(self, seal: bytes, log_end: bytes) -> bool:
        """Read the files if `seal` matches them and the log's end. Return whether it does."""
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
        # The header is left out: opening the store changes it.
        used = slice(RECORD_BYTES, top * RECORD_BYTES)
        return zlib.crc32(self._rows[used]), zlib.crc32(self._keys[used])


def is_current(rows: Any) -> bool:
    """Return whether a table file shows the pending transactions: the store was opened since this machine started."""
    return len(rows) >= RECORD_BYTES and _HEADER.unpack_from(rows) == (_MAGIC, _VERSION, _boot_id())


def in_memory() -> Callable[[str, int], bytearray]:
    """Return a `map_file` for a table in memory only."""
    files = defaultdict[str, bytearray](bytearray)

    def map_file(name: str, size: int) -> bytearray:
        files[name].extend(bytes(size - len(files[name])))
        return files[name]

    return map_file


def _size_for(records: int) -> int:
    """Return the next power of two above a number of records."""
    return max(_ROOM, 1 << records.bit_length())


def _boot_id() -> bytes:
    """Return the id of this run of the machine. What a process wrote during the same run is still in the files."""
    return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))
