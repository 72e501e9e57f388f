"""A sink that lacks a right in PostgreSQL or MariaDB says what the server refused, and the GRANTs that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from arrow_frames import GONE, frame

from databases import TestDatabase, new_database
from penstock.clients.rights import MissingRightError
from penstock.spark_sink import SqlSink

SCHEMA = frame(GONE, []).schema
#: What a sink with a key and deletions needs in a schema, and what the server refuses without.
NEEDED = {
    "USAGE ON SCHEMA shop": "schema shop",
    "CREATE ON SCHEMA shop": "schema shop",
    **{f"{right} ON TABLE shop.orders": "table orders" for right in ("SELECT", "INSERT", "UPDATE", "DELETE")},
    **{f"{right} ON TABLE shop.penstock_ledger": "table penstock_ledger" for right in ("SELECT", "INSERT", "UPDATE")},
}


def batch(offset: int = 0) -> Any:
    """Return a batch of one row."""
    return frame(GONE, [(0, offset, "canary-row", 1, False)], query="q")


@pytest.fixture
def database(postgresql_url: str) -> Iterator[TestDatabase]:
    made = new_database(postgresql_url)
    role = role_of(made)
    made.execute(f"CREATE ROLE {role} LOGIN", "CREATE SCHEMA shop")
    yield made
    made.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def role_of(database: TestDatabase) -> str:
    """Return the role of a test: they are the server's, so each has one of its own."""
    return f"clerk_of_{sa.make_url(database.url).database}"


def sink_of(database: TestDatabase, user: str | None = None, schema: str | None = "shop", **settings: Any) -> SqlSink:
    url = sa.make_url(database.url)
    text = (url if user is None else url.set(username=user)).render_as_string(hide_password=False)
    return SqlSink(text, "orders", ["id"], delete="gone", schema=schema, **settings)


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(MissingRightError) as raised:
        act()
    assert (raised.value.__cause__, raised.value.__suppress_context__) == (None, True)
    assert "canary-row" not in str(raised.value)
    return str(raised.value)


def statements_of(text: str) -> list[str]:
    """Return the statements that an error tells."""
    return text.partition("an administrator gives all that the sink needs with: ")[2].split("; ")


@pytest.mark.parametrize("missing", NEEDED)
def test_a_right_that_is_missing_shows_at_the_start_and_the_statements_give_it(
    database: TestDatabase, missing: str
) -> None:
    sink_of(database).check(SCHEMA)
    role = role_of(database)
    database.execute(*(f"GRANT {right} TO {role}" for right in NEEDED if right != missing))

    error = refusal(lambda: sink_of(database, role).check(SCHEMA))

    assert f"42501, permission denied for {NEEDED[missing]}; nothing" in error
    database.execute(*statements_of(error))
    sink_of(database, role).check(SCHEMA)


def test_a_right_that_is_taken_away_ends_the_batch_which_is_stored_once_it_is_given_again(
    database: TestDatabase,
) -> None:
    sink_of(database).check(SCHEMA)
    role, sink = role_of(database), sink_of(database, role_of(database), staging="driver")
    database.execute(*(f"GRANT {right} TO {role}" for right in NEEDED))
    sink(batch(), 0)
    database.execute(f"REVOKE UPDATE ON shop.penstock_ledger FROM {role}")

    error = refusal(lambda: sink(batch(1), 1))

    assert "batch 1 was refused by table orders" in error
    assert statements_of(error) == [
        f'GRANT USAGE, CREATE ON SCHEMA "shop" TO "{role}"',
        f'GRANT TEMPORARY ON DATABASE "{sa.make_url(database.url).database}" TO "{role}"',
        f'GRANT SELECT, INSERT, UPDATE, DELETE ON TABLE "shop"."orders" TO "{role}"',
        f'GRANT SELECT, INSERT, UPDATE ON TABLE "shop"."penstock_ledger" TO "{role}"',
    ]
    database.execute(*statements_of(error))
    sink(batch(1), 1)
    assert database.rows("SELECT next_offset FROM shop.penstock_ledger") == [(2,)]


