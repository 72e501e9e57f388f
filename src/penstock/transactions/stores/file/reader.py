"""What lies in a file store, read without its lock and without changing anything, while another process has it or none.

It replays the redo log as an opening does, to the last frame that is whole. Segments come and go meanwhile: what does
not fit together is read again, and only what never does is damaged. What is shown was written; it may be not durable.
"""

from __future__ import annotations

import time
from pathlib import Path

import tenacity

from penstock.errors import MessageFormatError, PenstockError, StoreDamagedError, StoreFailedError
from penstock.transactions.model import PendingTransaction
from penstock.transactions.operator.description import described
from penstock.transactions.stores.file.log.entries import decode_entry
from penstock.transactions.stores.file.log.folder import Folder
from penstock.transactions.stores.file.log.frames import Record
from penstock.transactions.stores.file.log.ledger import Ledger, StoredTransaction
from penstock.transactions.stores.file.log.redo import read_segments, segments_of
from penstock.transactions.stores.file.shard import read_slow_call
from penstock.transactions.wire.half import Line
from penstock.transactions.wire.ops import Verdict

#: Times that it is read before what does not fit together counts as damaged, and seconds between two.
_TRIES = 5
_PAUSE_S = 0.2


def read_pending(folder: Path) -> list[PendingTransaction]:
    """Return what is not settled in the store in a folder, oldest first.

    Ages are by this machine's clock, as the births are. Raises `PenstockError` where there is no store, or where it
    cannot be read.
    """
    reading = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(_TRIES),
        wait=tenacity.wait_fixed(_PAUSE_S),
        retry=tenacity.retry_if_exception_type((StoreDamagedError, FileNotFoundError, MessageFormatError)),
        reraise=True,
    )
    try:
        pending = reading(_replayed, folder).pending
    except MessageFormatError as error:
        raise StoreDamagedError(
            f"the file store in {folder} does not read: {error}; its process says more when it opens it"
        ) from error
    except OSError as error:
        raise StoreFailedError(f"the file store in {folder} cannot be read: {error}; look as its user") from error
    waiting = sorted(pending.values(), key=lambda stored: stored.number)
    heads: dict[Line, StoredTransaction] = {}
    shown, now_ms, obstacle = [], time.time() * 1000, read_slow_call(folder) or "its process, to publish it"
    for stored in waiting:
        head = stored if stored.line is None else heads.setdefault(stored.line, stored)
        is_held = head is not stored and stored.verdict is Verdict.COMMIT
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


def _replayed(path: Path) -> Ledger:
    folder, ledger = Folder(path), Ledger()
    names = segments_of(folder.names()) if path.is_dir() else []
    if not names:
        raise PenstockError(f"there is no file store in {path}; a FileStore makes one")

    def replay(record: Record) -> None:
        ledger.apply(decode_entry(record.kind, record.payload), record.place, record.size)

    read_segments(folder, names, replay)
    return ledger
