"""What lies in a file store, read without its lock and without changing anything, by any process.

It reads the state table, and the halves in the redo log. After a crash of the machine the table cannot be trusted: then
one is made of the log, in memory. What does not fit together, since segments come and go, is read again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tenacity

from penstock.errors import PenstockError, StoreDamagedError, StoreFailedError
from penstock.transactions.model import PendingTransaction
from penstock.transactions.operator.description import described
from penstock.transactions.stores.file.log.folder import Folder
from penstock.transactions.stores.file.log.ledger import Replay, StoredTransaction, decoded, loaded
from penstock.transactions.stores.file.log.redo import read_record, read_segments, segment_of, segments_of
from penstock.transactions.stores.file.log.table import (
    KEYS,
    RECORD_BYTES,
    ROWS,
    STAYS,
    RawRow,
    Row,
    StateTable,
    is_current,
    rows_in,
)
from penstock.transactions.wire.half import Line
from penstock.transactions.wire.ids import ID_BYTES, id_bytes, is_id
from penstock.transactions.wire.ops import Verdict

#: Times that it is read before what does not fit together counts as damaged, and seconds between two.
_TRIES = 5
_PAUSE_S = 0.2


def read_pending(folder: Path, only: str | None = None) -> list[PendingTransaction]:
    """Return what is not settled in the store in a folder, oldest first; of one id, if `only` names one.

    Ages are by this machine's clock, as the births are. Raises `PenstockError` where there is no store, or where it
    cannot be read.
    """
    reading = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(_TRIES),
        wait=tenacity.wait_fixed(_PAUSE_S),
        retry=tenacity.retry_if_exception_type((StoreDamagedError, FileNotFoundError)),
        reraise=True,
    )
    try:
        pending = reading(_pending, folder, only)
    except OSError as error:
        raise StoreFailedError(f"the file store in {folder} cannot be read: {error}; look as its user") from error
    waiting = sorted(pending, key=lambda stored: stored.number)
    heads: dict[Line, StoredTransaction] = {}
    shown, now_ms, obstacle = [], time.time() * 1000, "its process, to publish it"
    for stored in waiting:
        head = stored if stored.line is None else heads.setdefault(stored.line, stored)
        is_held = head is not stored and stored.verdict is Verdict.COMMIT
        if only in {None, stored.transaction_id}:
            shown.append(shown_as(stored, now_ms, head.transaction_id if is_held else None, obstacle))
    return shown


def shown_as(
    stored: StoredTransaction, now_ms: float, held_by: str | None, obstacle: str, unasked: str = ""
) -> PendingTransaction:
    """Return a transaction as operators see it; `obstacle` and `unasked` are what stands in its way."""
    return described(
        stored.transaction_id,
        stored.group,
        stored.topics,
        birth_ms=stored.birth_ms,
        now_ms=now_ms,
        check_count=stored.check_count,
        verdict=stored.verdict,
        deliver_at_ms=stored.deliver_at_ms,
        held_by=held_by,
        obstacle="the discarded topic" if stored.verdict is Verdict.DISCARD else obstacle,
        unasked=unasked,
    )


def _pending(path: Path, only: str | None) -> list[StoredTransaction]:
    """Read what is pending; with an id, that and what stands in a line, which may be before it."""
    folder = Folder(path)
    found = folder.names() if path.is_dir() else []
    names = segments_of(found)
    if not names:
        raise PenstockError(f"there is no file store in {path}; a FileStore makes one")
    files: dict[str, bytes | bytearray] = {name: folder.read(name) for name in (ROWS, KEYS) if name in found}
    if not is_current(files.get(ROWS, b"")):
        files = _replayed(folder, names)
    rows, keys = files[ROWS], files[KEYS]
    if only is None:
        return [*_read(folder, names, rows_in(rows))]
    raw_id = id_bytes(only) if is_id(only) else b""
    wanted = (
        (number, row)
        for number, row in rows_in(rows)
        if row[5] & STAYS or keys[number * RECORD_BYTES : number * RECORD_BYTES + ID_BYTES] == raw_id
    )
    return [*_read(folder, names, wanted)]


def _replayed(folder: Folder, names: Sequence[str]) -> dict[str, bytes | bytearray]:
    """Return the files of the table that a log makes."""
    files: dict[str, bytes | bytearray] = {}

    def in_memory(name: str, size: int) -> bytearray:
        content = bytearray(files.get(name, b""))
        content.extend(bytes(size - len(content)))
        files[name] = content
        return content

    table = StateTable(in_memory)
    table.clear()
    read_segments(folder, names, Replay(table))
    return files


def _read(folder: Folder, names: Sequence[str], rows: Iterable[tuple[int, RawRow]]) -> Iterator[StoredTransaction]:
    segments = [segment_of(folder, name) for name in names]
    for number, raw_row in rows:
        row = Row._make(raw_row)
        try:
            record = read_record(folder, segments, row.place, row.size)
        except StoreDamagedError:
            # It may have been settled a moment ago.
            if folder.read(ROWS, number * RECORD_BYTES, RECORD_BYTES) == bytes(RECORD_BYTES):
                continue
            raise
        stored = loaded(number, row, 0, decoded(record))
        stored.halves = None
        yield stored
