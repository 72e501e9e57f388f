"""What lies in a file store, read without its lock and without changing anything, while another process has it or none.

It replays the redo log as an opening does, to the last frame that is whole. Segments come and go meanwhile: what does
not fit together is read again, and only what never does is damaged. What is shown was written; it may be not durable.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import tenacity

from penstock.errors import MessageFormatError, PenstockError, StoreDamagedError, StoreFailedError
from penstock.transactions.model import PendingTransaction
from penstock.transactions.operator.description import described as described_by
from penstock.transactions.stores.file.log.entries import decode_entry
from penstock.transactions.stores.file.log.frames import HEADER_BYTES, Record, SegmentHeader, decode_header, scan
from penstock.transactions.stores.file.log.ledger import Ledger, StoredTransaction
from penstock.transactions.stores.file.log.redo import SUFFIX
from penstock.transactions.stores.file.slow_call import read_slow_call
from penstock.transactions.wire.half import Line
from penstock.transactions.wire.ops import Verdict

#: Times that it is read before what does not fit together counts as damaged, and seconds between two.
_TRIES = 5
_PAUSE_S = 0.2


class _MovedError(Exception):
    """The log went on while it was read, or it is damaged."""


#: What a log that goes on meanwhile looks like: it is read again.
_UNFIT = (_MovedError, FileNotFoundError, MessageFormatError)


def read_pending(folder: Path) -> list[PendingTransaction]:
    """Return what is not settled in the store in a folder, oldest first.

    Ages are by this machine's clock, as the births are. Raises `PenstockError` where there is no store, or where it
    cannot be read.
    """
    reading = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(_TRIES),
        wait=tenacity.wait_fixed(_PAUSE_S),
        retry=tenacity.retry_if_exception_type(_UNFIT),
        reraise=True,
    )
    try:
        pending = reading(_replayed, folder).pending
    except _UNFIT as cause:
        raise StoreDamagedError(
            f"the file store in {folder} does not read: {cause}; its process says more when it opens it"
        ) from cause
    except OSError as error:
        raise StoreFailedError(f"the file store in {folder} cannot be read: {error}; look as its user") from error
    obstacle = read_slow_call(folder) or "its process, to publish it"
    return _all_described(sorted(pending.values(), key=lambda stored: stored.number), obstacle)


def _replayed(folder: Path) -> Ledger:
    ledger = Ledger()
    for record in _records(folder):
        ledger.apply(decode_entry(record.kind, record.payload), record.place, record.size)
    return ledger


def _records(folder: Path) -> Iterator[Record]:
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise PenstockError(f"there is no file store in {folder}; a FileStore makes one")
    headers = [_header(path) for path in paths]
    floor = headers[-1].floor
    at, sequence = floor, None
    for path, header in zip(paths, headers, strict=True):
        if header.base < floor:
            # Nobody needs it any more; it is about to be removed.
            continue
        if header.base != at or (sequence is not None and header.sequence != sequence):
            raise _MovedError(f"{path.name} does not follow on what stands before: place {at}")
        read = scan(path.read_bytes(), header)
        if read.stray is not None:
            raise _MovedError(f"{path.name} is damaged from byte {read.end} to {read.stray}")
        yield from read.records
        at, sequence = header.base + read.end, read.sequence


def _header(path: Path) -> SegmentHeader:
    with path.open("rb") as file:
        return decode_header(file.read(HEADER_BYTES))


def described(
    stored: StoredTransaction, now_ms: float, held_by: str | None, obstacle: str, unasked: str = ""
) -> PendingTransaction:
    """Return a transaction as operators see it; `obstacle` and `unasked` are what stands in its way."""
    return described_by(
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


def _all_described(waiting: Sequence[StoredTransaction], obstacle: str) -> list[PendingTransaction]:
    now_ms = time.time() * 1000
    heads: dict[Line, StoredTransaction] = {}
    shown = []
    for stored in waiting:
        head = stored if stored.line is None else heads.setdefault(stored.line, stored)
        is_held = head is not stored and stored.verdict is Verdict.COMMIT
        held_by = head.transaction_id if is_held else None
        shown.append(described(stored, now_ms, held_by, obstacle))
    return shown
