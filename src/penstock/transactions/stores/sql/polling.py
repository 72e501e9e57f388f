"""The polls of producers: the checks of their group, and the settlement of their transactions.

One producer takes a check. If it does not answer, the coordinator asks again after an interval.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Collection, Sequence

import sqlalchemy as sa

from penstock.transactions.connections import cause_of
from penstock.transactions.store import SettledCallback
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.database import Database
from penstock.transactions.wire.half import CheckRequest, unpack_halves
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Verdict

_log = logging.getLogger("penstock.transactions")

#: Seconds after a poll that failed; between two heartbeats of a producer, which counts as dead after five.
_RETRY_DELAY_S = 0.5
_HEARTBEAT_INTERVAL_S = 2.0
#: Most checks that a producer takes at once.
_MAX_CHECKS = 200


class SqlCheckSource:
    """The checks of a group. Used by one thread."""

    def __init__(self, database: Database, group: str) -> None:
        self._database = database
        self._group = group
        self._name = new_id()
        self._seen = -math.inf
        self._closed = threading.Event()

    def take(self, timeout_s: float, running: Collection[str] = ()) -> Sequence[CheckRequest]:
        """Return the waiting checks. If there are none, wait `timeout_s` seconds before returning.

        Leaves out the `running` transactions: a check that hangs is asked again, of another producer.
        """
        found: Sequence[CheckRequest] = ()
        try:
            self._send_heartbeat()
            found = self._take(running)
        except sa.exc.SQLAlchemyError as error:
            _log.warning("checks of group %s cannot be taken: %s; trying again", self._group, cause_of(error))
            self._closed.wait(_RETRY_DELAY_S)
        if not found:
            self._closed.wait(timeout_s)
        return found

    def close(self) -> None:
        """Leave the group: this producer no longer counts as alive."""
        self._closed.set()
        try:
            schema.remove_heartbeat(self._database, self._name)
        except sa.exc.SQLAlchemyError as error:
            _log.warning("group %s: the heartbeat of a stopped producer stays: %s", self._group, cause_of(error))

    def _send_heartbeat(self) -> None:
        if time.monotonic() - self._seen >= _HEARTBEAT_INTERVAL_S:
            schema.write_heartbeat(self._database, "producer", self._name, self._group)
            self._seen = time.monotonic()

    def _take(self, running: Collection[str]) -> list[CheckRequest]:
        tx = schema.tx
        is_asked = (tx.c.producer_group == self._group) & tx.c.asked_at.is_not(None) & tx.c.id.not_in(running)
        asked = sa.select(tx.c.id).where(is_asked).order_by(tx.c.asked_at).limit(_MAX_CHECKS)
        with self._database.read() as connection:
            if not connection.execute(asked.limit(1)).all():
                return []
        with self._database.begin() as connection:
            ids = list(connection.execute(asked.with_for_update(skip_locked=True)).scalars())
            connection.execute(tx.update().where(tx.c.id.in_(ids)).values(asked_at=None))
            rows = connection.execute(sa.select(tx).where(tx.c.id.in_(ids)).order_by(tx.c.seq)).all()
        return [CheckRequest(unpack_halves(row.halves)[0], row.shard, row.seq, row.check_count + 1) for row in rows]


#: Seconds between two polls for settled transactions.
_WATCH_INTERVAL_S = 0.02


class SettledWatch:
    """Polls for the settlement of watched transactions, on a thread that the first watch starts. Thread-safe."""

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self._stopping = threading.Event()
        self._has_watches = threading.Event()
        # Guards the callbacks and the start of the thread.
        self._lock = threading.Lock()
        self._callbacks: dict[str, SettledCallback] = {}
        self._thread = threading.Thread(target=self._run, name=f"penstock-sql-watch-{name}", daemon=True)

    def add(self, transaction_id: str, callback: SettledCallback) -> None:
        """Watch a transaction."""
        with self._lock:
            self._callbacks[transaction_id] = callback
            if self._thread.ident is None:
                self._thread.start()
            self._has_watches.set()

    def remove(self, transaction_id: str) -> None:
        """Remove the callback of a transaction."""
        with self._lock:
            self._callbacks.pop(transaction_id, None)

    def stop(self) -> None:
        """Stop polling. Waiting callbacks are not called; the producer drops those transactions."""
        self._stopping.set()
        self._has_watches.set()
        if self._thread.ident is not None:
            self._thread.join(_RETRY_DELAY_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._has_watches.wait()
            with self._lock:
                ids = list(self._callbacks)
                if not ids:
                    self._has_watches.clear()
                    continue
            try:
                settled = self._settled(ids)
            except sa.exc.SQLAlchemyError as error:
                _log.warning("the SQL store cannot be read: %s; trying again", cause_of(error))
                self._stopping.wait(_RETRY_DELAY_S)
                continue
            for transaction_id, state in settled:
                with self._lock:
                    callback = self._callbacks.pop(transaction_id, None)
                if callback is not None:
                    callback(Verdict(state))
            self._stopping.wait(_WATCH_INTERVAL_S)

    def _settled(self, ids: list[str]) -> list[tuple[str, int]]:
        tx = schema.tx
        found: list[tuple[str, int]] = []
        with self._database.read() as connection:
            for portion in schema.in_groups(ids):
                wanted = tx.c.id.in_(portion) & tx.c.settled_at.is_not(None)
                found += map(tuple, connection.execute(sa.select(tx.c.id, tx.c.state).where(wanted)))
        return found