def test_a_ledger_that_may_not_be_read_shows_before_the_query_begins_anywhere(database: TestDatabase) -> None:
    sink_of(database).check(SCHEMA)
    database.execute(f"GRANT USAGE, CREATE ON SCHEMA shop TO {role_of(database)}")

    assert "permission denied for table penstock_ledger" in refusal(sink_of(database, role_of(database)).position)


def test_columns_that_may_not_be_added_show_as_the_owners_right_and_rights_on_columns_are_enough(
    database: TestDatabase,
) -> None:
    sink_of(database).check(SCHEMA)
    role = role_of(database)
    database.execute(*(f"GRANT {right} TO {role}" for right in NEEDED if right != "INSERT ON TABLE shop.orders"))
    database.execute(f"GRANT INSERT (id, price) ON shop.orders TO {role}")
    sink_of(database, role).check(SCHEMA)

    wider = frame({**GONE, "more": GONE["price"]}, []).schema
    error = refusal(lambda: sink_of(database, role, evolve=True).check(wider))

    assert "must be owner of table orders" in error
    assert f'ALTER TABLE "shop"."orders" OWNER TO "{role}"' in statements_of(error)


#: What a sink with a key and deletions needs in MariaDB, on both of its tables and on the database.
OF_MARIADB = [
    *((right, table) for table in ("orders", "penstock_ledger") for right in ("SELECT", "INSERT", "UPDATE")),
    ("DELETE", "orders"),
    *((right, "*") for right in ("SELECT", "INSERT", "CREATE", "DROP", "CREATE TEMPORARY TABLES")),
]


@pytest.fixture
def clerk(mariadb: TestDatabase) -> Iterator[str]:
    """Return the name of a user of MariaDB without rights."""
    name = str(sa.make_url(mariadb.url).database)[-30:]
    mariadb.execute(f"CREATE USER '{name}'@'127.0.0.1'")
    yield name
    mariadb.execute(f"DROP USER '{name}'@'127.0.0.1'")


@pytest.mark.thorough
@pytest.mark.parametrize("missing", OF_MARIADB, ids=" on ".join)
def test_a_right_that_is_missing_in_mariadb_shows_at_the_start_and_the_statements_give_it(
    mariadb: TestDatabase, clerk: str, missing: tuple[str, str]
) -> None:
    sink_of(mariadb, schema=None).check(SCHEMA)
    staged: Any = "executors" if missing[1] == "*" and "TEMPORARY" not in missing[0] else "driver"
    sink = sink_of(mariadb, clerk, None, staging=staged)
    given = [(right, table) for right, table in OF_MARIADB if (right, table) != missing]
    if missing[1] != "*":
        given = [one for one in given if one[1] != "*" or "TEMPORARY" in one[0]]  # a right on all of it is one on each
    mariadb.execute(*(f"GRANT {right} ON {table} TO '{clerk}'@'127.0.0.1'" for right, table in given))

    error = refusal(lambda: sink.check(SCHEMA))

    assert "was refused by table orders" in error
    mariadb.execute(*statements_of(error))
    sink.check(SCHEMA)


def test_rights_that_a_batch_or_a_new_column_lacks_in_mariadb_are_named(mariadb: TestDatabase, clerk: str) -> None:
    mariadb.execute(f"GRANT SELECT, INSERT, CREATE, CREATE TEMPORARY TABLES ON * TO '{clerk}'@'127.0.0.1'")

    error = refusal(lambda: sink_of(mariadb, clerk, None, staging="driver")(batch(), 1))

    assert "batch 1 was refused by table orders" in error
    assert "1142, UPDATE command denied to user" in error
    mariadb.execute(*statements_of(error))
    sink_of(mariadb, clerk, None, staging="driver")(batch(), 1)
    assert mariadb.rows("SELECT id FROM orders") == [("canary-row",)]

    wider = frame({**GONE, "more": GONE["price"]}, []).schema
    error = refusal(lambda: sink_of(mariadb, clerk, None, staging="driver", evolve=True).check(wider))

    assert "1142, ALTER command denied to user" in error
    assert any(", ALTER ON" in statement for statement in statements_of(error))
