"""One shard of a SQL store: ready, held and settled transactions, by SQL statements.

Writes to the database are queued, and `flush` makes them in their order. If the database fails for a moment, nothing is
lost, and nothing new is taken before the writes succeed. Set-aside transactions leave their messages in the database.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import sqlalchemy as sa

from penstock.transactions.core.pending import Pending
from penstock.transactions.core.queue import Blocking, Delays, ReadyQueue
from penstock.transactions.stores.shards import ShardBacklog, StoredBatch
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.database import BY_KEY, Database
from penstock.transactions.stores.sql.leases import Lease
from penstock.transactions.stores.store_coordinator import Counts
from penstock.transactions.wire.half import unpack_halves
from penstock.transactions.wire.ids import id_bytes, id_text
from penstock.transactions.wire.ops import Author, Verdict

#: The order of decisions; within a line, the order in which halves were stored. Both are numbers of one sequence.
_ORDER = sa.case((schema.tx.c.order_key.is_(None), schema.tx.c.decided_seq), else_=schema.tx.c.seq).label("place")
#: Most ready transactions that one query returns.
_READY_LIMIT = sa.bindparam("limit", schema.STATEMENT_LIMIT, type_=sa.Integer)
#: Above all numbers of the sequence.
_NO_NUMBER = sa.literal_column(str((1 << 63) - 1), sa.BigInteger)


class SqlBacklog(ShardBacklog):
    """One shard. Used by the coordinator's thread."""

    def __init__(self, database: Database, lease: Lease, counts: Counts) -> None:
        self._database = database
        self._lease = lease
        self._counts = counts
        self._ready = self._select_ready()
        self.queue = ReadyQueue(Delays(), self._remember_set_aside)
        # Transactions that the current choice sets aside, and that the database does not show as held yet.
        self._newly_set_aside: list[Pending] = []
        # The reason why a topic's transactions wait, by topic, as the database shows it.
        self._explained: dict[str, str] = {}
        # Queued writes. After a transient error, `flush` goes on with the write that failed.
        self._writes = deque[Callable[[], object]]()

    def is_durable(self) -> bool:
        """Return whether the database shows all publications."""
        return not self._writes

    def flush(self) -> None:
        """Make the queued writes."""
        while self._writes:
            self._writes[0]()
            self._writes.popleft()

    def may_open(self, claim: Sequence[str]) -> bool:
        """Renew the lease: a coordinator that lost the shard must not fence the new owner."""
        self.is_lost = self.is_lost or not self._lease.renew(claim=" ".join(claim))
        return not self.is_lost

    def claimed(self) -> Sequence[str]:
        """Return the transactional ids that were written last."""
        claim = sa.select(schema.shard.c.claim).where(schema.shard.c.number == self._lease.number)
        with self._database.read() as connection:
            found = connection.execute(claim).scalar()
        return (found or "").split()

    def _taken_over(self, names: Sequence[str]) -> None:
        self._writes.append(partial(self._write_taken_over, names))

    def _write_taken_over(self, names: Sequence[str]) -> None:
        """Settle transactions by their names in the done log, and release those that a former owner held."""
        tx = schema.tx
        for ids in schema.in_groups(names):
            discarded = tx.c.id.in_(list(map(_discard_name, ids))) & (tx.c.state == schema.DISCARD)
            self._mark_settled(sa.or_(tx.c.id.in_(ids) & (tx.c.state == schema.COMMIT), discarded))
        held = schema.is_set_aside & (tx.c.shard == self._lease.number) & self._owns_shard()
        with self._database.begin() as connection:
            connection.execute(tx.update().where(held).values(held=0, held_why=None, publish_at_ms=0))

    def next_batch(self, limit: int, blocking: Blocking, room_bytes: int) -> StoredBatch | None:
        """Take transactions that can be published together, and mark the others as held."""
        if not self.queue.ready:
            for pending in self._take(limit, room_bytes):
                self._queue_decided(pending)
        chosen = self.queue.choose(limit, blocking, room_bytes)
        set_aside, self._newly_set_aside = self._newly_set_aside, []
        self._hold(set_aside)
        return self._batch(list(chosen.values()))

    def _batch(self, chosen: list[Pending]) -> StoredBatch | None:
        # Their watchers may be in any process.
        return StoredBatch(chosen, discarded_to=self._discarded_to, is_watched=True) if chosen else None

    def _queue_decided(self, pending: Pending) -> None:
        """Queue a transaction from the database. It may be queued already, or have been discarded since its commit."""
        known = self.queue.all.get(pending.half.transaction_id)
        if known is not None:
            if known.verdict is pending.verdict:
                return
            self.queue.forget([known])
        self.queue.keys.add(pending)
        self.queue.add(pending)

    def _remember_set_aside(self, pending: Pending) -> None:
        if pending.dropped is None:
            self._newly_set_aside.append(pending)

    def _take(self, limit: int, room_bytes: int) -> Sequence[Pending]:
        """Return the next transactions to publish in their order, without held ones. Settle the rolled-back ones."""
        if self.is_lost:
            return ()
        tx = schema.tx
        with self._database.read() as connection:
            # The ownership is checked after the relay was opened: a coordinator that takes the shard later fences this
            # relay.
            self.is_lost = not connection.execute(sa.select(self._owns_shard())).scalar()
            if self.is_lost:
                return ()
            rows = connection.execute(self._ready, {"limit": min(limit, schema.STATEMENT_LIMIT)}).all()
            rolled_back = [row.id for row in rows if row.state == schema.ROLLBACK]
            rows = [row for row in rows if row.state != schema.ROLLBACK]
            ends = accumulate(row.size for row in rows)
            fitting = [row for row, end in zip(rows, ends, strict=True) if end <= room_bytes] or rows[:1]
            ids, delayed = [row.id for row in fitting], [row.id for row in fitting if row.publish_at_ms]
            entries = self._decided(connection, tx.c.id.in_(ids)) if ids and not delayed else ()
        if delayed:
            with self._database.begin() as connection:
                # A cancellation under way ends first. None counts after this, even if the clock steps back.
                is_due = tx.c.id.in_(delayed) & (tx.c.publish_at_ms > 0)
                connection.execute(tx.update().where(is_due).values(publish_at_ms=0))
                entries = self._decided(connection, tx.c.id.in_(ids))
        if rolled_back:
            self._mark_settled(tx.c.id.in_(rolled_back))
        return entries

    def trial(self, waiting: Sequence[Pending], fits: Callable[[Pending], bool]) -> StoredBatch | None:
        """Take set-aside transactions from the front, up to the first that is being decided or does not fit."""
        found = self._take_held([pending.half.transaction_id for pending in waiting]) if waiting else {}
        chosen: list[Pending] = []
        for pending in waiting:
            name = pending.half.transaction_id
            stored = found.get(name)
            if not pending.held:
                # It stood behind a transaction that is no longer held.
                continue
            if stored is not None and stored.verdict is pending.verdict:
                pending.load(list(zip(stored.offsets, stored.halves, strict=True)))
                if not fits(pending):
                    break
                chosen.append(pending)
            elif stored is not None:
                self._queue_decided(stored)
            elif name in found:
                self.queue.forget([pending])
            else:
                break
        tried = set(chosen)
        self._hold([pending for pending in waiting if pending.held and pending not in tried])
        return self._batch(chosen)

    def _take_held(self, ids: Sequence[str]) -> Mapping[str, Pending | None]:
        """Return held transactions by id. No other decision of them counts until they are held again or settled.

        The verdict of a transaction may have changed meanwhile. None stands for a settled transaction.
        """
        tx = schema.tx
        with self._database.begin() as connection:
            self.is_lost = not connection.execute(sa.select(self._owns_shard())).scalar()
            if self.is_lost:
                return {}
            held = sa.and_(tx.c.id.in_(ids), tx.c.settled_at.is_(None), tx.c.state.in_((schema.COMMIT, schema.DISCARD)))
            # With the locks of this statement, no other session changes them.
            connection.execute(tx.update().where(held).values(held=0, publish_at_ms=None))
            found = {pending.transaction_id: pending for pending in self._decided(connection, held)}
        return dict[str, Pending | None].fromkeys(ids) | found

    def explain(self) -> None:
        """Write the reasons why transactions wait, for topics whose reason has changed."""
        for topic in self.set_aside.topics():
            why = self._why(topic)
            if self._explained.get(topic) != why:
                self._explained[topic] = why
                # Transactions in a trial are held again when it ends.
                self._hold([pending for pending in self.set_aside.fronts(topic) if not pending.in_flight])

    def _published(self, some: Sequence[Pending]) -> None:
        names = [pending.half.transaction_id for pending in some]
        self.queue.forget(some)
        self._writes.append(partial(self._write_published, names))

    def _write_published(self, names: Sequence[str]) -> None:
        """Mark transactions as settled; settled ones stay as they are."""
        for ids in schema.in_groups(names):
            self._mark_settled(schema.tx.c.id.in_(ids))

    def _given_back(self, some: Sequence[Pending]) -> None:
        super()._given_back(some)
        self._hold([pending for pending in some if pending.held])

    def _hold(self, some: Sequence[Pending]) -> None:
        """Queue the write that these are held, and why. Their messages leave the memory."""
        for pending in some:
            pending.drop()
        if some:
            reasons = {pending.half.transaction_id: self.why_held(pending) for pending in some}
            self._writes.append(partial(self._write_held, reasons))

    def _write_held(self, reasons: Mapping[str, str]) -> None:
        """Mark transactions as held, with the reasons by id. This ends a trial that took them."""
        tx, by_reason = schema.tx, defaultdict[str, list[str]](list)
        for name, why in reasons.items():
            by_reason[why].append(name)
        with self._database.begin() as connection:
            for why, names in by_reason.items():
                for ids in schema.in_groups(names):
                    held = tx.update().where(tx.c.id.in_(ids), tx.c.settled_at.is_(None), self._owns_shard())
                    connection.execute(held.values(held=1, held_why=why, publish_at_ms=None))

    def _owns_shard(self) -> sa.ColumnElement[bool]:
        return sa.exists().where(self._lease.is_held)

    def _select_ready(self) -> sa.Select[Any]:
        """Return the query of the transactions that can be settled now, in their order.

        In a line: all from its beginning up to the first that is undecided or held. The query looks for that one once
        for each line. A search for each row would take minutes if a line has thousands.
        """
        tx, waiting = schema.tx, schema.tx.alias("waiting")
        ready = sa.and_(tx.c.shard == self._lease.number, tx.c.publish_at_ms <= self._database.now_ms)
        is_in_line = tx.c.order_key.is_not(None) & (tx.c.state != schema.ROLLBACK)
        number = sa.func.row_number().over(partition_by=schema.line, order_by=tx.c.seq).label("number")
        found = tx.c.id, _ORDER
        row = sa.select(*found, *schema.line, number).where(ready, is_in_line).subquery("numbered").c
        first_waiting = sa.select(sa.func.coalesce(sa.func.min(waiting.c.seq), _NO_NUMBER)).where(
            waiting.c.order_key == row.order_key,
            waiting.c.producer_group == row.producer_group,
            waiting.c.publish_at_ms.is_(None),
            # With expressions and the hint, no planner looks at all unsettled rows of the shard instead.
            waiting.c.shard + 0 == row.shard,
            sa.func.coalesce(waiting.c.settled_at, 0) == 0,
        )
        first_waiting = first_waiting.with_hint(waiting, "FORCE INDEX (penstock_tx_keys)", "mysql")
        searched = sa.case((row.number == 1, first_waiting.scalar_subquery())).label("line_end")
        # The limit is for MariaDB, which would search for each row without it. There `first_value` is fast, `max` slow.
        row = sa.select(*row, searched).limit(_NO_NUMBER).subquery("searched").c
        line = row.shard, row.producer_group, row.order_key
        end = sa.func.first_value(row.line_end).over(partition_by=line, order_by=row.place).label("end")
        row = sa.select(*row, end).subquery("in_line").c
        both = sa.union_all(
            sa.select(*found).where(ready, ~is_in_line), sa.select(row.id, row.place).where(row.place < row.end)
        )
        first = both.order_by("place").limit(_READY_LIMIT).subquery("first_ready")
        # At least the size that the queue counts. For these rows alone: MariaDB reads a whole value to get its length.
        size = sa.func.length(tx.c.halves).label("size")
        found_first = sa.select(tx.c.id, tx.c.state, tx.c.publish_at_ms, size)
        return found_first.join_from(first, tx, tx.c.id == first.c.id).order_by(first.c.place)

    @staticmethod
    def _decided(connection: sa.Connection, some: sa.ColumnElement[bool]) -> list[Pending]:
        is_open = schema.tx.c.settled_at.is_(None)
        return list(map(_pending, connection.execute(sa.select(schema.tx).where(some, is_open).order_by(_ORDER))))

    def _mark_settled(self, some: sa.ColumnElement[bool]) -> None:
        """Mark decided transactions as settled, and count them. `some` has their ids."""
        tx = schema.tx
        now, is_kept = self._database.now, tx.c.state == schema.DISCARD
        answered, age = schema.answered_checks.label("answered"), (now - tx.c.birth).label("age")
        decided = sa.select(tx.c.id, tx.c.state, answered, age).where(
            some, tx.c.settled_at.is_(None), tx.c.state != schema.PREPARED
        )
        with self._database.begin() as connection:
            # Without the hint, a scan could wait for the rows of an outbox whose transaction is open.
            locking = decided.with_for_update().with_hint(tx, BY_KEY, "mysql")
            settled = connection.execute(locking).all()
            settling = tx.update().where(tx.c.id.in_([row.id for row in settled]))
            # Settled transactions leave their line: those behind them would look at each.
            kept = {column.name: sa.case((is_kept, column)) for column in (tx.c.halves, tx.c.order_key)}
            connection.execute(settling.values(settled_at=now, publish_at_ms=None, **kept))
        for row in settled:
            self._counts.answered_checks += row.answered
            self._counts.settled(Verdict(row.state), row.age)


def _pending(row: Any) -> Pending:
    """Return a due transaction with its messages."""
    verdict = Verdict(row.state)
    first, *others = unpack_halves(row.halves)
    pending = Pending(first._replace(deliver_at_ms=None) if verdict is Verdict.COMMIT else first, 0)
    for place, half in enumerate(others, 1):
        pending.add_part(place, half)
    pending.verdict, pending.author = verdict, Author(row.author)
    if row.check_count:
        pending.check_count = row.check_count
    if verdict is Verdict.DISCARD:
        pending.done_name = _discard_name(row.id)
    return pending


def _discard_name(transaction_id: str) -> str:
    """Return the name of a discarded transaction in the done log, or the id that belongs to such a name.

    If a resumed transaction commits, this name keeps it from counting as published because of its former discard.
    """
    return id_text(bytes(octet ^ 0xFF for octet in id_bytes(transaction_id)))
