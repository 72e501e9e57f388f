"""The shards of a SQL store, as its coordinator works on them: statements, made by the coordinator's thread."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import sqlalchemy as sa

from penstock.clients.bounded_calls import BriefQuestion
from penstock.transactions.model import CoordinatorStatistics
from penstock.transactions.stores.relay.counts import Counts
from penstock.transactions.stores.relay.shards import CheckTerms, DueCheck, StoreShards
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.backlog import GROUP, SqlBacklog
from penstock.transactions.stores.sql.database import Database
from penstock.transactions.stores.sql.leases import Leases
from penstock.transactions.stores.sql.mysql import forget_numbers
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id

#: Seconds between two looks into the database: after something was found, and when nothing was.
_BUSY_S = 0.01
_IDLE_S = 0.1
#: Seconds between two looks for checks that are due; and leases are renewed so many times within a session.
_CHECK_S = 0.1
_RENEWALS = 4
#: Checks in one round.
_CHECKS = 1_000
#: Refusals that one statement counts.
_REFUSALS = 1_000
#: Seconds that `statistics` waits for the database; after that it returns what was found last.
_MOMENT_S = 1.0
#: Settled rows are kept so long, for those who wait to hear of them; discarded ones, so that they can be resumed.
_KEPT_S = 60.0
_DISCARDED_KEPT_S = 30 * 24 * 3600.0
_REFUSALS_KEPT_S = 24 * 3600.0
#: Transactions that one statement deletes: it has a time limit.
_PURGED = 10_000


class SqlShards(StoreShards):
    """What one coordinator has of a SQL store. Used by its thread, save for `statistics` and `half`."""

    def __init__(self, database: Database, name: str, count: int, discarded: str, terms: CheckTerms) -> None:
        super().__init__(name, count, Counts())
        self._database = database
        self._discarded = discarded
        self._policy = terms.policy
        self._coordinator = new_id()
        self._leases = Leases(database, self._coordinator, terms.session_s)
        self._renew_every_s = terms.session_s / _RENEWALS
        # Monotonic seconds of the next time.
        self._renew_at = self._check_at = 0.0
        # Exhausted transactions, and when they are due again.
        self._exhausted: dict[str, float] = {}
        self._question = BriefQuestion("counts of the SQL store")
        # What the store held when it was looked at last, all shards (True) and some: fields of the statistics, where
        # answered checks are those of what is pending. Each is replaced as a whole.
        self._last: dict[bool, dict[str, Any]] = {}
        self._look(None)
        # Checks of pending transactions that were answered before the start.
        self._answered_before = self._last[True]["answered_checks"]

    @property
    def owned(self) -> Collection[int]:
        """The shards whose leases it has."""
        return self._leases.owned

    def backlog(self, shard: int) -> SqlBacklog:
        """Return what waits in a shard."""
        return SqlBacklog(self._database, shard, self._leases, self._discarded, self.counts)

    def renew(self) -> None:
        """Renew the leases, take free shards, and see which are to be handed over, when it is time."""
        now = time.monotonic()
        if now >= self._renew_at:
            self._renew_at = now + self._renew_every_s
            self._leases.renew_all()
            self.leaving = set(self._leases.surplus())

    def give_up(self, shard: int) -> None:
        """Leave a shard to others."""
        self._leases.give_up(shard)
        super().give_up(shard)

    def due(self) -> Sequence[DueCheck]:
        """Return what is due, when it is time; what is exhausted, once an interval."""
        now_s = time.monotonic()
        if now_s < self._check_at:
            return ()
        self._check_at = now_s + _CHECK_S
        self._count_refusals()
        if not self.owned:
            return ()
        tx = schema.tx
        is_exhausted = self._is_exhausted()
        columns = sa.select(tx.c.id, tx.c.producer_group, tx.c.check_count).limit(_CHECKS)
        with self._database.read() as connection:
            due = list(connection.execute(columns.where(self._is_due(), ~is_exhausted)))
            exhausted = connection.execute(columns.where(self._is_due(), is_exhausted)).all()
        again_s = now_s + self._policy.interval_s
        waiting = {row.id: self._exhausted[row.id] for row in exhausted if self._exhausted.get(row.id, 0.0) > now_s}
        due += [row for row in exhausted if row.id not in waiting]
        self._exhausted = {row.id: waiting.get(row.id, again_s) for row in exhausted}
        return [DueCheck(*row) for row in due]

    def ask(self, due: Sequence[DueCheck]) -> Collection[str]:
        """Let producers find the checks in the database; return the groups of which nobody looks there."""
        tx, alive, now = schema.tx, schema.alive, self._database.now
        with self._database.begin() as connection:
            living = connection.execute(sa.select(alive.c.producer_group).where(schema.is_living_producer(now)))
            groups = set(living.scalars())
            asked = {"question": tx.c.check_count + 1, "asked_at": now, "taken_until": 0.0}
            for start in range(0, len(due), GROUP):
                some = tx.c.id.in_([check.transaction_id for check in due[start : start + GROUP]])
                # Still due: one that was answered since it was read would be checked once more, and too soon.
                connection.execute(tx.update().where(some, self._is_due(), ~self._is_exhausted()).values(**asked))
        return {check.group for check in due} - groups

    def half(self, due: DueCheck) -> Half | None:
        """Read the first half of a transaction that nobody has decided, or None."""
        tx, message = schema.tx, schema.message
        both = sa.select(tx, message).join_from(tx, message, (message.c.tx == tx.c.id) & (message.c.part == 0))
        with self._database.read() as connection:
            row = connection.execute(both.where(tx.c.id == due.transaction_id, tx.c.state == schema.PREPARED)).first()
        return None if row is None else schema.half_of(row, row, 1)

    def _is_exhausted(self) -> sa.ColumnElement[bool]:
        """Return the condition of what was checked as often as is allowed."""
        return schema.tx.c.check_count >= self._policy.maximum

    def _is_due(self) -> sa.ColumnElement[bool]:
        """Return the condition of what is undecided and due: asked the first time, after an answer, or once more."""
        tx, policy, now = schema.tx, self._policy, self._database.now
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
        due = sa.case((tx.c.answered_at.is_(None), first), else_=tx.c.answered_at + interval)
        return sa.and_(
            tx.c.shard.in_(sorted(self.owned)),
            tx.c.settled_at.is_(None),
            tx.c.state == schema.PREPARED,
            sa.or_(
                (tx.c.question > 0) & (tx.c.asked_at + policy.interval_s <= now), (tx.c.question == 0) & (due <= now)
            ),
        )

    def _count_refusals(self) -> None:
        """Count the refused decisions that no coordinator has counted: each has one that does."""
        refusal = schema.refusal
        new = sa.select(refusal.c.number).where(refusal.c.counted_by.is_(None)).limit(_REFUSALS)
        with self._database.read() as connection:
            if connection.execute(new.limit(1)).first() is None:
                return
        with self._database.begin() as connection:
            numbers = list(connection.execute(new.with_for_update(skip_locked=True)).scalars())
            mine = refusal.c.number.in_(numbers)
            connection.execute(refusal.update().where(mine).values(counted_by=self._coordinator))
        self.counts.refused += len(numbers)

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
            if self._database.kind == "mysql":
                forget_numbers(connection)

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

    def note_slow_call(self, shard: int, call: str, age_s: float) -> None:
        """Write down the call that publication of a shard waits for."""
        slow, mine = schema.slow_call, self._leases.is_mine(shard)
        values = sa.select(schema.shard.c.number, sa.literal(call), self._database.now - age_s).where(mine)
        with self._database.begin() as connection:
            connection.execute(slow.delete().where(slow.c.shard == shard))
            if call:
                connection.execute(slow.insert().from_select([slow.c.shard, slow.c.call, slow.c.since], values))

    def wait_s(self, *, takes_more: bool, busy: bool) -> float:  # noqa: ARG002 - who writes there wakes nobody
        """Return the seconds after which to look into the database again."""
        return _BUSY_S if busy else _IDLE_S

    def close(self) -> None:
        """Give all up, and be no longer counted among the coordinators."""
        self._leases.leave()

    def statistics(self, shards: Collection[int] | None = None) -> CoordinatorStatistics:
        """Return what was counted, and what the store holds. Safe from any thread.

        What the store holds is what was found last, where the database does not answer at once.
        """
        # Before the database is asked: what is counted here is not pending there any more. What is settled at this very
        # moment may be in neither.
        counted = self.counts.statistics()
        with suppress(sa.exc.SQLAlchemyError):
            self._question.ask(partial(self._look, shards), _MOMENT_S)
        last = self._last.get(shards is None) or self._last[True]
        answered = counted.answered_checks + last["answered_checks"] - self._answered_before
        return replace(counted, **{**last, "answered_checks": answered})

    def _look(self, shards: Collection[int] | None) -> None:
        """Count what the store holds now, in all shards or in some."""
        tx, now = schema.tx, self._database.now
        pending = sa.and_(tx.c.settled_at.is_(None), sa.true() if shards is None else tx.c.shard.in_(shards))
        earlier = tx.alias("earlier")
        behind = sa.exists().where(schema.before_it(earlier))
        with self._database.read() as connection:

            def count(condition: sa.ColumnElement[bool]) -> int:
                return connection.execute(sa.select(sa.func.count()).select_from(tx).where(condition)).scalar_one()

            number, oldest, answered = connection.execute(
                sa.select(
                    sa.func.count(), now - sa.func.min(tx.c.birth), sa.func.coalesce(sa.func.sum(schema.answered()), 0)
                ).where(pending)
            ).one()
            self._last[shards is None] = {
                "pending": number,
                "oldest_pending_age": max(0.0, oldest or 0.0),
                "held": count(pending & (tx.c.held != schema.FREE)),
                "delayed": count(pending & schema.is_delayed(self._database)),
                "held_by_key": count(pending & (tx.c.state == schema.COMMIT) & tx.c.order_key.is_not(None) & behind),
                "answered_checks": int(answered),
            }
