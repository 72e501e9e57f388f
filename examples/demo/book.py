"""The airline's own database: a SQLite file whose `flights` table is the local transaction of every message.

Its table `answers` is also the barrier between a slow local transaction and its check: a check that finds no flight
writes ROLLBACK there, in one write transaction, and a local transaction that comes later finds it and gives up.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

from demo.flights import Flight
from penstock.errors import PenstockError

#: Seconds to wait for the other sending process to finish its write.
_BUSY_TIMEOUT_S = 30.0

_TABLES = """
CREATE TABLE IF NOT EXISTS flights (
    sequence INTEGER PRIMARY KEY, tail TEXT, place TEXT NOT NULL, delay INTEGER NOT NULL,
    transaction_id TEXT NOT NULL UNIQUE
);
CREATE TABLE IF NOT EXISTS answers (
    transaction_id TEXT PRIMARY KEY, departed INTEGER NOT NULL, times INTEGER NOT NULL
) WITHOUT ROWID;
"""


class RefusedError(PenstockError):
    """A check has already answered ROLLBACK for this transaction; send the flight in a new one."""


class FlightBook:
    """The airline's tables, open in one process. Safe to share between its threads: one write at a time."""

    def __init__(self, folder: Path) -> None:
        path = folder / "airline.sqlite"
        self._connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        # One connection per process: SQLite lets one writer in at a time anyway, and a lock wakes the next
        # thread at once where SQLite's own busy handler would sleep.
        self._lock = threading.Lock()
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.executescript(_TABLES)

    def record(self, flight: Flight, transaction_id: str) -> None:
        """Run the local transaction of one flight: insert it, then commit if it departed and roll back if not.

        `RefusedError` where a check was faster and answered ROLLBACK.
        """
        with self._write(commit=flight.departed):
            query = "SELECT 1 FROM answers WHERE transaction_id = ?"
            if self._connection.execute(query, (transaction_id,)).fetchone():
                raise RefusedError(
                    f"transaction {transaction_id} of flight {flight.sequence} was rolled back by a check "
                    "before its local transaction ran; send the flight again"
                )
            self._connection.execute(
                "INSERT INTO flights VALUES (?, ?, ?, ?, ?)",
                (flight.sequence, flight.tail, flight.place, flight.delay, transaction_id),
            )

    def answer(self, transaction_id: str) -> bool:
        """Tell whether the flight of that transaction departed, and see to it that the answer stays true."""
        with self._write():
            query = "SELECT 1 FROM flights WHERE transaction_id = ?"
            departed = self._connection.execute(query, (transaction_id,)).fetchone() is not None
            self._connection.execute(
                "INSERT INTO answers VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET times = times + 1",
                (transaction_id, departed),
            )
        return departed

    @contextmanager
    def _write(self, *, commit: bool = True) -> Iterator[None]:
        """Run a write transaction; it is rolled back where an exception passes through."""
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT" if commit else "ROLLBACK")

    def last_recorded(self) -> dict[str, int]:
        """Return, for each aircraft, the last flight in the table: where a restarted sender goes on."""
        return dict(self._rows("SELECT coalesce(tail, ''), MAX(sequence) FROM flights GROUP BY 1"))

    def count(self) -> int:
        """Return how many flights the table holds."""
        return int(self._rows("SELECT COUNT(*) FROM flights")[0][0])

    def transaction_of(self, sequence: int) -> str | None:
        """Return the transaction that recorded a flight, or None."""
        rows = self._rows("SELECT transaction_id FROM flights WHERE sequence = ?", (sequence,))
        return rows[0][0] if rows else None

    def answered(self, transaction_id: str) -> bool:
        """Tell whether a check found the flight of that transaction in the table and answered COMMIT."""
        return bool(self._rows("SELECT 1 FROM answers WHERE transaction_id = ? AND departed", (transaction_id,)))

    def answers(self) -> int:
        """Return how many transactions the checks settled, one way or the other."""
        return int(self._rows("SELECT COUNT(*) FROM answers")[0][0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        with self._lock:
            self._connection.close()

    def _rows(self, query: str, values: tuple[object, ...] = ()) -> list[Any]:
        with self._lock, closing(self._connection.execute(query, values)) as cursor:
            return cursor.fetchall()
