"""What `SqlSink` keeps of a server between micro-batches, on the driver and in Python workers, and what ends it."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import sqlalchemy as sa
from arrow_frames import PRICES, frame
from pyspark.sql import DataFrame, SparkSession

from databases import TestDatabase
from penstock.errors import SinkError
from penstock.spark_sink import SqlSink
from penstock.spark_sink.sinks.sql import stages as ways
from penstock.spark_sink.sinks.sql.databases.mysql import MySql
from penstock.spark_sink.sinks.sql.databases.postgresql import PostgreSql
from penstock.spark_sink.sinks.sql.rows import Report
from penstock.spark_sink.sinks.sql.stages import run_tasks


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that grows where tables are checked."""
    found: list[object] = []
    real = ways.prepare
    monkeypatch.setattr(ways, "prepare", lambda *given: found.append(given) or real(*given))
    return found


def stages(database: TestDatabase) -> list[str]:
    found = sa.inspect(sa.create_engine(database.url, poolclass=sa.NullPool)).get_table_names()
    return sorted(name for name in found if name.startswith("penstock_stage"))


#: The sessions of a database but this one, and what ends one.
SESSIONS = {
    "postgresql": (
        "SELECT pid FROM pg_stat_activity WHERE pid != pg_backend_pid() AND datname = current_database()",
        "SELECT pg_terminate_backend({})",
    ),
    "mariadb": (
        "SELECT id FROM information_schema.processlist WHERE id != connection_id() AND db = database()",
        "KILL {}",
    ),
}


def batch(number: int, run: str | None = "run", query: str = "q", **options: Any) -> DataFrame:
    """Return a batch of two rows: of a key of its own, and of one that all batches have."""
    rows = [(0, 2 * number, f"k{number}", number), (0, 2 * number + 1, "all", 1)]
    return frame(PRICES, rows, run=run, query=query if run else "", **options)


def totals(database: TestDatabase) -> dict[str, int]:
    return dict(database.rows("SELECT id, price FROM totals"))  # type: ignore[arg-type] # two columns


def expected(batches: int) -> dict[str, int]:
    return {**{f"k{n}": n for n in range(batches)}, "all": batches}


def totals_sink(database: TestDatabase, **options: Any) -> SqlSink:
    return SqlSink(database.url, "totals", ["id"], sum_columns=["price"], **options)


def test_tables_are_checked_once_and_a_staging_table_is_gone_with_its_batch(
    server: TestDatabase, checks: list[object]
) -> None:
    sink, during = totals_sink(server), list[int]()

    for number in range(3):
        sink(batch(number, between=lambda: during.append(len(stages(server)))), number)

    assert (len(checks), during, stages(server)) == (1, [1] * 3, [])
    assert totals(server) == expected(3)


def test_a_table_that_has_changed_since_is_checked_again(server: TestDatabase, checks: list[object]) -> None:
    sink = totals_sink(server)
    sink(batch(0), 0)

    server.execute("ALTER TABLE totals ADD COLUMN more INT NOT NULL DEFAULT 7")
    sink(batch(1), 1)
    assert len(checks) == 2
    server.execute("ALTER TABLE totals ALTER COLUMN more DROP DEFAULT")
    with pytest.raises(SinkError, match="column more must not be empty"):
        sink(batch(2), 2)
    assert stages(server) == []
    key, wider = {
        "postgresql": ("CONSTRAINT totals_pkey", "ALTER COLUMN price TYPE NUMERIC"),
        "mariadb": ("PRIMARY KEY", "MODIFY price DECIMAL(38, 0)"),
    }[server.kind]
    server.execute("ALTER TABLE totals DROP COLUMN more", f"ALTER TABLE totals DROP {key}")
    with pytest.raises(SinkError, match=r"no primary key or unique index on|no unique or exclusion constraint"):
        sink(batch(2), 2)
    server.execute("ALTER TABLE totals ADD PRIMARY KEY (id)", f"ALTER TABLE totals {wider}")
    sink(batch(2), 2)
    assert totals(server) == expected(3)

    server.execute("DROP TABLE totals")
    sink(batch(3), 3)  # as before: the table is made again, the ledger goes on
    assert totals(server) == {"k3": 3, "all": 1}
    server.execute("DROP TABLE penstock_ledger")
    sink(batch(4), 4)
    assert totals(server) == {"k3": 3, "k4": 4, "all": 2}


