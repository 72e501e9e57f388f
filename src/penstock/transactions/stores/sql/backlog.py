"""What waits in one shard of a SQL store: what is to be published, what is held, what was settled; in statements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import sqlalchemy as sa

from penstock.transactions.stores.relay.counts import Counts
from penstock.transactions.stores.relay.publishable import OutboundMessage, Publishable
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.database import Database
from penstock.transactions.stores.sql.leases import Leases
from penstock.transactions.wire.discarded import BY_OPERATOR, EXHAUSTED, encode_discarded
from penstock.transactions.wire.ids import id_bytes, id_text
from penstock.transactions.wire.ops import Author, Verdict

#: Transactions in one group, or in one statement.
GROUP = 500
#: The order of the decisions. It is sorted: SQLite would walk its index of all decisions, for the sake of the order.
_DECIDED = schema.tx.c.decided_seq + sa.literal_column("0", sa.BigInteger)


class SqlBacklog:
    """One shard. Used by the coordinator's thread."""

    def __init__(self, database: Database, shard: int, leases: Leases, discarded: str, counts: Counts) -> None:
        self._database = database
        self._shard = shard
        self._leases = leases
        self._discarded = discarded
        self._counts = counts
        self._ready = self._is_ready()
        # Whether what a former owner held was released.
        self._is_released = False
        #: Whether another coordinator has the shard.
        self.is_lost = False

    def may_open(self, claim: Sequence[str]) -> bool:
        """Renew the lease: a coordinator that lost the shard must not fence its new owner."""
        self.is_lost = self.is_lost or not self._leases.claim(self._shard, claim)
        return not self.is_lost

    def claimed(self) -> Sequence[str]:
        """Return the transactional ids that were written down last."""
        return self._leases.claimed(self._shard)

    def take(self, limit: int, room_bytes: int) -> Sequence[Publishable]:
        """Return what to publish next, and settle what was rolled back. Waits for nobody."""
        if self.is_lost:
            return ()
        if not self._is_released:
            # Whoever had the shard was shut out, and the done log was read.
            self._release(sa.true())
            self._is_released = True
        tx, message = schema.tx, schema.message
        sizes = sa.select(sa.func.sum(sa.func.length(message.c.value))).where(message.c.tx == tx.c.id)
        found = sa.select(tx, sizes.scalar_subquery().label("size")).where(self._ready)
        with self._database.read() as connection:
            # With the ownership, after the relay was opened: whoever takes the shard from now on fences this one.
            self.is_lost = not self._is_mine(connection)
            if self.is_lost:
                return ()
            rows = connection.execute(found.order_by(_DECIDED).limit(min(limit, GROUP))).all()
            rolled_back = [row.id for row in rows if row.state == schema.ROLLBACK]
            rows = [row for row in rows if row.state != schema.ROLLBACK]
            before = accumulate((row.size or 0 for row in rows), initial=0)
            fitting = [row for row, taken in zip(rows, before, strict=False) if taken + (row.size or 0) <= room_bytes]
            entries = self._publishables(connection, fitting or rows[:1])
        if rolled_back:
            self._settle({schema.ROLLBACK: rolled_back})
        return entries

    def wants_visible(self, entries: Sequence[Publishable]) -> bool:  # noqa: ARG002 - it is not known here
        """Whether it is waited for until they can be seen: who waits may be in any process."""
        return True

    def published(self, names: Collection[str]) -> None:
        """Mark transactions as settled; those that are already are left alone."""
        ids = list(names)
        for start in range(0, len(ids), GROUP):
            some = ids[start : start + GROUP]
            self._settle({schema.COMMIT: some, schema.DISCARD: list(map(_other_id, some))})

    def hold(self, reasons: Mapping[str, str]) -> None:
        """Note what is tried apart from now on, and why."""
        tx, by_reason = schema.tx, defaultdict[str, list[str]](list)
        for name, why in reasons.items():
            by_reason[why].append(name)
        still = sa.case((tx.c.held == schema.TRIED, schema.TRIED), else_=schema.HELD)
        with self._database.begin() as connection:
            for why, names in by_reason.items():
                for some in _in_groups(names):
                    held = tx.update().where(some, tx.c.settled_at.is_(None))
                    connection.execute(held.values(held=still, held_why=why, publish_at_ms=None))

    def release(self, names: Collection[str]) -> None:
        """Let `take` return what was held; what was only taken is free."""
        for some in _in_groups(names):
            self._release(some)

    def take_held(self, names: Sequence[str]) -> Mapping[str, Publishable | None]:
        """Take what is held for a trial; None stands for what was discarded or settled."""
        tx, found = schema.tx, dict[str, Publishable | None].fromkeys(names)
        with self._database.begin() as connection:
            self.is_lost = not self._is_mine(connection)
            if self.is_lost:
                return {}
            for wanted, state in ((names, schema.COMMIT), (list(map(_other_id, names)), schema.DISCARD)):
                held = sa.and_(
                    tx.c.id.in_(wanted), tx.c.shard == self._shard, tx.c.settled_at.is_(None), tx.c.state == state
                )
                tried = {"held": schema.TRIED, "publish_at_ms": None}
                rows = self._database.update(connection, tx, held, tried, list(tx.c))
                found.update((entry.transaction_id, entry) for entry in self._publishables(connection, rows))
        return found

    def put_back(self, names: Collection[str]) -> None:
        """A trial of these is over."""
        tx = schema.tx
        with self._database.begin() as connection:
            for some in _in_groups(names):
                tried = tx.update().where(some, tx.c.held == schema.TRIED, self._mine())
                connection.execute(tried.values(held=schema.HELD))

    def _release(self, some: sa.ColumnElement[bool]) -> None:
        tx = schema.tx
        held = (tx.c.shard == self._shard) & tx.c.settled_at.is_(None) & (tx.c.held != schema.FREE)
        with self._database.begin() as connection:
            connection.execute(tx.update().where(held, some, self._mine()).values(**schema.FREE_AGAIN))

    def _mine(self) -> sa.ColumnElement[bool]:
        return sa.exists(sa.select(schema.shard.c.number).where(self._leases.is_mine(self._shard)))

    def _is_mine(self, connection: sa.Connection) -> bool:
        mine = self._leases.is_mine(self._shard)
        return connection.execute(sa.select(schema.shard.c.number).where(mine)).first() is not None

    def _is_ready(self) -> sa.ColumnElement[bool]:
        """Return the condition of what can be settled now."""
        tx = schema.tx
        earlier = tx.alias("earlier")
        in_the_way = sa.exists().where(
            schema.before_it(earlier),
            sa.or_(
                earlier.c.state == schema.PREPARED,
                # It was decided later but goes first; or it goes first and is held.
                sa.and_(
                    earlier.c.state.in_((schema.COMMIT, schema.DISCARD)),
                    sa.or_(earlier.c.decided_seq > tx.c.decided_seq, earlier.c.held != schema.FREE),
                ),
            ),
        )
        return sa.and_(
            tx.c.shard == self._shard,
            tx.c.publish_at_ms <= self._database.now_ms,
            sa.or_(tx.c.state == schema.ROLLBACK, tx.c.order_key.is_(None), ~in_the_way),
        )

    def _publishables(self, connection: sa.Connection, rows: Sequence[Any]) -> list[Publishable]:
        """Return transactions with their messages."""
        message, parts = schema.message, defaultdict[str, list[Any]](list)
        of_rows = message.c.tx.in_([row.id for row in rows])
        wanted = sa.select(message).where(of_rows).order_by(message.c.tx, message.c.part)
        for part in connection.execute(wanted) if rows else ():
            parts[part.tx].append(part)
        return [self._publishable(row, parts[row.id]) for row in rows]

    def _publishable(self, row: Any, parts: Sequence[Any]) -> Publishable:
        messages, name = [], row.id if row.state == schema.COMMIT else _other_id(row.id)
        for part in parts:
            key, value = (None if content is None else bytes(content) for content in (part.key, part.value))
            if row.state == schema.COMMIT:
                headers = schema.decode_headers(part.headers)
                messages.append(OutboundMessage(part.topic, part.partition, key, value, headers))
            else:
                half = schema.half_of(row, part, len(parts))
                headers = tuple(encode_discarded(half, reason_of_discard(row.author), row.check_count))
                messages.append(OutboundMessage(self._discarded, None, key, value, headers))
        if row.state == schema.DISCARD:
            return Publishable(name, messages, None, discards=row.id)
        line = None if row.order_key is None else (row.producer_group, bytes(row.order_key))
        return Publishable(name, messages, line)

    def _settle(self, wanted: Mapping[int, Sequence[str]]) -> None:
        """Mark transactions as settled, by the state that they must have, and count them."""
        tx, message = schema.tx, schema.message
        over = {"settled_at": self._database.now, "publish_at_ms": None, "held": schema.FREE, "taken_until": 0.0}
        answered, age = schema.answered().label("answered"), (tx.c.settled_at - tx.c.birth).label("age")
        settled: list[Any] = []
        with self._database.begin() as connection:
            for state, ids in wanted.items():
                found = sa.and_(tx.c.id.in_(ids), tx.c.settled_at.is_(None), tx.c.state == state)
                rows = self._database.update(connection, tx, found, over, [tx.c.id, tx.c.state, answered, age])
                if rows and state != schema.DISCARD:
                    connection.execute(message.delete().where(message.c.tx.in_([row.id for row in rows])))
                settled += rows
        for row in settled:
            self._counts.answered_checks += row.answered
            self._counts.settled(Verdict(row.state), row.age)


def _in_groups(names: Iterable[str]) -> Iterator[sa.ColumnElement[bool]]:
    """Yield conditions for transactions by their names in the done log, each for some of them."""
    tx, ids = schema.tx, list(names)
    for start in range(0, len(ids), GROUP):
        some = ids[start : start + GROUP]
        yield sa.or_(
            tx.c.id.in_(some) & (tx.c.state == schema.COMMIT),
            tx.c.id.in_(list(map(_other_id, some))) & (tx.c.state == schema.DISCARD),
        )


def reason_of_discard(author: int | None) -> str:
    """Return why a transaction was discarded, given who decided that."""
    return BY_OPERATOR if author == Author.OPERATOR else EXHAUSTED


def _other_id(transaction_id: str) -> str:
    """Return what stands in the done log for a transaction that went to the discarded topic, or the id of that.

    One that is resumed later and commits is not taken for published because it was discarded once.
    """
    return id_text(bytes(octet ^ 0xFF for octet in id_bytes(transaction_id)))
