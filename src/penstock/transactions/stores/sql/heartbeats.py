"""Signs of life in the database: which coordinators and which producers that answer checks are alive."""

from __future__ import annotations

from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.database import Database


def write_heartbeat(database: Database, kind: str, name: str, group: str = "") -> None:
    """Write down that a `coordinator` or a `producer` (the kind) is alive. No other has its name."""
    alive = schema.alive
    insert = database.insert(alive).values(kind=kind, name=name, producer_group=group, seen=database.now)
    with database.begin() as connection:
        connection.execute(insert.on_conflict_do_update(index_elements=["kind", "name"], set_={"seen": database.now}))


def remove_heartbeat(database: Database, name: str) -> None:
    """Let somebody count as gone at once."""
    with database.begin() as connection:
        connection.execute(schema.alive.delete().where(schema.alive.c.name == name))
