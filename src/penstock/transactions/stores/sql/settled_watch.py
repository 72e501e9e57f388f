"""Callbacks of those who wait until a transaction is settled: its row is looked at again and again."""

from __future__ import annotations

import logging
import threading

import sqlalchemy as sa

from penstock.transactions.connections import cause_of
from penstock.transactions.store import SettledCallback
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.database import Database
from penstock.transactions.wire.ops import Verdict

_log = logging.getLogger("penstock.transactions")

_POLL_S = 0.02
_PAUSE_S = 0.5
_AT_ONCE = 500


class SettledWatch:
    """Looks for watched transactions that were settled, on a thread that the first one starts. Thread-safe."""

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self._stopping = threading.Event()
        self._some = threading.Event()
        # Guards the callbacks, and starting.
        self._lock = threading.Lock()
        self._callbacks: dict[str, SettledCallback] = {}
        self._thread = threading.Thread(target=self._run, name=f"penstock-sql-watch-{name}", daemon=True)

    def add(self, transaction_id: str, callback: SettledCallback) -> None:
        """Watch a transaction."""
        with self._lock:
            self._callbacks[transaction_id] = callback
            if self._thread.ident is None:
                self._thread.start()
            self._some.set()

    def remove(self, transaction_id: str) -> None:
        """Watch it no more."""
        with self._lock:
            self._callbacks.pop(transaction_id, None)

    def stop(self) -> None:
        """End. Callbacks that still wait are not called; the producer gives those transactions up."""
        self._stopping.set()
        self._some.set()
        if self._thread.ident is not None:
            self._thread.join(_PAUSE_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._some.wait()
            with self._lock:
                ids = list(self._callbacks)
                if not ids:
                    self._some.clear()
                    continue
            try:
                settled = self._settled(ids)
            except sa.exc.SQLAlchemyError as error:
                _log.warning("the SQL store cannot be looked at: %s; trying again", cause_of(error))
                self._stopping.wait(_PAUSE_S)
                continue
            for transaction_id, state in settled:
                with self._lock:
                    callback = self._callbacks.pop(transaction_id, None)
                if callback is not None:
                    callback(Verdict(state))
            self._stopping.wait(_POLL_S)

    def _settled(self, ids: list[str]) -> list[tuple[str, int]]:
        tx = schema.tx
        found: list[tuple[str, int]] = []
        with self._database.read() as connection:
            for start in range(0, len(ids), _AT_ONCE):
                wanted = tx.c.id.in_(ids[start : start + _AT_ONCE]) & tx.c.settled_at.is_not(None)
                found += map(tuple, connection.execute(sa.select(tx.c.id, tx.c.state).where(wanted)))
        return found
