"""A sink that lacks rights in PostgreSQL or MariaDB says which, on what, and the GRANT that gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa
from pyspark.sql.types import BooleanType, IntegerType, LongType, StringType, StructType

from databases import TestDatabase, new_database
from penstock.clients.rights import MissingRightError
from penstock.spark_sink import SqlSink

SCHEMA = (
    StructType()
    .add("topic", StringType())
    .add("partition", IntegerType())
    .add("offset", LongType())
    .add("id", StringType())
    .add("gone", BooleanType())
)
#: What a sink with a key and deletions needs, and how each is said. With the staging on executors it needs them all.
NEEDED = {
    "USAGE ON SCHEMA shop": "USAGE, CREATE on schema shop",
    "CREATE ON SCHEMA shop": "CREATE on schema shop",
    "SELECT ON TABLE shop.orders": "SELECT on table shop.orders",
    "INSERT ON TABLE shop.orders": "INSERT on table shop.orders",
    "UPDATE ON TABLE shop.orders": "UPDATE on table shop.orders",
    "DELETE ON TABLE shop.orders": "DELETE on table shop.orders",
    "SELECT ON TABLE shop.penstock_ledger": "SELECT on table shop.penstock_ledger",
    "INSERT ON TABLE shop.penstock_ledger": "INSERT on table shop.penstock_ledger",
    "UPDATE ON TABLE shop.penstock_ledger": "UPDATE on table shop.penstock_ledger",
}


class Batch:
    """A batch of one row, as far as a sink looks at it on the driver."""

    schema = SCHEMA

    def __init__(self, offset: int = 0) -> None:
        columns = {"topic": ["t"], "partition": pa.array([0], pa.int32()), "offset": [offset]}
        self._rows = pa.table({**columns, "id": ["canary-row"], "gone": [False]})

    def toArrow(self) -> pa.Table:  # noqa: N802 - Spark's name
        return self._rows


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


@pytest.fixture
def sink_of(database: TestDatabase) -> Callable[..., SqlSink]:
    def make(*, owner: bool = False, **settings: Any) -> SqlSink:
        url = sa.make_url(database.url)
        if not owner:
            url = url.set(username=role_of(database))
        text = url.render_as_string(hide_password=False)
        settings = {"key": ["id"], "delete": "gone", "schema": "shop", "name": "q", **settings}
        return SqlSink(text, "orders", **settings)

    return make


def refusal(act: Callable[[], object]) -> MissingRightError:
    with pytest.raises(MissingRightError) as raised:
        act()
    return raised.value


@pytest.mark.parametrize("missing", NEEDED)
def test_each_right_that_is_missing_is_named_at_the_start_and_its_statement_gives_it(
    database: TestDatabase, sink_of: Callable[..., SqlSink], missing: str
) -> None:
    sink_of(owner=True).check(SCHEMA)
    role = role_of(database)
    database.execute(*(f"GRANT {right} TO {role}" for right in NEEDED if right != missing))

    error = refusal(lambda: sink_of().check(SCHEMA))

    assert str(error).startswith(f"table orders cannot be written: {role} lacks the right {NEEDED[missing]}; ")
    database.execute(*(right.command(role) for right in error.rights))
    sink_of().check(SCHEMA)


def test_tables_that_may_not_be_made_are_told_as_the_right_to_make_them(
    database: TestDatabase, sink_of: Callable[..., SqlSink]
) -> None:
    role = role_of(database)
    database.execute(f"GRANT USAGE ON SCHEMA shop TO {role}")

    error = refusal(lambda: sink_of(staging="driver").check(SCHEMA))

    assert "lacks the right CREATE on schema shop;" in str(error)
    assert str(error).endswith(f"GRANT CREATE ON SCHEMA shop TO {role}")


def test_a_right_that_is_taken_away_ends_the_batch_which_is_stored_once_it_is_given_again(
    database: TestDatabase, sink_of: Callable[..., SqlSink]
) -> None:
    sink_of(owner=True).check(SCHEMA)
    role, sink = role_of(database), sink_of(staging="driver")
    database.execute(*(f"GRANT {right} TO {role}" for right in NEEDED))
    batch: Any = Batch()
    sink(batch, 0)
    database.execute(f"REVOKE UPDATE ON shop.penstock_ledger FROM {role}")
    later: Any = Batch(1)

    error = refusal(lambda: sink(later, 1))

    assert "batch 1 cannot be stored in table orders, and nothing of it was" in str(error)
    assert f"GRANT UPDATE ON TABLE shop.penstock_ledger TO {role}" in str(error)
    assert "canary-row" not in str(error)
    assert (error.__cause__, error.__suppress_context__) == (None, True)
    database.execute(*(right.command(role) for right in error.rights))
    sink(later, 1)
    assert database.rows("SELECT next_offset FROM shop.penstock_ledger") == [(2,)]


def test_a_ledger_that_may_not_be_read_is_told_before_the_query_begins_anywhere(
    database: TestDatabase, sink_of: Callable[..., SqlSink]
) -> None:
    sink_of(owner=True).check(SCHEMA)
    database.execute(f"GRANT USAGE, CREATE ON SCHEMA shop TO {role_of(database)}")

    error = refusal(sink_of().position)

    assert "on table shop.penstock_ledger" in str(error)


def test_columns_that_may_not_be_added_are_told_as_the_owners_right(
    database: TestDatabase, sink_of: Callable[..., SqlSink]
) -> None:
    sink_of(owner=True).check(SCHEMA)
    role = role_of(database)
    database.execute(*(f"GRANT {right} TO {role}" for right in NEEDED))

    error = refusal(lambda: sink_of(evolve=True).check(StructType([*SCHEMA.fields]).add("more", StringType())))

    assert f"ALTER TABLE shop.orders OWNER TO {role}" in str(error)

    database.execute("ALTER TABLE shop.penstock_ledger DROP COLUMN query_id")  # as a former version's
    error = refusal(lambda: sink_of().check(SCHEMA))

    assert str(error).endswith(f"ALTER TABLE shop.penstock_ledger OWNER TO {role}")


def test_rights_on_single_columns_are_left_to_the_server(
    database: TestDatabase, sink_of: Callable[..., SqlSink]
) -> None:
    sink_of(owner=True).check(SCHEMA)
    role = role_of(database)
    database.execute(*(f"GRANT {right} TO {role}" for right in NEEDED if right != "INSERT ON TABLE shop.orders"))
    database.execute(f"GRANT INSERT (id) ON shop.orders TO {role}")

    sink_of().check(SCHEMA)


def test_a_sink_of_sqlite_asks_for_no_rights(tmp_path: Any) -> None:
    SqlSink(f"sqlite:///{tmp_path}/t.db", "orders", name="q").check(SCHEMA)


#: What a sink with a key and deletions needs in MariaDB, on both of its tables and on the database.
OF_MARIADB = [
    *((right, table) for table in ("orders", "penstock_ledger") for right in ("SELECT", "INSERT", "UPDATE")),
    ("DELETE", "orders"),
    *((right, "*") for right in ("SELECT", "INSERT", "CREATE", "DROP", "CREATE TEMPORARY TABLES")),
]


@pytest.mark.thorough
@pytest.mark.parametrize("missing", OF_MARIADB, ids=" on ".join)
def test_each_right_that_is_missing_in_mariadb_is_named_at_the_start_and_its_statement_gives_it(
    mariadb: TestDatabase, missing: tuple[str, str]
) -> None:
    SqlSink(mariadb.url, "orders", ["id"], delete="gone", name="q").check(SCHEMA)
    url = sa.make_url(mariadb.url)
    role = f"'{url.database[-30:]}'@'127.0.0.1'"  # type: ignore[index] # it has a name
    clerk = url.set(username=url.database[-30:]).render_as_string()  # type: ignore[index] # as above
    staged: Any = "executors" if missing[1] == "*" and "TEMPORARY" not in missing[0] else "driver"
    sink = SqlSink(clerk, "orders", ["id"], delete="gone", name="q", staging=staged)
    given = [(right, table) for right, table in OF_MARIADB if (right, table) != missing]
    if missing[1] != "*":
        given = [one for one in given if one[1] != "*" or "TEMPORARY" in one[0]]  # a right on all of it is one on each
    mariadb.execute(f"CREATE USER {role}", *(f"GRANT {right} ON {table} TO {role}" for right, table in given))

    error = refusal(lambda: sink.check(SCHEMA))

    of_database = "`.*" if missing[1] == "*" else f"`.`{missing[1]}`"
    assert str(error).startswith(f"table orders cannot be written: {role} lacks the right {missing[0]} on table `")
    assert f"{url.database}{of_database}; an administrator" in str(error)
    mariadb.execute(*(right.command(role) for right in error.rights))
    sink.check(SCHEMA)
    mariadb.execute(f"DROP USER {role}")


def test_rights_that_a_batch_or_a_new_column_lacks_in_mariadb_are_named(mariadb: TestDatabase) -> None:
    url = sa.make_url(mariadb.url)
    role = f"'{url.database[-30:]}'@'127.0.0.1'"  # type: ignore[index] # it has a name
    mariadb.execute(f"CREATE USER {role}", f"GRANT SELECT, INSERT, CREATE, CREATE TEMPORARY TABLES ON * TO {role}")
    clerk = url.set(username=url.database[-30:]).render_as_string()  # type: ignore[index] # as above
    batch: Any = Batch()

    error = refusal(lambda: SqlSink(clerk, "orders", ["id"], staging="driver", name="q")(batch, 1))

    assert str(error).startswith(
        f"batch 1 cannot be stored in table orders, and nothing of it was: {role} lacks the ri"
    )
    assert "canary-row" not in str(error)
    mariadb.execute(*(right.command(role) for right in error.rights))
    SqlSink(clerk, "orders", ["id"], staging="driver", name="q")(batch, 1)
    assert mariadb.rows("SELECT id FROM orders") == [("canary-row",)]

    wider = StructType([*SCHEMA.fields]).add("more", StringType())
    error = refusal(lambda: SqlSink(clerk, "orders", ["id"], staging="driver", name="q", evolve=True).check(wider))

    assert f"lacks the right ALTER on table `{url.database}`.`orders`;" in str(error)
    mariadb.execute(f"DROP USER {role}")
