"""File stores of tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.transactions import new_id
from penstock.transactions.stores.file import FileStore
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Verdict

COMMIT, ROLLBACK = Verdict.COMMIT, Verdict.ROLLBACK


#: Nothing answers there: what does not need Kafka shall not ask for it.
NOWHERE = "127.0.0.1:9"


def half(value: bytes = b"v", **fields: Any) -> Half:
    return Half(new_id(), "orders", "t", None, None, value, (), None)._replace(**fields)


def store_of(path: Path, **options: Any) -> FileStore:
    return FileStore(path, bootstrap_servers=NOWHERE, segment_bytes=4_096, **options)
