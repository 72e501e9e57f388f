"""What is written on the way of a message: many requests in one transaction of the database."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol, cast

import sqlalchemy as sa

from penstock.errors import StoppedError
from penstock.transactions.connections import cause_of
from penstock.transactions.core.decisions import may_cancel
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.database import Database
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Verdict

_log = logging.getLogger("penstock.transactions")

#: Requests in one transaction.
_BATCH = 500


class Request(Protocol):
    """Something to write."""

    def write(self, database: Database, connection: sa.Connection) -> None:
        """Write it; a second time after an error changes nothing."""

    def complete(self, error: Exception | None) -> None:
        """Take what became of it; called once."""


@dataclass(frozen=True, slots=True)
class NewTransaction:
    """A transaction's row, and its messages."""

    halves: Sequence[Half]
    shard: int

    def write(self, database: Database, connection: sa.Connection) -> None:
        """Insert it."""
        insert([self], database, connection)


def insert(new: Sequence[NewTransaction], database: Database, connection: sa.Connection) -> None:
    """Insert transactions, in their order."""
    rows = [
        {
            "id": one.halves[0].transaction_id,
            "shard": one.shard,
            "producer_group": one.halves[0].group,
            "order_key": one.halves[0].order_key,
            "immunity": (one.halves[0].immunity_ms or 0) / 1000,
            "deliver_at_ms": one.halves[0].deliver_at_ms,
        }
        for one in new
    ]
    # Who repeats this after an error whose transaction was committed all the same finds it there.
    connection.execute(database.once("tx", lambda: _insert_tx(database)), rows)
    messages = [row for one in new for row in schema.message_rows(one.halves)]
    connection.execute(
        database.once("message", lambda: database.insert(schema.message).on_conflict_do_nothing()), messages
    )


def _insert_tx(database: Database) -> sa.Executable:
    zero = ("check_count", "question", "taken_until", "held_until", "held_count")
    constants = {
        "seq": database.next,
        "birth": database.now,
        "state": sa.literal_column(str(schema.PREPARED), sa.SmallInteger),
        **dict.fromkeys(zero, sa.literal_column("0", sa.Integer)),
    }
    given = ("id", "shard", "producer_group", "order_key", "immunity", "deliver_at_ms")
    row = database.insert(schema.tx).values(**constants, **{name: sa.bindparam(name) for name in given})
    return row.on_conflict_do_nothing()


@dataclass(slots=True)
class Decision:
    """A decision, which counts if it is the first."""

    transaction_id: str
    group: str | None
    verdict: Verdict
    author: Author
    actor: str = ""
    #: Set by `write`: the state that stood before it, or -1 where there is no such transaction; None: it counts.
    refused_by: int | None = None
    #: Set by `write`: whether what stood in its way is under way to Kafka.
    under_way: bool = False

    def write(self, database: Database, connection: sa.Connection) -> None:
        """Make it the transaction's state, unless that has one; a message that is not due yet may be taken back.

        An operator may discard what is committed and refused by Kafka: nothing of it is under way, and only the trials
        of its coordinator take it, which mark it before.
        """
        tx = schema.tx
        of_group, cancels = self.group is not None, may_cancel(self.verdict, self.author)
        statement = database.once(f"decide {of_group} {cancels}", lambda: _decide(database, of_group, cancels))
        done = connection.execute(
            statement,
            {
                "wanted_id": self.transaction_id,
                "wanted_group": self.group,
                "verdict": int(self.verdict),
                "by": int(self.author),
                "who": self.actor,
            },
        )
        self.refused_by = None
        if done.rowcount or self._discards_refused(database, connection):
            return
        named = tx.c.id == self.transaction_id
        if self.group is not None:
            named &= tx.c.producer_group == self.group
        row = connection.execute(sa.select(tx.c.state, tx.c.settled_at).where(named)).first()
        self.refused_by = -1 if row is None else int(row.state)
        self.under_way = row is not None and row.settled_at is None and row.state == schema.COMMIT
        connection.execute(
            schema.refusal.insert().values(
                tx=self.transaction_id, verdict=int(self.verdict), author=int(self.author), at=database.now
            )
        )

    def _discards_refused(self, database: Database, connection: sa.Connection) -> bool:
        if (self.verdict, self.author) != (Verdict.DISCARD, Author.OPERATOR):
            return False
        tx = schema.tx
        refused = sa.and_(
            tx.c.id == self.transaction_id,
            tx.c.state == schema.COMMIT,
            tx.c.settled_at.is_(None),
            tx.c.held_until > 0,
            tx.c.taken_until < schema.TAKEN,
        )
        values = {
            "state": schema.DISCARD,
            "author": int(self.author),
            "actor": self.actor,
            "decided_seq": database.next,
            "held_until": 0.0,
        }
        return bool(connection.execute(tx.update().where(refused).values(**values)).rowcount)

    def refusal(self) -> str | None:
        """Say why it does not count, or None."""
        if self.refused_by is None:
            return None
        what = f"transaction {self.transaction_id}: its {self.verdict.name} was refused"
        if self.refused_by < 0:
            return f"{what}: the store has no such transaction of that group; it is unknown, or settled long ago"
        if self.verdict is Verdict.DISCARD and self.under_way:
            return (
                f"{what}: COMMIT was decided before, and it is not held, or is being published just now; what Kafka "
                "refuses can be discarded: look at what it waits for, and try again"
            )
        return f"{what}: {Verdict(self.refused_by).name} was decided before, and the first decision stands"


