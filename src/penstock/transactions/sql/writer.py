"""What is written on the way of a message: many requests in one transaction of the database."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

import sqlalchemy as sa

from penstock.transactions.records import Author, Half, Verdict
from penstock.transactions.sql import schema
from penstock.transactions.sql.database import Database

_log = logging.getLogger("penstock.transactions")

#: Requests in one transaction.
_BATCH = 500


class Request(Protocol):
    """Something to write."""

    def write(self, database: Database, connection: sa.Connection) -> None:
        """Write it; a second time after an error changes nothing."""

    def tell(self, error: Exception | None) -> None:
        """Take what became of it; called once."""


@dataclass(frozen=True, slots=True)
class NewTransaction:
    """A transaction's row, and its messages."""

    halves: Sequence[Half]
    shard: int

    def write(self, database: Database, connection: sa.Connection) -> None:
        """Insert it."""
        half = self.halves[0]
        row = {
            "id": half.transaction_id,
            "seq": database.next,
            "shard": self.shard,
            "producer_group": half.group,
            "state": schema.PREPARED,
            "order_key": half.order_key,
            "birth": database.now,
            "immunity": (half.immunity_ms or 0) / 1000,
            "deliver_at_ms": half.deliver_at_ms,
            "check_count": 0,
            "question": 0,
            "taken_until": 0.0,
            "held_until": 0.0,
            "held_count": 0,
        }
        # Who repeats this after an error whose transaction was committed all the same finds it there.
        connection.execute(database.insert(schema.tx).values(row).on_conflict_do_nothing())
        connection.execute(database.insert(schema.message).on_conflict_do_nothing(), schema.message_rows(self.halves))


@dataclass(slots=True)
class Decision:
    """A decision, which counts if it is the first."""

    transaction_id: str
    group: str | None
    verdict: Verdict
    author: Author
    actor: str = ""
    #: Set by `write`: the state that stood in its way, or -1 where there is no such transaction; None: it counts.
    refused_by: int | None = None

    def write(self, database: Database, connection: sa.Connection) -> None:
        """Make it the transaction's state, unless that has one."""
        tx = schema.tx
        named = tx.c.id == self.transaction_id
        if self.group is not None:
            named &= tx.c.producer_group == self.group
        done = connection.execute(
            tx.update()
            .where(named, tx.c.state == schema.PREPARED)
            .values(
                state=int(self.verdict),
                author=int(self.author),
                actor=self.actor,
                decided_seq=database.next,
                question=0,
            )
        )
        self.refused_by = None
        if done.rowcount:
            return
        standing = connection.execute(sa.select(tx.c.state).where(named)).scalar()
        self.refused_by = -1 if standing is None else int(standing)
        connection.execute(
            schema.refusal.insert().values(
                tx=self.transaction_id, verdict=int(self.verdict), author=int(self.author), at=database.now
            )
        )

    def refusal(self) -> str | None:
        """Say why it does not count, or None."""
        if self.refused_by is None:
            return None
        what = f"transaction {self.transaction_id}: its {self.verdict.name} was refused"
        if self.refused_by < 0:
            return f"{what}: the store has no such transaction of that group; it is unknown, or settled long ago"
        return f"{what}: {Verdict(self.refused_by).name} was decided before, and the first decision stands"


class Writer:
    """One thread that writes what is submitted, in its order. Thread-safe.

    Args:
        database: where to.
        name: what the thread's name ends with.
    """

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"penstock-sql-writer-{name}", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Write what was submitted, at most `timeout_s` seconds, and end."""
        self._requests.put(None)
        self._thread.join(timeout_s)

    def submit(self, request: Request) -> None:
        """Have a request written after those that were submitted before."""
        self._requests.put(request)

    def _run(self) -> None:
        while True:
            first = self._requests.get()
            batch = [] if first is None else [first]
            last = first is None
            while not last and len(batch) < _BATCH:
                try:
                    request = self._requests.get_nowait()
                except Empty:
                    break
                if request is None:
                    last = True
                else:
                    batch.append(request)
            self._write(batch)
            if last:
                return

    def _write(self, batch: list[Request]) -> None:
        error = self._attempt(batch)
        if error is None:
            for request in batch:
                _tell(request, None)
            return
        if len(batch) > 1:
            _log.warning("a batch of the SQL store was not written: %s; each alone now", cause_of(error))
        for request in batch:
            # Repeated alone: what one of them did wrong is no fault of the others', and a lost connection comes back.
            _tell(request, self._attempt([request]))

    def _attempt(self, batch: list[Request]) -> Exception | None:
        try:
            with self._database.begin() as connection:
                for request in batch:
                    request.write(self._database, connection)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
            return error
        return None


def _tell(request: Request, error: Exception | None) -> None:
    try:
        request.tell(error)
    except Exception:  # noqa: BLE001 - one that is told wrongly shall not keep the others waiting
        _log.exception("a request of the SQL store could not be told of; this is an error in penstock")


def cause_of(error: Exception) -> str:
    """Return what a database said, for an error of ours: without the statement and its parameters."""
    cause: object = getattr(error, "orig", None) or error
    lines = str(cause).splitlines()
    return f"{type(cause).__name__}: {lines[0] if lines else 'no reason given'}"


__all__ = ["Decision", "NewTransaction", "Request", "Writer", "cause_of"]
