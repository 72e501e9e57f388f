"""What a coordinator of a SQL store has counted, and what the store holds."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import sqlalchemy as sa

from penstock.clients.bounded_calls import BriefQuestion
from penstock.transactions.model import FINISH_BUCKETS_S, CoordinatorStatistics
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.database import Database
from penstock.transactions.stores.sql.shards.check_scheduler import SqlCheckScheduler
from penstock.transactions.stores.sql.shards.relay_queries import Settled

#: Refusals that one statement counts.
_AT_ONCE = 10_000
#: Seconds that `statistics` waits for the database; after that it returns what was found last.
_MOMENT_S = 1.0


class _Held(NamedTuple):
    """What the store holds."""

    pending: int
    oldest_pending_age: float
    held: int
    delayed: int
    held_by_key: int
    #: Answered checks of what is pending.
    answered: int


class SqlCounts:
    """Counts of one coordinator since its start. Written by its thread alone, read by all; each is a number."""

    def __init__(self, database: Database, checks: SqlCheckScheduler, name: str) -> None:
        self._database = database
        self._checks = checks
        self._name = name
        self._settled = {schema.COMMIT: 0, schema.ROLLBACK: 0, schema.DISCARD: 0}
        self._finish_times = [0] * (len(FINISH_BUCKETS_S) + 1)
        self._finish_seconds = 0.0
        self._answered = self._refused = 0
        self._question = BriefQuestion("counts of the SQL store")
        # What was found last, of all shards (True) and of some. Each is replaced as a whole.
        self._last: dict[bool, _Held] = {}
        # Checks of pending transactions that were answered before the start.
        self._answered_before = 0

    def begin(self) -> None:
        """Begin to count."""
        self._look(None)
        self._answered_before = self._last[True].answered

    def settled(self, found: Iterable[Settled]) -> None:
        """Count transactions that were settled."""
        for one in found:
            self._answered += one.answered
            if one.state == schema.COMMIT:
                self._finish_times[bisect.bisect_left(FINISH_BUCKETS_S, one.age_s)] += 1
                self._finish_seconds += max(one.age_s, 0.0)
            # Last, as `statistics` reads it first: what is counted here is counted in all.
            self._settled[one.state] += 1

    def refusals(self) -> None:
        """Count the refused decisions that no coordinator has counted: each has one that does."""
        refusal = schema.refusal
        new = sa.select(refusal.c.number).where(refusal.c.counted_by.is_(None)).limit(_AT_ONCE)
        with self._database.read() as connection:
            if connection.execute(new.limit(1)).first() is None:
                return
        with self._database.begin() as connection:
            mine = refusal.c.number.in_(new.with_for_update(skip_locked=True))
            counted = connection.execute(refusal.update().where(mine).values(counted_by=self._name)).rowcount
        self._refused += counted

    def statistics(self, shards: Collection[int] | None = None) -> CoordinatorStatistics:
        """Return what was counted, and what the store holds, in all shards or in some; what relays count is 0.

        What the store holds is what was found last, where the database does not answer at once.
        """
        # Before the database is asked: what is counted here is not pending there any more. What is settled at this very
        # moment may be in neither.
        counts, answered_so_far = dict(self._settled), self._answered
        finish_times, finish_seconds = tuple(self._finish_times), self._finish_seconds
        with suppress(sa.exc.SQLAlchemyError):
            self._question.ask(partial(self._look, shards), _MOMENT_S)
        last = self._last.get(shards is None) or self._last[True]
        return CoordinatorStatistics(
            partitions=0,
            pending=last.pending,
            oldest_pending_age=last.oldest_pending_age,
            held=last.held,
            committed=counts[schema.COMMIT],
            rolled_back=counts[schema.ROLLBACK],
            discarded=counts[schema.DISCARD],
            refused=self._refused,
            forged=0,
            checks=self._checks.sent,
            answered_checks=answered_so_far + last.answered - self._answered_before,
            no_producer=self._checks.no_producer,
            groups=0,
            recoveries=0,
            held_by_key=last.held_by_key,
            delayed=last.delayed,
            finish_times=finish_times,
            finish_seconds=finish_seconds,
        )

    def _look(self, shards: Collection[int] | None) -> None:
        """Count what the store holds now, in all shards or in some."""
        tx, now = schema.tx, self._database.now
        pending = sa.and_(tx.c.settled_at.is_(None), sa.true() if shards is None else tx.c.shard.in_(shards))
        committed = pending & (tx.c.state == schema.COMMIT)
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
            self._last[shards is None] = _Held(
                pending=number,
                oldest_pending_age=max(oldest or 0.0, 0.0),
                held=count(pending & (tx.c.held_until > now) & (tx.c.held_count > 0)),
                delayed=count(committed & (tx.c.deliver_at_ms > now * 1000)),
                held_by_key=count(committed & tx.c.order_key.is_not(None) & behind),
                answered=int(answered),
            )
