"""Calls into the Kafka client that have not gone on for long, by shard, for operators in other processes."""

from __future__ import annotations

import logging

import sqlalchemy as sa

from penstock.transactions.connections import cause_of
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.database import Database
from penstock.transactions.stores.sql.shards.leases import Leases

_log = logging.getLogger("penstock.transactions")


class SlowCalls:
    """Writes them down when they change. Used by the coordinator's thread."""

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
