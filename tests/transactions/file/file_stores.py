"""File stores of tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.transactions import new_id
from penstock.transactions.stores.file.log.entries import StoredTransaction
from penstock.transactions.stores.file.store import FileStore
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Verdict

COMMIT, ROLLBACK = Verdict.COMMIT, Verdict.ROLLBACK


#: Nothing answers there: what does not need Kafka shall not ask for it.
NOWHERE = "127.0.0.1:9"


def half(value: bytes = b"v", **fields: Any) -> Half:
    return Half(new_id(), "orders", "t", None, None, value, (), None)._replace(**fields)


def pending_in(store: FileStore) -> list[StoredTransaction]:
    """Return the transactions of a store, by its table, in the order of preparation."""
    opened = store.opened
    found = (opened.peek(number) for number, _ in opened.table)
    return sorted((stored for stored in found if stored is not None), key=lambda stored: stored.number)


def forget_halves(store: FileStore) -> None:
    """Let all payloads be read from the log."""
    for stored in store.opened.live.values():
        stored.drop()


def halves_of(store: FileStore, stored: StoredTransaction) -> list[Half]:
    """Return the halves of a transaction, from memory or the log."""
    store.opened.load_payload(stored)
    return list(stored.halves)


def store_of(path: Path, **options: Any) -> FileStore:
    return FileStore(path, bootstrap_servers=NOWHERE, segment_bytes=4_096, **options)
