"""What a coordinator reads and writes of the transactions of one shard: what is to be published, and what was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from penstock.transactions.ids import id_bytes, id_text
from penstock.transactions.outbound import OutboundMessage, Publishable
from penstock.transactions.records import BY_OPERATOR, EXHAUSTED, Author, encode_discarded
from penstock.transactions.sql import schema
from penstock.transactions.sql.database import Database

#: Transactions in one group.
GROUP = 500
#: Seconds until something that was refused is tried again: the first time, and at most.
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_LONGEST_POWER = 6
#: Settled rows are kept so long, for those who wait to hear of them; discarded ones, so that they can be resumed.
_KEPT_S = 60.0
_DISCARDED_KEPT_S = 30 * 24 * 3600.0
_REFUSALS_KEPT_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Settled:
    """A transaction that was settled.

    Attributes:
        state: how.
        answered: its answered checks, the one that decided included.
        age_s: seconds since its birth.
    """

    state: int
    answered: int
    age_s: float


class Claims:
    """The transactions of shards, in statements. Used by the coordinator's thread.

    Args:
        database: where they are.
        discarded: topic for those whose checks are exhausted.
    """

    def __init__(self, database: Database, discarded: str) -> None:
        self._database = database
        self._discarded = discarded

    def waiting(self, number: int) -> bool:
        """Tell whether something of a shard can be settled. Waits for nobody."""
        tx = schema.tx
        rolled_back = (tx.c.shard == number) & tx.c.settled_at.is_(None) & (tx.c.state == schema.ROLLBACK)
        with self._database.read() as connection:
            for condition in (rolled_back, self._ready(number)):
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

    def claim(self, number: int, mine: sa.ColumnElement[bool]) -> list[Publishable] | None:
        """Return what to publish next of a shard, in its order; None where the shard is another's."""
        tx, message = schema.tx, schema.message
        with self._database.read() as connection:
            if connection.execute(sa.select(schema.shard.c.number).where(mine)).first() is None:
                return None
            rows = connection.execute(
                sa.select(tx).where(self._ready(number)).order_by(tx.c.decided_seq).limit(GROUP)
            ).all()
            wanted = message.c.tx.in_([row.id for row in rows])
            parts: dict[str, list[Any]] = {}
            for part in connection.execute(sa.select(message).where(wanted).order_by(message.c.tx, message.c.part)):
                parts.setdefault(part.tx, []).append(part)
        return [self._publishable(row, parts.get(row.id, [])) for row in rows]

    def settle(self, ids: Sequence[str]) -> list[Settled]:
        """Mark transactions as settled; those that are already, or are unknown, are left alone.

        Args:
            ids: as `claim` gave them out, and the done log holds them.
        """
        settled = []
        for start in range(0, len(ids), GROUP):
            some = ids[start : start + GROUP]
            with self._database.begin() as connection:
                settled += self._settle(connection, some, schema.COMMIT)
                settled += self._settle(connection, list(map(_other_id, some)), schema.DISCARD)
        return settled

    def hold(self, refused: Mapping[str, str]) -> None:
        """Leave what Kafka refused alone for a while, longer each time."""
        tx, now = schema.tx, self._database.now
        # 2 ** n, which not every SQLite has.
        pause = sa.case(
            *((tx.c.held_count == n, _FIRST_PAUSE_S * 2**n) for n in range(_LONGEST_POWER)), else_=_LONGEST_PAUSE_S
        )
        with self._database.begin() as connection:
            for name, why in refused.items():
                connection.execute(
                    tx.update()
                    .where(tx.c.id.in_((name, _other_id(name))))
                    .values(held_until=now + pause, held_count=tx.c.held_count + 1, held_why=why)
                )

    def purge(self) -> None:
        """Delete what nobody will ask about."""
        tx, refusal, now = schema.tx, schema.refusal, self._database.now
        with self._database.begin() as connection:
            connection.execute(tx.delete().where(tx.c.settled_at < now - _KEPT_S, tx.c.state != schema.DISCARD))
            old = sa.and_(tx.c.settled_at < now - _DISCARDED_KEPT_S, tx.c.state == schema.DISCARD)
            message = schema.message
            connection.execute(message.delete().where(message.c.tx.in_(sa.select(tx.c.id).where(old))))
            connection.execute(tx.delete().where(old))
            connection.execute(refusal.delete().where(refusal.c.at < now - _REFUSALS_KEPT_S))
            connection.execute(schema.alive.delete().where(schema.alive.c.seen < now - _REFUSALS_KEPT_S))

    def _ready(self, number: int) -> sa.ColumnElement[bool]:
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
                sa.and_(
                    tx.c.state == schema.COMMIT,
                    sa.or_(tx.c.deliver_at_ms.is_(None), tx.c.deliver_at_ms <= now * 1000),
                ),
            ),
            sa.or_(tx.c.order_key.is_(None), ~in_the_way),
        )

    def _publishable(self, row: Any, parts: Sequence[Any]) -> Publishable:
        messages, name = [], row.id if row.state == schema.COMMIT else _other_id(row.id)
        for part in parts:
            key, value = (None if content is None else bytes(content) for content in (part.key, part.value))
            if row.state == schema.COMMIT:
                headers = schema.decode_headers(part.headers)
                messages.append(OutboundMessage(part.topic, part.partition, key, value, headers))
            else:
                half = schema.half_of(_Joined(row, part), len(parts))
                headers = tuple(encode_discarded(half, reason_of_discard(row.author), row.check_count))
                messages.append(OutboundMessage(self._discarded, None, key, value, headers))
        line = None if row.order_key is None else (row.producer_group, bytes(row.order_key))
        return Publishable(name, messages, line)

    def _settle(self, connection: sa.Connection, wanted: Sequence[str], state: int) -> list[Settled]:
        tx, message, now = schema.tx, schema.message, self._database.now
        if not wanted:
            return []
        rows = connection.execute(
            tx.update()
            .where(tx.c.id.in_(wanted), tx.c.settled_at.is_(None), tx.c.state == state)
            .values(settled_at=now, held_until=0.0)
            .returning(
                tx.c.id, tx.c.state, schema.answered().label("answered"), (tx.c.settled_at - tx.c.birth).label("age")
            )
        ).all()
        if state != schema.DISCARD:
            connection.execute(message.delete().where(message.c.tx.in_([row.id for row in rows])))
        return [Settled(row.state, row.answered, row.age) for row in rows]


def reason_of_discard(author: int | None) -> str:
    """Return why a transaction was discarded, given who decided that."""
    return BY_OPERATOR if author == Author.OPERATOR else EXHAUSTED


def _other_id(transaction_id: str) -> str:
    """Return what stands in the done log for a transaction that went to the discarded topic, or the id of that.

    One that is resumed later and commits is not taken for published because it was discarded once.
    """
    return id_text(bytes(octet ^ 0xFF for octet in id_bytes(transaction_id)))


class _Joined:
    """A transaction's row and a message's row as one."""

    def __init__(self, row: Any, part: Any) -> None:
        self._row = row
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name) if hasattr(self._part, name) else getattr(self._row, name)


__all__ = ["GROUP", "Claims", "Settled", "reason_of_discard"]
