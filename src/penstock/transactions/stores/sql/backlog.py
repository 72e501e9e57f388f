"""The shards of a SQL store that are a coordinator's, by leases in the database, and what waits in each; in statements.

Leases go by the database's clock, and are shared evenly among the coordinators that live. Of a shard there is what is
to be published, what is held, and what was settled.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import sqlalchemy as sa

from penstock.transactions.core.pending import Pending
from penstock.transactions.stores.coordination import Counts
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.database import Database
from penstock.transactions.stores.stored_backlog import decided
from penstock.transactions.wire.half import BY_OPERATOR, EXHAUSTED
from penstock.transactions.wire.ids import id_bytes, id_text
from penstock.transactions.wire.ops import Author, Verdict

_log = logging.getLogger("penstock.transactions")


class Leases:
    """The leases of one coordinator, by its name that no other has. Used by its thread.

    A lease that ran out (after `session_s` of silence) and was not taken by another is still good: the epoch says so.
    """

    def __init__(self, database: Database, name: str, session_s: float) -> None:
        self._database = database
        self._name = name
        self._session_s = session_s
        #: Epochs by shard.
        self.owned: dict[int, int] = {}

    def renew_all(self) -> None:
        """Say that this coordinator lives, renew what it has, and take its share of what is free."""
        schema.write_heartbeat(self._database, "coordinator", self._name)
        for number in list(self.owned):
            if not self.renew(number):
                del self.owned[number]
        share = self._share()
        while len(self.owned) < share and self._take():
            pass

    def surplus(self) -> list[int]:
        """Return the shards to give up, since others live that have none."""
        return sorted(self.owned)[self._share() :]

    def renew(self, number: int, **noted: Any) -> bool:
        """Renew a lease, and note something in the shard's row; tell whether it is still this coordinator's."""
        shard, until = schema.shard, self._database.now + self._session_s
        with self._database.begin() as connection:
            renewed = shard.update().where(self.is_mine(number)).values(lease_until=until, **noted)
            is_mine = bool(connection.execute(renewed).rowcount)
        if not is_mine:
            _log.warning("shard %d was taken by another coordinator", number)
        return is_mine

    def claimed(self, number: int) -> list[str]:
        """Return the transactional ids that were written down last for a shard."""
        with self._database.read() as connection:
            found = connection.execute(sa.select(schema.shard.c.claim).where(schema.shard.c.number == number)).scalar()
        return (found or "").split()

    def give_up(self, number: int) -> None:
        """Leave a shard to others. Nothing may be under way in it."""
        with self._database.begin() as connection:
            connection.execute(schema.shard.update().where(self.is_mine(number)).values(owner=None, lease_until=0.0))
        del self.owned[number]

    def is_mine(self, number: int) -> sa.ColumnElement[bool]:
        """Return the condition that a shard is this coordinator's, for a statement that must not do without."""
        shard = schema.shard
        return sa.and_(
            shard.c.number == number, shard.c.owner == self._name, shard.c.epoch == self.owned.get(number, -1)
        )

    def leave(self) -> None:
        """Give all up, and be no longer counted."""
        for number in list(self.owned):
            self.give_up(number)
        schema.remove_heartbeat(self._database, self._name)

    def _share(self) -> int:
        alive, now = schema.alive, self._database.now
        living = alive.c.seen > now - self._session_s
        with self._database.read() as connection:
            names = connection.execute(
                sa.select(alive.c.name).where(alive.c.kind == "coordinator", living).order_by(alive.c.name)
            ).scalars()
            others = [name for name in names if name != self._name]
            total = connection.execute(sa.select(sa.func.count()).select_from(schema.shard)).scalar_one()
        rank = sum(name < self._name for name in others)
        base, rest = divmod(total, len(others) + 1)
        return int(base + (rank < rest))

    def _take(self) -> bool:
        shard, now = schema.shard, self._database.now
        free = (
            sa.select(shard.c.number)
            .where(sa.or_(shard.c.owner.is_(None), shard.c.lease_until < now))
            .order_by(shard.c.number)
            .limit(1)
            # Another that takes one at the same time takes the next.
            .with_for_update(skip_locked=True)
        )
        with self._database.begin() as connection:
            number = connection.execute(free).scalar()
            if number is None:
                return False
            taken = {"owner": self._name, "lease_until": now + self._session_s, "epoch": shard.c.epoch + 1}
            ((epoch,),) = self._database.update(connection, shard, shard.c.number == number, taken, [shard.c.epoch])
        self.owned[number] = epoch
        return True


