"""A sink that lacks a right in PostgreSQL or MariaDB says what the server refused before it stores anything."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from arrow_frames import GONE, frame

from databases import TestDatabase, new_database
from penstock.clients.rights import MissingRightError
from penstock.spark_sink import SqlSink

SCHEMA = frame(GONE, []).schema


def sink_of(database: TestDatabase, user: str | None = None, **settings: Any) -> SqlSink:
    url = sa.make_url(database.url)
    text = (url if user is None else url.set(username=user)).render_as_string(hide_password=False)
    return SqlSink(text, "orders", ["id"], delete="gone", **settings)


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(MissingRightError, match="a sink needs SELECT, INSERT and UPDATE on its table") as raised:
        act()
    assert (raised.value.__cause__, raised.value.__suppress_context__) == (None, True)
    return str(raised.value)


#: What a sink with a key and deletions needs in a schema, and what the server refuses without.
NEEDED = {
    "USAGE ON SCHEMA shop": "schema shop",
    "CREATE ON SCHEMA shop": "schema shop",
    **{f"{right} ON TABLE shop.orders": "table orders" for right in ("SELECT", "INSERT", "UPDATE", "DELETE")},
    **{f"{right} ON TABLE shop.penstock_ledger": "table penstock_ledger" for right in ("SELECT", "INSERT", "UPDATE")},
}


@pytest.fixture
def role(postgresql_url: str) -> Iterator[tuple[TestDatabase, str]]:
    """Return a database with the tables of a sink, and a role without rights: roles are the server's."""
    database = new_database(postgresql_url)
    name = f"clerk_of_{sa.make_url(database.url).database}"
    database.execute(f"CREATE ROLE {name} LOGIN", "CREATE SCHEMA shop")
    sink_of(database, schema="shop").check(SCHEMA)
    yield database, name
    database.execute(f"DROP OWNED BY {name}", f"DROP ROLE {name}")


def test_each_right_that_is_missing_in_postgresql_shows_at_the_start(role: tuple[TestDatabase, str]) -> None:
    database, name = role
    sink = sink_of(database, name, schema="shop")
    database.execute(*(f"GRANT {right} TO {name}" for right in NEEDED))
    sink.check(SCHEMA)

    for right, refused in NEEDED.items():
        database.execute(f"REVOKE {right} FROM {name}")
        assert f"42501, permission denied for {refused}; nothing" in refusal(lambda: sink.check(SCHEMA))
        database.execute(f"GRANT {right} TO {name}")

    database.execute(f"REVOKE INSERT ON shop.orders FROM {name}", f"GRANT INSERT (id, price) ON shop.orders TO {name}")
    sink.check(SCHEMA)  # rights on its columns are enough
    wider = frame({**GONE, "more": GONE["price"]}, []).schema
    evolving = sink_of(database, name, schema="shop", evolve=True)
    assert "must be owner of table orders" in refusal(lambda: evolving.check(wider))
    database.execute(f"REVOKE ALL ON shop.penstock_ledger FROM {name}")
    assert "permission denied for table penstock_ledger" in refusal(sink.ledger)


#: What a sink with a key and deletions needs in MariaDB, on both of its tables and on the database, by its staging.
OF_TABLES = [*((right, table) for table in ("orders", "penstock_ledger") for right in ("SELECT", "INSERT", "UPDATE")),
             ("DELETE", "orders")]  # fmt: skip
OF_MARIADB: dict[Any, list[tuple[str, str]]] = {
    "driver": [*OF_TABLES, ("CREATE TEMPORARY TABLES", "*")],
    "executors": [(right, "*") for right in ("SELECT", "INSERT", "CREATE", "DROP")],
}


@pytest.mark.thorough
@pytest.mark.parametrize("staged", OF_MARIADB)
def test_each_right_that_is_missing_in_mariadb_shows_at_the_start(mariadb: TestDatabase, staged: Any) -> None:
    name = str(sa.make_url(mariadb.url).database)[-30:]
    clerk = f"'{name}'@'127.0.0.1'"
    sink = sink_of(mariadb, name, staging=staged)
    sink_of(mariadb).check(SCHEMA)
    needed = OF_MARIADB[staged] + (OF_TABLES if staged == "executors" else [])
    mariadb.execute(f"CREATE USER {clerk}", *(f"GRANT {right} ON {table} TO {clerk}" for right, table in needed))
    sink.check(SCHEMA)

    for right, table in OF_MARIADB[staged]:
        mariadb.execute(f"REVOKE {right} ON {table} FROM {clerk}")
        assert re.search("1044|1142", refusal(lambda: sink.check(SCHEMA))), (right, table)
        mariadb.execute(f"GRANT {right} ON {table} TO {clerk}")
    wider = frame({**GONE, "more": GONE["price"]}, []).schema
    evolving = sink_of(mariadb, name, staging=staged, evolve=True)
    assert "1142, ALTER command denied to user" in refusal(lambda: evolving.check(wider))
    mariadb.execute(f"DROP USER {clerk}")
