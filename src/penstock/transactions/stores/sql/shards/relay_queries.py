"""The statements of a relay: what of a shard is to be published, what is held, and what was settled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import sqlalchemy as sa

from penstock.transactions.stores.relay.backlog import Reason
from penstock.transactions.stores.relay.publishable import OutboundMessage, Publishable
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.database import Database
from penstock.transactions.wire.discarded import BY_OPERATOR, EXHAUSTED, encode_discarded
from penstock.transactions.wire.ids import id_bytes, id_text
from penstock.transactions.wire.ops import Author

#: Transactions in one group.
GROUP = 500
#: Seconds for which what is tried apart is left alone by the main path; its relay knows it longer.
_HELD_S = 600.0
#: Settled rows are kept so long, for those who wait to hear of them; discarded ones, so that they can be resumed.
_KEPT_S = 60.0
_DISCARDED_KEPT_S = 30 * 24 * 3600.0
_REFUSALS_KEPT_S = 24 * 3600.0
#: Transactions that one statement deletes: it has a time limit.
_PURGED = 10_000


@dataclass(frozen=True, slots=True)
class Settled:
    """A transaction that was settled."""

    state: int
    #: Its answered checks, the one that decided included.
    answered: int
    #: Since its birth.
    age_s: float


class RelayQueries:
    """The transactions of shards, in statements. Used by the coordinator's thread."""

    def __init__(self, database: Database, discarded: str) -> None:
        self._database = database
        self._discarded = discarded

    def has_ready(self, number: int) -> bool:
        """Tell whether something of a shard can be settled. Waits for nobody."""
        tx = schema.tx
        rolled_back = (tx.c.shard == number) & tx.c.settled_at.is_(None) & (tx.c.state == schema.ROLLBACK)
        with self._database.read() as connection:
            for condition in (rolled_back, self._is_ready(number)):
                if connection.execute(sa.select(tx.c.id).where(condition).limit(1)).first() is not None:
                    return True
        return False

    def roll_back(self, number: int) -> list[Settled]:
        """Settle what was rolled back."""
        tx = schema.tx
        with self._database.begin() as connection:
            found = sa.select(tx.c.id).where(
                tx.c.shard == number, tx.c.settled_at.is_(None), tx.c.state == schema.ROLLBACK
            )
            ids = list(connection.execute(found.limit(GROUP)).scalars())
            return self._settle(connection, ids, schema.ROLLBACK)

    def ready(self, number: int, mine: sa.ColumnElement[bool], limit: int, room_bytes: int) -> list[Publishable] | None:
        """Return what to publish next of a shard, in its order; None where the shard is another's.

        It is `limit` transactions at most, and `room_bytes` of values; a single one may be larger.
        """
        tx, message = schema.tx, schema.message
        sizes = sa.select(sa.func.sum(sa.func.length(message.c.value))).where(message.c.tx == tx.c.id)
        found = sa.select(tx, sizes.scalar_subquery().label("size")).where(self._is_ready(number))
        with self._database.read() as connection:
            if connection.execute(sa.select(schema.shard.c.number).where(mine)).first() is None:
                return None
            rows = connection.execute(found.order_by(tx.c.decided_seq).limit(min(limit, GROUP))).all()
            behind = accumulate((row.size or 0 for row in rows), initial=0)
            fitting = [row for row, before in zip(rows, behind, strict=False) if before + (row.size or 0) <= room_bytes]
            return self._publishables(connection, fitting or rows[:1])

    def settle(self, ids: Sequence[str]) -> list[Settled]:
        """Mark transactions, by their names in the done log, as settled; those that are already are left alone."""
        settled = []
        for start in range(0, len(ids), GROUP):
            some = ids[start : start + GROUP]
            with self._database.begin() as connection:
                settled += self._settle(connection, some, schema.COMMIT)
                settled += self._settle(connection, list(map(_other_id, some)), schema.DISCARD)
        return settled

    def hold(self, reasons: Mapping[str, Reason]) -> None:
        """Note what is tried apart from now on, and why; what waits for another was not refused itself."""
        tx, now = schema.tx, self._database.now
        with self._database.begin() as connection:
            for name, (why, behind) in reasons.items():
                connection.execute(
                    tx.update()
                    .where(tx.c.id.in_((name, _other_id(name))), tx.c.settled_at.is_(None))
                    .values(
                        held_until=now + _HELD_S, held_count=tx.c.held_count + 1 if behind is None else 0, held_why=why
                    )
                )

    def release(self, number: int, mine: sa.ColumnElement[bool], names: Collection[str] | None = None) -> None:
        """Let go what is held of a shard: some by their names, or all that a former owner held.

        The latter once whoever had it was shut out, and the done log was read.
        """
        tx = schema.tx
        held = (tx.c.shard == number) & tx.c.settled_at.is_(None) & (tx.c.state != schema.PREPARED)
        marked = sa.or_(tx.c.held_until > 0, tx.c.taken_until > 0)
        with self._database.begin() as connection:
            for some in [sa.true()] if names is None else _in_groups(tx.c.id, names):
                released = tx.update().where(held, marked, some, _is(mine))
                connection.execute(released.values(held_until=0.0, taken_until=0.0))

    def take_held(
        self, number: int, names: Sequence[str], mine: sa.ColumnElement[bool]
    ) -> dict[str, Publishable] | None:
        """Take what is held for a trial: until `put_back` nobody discards it; None where the shard is another's.

        What is missing in what it returns was settled, or decided in another way.
        """
        tx, now = schema.tx, self._database.now
        found: dict[str, Publishable] = {}
        with self._database.begin() as connection:
            if connection.execute(sa.select(schema.shard.c.number).where(mine)).first() is None:
                return None
            for wanted, state in ((names, schema.COMMIT), (list(map(_other_id, names)), schema.DISCARD)):
                held = tx.c.id.in_(wanted) & (tx.c.shard == number)
                rows = connection.execute(
                    tx.update()
                    .where(held, tx.c.settled_at.is_(None), tx.c.state == state)
                    .values(taken_until=schema.TAKEN, held_until=now + _HELD_S)
                    .returning(*tx.c)
                ).all()
                found.update((entry.transaction_id, entry) for entry in self._publishables(connection, rows))
        return found

    def put_back(self, names: Iterable[str], mine: sa.ColumnElement[bool]) -> None:
        """A trial of these is over."""
        tx = schema.tx
        with self._database.begin() as connection:
            for some in _in_groups(tx.c.id, names):
                connection.execute(
                    tx.update().where(some, tx.c.taken_until >= schema.TAKEN, _is(mine)).values(taken_until=0.0)
                )

    def purge(self) -> None:
        """Delete what nobody will ask about."""
        tx, refusal, now = schema.tx, schema.refusal, self._database.now
        while self._purge((tx.c.settled_at < now - _KEPT_S) & (tx.c.state != schema.DISCARD)):
            pass
        while self._purge((tx.c.settled_at < now - _DISCARDED_KEPT_S) & (tx.c.state == schema.DISCARD)):
            pass
        with self._database.begin() as connection:
            connection.execute(refusal.delete().where(refusal.c.at < now - _REFUSALS_KEPT_S))
            connection.execute(schema.alive.delete().where(schema.alive.c.seen < now - _REFUSALS_KEPT_S))

    def _purge(self, old: sa.ColumnElement[bool]) -> bool:
        """Delete old transactions with their messages, as many as one statement may; tell whether there may be more."""
        tx, message = schema.tx, schema.message
        with self._database.begin() as connection:
            ids = list(connection.execute(sa.select(tx.c.id).where(old).limit(_PURGED)).scalars())
            for start in range(0, len(ids), GROUP):
                some = ids[start : start + GROUP]
                connection.execute(message.delete().where(message.c.tx.in_(some)))
                connection.execute(tx.delete().where(tx.c.id.in_(some)))
        return len(ids) == _PURGED

    def _is_ready(self, number: int) -> sa.ColumnElement[bool]:
        """Return the condition of what can be published now."""
        tx, now = schema.tx, self._database.now
        earlier = tx.alias("earlier")
        in_the_way = sa.exists().where(
            schema.before_it(earlier),
            sa.or_(
                earlier.c.state == schema.PREPARED,
                # It was decided later but goes first; or it goes first and is held.
                sa.and_(
                    earlier.c.state.in_((schema.COMMIT, schema.DISCARD)),
                    sa.or_(earlier.c.decided_seq > tx.c.decided_seq, earlier.c.held_until > now),
                ),
            ),
        )
        return sa.and_(
            tx.c.shard == number,
            tx.c.settled_at.is_(None),
            tx.c.held_until <= now,
            sa.or_(
                tx.c.state == schema.DISCARD,
                (tx.c.state == schema.COMMIT) & sa.or_(tx.c.deliver_at_ms.is_(None), tx.c.deliver_at_ms <= now * 1000),
            ),
            sa.or_(tx.c.order_key.is_(None), ~in_the_way),
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

    def _settle(self, connection: sa.Connection, wanted: Sequence[str], state: int) -> list[Settled]:
        tx, message, now = schema.tx, schema.message, self._database.now
        if not wanted:
            return []
        rows = connection.execute(
            tx.update()
            .where(tx.c.id.in_(wanted), tx.c.settled_at.is_(None), tx.c.state == state)
            .values(settled_at=now, held_until=0.0, taken_until=0.0)
            .returning(
                tx.c.id, tx.c.state, schema.answered().label("answered"), (tx.c.settled_at - tx.c.birth).label("age")
            )
        ).all()
        if state != schema.DISCARD:
            connection.execute(message.delete().where(message.c.tx.in_([row.id for row in rows])))
        return [Settled(row.state, row.answered, row.age) for row in rows]


def _in_groups(column: sa.Column[str], names: Iterable[str]) -> Iterator[sa.ColumnElement[bool]]:
    """Yield conditions for transactions by their names in the done log, each for some of them."""
    ids = [one for name in names for one in (name, _other_id(name))]
    return (column.in_(ids[start : start + GROUP]) for start in range(0, len(ids), GROUP))


def _is(mine: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    return sa.exists(sa.select(schema.shard.c.number).where(mine))


def reason_of_discard(author: int | None) -> str:
    """Return why a transaction was discarded, given who decided that."""
    return BY_OPERATOR if author == Author.OPERATOR else EXHAUSTED


def _other_id(transaction_id: str) -> str:
    """Return what stands in the done log for a transaction that went to the discarded topic, or the id of that.

    One that is resumed later and commits is not taken for published because it was discarded once.
    """
    return id_text(bytes(octet ^ 0xFF for octet in id_bytes(transaction_id)))