#: Transactions in one group, or in one statement.
GROUP = 500
#: The order of the decisions. It is sorted: SQLite would walk its index of all decisions, for the sake of the order.
_DECIDED = schema.tx.c.decided_seq + sa.literal_column("0", sa.BigInteger)


class SqlBacklog:
    """One shard. Used by the coordinator's thread."""

    def __init__(self, database: Database, shard: int, leases: Leases, counts: Counts) -> None:
        self._database = database
        self._shard = shard
        self._leases = leases
        self._counts = counts
        self._ready = self._is_ready()
        #: Whether another coordinator has the shard.
        self.is_lost = False

    def may_open(self, claim: Sequence[str]) -> bool:
        """Renew the lease: a coordinator that lost the shard must not fence its new owner."""
        self.is_lost = self.is_lost or not self._leases.renew(self._shard, claim=" ".join(claim))
        return not self.is_lost

    def claimed(self) -> Sequence[str]:
        """Return the transactional ids that were written down last."""
        return self._leases.claimed(self._shard)

    def taken_over(self, names: Sequence[str]) -> None:
        """Mark transactions as settled, by their names in the done log, and free what a former owner held."""
        tx = schema.tx
        for some in _in_groups(names):
            discarded = tx.c.id.in_(list(map(_other_id, some))) & (tx.c.state == schema.DISCARD)
            self._settle(sa.or_(tx.c.id.in_(some) & (tx.c.state == schema.COMMIT), discarded))
        held = (tx.c.shard == self._shard) & tx.c.settled_at.is_(None) & (tx.c.held != schema.FREE)
        with self._database.begin() as connection:
            connection.execute(tx.update().where(held, self._mine()).values(**schema.FREE_AGAIN))

    def take(self, limit: int, room_bytes: int) -> Sequence[Pending]:
        """Return what to publish next, and settle what was rolled back. Waits for nobody."""
        if self.is_lost:
            return ()
        tx, message = schema.tx, schema.message
        # No less than the queue takes them for: headers are in hexadecimal digits.
        lengths = (sa.func.coalesce(sa.func.length(message.c[name]), 0) for name in ("key", "value", "headers"))
        sizes = sa.select(sa.func.sum(sum(lengths, sa.literal_column("0")))).where(message.c.tx == tx.c.id)
        earlier = tx.alias("before_it")
        is_decided = earlier.c.state.in_((schema.COMMIT, schema.DISCARD))
        before = sa.select(sa.func.count()).select_from(earlier).where(schema.before_it(earlier), is_decided)
        sums = sizes.scalar_subquery().label("size"), before.scalar_subquery().label("before")
        found = sa.select(tx, *sums).where(self._ready)
        with self._database.read() as connection:
            # With the ownership, after the relay was opened: whoever takes the shard from now on fences this one.
            self.is_lost = not self._is_mine(connection)
            if self.is_lost:
                return ()
            rows = connection.execute(found.order_by(_DECIDED).limit(min(limit, GROUP))).all()
            rolled_back = [row.id for row in rows if row.state == schema.ROLLBACK]
            rows = _in_line([row for row in rows if row.state != schema.ROLLBACK])
            total = accumulate((row.size or 0 for row in rows), initial=0)
            fitting = [row for row, taken in zip(rows, total, strict=False) if taken + (row.size or 0) <= room_bytes]
            entries = self._decided(connection, fitting or rows[:1])
        if rolled_back:
            self._settle(tx.c.id.in_(rolled_back))
        return entries

    def wants_visible(self, some: Sequence[Pending]) -> bool:  # noqa: ARG002 - it is not known here
        """Whether it is waited for until they can be seen: who waits may be in any process."""
        return True

    def published(self, ids: Sequence[str]) -> None:
        """Mark transactions as settled; those that are already are left alone."""
        for some in _in_groups(ids):
            self._settle(schema.tx.c.id.in_(some))

    def hold(self, reasons: Mapping[str, str]) -> None:
        """Note what is tried apart from now on, and why; a trial that had it is over."""
        tx, by_reason = schema.tx, defaultdict[str, list[str]](list)
        for name, why in reasons.items():
            by_reason[why].append(name)
        with self._database.begin() as connection:
            for why, names in by_reason.items():
                for some in _in_groups(names):
                    held = tx.update().where(tx.c.id.in_(some), tx.c.settled_at.is_(None), self._mine())
                    connection.execute(held.values(held=schema.HELD, held_why=why, publish_at_ms=None))

    def take_held(self, ids: Sequence[str]) -> Mapping[str, Pending | None]:
        """Take what is held for a trial; None stands for what is settled."""
        tx = schema.tx
        with self._database.begin() as connection:
            self.is_lost = not self._is_mine(connection)
            if self.is_lost:
                return {}
            held = sa.and_(tx.c.id.in_(ids), tx.c.settled_at.is_(None), tx.c.state.in_((schema.COMMIT, schema.DISCARD)))
            tried = {"held": schema.TRIED, "publish_at_ms": None}
            rows = self._database.update(connection, tx, held, tried, list(tx.c))
            found = {pending.transaction_id: pending for pending in self._decided(connection, rows)}
        return dict[str, Pending | None].fromkeys(ids) | found

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

    def _decided(self, connection: sa.Connection, rows: Sequence[Any]) -> list[Pending]:
        """Return transactions with their messages."""
        message, parts = schema.message, defaultdict[str, list[Any]](list)
        of_rows = message.c.tx.in_([row.id for row in rows])
        wanted = sa.select(message).where(of_rows).order_by(message.c.tx, message.c.part)
        for part in connection.execute(wanted) if rows else ():
            parts[part.tx].append(part)
        return [_pending(row, parts[row.id]) for row in rows]

    def _settle(self, some: sa.ColumnElement[bool]) -> None:
        """Mark decided transactions as settled, and count them."""
        tx, message = schema.tx, schema.message
        over = {"settled_at": self._database.now, "publish_at_ms": None, "held": schema.FREE, "taken_until": 0.0}
        answered, age = schema.answered().label("answered"), (tx.c.settled_at - tx.c.birth).label("age")
        found = sa.and_(some, tx.c.settled_at.is_(None), tx.c.state != schema.PREPARED)
        with self._database.begin() as connection:
            settled = self._database.update(connection, tx, found, over, [tx.c.id, tx.c.state, answered, age])
            gone = [row.id for row in settled if row.state != schema.DISCARD]
            if gone:
                connection.execute(message.delete().where(message.c.tx.in_(gone)))
        for row in settled:
            self._counts.answered_checks += row.answered
            self._counts.settled(Verdict(row.state), row.age)


