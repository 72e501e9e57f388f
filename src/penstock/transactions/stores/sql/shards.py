"""The shards of a SQL store, as its coordinator uses them: SQL statements of the coordinator's thread."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import sqlalchemy as sa

from penstock.clients.bounded_calls import BriefQuestion
from penstock.errors import StoreDamagedError
from penstock.transactions.model import CoordinatorStatistics
from penstock.transactions.stores.shards import CheckTerms, DueCheck, StoreShards
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.backlog import SqlBacklog
from penstock.transactions.stores.sql.database import Database
from penstock.transactions.stores.sql.leases import Lease
from penstock.transactions.stores.store_coordinator import Counts
from penstock.transactions.wire.half import Half, unpack_halves
from penstock.transactions.wire.ids import new_id

#: Seconds between two polls of the database: after one that found something, and after one that did not.
_BUSY_POLL_S = 0.01
_IDLE_POLL_S = 0.1
#: Seconds between two searches for due checks; and renewals of a lease within a session.
_CHECK_S = 0.1
_RENEWALS = 4
#: Most checks in one round.
_MAX_CHECKS = 1_000
#: Most refusals that one statement counts.
_MAX_REFUSALS = 1_000
#: Seconds that `statistics` waits for the database. After that it returns the last known numbers.
_STATISTICS_BUDGET_S = 1.0
#: Seconds that settled rows are kept, for producers that wait for the settlement; discarded rows, so that operators can
#: resume them; and heartbeats.
_SETTLED_KEPT_S = 60.0
_DISCARDED_KEPT_S = 30 * 24 * 3600.0
_SILENT_KEPT_S = 24 * 3600.0
#: Most rows that one transaction deletes: its statements have a time-out.
_PURGE_LIMIT = 10_000


class SqlShards(StoreShards):
    """One coordinator's view of a SQL store. Used by the coordinator's thread, except `statistics` and `half`."""

    def __init__(self, database: Database, name: str, count: int, terms: CheckTerms) -> None:
        super().__init__(name, count, Counts())
        self._database = database
        self._policy = terms.policy
        self._coordinator = new_id()
        self._session_s = terms.session_s
        self._leases: dict[int, Lease] = {}
        # Monotonic seconds of the next renewal and of the next search for checks.
        self._renew_at = self._check_at = 0.0
        self._question = BriefQuestion("counts of the SQL store")
        # The last counts of the store: of all shards (True) and of some (False), as fields of the statistics.
        # `answered_checks` counts those of pending transactions. Each dict is replaced as a whole.
        self._last: dict[bool, dict[str, Any]] = {}
        self._read_counts(None)
        # Checks of pending transactions that were answered before the start.
        self._answered_before = self._last[True]["answered_checks"]

    @property
    def owned(self) -> Collection[int]:
        """The shards whose leases this coordinator has."""
        return self._leases

    def backlog(self, shard: int) -> SqlBacklog:
        """Return the backlog of a shard."""
        return SqlBacklog(self._database, self._leases[shard], self.counts)

    def renew(self) -> None:
        """At the due time: renew the leases, take free shards up to the share, and leave shards above it."""
        now = time.monotonic()
        if now < self._renew_at:
            return
        self._renew_at = now + self._session_s / _RENEWALS
        schema.write_heartbeat(self._database, "coordinator", self._coordinator)
        for number, lease in list(self._leases.items()):
            if not lease.renew():
                del self._leases[number]
        share = self._share()
        while len(self._leases) < share and (new := Lease.take(self._database, self._coordinator, self._session_s)):
            self._leases[new.number] = new
        self._require_same_tables()
        self.leaving = set(sorted(self._leases)[share:])

    def _require_same_tables(self) -> None:
        """Raise an error if the tables were made again: they have another done log and other transactional ids."""
        with self._database.read() as connection:
            uuid = connection.execute(sa.select(schema.store.c.uuid)).scalar()
        if not self.name.endswith(f".sql-{uuid}"):
            raise StoreDamagedError(
                "the tables penstock_* of the SQL store were dropped and made again while its coordinator ran, and "
                "what they held is gone; start the coordinator again"
            )

    def _share(self) -> int:
        """Return the number of shards that this coordinator should have among the living ones."""
        alive, now = schema.alive, self._database.now
        living = (alive.c.kind == "coordinator") & (alive.c.seen > now - self._session_s)
        with self._database.read() as connection:
            names = set(connection.execute(sa.select(alive.c.name).where(living)).scalars()) | {self._coordinator}
        base, rest = divmod(self.count, len(names))
        return base + (sorted(names).index(self._coordinator) < rest)

    def give_up(self, shard: int) -> None:
        """Release a shard."""
        self._leases[shard].give_up()
        del self._leases[shard]
        super().give_up(shard)

    def due(self) -> Sequence[DueCheck]:
        """Return due checks, at the due time, and offer them to producers. Each is due again after an interval."""
        now_s = time.monotonic()
        if now_s < self._check_at:
            return ()
        self._check_at = now_s + _CHECK_S
        self._count_refusals()
        tx, policy, now = schema.tx, self._policy, self._database.now
        is_immune = tx.c.immunity > policy.timeout_s
        first_at = tx.c.birth + sa.case((is_immune, tx.c.immunity), else_=policy.timeout_s)
        is_open = tx.c.settled_at.is_(None) & (tx.c.state == schema.PREPARED)
        found = (
            sa.select(tx.c.id, tx.c.producer_group, tx.c.check_count, now.label("now"))
            .where(tx.c.shard.in_(sorted(self.owned)), is_open, sa.func.coalesce(tx.c.check_at, first_at) <= now)
            .limit(_MAX_CHECKS)
        )
        with self._database.read() as connection:
            rows = connection.execute(found).all() if self.owned else ()
        plans = [
            {"of": row.id, "after": row.check_count, "at": row.now + policy.interval(row.check_count + 1)}
            for row in rows
        ]
        if plans:
            # A check that was answered since the read has another plan.
            is_unanswered = (tx.c.id == sa.bindparam("of")) & (tx.c.check_count == sa.bindparam("after"))
            asked_at = sa.case((tx.c.check_count < policy.maximum, now))
            planned = tx.update().where(is_unanswered, is_open).values(check_at=sa.bindparam("at"), asked_at=asked_at)
            with self._database.begin() as connection:
                connection.execute(planned, plans)
        return [DueCheck(row.id, row.producer_group, row.check_count) for row in rows]

    def ask(self, due: Sequence[DueCheck]) -> Collection[str]:
        """Return the groups without a living producer. The others find their checks in the database."""
        alive, now = schema.alive, self._database.now
        with self._database.read() as connection:
            living = connection.execute(sa.select(alive.c.producer_group).where(schema.is_living_producer(now)))
            return {check.group for check in due}.difference(living.scalars())

    def half(self, due: DueCheck) -> Half | None:
        """Read the first half of an undecided transaction, or None."""
        is_undecided = (schema.tx.c.id == due.transaction_id) & (schema.tx.c.state == schema.PREPARED)
        with self._database.read() as connection:
            halves = connection.execute(sa.select(schema.tx.c.halves).where(is_undecided)).scalar()
        return None if halves is None else unpack_halves(halves)[0]

    def _count_refusals(self) -> None:
        """Count the refused decisions. The coordinator that deletes a row counts it."""
        number = schema.refusal.c.number
        with self._database.read() as connection:
            first = connection.execute(sa.select(sa.func.min(number))).scalar()
        if first is not None:
            with self._database.begin() as connection:
                counted = connection.execute(schema.refusal.delete().where(number < first + _MAX_REFUSALS))
            self.counts.refused += counted.rowcount

    def purge(self) -> None:
        """Delete settled transactions and heartbeats that are old, and drawn numbers. The next call goes on."""
        tx, now = schema.tx, self._database.now
        self._move_astray()
        is_discarded = tx.c.state == schema.DISCARD
        self._purge(tx, "id", (tx.c.settled_at < now - _SETTLED_KEPT_S) & ~is_discarded)
        self._purge(tx, "id", (tx.c.settled_at < now - _DISCARDED_KEPT_S) & is_discarded)
        with self._database.begin() as connection:
            connection.execute(schema.alive.delete().where(schema.alive.c.seen < now - _SILENT_KEPT_S))
        if self._database.kind == "mysql":
            # The counter goes on without its rows.
            self._purge(schema.drawn, "n", sa.true())

    def _move_astray(self) -> None:
        """Move transactions into shards that exist: a sender may know tables from before, which had more."""
        tx = schema.tx
        # A line keeps its order. With the expressions, every planner looks at these shards only.
        is_astray = (tx.c.shard >= self.count) & (sa.func.coalesce(tx.c.settled_at, 0) == 0)
        astray = sa.select(tx.c.id).where(is_astray).order_by(tx.c.seq + 0).limit(_MAX_CHECKS)
        with self._database.read() as connection:
            ids = connection.execute(astray).scalars().all()
        if ids:
            with self._database.begin() as connection:
                connection.execute(tx.update().where(tx.c.id.in_(ids)).values(shard=tx.c.shard % self.count))

    def _purge(self, table: sa.TableClause, key: str, old: sa.ColumnElement[bool]) -> None:
        """Delete old rows, until none is left or the leases are due for renewal: publication waits meanwhile."""
        is_full = True
        while is_full:
            with self._database.begin() as connection:
                keys = list(connection.execute(sa.select(table.c[key]).where(old).limit(_PURGE_LIMIT)).scalars())
                for portion in schema.in_groups(keys):
                    self._database.delete(connection, table, key, portion)
            is_full = len(keys) == _PURGE_LIMIT and time.monotonic() < self._renew_at

    def note_slow_call(self, shard: int, call: str, age_s: float) -> None:
        """Write down the call that publication of a shard waits for."""
        self._leases[shard].renew(slow_call=call or None, slow_since=self._database.now - age_s)

    def wait_s(self, *, takes_more: bool, busy: bool) -> float:  # noqa: ARG002 - a write wakes no thread
        """Return the seconds until the next poll of the database."""
        return _BUSY_POLL_S if busy else _IDLE_POLL_S

    def close(self) -> None:
        """Release all shards, and leave the coordinators."""
        for shard in list(self._leases):
            self.give_up(shard)
        schema.remove_heartbeat(self._database, self._coordinator)

    def statistics(self, shards: Collection[int] | None = None) -> CoordinatorStatistics:
        """Return the counts since the start, and the content of the store. Safe from any thread.

        If the database does not answer at once, the content is that of the last answer.
        """
        # Read before the database: a transaction counted here is no longer pending there. One that is being settled at
        # this moment may be in neither.
        counted = self.counts.statistics()
        with suppress(sa.exc.SQLAlchemyError):
            self._question.ask(partial(self._read_counts, shards), _STATISTICS_BUDGET_S)
        last = self._last.get(shards is None) or self._last[True]
        answered = counted.answered_checks + last["answered_checks"] - self._answered_before
        return replace(counted, **{**last, "answered_checks": answered})

    def _read_counts(self, shards: Collection[int] | None) -> None:
        """Count the content of the store now, in all shards or in some."""
        tx, now = schema.tx, self._database.now
        pending = sa.and_(tx.c.settled_at.is_(None), sa.true() if shards is None else tx.c.shard.in_(shards))
        place = sa.func.row_number().over(partition_by=schema.line, order_by=tx.c.seq).label("place")
        in_lines = sa.select(tx.c.state, place).where(pending, tx.c.order_key.is_not(None)).subquery()
        behind = sa.select(sa.func.count()).where(in_lines.c.place > 1, in_lines.c.state == schema.COMMIT)
        sums = {"held": schema.is_set_aside, "delayed": schema.is_delayed(self._database)}
        found = sa.select(
            sa.func.count().label("pending"),
            (now - sa.func.min(tx.c.birth)).label("oldest_pending_age"),
            sa.func.sum(schema.answered_checks).label("answered_checks"),
            *(sa.func.sum(sa.case((condition, 1), else_=0)).label(name) for name, condition in sums.items()),
            behind.scalar_subquery().label("held_by_key"),
        )
        with self._database.read() as connection:
            row = connection.execute(found.where(pending)).mappings().one()
        counted = {name: int(row[name] or 0) for name in row if name != "oldest_pending_age"}
        self._last[shards is None] = {**counted, "oldest_pending_age": max(0.0, row["oldest_pending_age"] or 0.0)}
