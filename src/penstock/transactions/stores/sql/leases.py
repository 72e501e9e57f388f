"""The leases of a coordinator on the shards of a SQL store.

They go by the database's clock, and are shared evenly among the coordinators that live.
"""

from __future__ import annotations

import logging
from typing import Any

import sqlalchemy as sa

from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.database import Database

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