def _in_line(rows: Sequence[Any]) -> list[Any]:
    """Return the rows before which all that stand before them in their line are returned.

    A row may be ready together with an earlier one of its line that was decided before it. Another one in between may
    not: it was decided first, and waits for the earlier one. Then the row waits for both.
    """
    found: list[Any] = []
    taken = Counter[tuple[str, bytes | None]]()
    for row in rows:
        line = row.producer_group, None if row.order_key is None else bytes(row.order_key)
        if row.order_key is None or row.before == taken[line]:
            taken[line] += 1
            found.append(row)
    return found


def _in_groups(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield names in portions for one statement each."""
    return (names[start : start + GROUP] for start in range(0, len(names), GROUP))


def _pending(row: Any, parts: Sequence[Any]) -> Pending:
    halves = [schema.half_of(row, part, len(parts)) for part in parts]
    done_name = row.id if row.state == schema.COMMIT else _other_id(row.id)
    return decided(halves, Verdict(row.state), Author(row.author), row.check_count, done_name)


def reason_of_discard(author: int | None) -> str:
    """Return why a transaction was discarded, given who decided that."""
    return BY_OPERATOR if author == Author.OPERATOR else EXHAUSTED


def _other_id(transaction_id: str) -> str:
    """Return what stands in the done log for a transaction that went to the discarded topic, or the id of that.

    One that is resumed later and commits is not taken for published because it was discarded once.
    """
    return id_text(bytes(octet ^ 0xFF for octet in id_bytes(transaction_id)))
