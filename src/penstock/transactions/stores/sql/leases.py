"""The lease of a coordinator on a shard of a SQL store, by the database's clock."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.database import Database

_log = logging.getLogger("penstock.transactions")


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of one coordinator on one shard. Used by its thread.

    An expired lease (after `session_s` of silence) stays valid until another coordinator takes the shard: the epoch
    shows that.

    Attributes:
        database: the database of the shard.
        owner: the coordinator's unique name.
        session_s: seconds for which no other coordinator may take the shard.
        number: the shard.
        epoch: rises with each owner.
    """

    database: Database
    owner: str
    session_s: float
    number: int
    epoch: int

    @classmethod
    def take(cls, database: Database, owner: str, session_s: float) -> Lease | None:
        """Take a free shard, or return None if there is none."""
        shard, now = schema.shard, database.now
        free = (
            sa.select(shard.c.number, shard.c.epoch)
            .where(sa.or_(shard.c.owner.is_(None), shard.c.lease_until < now))
            .order_by(shard.c.number)
            .limit(1)
            # A coordinator that takes a shard at the same time takes the next one.
            .with_for_update(skip_locked=True)
        )
        with database.begin() as connection:
            row = connection.execute(free).first()
            if row is None:
                return None
            taken = shard.update().where(shard.c.number == row.number)
            connection.execute(taken.values(owner=owner, lease_until=now + session_s, epoch=row.epoch + 1))
        return cls(database, owner, session_s, row.number, row.epoch + 1)

    @property
    def is_held(self) -> sa.ColumnElement[bool]:
        """The condition that the shard still belongs to this coordinator, for statements that require it."""
        shard = schema.shard
        return sa.and_(shard.c.number == self.number, shard.c.owner == self.owner, shard.c.epoch == self.epoch)

    def renew(self, **values: Any) -> bool:
        """Renew the lease, and write values into the shard's row. Return whether the lease still holds."""
        until = self.database.now + self.session_s
        with self.database.begin() as connection:
            renewed = schema.shard.update().where(self.is_held).values(lease_until=until, **values)
            is_held = bool(connection.execute(renewed).rowcount)
        if not is_held:
            _log.warning("shard %d was taken by another coordinator", self.number)
        return is_held

    def give_up(self) -> None:
        """Release the shard. No publication may be under way."""
        with self.database.begin() as connection:
            connection.execute(schema.shard.update().where(self.is_held).values(owner=None, lease_until=0.0))