def _decide(database: Database, of_group: bool, cancels: bool) -> sa.Executable:
    tx = schema.tx
    is_open: sa.ColumnElement[bool] = tx.c.state == schema.PREPARED
    if cancels:
        is_open = sa.or_(is_open, schema.is_delayed(database))
    statement = tx.update().where(tx.c.id == sa.bindparam("wanted_id"), is_open)
    if of_group:
        statement = statement.where(tx.c.producer_group == sa.bindparam("wanted_group"))
    return statement.values(
        state=sa.bindparam("verdict"),
        author=sa.bindparam("by"),
        actor=sa.bindparam("who"),
        decided_seq=database.next,
        question=0,
    )


class Writer:
    """One thread that writes what is submitted, in its order. Thread-safe."""

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        # Guards `_stopped`, and that nothing comes behind the None that ends the queue.
        self._lock = threading.Lock()
        self._stopped = False
        # Set by stop(), read by the thread.
        self._too_late = False
        self._thread = threading.Thread(target=self._run, name=f"penstock-sql-writer-{name}", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Write what was submitted, at most `timeout_s` seconds, and end; what is not begun by then is refused."""
        with self._lock:
            self._stopped = True
            self._requests.put(None)
        self._thread.join(timeout_s)
        self._too_late = True

    def submit(self, request: Request) -> None:
        """Have a request written after those that were submitted before; one that comes after the stop is refused."""
        with self._lock:
            taken = not self._stopped
            if taken:
                self._requests.put(request)
        if not taken:
            _complete(request, _refusal())

    def _run(self) -> None:
        while True:
            batch: list[Request] = []
            request = self._requests.get()
            with suppress(Empty):
                while request is not None:
                    batch.append(request)
                    if len(batch) == _BATCH:
                        break
                    request = self._requests.get_nowait()
            if batch:
                self._write(batch)
            if request is None:
                return

    def _write(self, batch: list[Request]) -> None:
        error = self._attempt(batch)
        if _is_of_the_database(error):
            # A new session may do, or the lock be free.
            error = self._attempt(batch)
        if error is None or self._too_late or _is_of_the_database(error) or len(batch) == 1:
            for request in batch:
                _complete(request, error)
            return
        _log.warning("a batch of the SQL store was not written: %s; each alone now", cause_of(error))
        for request in batch:
            # What one of them did wrong is no fault of the others'.
            _complete(request, self._attempt([request]))

    def _attempt(self, batch: list[Request]) -> Exception | None:
        if self._too_late:
            return _refusal()
        try:
            with self._database.begin() as connection:
                # In runs, for many rows of a kind are inserted at once.
                for new, run in itertools.groupby(batch, lambda request: isinstance(request, NewTransaction)):
                    if new:
                        insert(cast("list[NewTransaction]", list(run)), self._database, connection)
                        continue
                    for request in run:
                        request.write(self._database, connection)
                if self._too_late:
                    # It waited for the database, and its requests were completed as not stored.
                    raise _refusal()  # noqa: TRY301 - so that it is rolled back
        except Exception as error:  # noqa: BLE001 - whatever it is, the requests are completed with it
            return error
        return None


def _is_of_the_database(error: Exception | None) -> bool:
    """Tell whether an error is no fault of a request: a session that was lost, a lock, or no session to be had."""
    of_session = isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated
    return of_session or isinstance(error, sa.exc.OperationalError | sa.exc.TimeoutError)


def _refusal() -> StoppedError:
    return StoppedError("the SQL store was stopped")


def _complete(request: Request, error: Exception | None) -> None:
    try:
        request.complete(error)
    except Exception:  # noqa: BLE001 - one that fails shall not keep the others waiting
        _log.exception("a request of the SQL store could not be completed; this is an error in penstock")
