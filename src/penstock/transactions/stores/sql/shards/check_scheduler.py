"""Which undecided transactions are checked now, and which meet the discard policy: in statements."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial

import sqlalchemy as sa

from penstock.transactions.core.discard import Exhausted
from penstock.transactions.stores.relay.relayed_store import CheckTerms
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.database import Database
from penstock.transactions.stores.sql.writer import Decision
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Author, Verdict

_log = logging.getLogger("penstock.transactions")

#: Transactions in one round.
_AT_ONCE = 1_000


class SqlCheckScheduler:
    """Sends checks, and hands over to the discard policy. Used by the coordinator's thread."""

    def __init__(self, database: Database, checks: CheckTerms) -> None:
        self._database = database
        self._policy = checks.policy
        self._discarding = checks.discarding
        # Decisions that one thread makes together are written together: many exhausted ones delay nobody.
        self._gathering = threading.local()
        #: Checks that went to a live producer, and those whose group had none.
        self.sent = self.no_producer = 0

    def send_due(self, shards: list[int]) -> None:
        """Send the checks that are due: producers find them in the database."""
        tx, now = schema.tx, self._database.now
        undecided = sa.and_(tx.c.shard.in_(shards), tx.c.settled_at.is_(None), tx.c.state == schema.PREPARED)
        again = sa.and_(tx.c.question > 0, tx.c.asked_at + self._policy.interval_s <= now)
        first = sa.and_(tx.c.question == 0, tx.c.check_count < self._policy.maximum, self._due() <= now)
        is_due = sa.and_(undecided, sa.or_(again, first))
        due = sa.select(tx.c.id, tx.c.producer_group).where(is_due).limit(_AT_ONCE)
        alive = schema.alive
        with self._database.read() as connection:
            rows = connection.execute(due).all()
            if not rows:
                return
            living = set(
                connection.execute(sa.select(alive.c.producer_group).where(schema.is_living_producer(now))).scalars()
            )
        with self._database.begin() as connection:
            connection.execute(
                tx.update()
                # Still due: one that was answered since it was read would be checked once more, and too soon.
                .where(tx.c.id.in_([row.id for row in rows]), is_due)
                .values(question=tx.c.check_count + 1, asked_at=now, taken_until=0.0)
            )
        reached_nobody = [row.producer_group for row in rows if row.producer_group not in living]
        self.sent += len(rows) - len(reached_nobody)
        if reached_nobody:
            self.no_producer += len(reached_nobody)
            _log.error(
                "no producer of %s answers checks: %d transactions wait; start one with a check",
                ", ".join(sorted(set(reached_nobody))),
                len(reached_nobody),
            )

    def settle_exhausted(self, shards: list[int]) -> None:
        """Apply the discard policy to those whose checks are exhausted."""
        tx = schema.tx
        exhausted = sa.select(tx.c.id, tx.c.producer_group, tx.c.check_count).where(
            tx.c.shard.in_(shards),
            tx.c.settled_at.is_(None),
            tx.c.state == schema.PREPARED,
            tx.c.question == 0,
            tx.c.check_count >= self._policy.maximum,
            self._due() <= self._database.now,
        )
        with self._database.read() as connection:
            rows = connection.execute(exhausted.limit(_AT_ONCE)).all()
        self._gathering.decisions = gathered = list[Decision]()
        try:
            for row in rows:
                half, decide = partial(self._half, row.id), partial(self._decide, row.id)
                self._discarding.settle(Exhausted(row.id, row.producer_group, row.check_count, half, decide))
        finally:
            del self._gathering.decisions
        self._write(gathered)

    def _due(self) -> sa.ColumnElement[float]:
        tx, policy = schema.tx, self._policy
        first = tx.c.birth + sa.case((tx.c.immunity > policy.timeout_s, tx.c.immunity), else_=policy.timeout_s)
        interval: sa.ColumnElement[float] = sa.literal(policy.interval_s, sa.Double)
        if policy.backoff > 1.0:
            # From some number of checks on it grows no more.
            pauses: dict[int, float] = {}
            for n in range(1, policy.maximum + 1):
                pauses[n] = policy.interval(n)
                if pauses[n] == pauses.get(n - 1):
                    break
            whens = [(tx.c.check_count == n, pause) for n, pause in pauses.items()]
            interval = sa.case(*whens, else_=pauses[max(pauses)])
        return sa.case((tx.c.answered_at.is_(None), first), else_=tx.c.answered_at + interval)

    def _half(self, transaction_id: str) -> Half | None:
        """Read the first half of a transaction that nobody has decided, or None."""
        tx, message = schema.tx, schema.message
        both = sa.select(tx, message).join_from(tx, message, (message.c.tx == tx.c.id) & (message.c.part == 0))
        with self._database.read() as connection:
            row = connection.execute(both.where(tx.c.id == transaction_id, tx.c.state == schema.PREPARED)).first()
        return None if row is None else schema.half_of(row, row, 1)

    def _decide(self, transaction_id: str, verdict: Verdict) -> None:
        decision = Decision(transaction_id, None, verdict, Author.COORDINATOR)
        gathered: list[Decision] | None = getattr(self._gathering, "decisions", None)
        if gathered is None:
            self._write([decision])
        else:
            gathered.append(decision)

    def _write(self, decisions: Sequence[Decision]) -> None:
        if not decisions:
            return
        with self._database.begin() as connection:
            for decision in decisions:
                decision.write(self._database, connection)
