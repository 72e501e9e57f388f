"""The shards of a SQL store, as its coordinator works on them: statements, made by the coordinator's thread alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

import sqlalchemy as sa

from penstock.transactions.connections import cause_of
from penstock.transactions.model import CoordinatorStatistics
from penstock.transactions.stores.relay.backlog import Reason
from penstock.transactions.stores.relay.publishable import Publishable
from penstock.transactions.stores.relay.relay import Relay
from penstock.transactions.stores.relay.relayed_store import CheckTerms
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.database import Database
from penstock.transactions.stores.sql.shards.check_scheduler import SqlCheckScheduler
from penstock.transactions.stores.sql.shards.counts import SqlCounts
from penstock.transactions.stores.sql.shards.leases import Leases
from penstock.transactions.stores.sql.shards.relay_queries import RelayQueries
from penstock.transactions.wire.ids import new_id

_log = logging.getLogger("penstock.transactions")

#: Seconds between two looks into the database: after something was found, and when nothing was.
_BUSY_S = 0.01
_IDLE_S = 0.1
#: Seconds between two looks for checks that are due; and leases are renewed so many times within a session.
_CHECK_S = 0.1
_RENEWALS = 4


class SqlShards:
    """What one coordinator has of a SQL store. Used by its thread, save for `statistics`."""

    #: The database may be away, fail over, or refuse one of two that wait for each other.
    transient_errors: tuple[type[Exception], ...] = (sa.exc.SQLAlchemyError,)

    def __init__(self, database: Database, name: str, count: int, discarded: str, checks: CheckTerms) -> None:
        self.name = name
        self.count = count
        #: Shards that others shall have.
        self.leaving: set[int] = set()
        coordinator = new_id()
        self._leases = Leases(database, coordinator, checks.session_s)
        self._slow_calls = _SlowCalls(database, self._leases)
        self._queries = RelayQueries(database, discarded)
        self._scheduler = SqlCheckScheduler(database, checks)
        self._counts = SqlCounts(database, self._scheduler, coordinator)
        self._renew_every_s = checks.session_s / _RENEWALS
        # Monotonic seconds of the next time.
        self._renew_at = self._check_at = 0.0
        self._counts.begin()

    @property
    def owned(self) -> Collection[int]:
        """The shards whose leases it has."""
        return self._leases.owned

    def transactional_id(self, shard: int) -> str:
        """Return the transactional id that publishes a shard."""
        return f"{self.name}.{shard}"

    def backlog(self, shard: int) -> SqlBacklog:
        """Return what waits in a shard."""
        return SqlBacklog(shard, self._leases, self._queries, self._counts)

    def renew(self) -> None:
        """Renew the leases, take free shards, and see which are to be handed over, when it is time."""
        now = time.monotonic()
        if now >= self._renew_at:
            self._renew_at = now + self._renew_every_s
            self._leases.renew_all()
            self._slow_calls.forget_lost()
            self.leaving = set(self._leases.surplus())

    def give_up(self, shard: int) -> None:
        """Leave a shard to others."""
        self._leases.give_up(shard)
        self.leaving.discard(shard)

    def check(self) -> None:
        """Send the checks that are due, and hand over those that are exhausted, when it is time."""
        now = time.monotonic()
        if now >= self._check_at:
            self._check_at = now + _CHECK_S
            self._counts.refusals()
            owned = sorted(self.owned)
            if owned:
                self._scheduler.send_due(owned)
                self._scheduler.settle_exhausted(owned)

    def is_durable(self) -> bool:
        """Whether all that was published is settled: it is, in the transaction that marks it."""
        return True

    def purge(self) -> None:
        """Delete what nobody will ask for."""
        self._queries.purge()

    def note_slow_call(self, shard: int, call: str, age_s: float) -> None:
        """Note the call that publication of a shard waits for."""
        self._slow_calls.note(shard, call, age_s)

    def wait_s(self, relays: Iterable[Relay], *, busy: bool) -> float:  # noqa: ARG002 - who writes there wakes nobody
        """Return the seconds after which to look into the database again."""
        return _BUSY_S if busy else _IDLE_S

    def close(self) -> None:
        """Give all up, and be no longer counted among the coordinators."""
        self._leases.leave()

    def statistics(self, shards: Collection[int] | None) -> CoordinatorStatistics:
        """Return what was counted and what the store holds. Safe from any thread."""
        return self._counts.statistics(shards)


class SqlBacklog:
    """What waits in one shard. Used by the coordinator's thread."""

    def __init__(self, shard: int, leases: Leases, queries: RelayQueries, counts: SqlCounts) -> None:
        self._shard = shard
        self._leases = leases
        self._queries = queries
        self._counts = counts
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
        """Return what to publish next, and settle what was rolled back."""
        if self.is_lost:
            return ()
        mine = self._leases.is_mine(self._shard)
        if not self._is_released:
            self._queries.release(self._shard, mine)
            self._is_released = True
        if not self._queries.has_ready(self._shard):
            return ()
        self._counts.settled(self._queries.roll_back(self._shard))
        # With the ownership, after the relay was opened: whoever takes the shard from now on fences this one.
        entries = self._queries.ready(self._shard, mine, limit, room_bytes)
        self.is_lost = entries is None
        return entries or ()

    def wants_visible(self, entries: Sequence[Publishable]) -> bool:  # noqa: ARG002 - it is not known here
        """Whether it is waited for until they can be seen: who waits may be in any process."""
        return True

    def published(self, names: Collection[str]) -> None:
        """Mark as settled what is published."""
        self._counts.settled(self._queries.settle(list(names)))

    def give_back(self, names: Collection[str]) -> None:
        """Nothing was marked: it is free."""

    def hold(self, reasons: Mapping[str, Reason]) -> None:
        """Have what is tried apart left alone by `take`."""
        self._queries.hold(reasons)

    def release(self, names: Collection[str]) -> None:
        """Let `take` return what was held."""
        self._queries.release(self._shard, self._leases.is_mine(self._shard), names)

    def take_held(self, names: Sequence[str]) -> Mapping[str, Publishable | None]:
        """Take what is held for a trial; None stands for what was discarded or settled."""
        found = self._queries.take_held(self._shard, names, self._leases.is_mine(self._shard))
        if found is None:
            self.is_lost = True
            return {}
        return {name: found.get(name) for name in names}

    def put_back(self, names: Collection[str]) -> None:
        """A trial is over."""
        self._queries.put_back(names, self._leases.is_mine(self._shard))


