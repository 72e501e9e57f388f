"""A shard of a SQL store, in statements: what is to be published, what is held, and what was settled.

What is to be noted there is noted by `flush`, in its order: where the database fails for a moment, nothing is lost but
time, and nothing is taken from it before. What is set aside leaves its messages in the database.
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
from penstock.transactions.stores.coordination import Counts
from penstock.transactions.stores.shards import ShardBacklog, StoredBatch
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.database import Database
from penstock.transactions.stores.sql.leases import Lease
from penstock.transactions.wire.half import unpack_halves
from penstock.transactions.wire.ids import id_bytes, id_text
from penstock.transactions.wire.ops import Author, Verdict

#: The order of the decisions; in a line, that in which halves were stored. Both are numbers of one sequence.
_ORDER = sa.case((schema.tx.c.order_key.is_(None), schema.tx.c.decided_seq), else_=schema.tx.c.seq)


class SqlBacklog(ShardBacklog):
    """One shard. Used by the coordinator's thread."""

    def __init__(self, database: Database, lease: Lease, counts: Counts) -> None:
        self._database = database
        self._lease = lease
        self._counts = counts
        self._ready = self._is_ready()
        self.queue = ReadyQueue(Delays(), self._note_set_aside)
        # What the choice under way sets aside, and the database does not know to be held.
        self._newly_set_aside: list[Pending] = []
        # By topic, why what waits for its sake waits, as the database knows it.
        self._explained: dict[str, str] = {}
        # What is to be noted there; after an error that passes it is noted again, from the one that failed on.
        self._notes = deque[Callable[[], object]]()

    @property
    def is_flushed(self) -> bool:
        """Whether the database knows all that was published."""
        return not self._notes

    def flush(self) -> None:
        """Note in the database what is to be noted."""
        while self._notes:
            self._notes[0]()
            self._notes.popleft()

    def may_open(self, claim: Sequence[str]) -> bool:
        """Renew the lease: a coordinator that lost the shard must not fence its new owner."""
        self.is_lost = self.is_lost or not self._lease.renew(claim=" ".join(claim))
        return not self.is_lost

    def claimed(self) -> Sequence[str]:
        """Return the transactional ids that were written down last."""
        return self._lease.claimed()

    def _taken_over(self, names: Sequence[str]) -> None:
        self._notes.append(partial(self._note_taken_over, names))

    def _note_taken_over(self, names: Sequence[str]) -> None:
        """Mark transactions as settled, by their names in the done log, and free what a former owner held."""
        tx = schema.tx
        for some in schema.in_groups(names):
            discarded = tx.c.id.in_(list(map(_discard_name, some))) & (tx.c.state == schema.DISCARD)
            self._mark_settled(sa.or_(tx.c.id.in_(some) & (tx.c.state == schema.COMMIT), discarded))
        held = schema.is_set_aside & (tx.c.shard == self._lease.number) & self._owns_shard()
        with self._database.begin() as connection:
            connection.execute(tx.update().where(held).values(held=0, held_why=None, publish_at_ms=0))

    def next_batch(self, limit: int, blocking: Blocking, room_bytes: int) -> StoredBatch | None:
        """Take what can be published with others, and have the rest held."""
        if not self.queue.ready:
            for pending in self._take(limit, room_bytes):
                self._queue_decided(pending)
        chosen = self.queue.choose(limit, blocking, room_bytes)
        stopped, self._newly_set_aside = self._newly_set_aside, []
        self._hold(stopped)
        return self._batch(list(chosen.values()))

    def _batch(self, chosen: list[Pending]) -> StoredBatch | None:
        # Who waits until they can be seen may be in any process.
        return StoredBatch(chosen, discarded_to=self._discarded_to, is_watched=True) if chosen else None

    def _queue_decided(self, pending: Pending) -> None:
        """Take in what the database gave, which may be there already; what was committed may be discarded since."""
        known = self.queue.all.get(pending.half.transaction_id)
        if known is not None:
            if known.verdict is pending.verdict:
                return
            self.queue.forget(known)
        if (line := pending.half.line) is not None:
            self.queue.keys.add(line, pending)
        self.queue.add(pending)

    def _note_set_aside(self, pending: Pending) -> None:
        if pending.dropped is None:
            self._newly_set_aside.append(pending)

    def _take(self, limit: int, room_bytes: int) -> Sequence[Pending]:
        """Return what to publish next, in its order, and settle what was rolled back; nothing held is among it."""
        if self.is_lost:
            return ()
        tx = schema.tx
        # No less than the queue takes them for.
        size = sa.func.length(tx.c.halves).label("size")
        found = sa.select(tx.c.id, tx.c.state, size).where(self._ready).order_by(_ORDER)
        with self._database.read() as connection:
            # With the ownership, after the relay was opened: whoever takes the shard from now on fences this one.
            self.is_lost = not connection.execute(sa.select(self._owns_shard())).scalar()
            if self.is_lost:
                return ()
            rows = connection.execute(found.limit(min(limit, schema.STATEMENT_LIMIT))).all()
            rolled_back = [row.id for row in rows if row.state == schema.ROLLBACK]
            rows = [row for row in rows if row.state != schema.ROLLBACK]
            ends = accumulate(row.size for row in rows)
            fitting = [row.id for row, end in zip(rows, ends, strict=True) if end <= room_bytes]
            entries = self._decided(connection, tx.c.id.in_(fitting or [row.id for row in rows[:1]])) if rows else ()
        if rolled_back:
            self._mark_settled(tx.c.id.in_(rolled_back))
        return entries

    def trial(self, waiting: Sequence[Pending], fits: Callable[[Pending], bool]) -> StoredBatch | None:
        """Take the first of what is set aside, up to one that another decides just now, or that does not fit."""
        found = self._take_held([pending.half.transaction_id for pending in waiting]) if waiting else {}
        chosen: list[Pending] = []
        for pending in waiting:
            name = pending.half.transaction_id
            stored = found.get(name)
            if not pending.held:
                # It stood behind one that is not held any more.
                continue
            if stored is not None and stored.verdict is pending.verdict:
                pending.load(list(zip(stored.offsets, stored.halves, strict=True)))
                if not fits(pending):
                    break
                chosen.append(pending)
            elif stored is not None:
                self._queue_decided(stored)
            elif name in found:
                self.queue.forget(pending)
            else:
                break
        tried = set(chosen)
        self._hold([pending for pending in waiting if pending.held and pending not in tried])
        return self._batch(chosen)

    def _take_held(self, ids: Sequence[str]) -> Mapping[str, Pending | None]:
        """Return what is held; until it is held again, or settled, nobody decides it in another way.

        One that was decided in another way meanwhile is returned so. None stands for what is settled.
        """
        tx = schema.tx
        with self._database.begin() as connection:
            self.is_lost = not connection.execute(sa.select(self._owns_shard())).scalar()
            if self.is_lost:
                return {}
            held = sa.and_(tx.c.id.in_(ids), tx.c.settled_at.is_(None), tx.c.state.in_((schema.COMMIT, schema.DISCARD)))
            # Once this statement has their locks, nobody else changes them.
            connection.execute(tx.update().where(held).values(held=0, publish_at_ms=None))
            found = {pending.transaction_id: pending for pending in self._decided(connection, held)}
        return dict[str, Pending | None].fromkeys(ids) | found

    def explain(self) -> None:
        """Note why things wait, where the reason of their topic is another one by now."""
        for topic in self.set_aside.topics():
            why = self._why(topic)
            if self._explained.get(topic) != why:
                self._explained[topic] = why
                # What is being tried is held again when that ends.
                self._hold([pending for pending in self.set_aside.fronts(topic) if not pending.in_flight])

    def _published(self, some: Sequence[Pending]) -> None:
        names = [pending.half.transaction_id for pending in some]
        for pending in some:
            self.queue.forget(pending)
        self._notes.append(partial(self._note_published, names))

    def _note_published(self, names: Sequence[str]) -> None:
        """Mark transactions as settled; those that are already are left alone."""
        for some in schema.in_groups(names):
            self._mark_settled(schema.tx.c.id.in_(some))

    def _given_back(self, some: Sequence[Pending]) -> None:
        super()._given_back(some)
        self._hold([pending for pending in some if pending.held])

    def _hold(self, some: Sequence[Pending]) -> None:
        """Note that these are held, and why; their messages stay in the database."""
        for pending in some:
            pending.drop()
        if some:
            reasons = {pending.half.transaction_id: self.why_held(pending) for pending in some}
            self._notes.append(partial(self._note_held, reasons))

    def _note_held(self, reasons: Mapping[str, str]) -> None:
        """Note what is tried apart from now on, by its id, and why; a trial that had it is over."""
        tx, by_reason = schema.tx, defaultdict[str, list[str]](list)
        for name, why in reasons.items():
            by_reason[why].append(name)
        with self._database.begin() as connection:
            for why, names in by_reason.items():
                for some in schema.in_groups(names):
                    held = tx.update().where(tx.c.id.in_(some), tx.c.settled_at.is_(None), self._owns_shard())
                    connection.execute(held.values(held=1, held_why=why, publish_at_ms=None))

    def _owns_shard(self) -> sa.ColumnElement[bool]:
        return sa.exists().where(self._lease.is_held)

    def _is_ready(self) -> sa.ColumnElement[bool]:
        """Return the condition of what can be settled now.

        Of a line that is its beginning, up to the first that is undecided, not due or held.
        """
        tx, now_ms = schema.tx, self._database.now_ms
        earlier = tx.alias("earlier")
        waits = earlier.c.publish_at_ms.is_(None) | (earlier.c.publish_at_ms > now_ms)
        is_behind = sa.exists().where(schema.is_before_in_line(earlier), waits)
        goes = sa.or_(tx.c.order_key.is_(None), tx.c.state == schema.ROLLBACK, ~is_behind)
        return sa.and_(tx.c.shard == self._lease.number, tx.c.publish_at_ms <= now_ms, goes)

    @staticmethod
    def _decided(connection: sa.Connection, some: sa.ColumnElement[bool]) -> list[Pending]:
        """Return decided transactions with their messages."""
        is_open = schema.tx.c.settled_at.is_(None)
        return list(map(_pending, connection.execute(sa.select(schema.tx).where(some, is_open).order_by(_ORDER))))

    def _mark_settled(self, some: sa.ColumnElement[bool]) -> None:
        """Mark decided transactions as settled, and count them."""
        tx = schema.tx
        now, kept = self._database.now, sa.case((tx.c.state == schema.DISCARD, tx.c.halves))
        answered, age = schema.answered_checks.label("answered"), (now - tx.c.birth).label("age")
        decided = sa.select(tx.c.id, tx.c.state, answered, age).where(
            some, tx.c.settled_at.is_(None), tx.c.state != schema.PREPARED
        )
        with self._database.begin() as connection:
            settled = connection.execute(decided.with_for_update()).all()
            over = tx.update().where(tx.c.id.in_([row.id for row in settled]))
            connection.execute(over.values(settled_at=now, publish_at_ms=None, halves=kept))
        for row in settled:
            self._counts.answered_checks += row.answered
            self._counts.settled(Verdict(row.state), row.age)


def _pending(row: Any) -> Pending:
    """Return a transaction whose time has come, with its messages."""
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
    """Return what stands in the done log for a transaction that went to the discarded topic, or the id of that.

    One that is resumed later and commits is not taken for published because it was discarded once.
    """
    return id_text(bytes(octet ^ 0xFF for octet in id_bytes(transaction_id)))