def test_a_staging_table_into_which_a_lost_task_still_copies_is_left_behind(
    server: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = dict(MySql.connect_args)
    args["init_command"] = args["init_command"].replace("lock_wait_timeout = 60", "lock_wait_timeout = 1")
    monkeypatch.setattr(MySql, "connect_args", args)
    monkeypatch.setattr(PostgreSql, "begin", PostgreSql.begin.replace("'60s'", "'1s'"))
    sink = totals_sink(server)
    with sa.create_engine(server.url, poolclass=sa.NullPool).connect() as lost:

        def copy() -> None:
            lost.exec_driver_sql(f"INSERT INTO {stages(server)[0]} (penstock_attempt) VALUES (0)")  # noqa: S608 - as above

        sink(batch(0, between=copy), 0)
        left = stages(server)
        sink(batch(1), 1)

    assert len(left) == 1
    assert stages(server) == left
    assert totals(server) == expected(2)


@pytest.mark.thorough
def test_columns_that_spark_does_not_find_are_staged_by_at_most_max_connections_tasks(
    spark: SparkSession, postgresql: TestDatabase
) -> None:
    rows = [("orders", 0, n, f"k{n % 50}", n) for n in range(400)]
    parallel = spark.sparkContext.parallelize(rows, 6)
    many = spark.createDataFrame(parallel, "topic STRING, partition INT, offset BIGINT, `a.b``c` STRING, price BIGINT")
    reports: list[Report] = []

    def run(*given: Any) -> Report:
        reports.append(run_tasks(*given))
        return reports[-1]

    with mock.patch.object(ways, "run_tasks", run):
        SqlSink(postgresql.url, "newest", ["a.b`c"], max_connections=2)(many, 0)

    newest = {f"k{n % 50}": n for n in range(400)}
    assert dict(postgresql.rows('SELECT "a.b`c", price FROM newest')) == newest  # type: ignore[arg-type] # two columns
    assert len(reports[0].copied) == 2


@pytest.mark.parametrize(("cores", "kept"), [(2, 1), (3, 0)])
def test_tasks_keep_their_session_where_all_workers_stay_within_the_bound(
    server: TestDatabase, cores: int, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    sink, (listed, end) = totals_sink(server, max_connections=4), SESSIONS[server.kind]
    seen = []
    for number in range(2):
        sink(batch(number, cores=cores), number)  # by two tasks
        seen.append({session for (session,) in server.rows(listed)})

    assert [len(some) for some in seen] == [1 + kept] * 2, "the driver's, and that of the worker"
    assert seen[0] == seen[1]
    for session in seen[1]:
        server.execute(end.format(session))
    sink(batch(2, cores=cores), 2)
    assert "is tried again" not in caplog.text
    assert totals(server) == expected(3)


def test_a_staging_table_that_a_crash_has_emptied_is_noticed(server: TestDatabase) -> None:
    def empty() -> None:
        server.execute(f"TRUNCATE {stages(server)[0]}")

    sink = SqlSink(server.url, "events")
    with pytest.raises(SinkError, match="holds 0 rows, but its tasks copied 4"):
        sink(frame(PRICES, [(0, n, "a", 1) for n in range(4)], between=empty), 0)

    assert server.rows("SELECT * FROM events") == []
    assert sink.ledger() == {}


def test_staging_tables_of_a_driver_that_is_gone_are_removed_and_those_of_a_live_one_stay(
    server: TestDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    now = int(time.time()) // ways.HALF_DAY_S
    names = [f"{ways.PREFIX}{text}" for text in (f"{now - 2}_{7:016x}", f"{now}_{7:016x}", "of_somebody_else")]
    server.execute(*(f"CREATE TABLE {name} (id INT)" for name in names))

    SqlSink(server.url, "events")(frame(PRICES, [(0, 0, "a", 1)]), 0)

    assert stages(server) == sorted(names[1:])
    assert f"the staging table {names[0]} was left by a driver that is gone" in caplog.text