class _SlowCalls:
    """Calls into the Kafka client that have not gone on for long, for operators in other processes.

    Written down when they change. Used by the coordinator's thread.
    """

    def __init__(self, database: Database, leases: Leases) -> None:
        self._database = database
        self._leases = leases
        # By shard that is owned. Where there is none, a former owner may have left one.
        self._noted: dict[int, str] = {}

    def forget_lost(self) -> None:
        """Forget what was noted of shards that others have now."""
        self._noted = {one: noted for one, noted in self._noted.items() if one in self._leases.owned}

    def note(self, number: int, call: str, age_s: float) -> None:
        """Note the call of a shard, which has not gone on for so many seconds; an empty name where all calls do."""
        if self._noted.get(number) == call:
            return
        slow, shard = schema.slow_call, schema.shard
        values = sa.select(shard.c.number, sa.literal(call), self._database.now - age_s)
        # It is for people who look: where it cannot be written, for want of a right, say, publication goes on.
        self._noted[number] = call
        try:
            with self._database.begin() as connection:
                connection.execute(slow.delete().where(slow.c.shard == number))
                if call:
                    mine = values.where(self._leases.is_mine(number))
                    connection.execute(slow.insert().from_select([slow.c.shard, slow.c.call, slow.c.since], mine))
        except sa.exc.SQLAlchemyError as error:
            _log.warning("`penstock tx ls` is not told that %s hangs: %s", call or "no call", cause_of(error))
