"""`SqlSink` and a database that fails for a moment: deadlocks, lost connections, commits without an answer."""

from __future__ import annotations

import secrets
import socket
from dataclasses import replace
from typing import Any

import psycopg
import pymysql
import pytest
import sqlalchemy as sa
import tenacity
from arrow_frames import PRICES, Letters, frame

from databases import LOST, TestDatabase
from penstock.errors import SinkError
from penstock.spark_sink import SqlSink
from penstock.spark_sink.sinks.sql import sink as sql_sink
from penstock.spark_sink.sinks.sql.databases import DATABASES
from penstock.spark_sink.sinks.sql.databases.database import ErrorKind
from penstock.spark_sink.sinks.sql.databases.errors import error_kind, refused


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_sink, "_WAIT", tenacity.wait_none())


#: A function of each server that fails at the first changes of the ledger, and counts what no rollback takes back.
TRIGGERS = {
    "postgresql": [
        """CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN IF nextval('met') <= {times} THEN {how}; END IF; RETURN NEW; END $$""",
        "CREATE TRIGGER fail BEFORE UPDATE ON penstock_ledger FOR EACH ROW EXECUTE FUNCTION fail()",
    ],
    "mariadb": [
        """CREATE TRIGGER fail BEFORE UPDATE ON penstock_ledger FOR EACH ROW
        IF nextval(met) <= {times} THEN {how}; END IF"""
    ],
}
NEXT = {"postgresql": "SELECT nextval('met')", "mariadb": "SELECT nextval(met)"}
#: A deadlock, a conflict, and a connection that is lost.
FAILURES = {
    "postgresql": ["RAISE EXCEPTION USING ERRCODE = '40P01'", "RAISE EXCEPTION USING ERRCODE = '40001'",
                   "PERFORM pg_terminate_backend(pg_backend_pid())"],
    "mariadb": ["SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213", "SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1020",
                "KILL CONNECTION_ID()"],
}  # fmt: skip


def failing(sink: SqlSink, database: TestDatabase, times: int, how: str) -> None:
    """Have the database do something at the first changes of the ledger."""
    sink.check(frame(PRICES, []).schema)
    triggers = [statement.format(times=times, how=how) for statement in TRIGGERS[database.kind]]
    database.execute("CREATE SEQUENCE met", *triggers)


STAGED = ["executors", pytest.param("driver", marks=pytest.mark.thorough)]
BATCH = [(0, 0, "a", 1), (0, 1, "b", 2), (0, 2, "a", 3)]


@pytest.mark.parametrize("staged", STAGED)
@pytest.mark.parametrize("failure", range(3), ids=["deadlock", "conflict", "lost"])
def test_a_crash_in_the_middle_of_the_transaction_stores_nothing_and_the_next_run_completes(
    server: TestDatabase, staged: Any, failure: int, caplog: pytest.LogCaptureFixture
) -> None:
    sink = SqlSink(server.url, "totals", ["id"], sum_columns=["price"], staging=staged)
    failing(sink, server, 4, FAILURES[server.kind][failure])

    with pytest.raises(SinkError, match="batch 0 was refused by table totals"):
        replace(sink, tries=2)(frame(PRICES, BATCH, run="first", query="q"), 0)
    after_crash = server.rows("SELECT * FROM totals")
    sink(frame(PRICES, BATCH, run="second", query="q"), 0)

    assert after_crash == []
    assert server.rows(NEXT[server.kind]) == [(6,)]  # it really failed four times
    assert server.rows("SELECT id, price FROM totals ORDER BY id") == [("a", 4), ("b", 2)]
    assert caplog.text.count("batch 0 for table totals is tried again") == 3


def test_a_task_that_loses_its_connection_has_the_batch_staged_again(
    server: TestDatabase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = SqlSink(server.url, "events")
    kind, lost = type(sink.database), [True]
    stage = kind.stage

    def lose(*what: Any) -> None:
        if lost:
            lost.pop()
            raise sa.exc.DBAPIError("INSERT", None, LOST[server.kind])
        stage(*what)

    monkeypatch.setattr(kind, "stage", lose)

    sink(frame(PRICES, BATCH), 0)

    assert not lost
    assert "is tried again" in caplog.text
    assert server.rows("SELECT price FROM events ORDER BY price") == [(1,), (2,), (3,)]


def test_a_trigger_that_refuses_a_statement_without_rows_is_named_before_the_first_batch(
    postgresql: TestDatabase,
) -> None:
    sink, none = SqlSink(postgresql.url, "totals", ["id"], dead_letters=Letters()), frame(PRICES, [])
    sink.check(none.schema)
    postgresql.execute(
        """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE EXCEPTION USING ERRCODE = '23514'; END $$""",
        "CREATE TRIGGER refuse BEFORE INSERT ON totals FOR EACH STATEMENT EXECUTE FUNCTION refuse()",
    )

    with pytest.raises(SinkError, match="table totals refuses a statement without rows: CheckViolation, 23514"):
        sink.check(none.schema)


@pytest.mark.parametrize("staged", STAGED)
def test_a_key_that_no_index_holds_is_a_dead_letter(server: TestDatabase, staged: Any) -> None:
    letters, long = Letters(), secrets.token_hex(9_000)  # it can hardly be compressed
    sink = SqlSink(server.url, "prices", ["id"], dead_letters=letters, staging=staged)

    sink(frame(PRICES, [(0, 0, "a", 1), (0, 1, long, 2), (0, 2, "b", 3)]), 0)

    assert server.rows("SELECT id, price FROM prices ORDER BY id") == [("a", 1), ("b", 3)]
    reason = {"postgresql": "54000", "mariadb": "id would not be kept as VARCHAR(255)"}[server.kind]
    assert [(letter.offset, reason in letter.reason) for letter in letters.written] == [(1, True)]


def test_a_server_s_answer_does_not_tell_who_the_user_is(postgresql: TestDatabase) -> None:
    unknown = sa.make_url(postgresql.url).set(username="canary_4711").render_as_string(hide_password=False)

    with pytest.raises(SinkError, match=r'role "..." does not exist') as caught:
        SqlSink(unknown, "prices").check(frame(PRICES, []).schema)

    assert "canary" not in str(caught.value)
    denied = pymysql.err.OperationalError(1045, "Access denied for user 'canary'@'10.0.0.1' (using password: YES)")
    address = sa.make_url("mysql://h/d")
    refusal = refused(DATABASES["mysql"], sa.exc.OperationalError("", None, denied), "t", address, None)
    assert "1045, Access denied for user '...' (using password: YES)" in str(refusal)
    other = psycopg.OperationalError("FATALE : l'authentification de « canary-4711 » a échoué")  # another language
    address = sa.make_url("postgresql:///d?user=canary-4711")
    refusal = refused(DATABASES["postgresql"], sa.exc.OperationalError("", None, other), "t", address, None)
    assert "l'authentification de « ... » a échoué" in str(refusal)


@pytest.mark.parametrize(
    ("state", "transient"),
    [("40P01", True), ("40001", True), ("08006", True), ("57P01", True), ("53300", True), ("25006", True),
     ("23505", False), ("42P01", False), ("28P01", False), ("54000", False), ("57014", False),
     (1205, True), (1213, True), (2003, True), (2013, True), (1290, True), (1040, True), (1053, True), (0, True),
     (1045, False), (1062, False), (1142, False), (1064, False)],
)  # fmt: skip
def test_what_is_transient_is_reported_by_sqlstate_or_number(state: str | int, transient: bool) -> None:
    error = psycopg.errors.lookup(state)() if isinstance(state, str) else pymysql.err.OperationalError(state, "40001")

    database = DATABASES["postgresql" if isinstance(state, str) else "mysql"]
    assert (error_kind(database, sa.exc.DBAPIError("", None, error)) is ErrorKind.TRANSIENT) is transient
    stateless = sa.exc.ProgrammingError("", None, psycopg.ProgrammingError("no state"))
    for other in (stateless, SinkError("the connection is lost")):
        assert error_kind(database, other) is ErrorKind.OTHER


def test_the_address_bounds_a_statement_of_postgresql(postgresql: TestDatabase) -> None:
    SqlSink(postgresql.url, "prices", ["id"]).check(frame(PRICES, []).schema)
    url = sa.make_url(postgresql.url).update_query_string("options=-c%20statement_timeout%3D1s")
    sink = SqlSink(url.render_as_string(hide_password=False), "prices", ["id"])

    with sa.create_engine(postgresql.url, poolclass=sa.NullPool).begin() as locking:
        locking.exec_driver_sql("LOCK TABLE prices")
        with pytest.raises(SinkError, match=r"batch 0 was refused .* 57014, canceling statement due to statement time"):
            sink(frame(PRICES, BATCH), 0)


@pytest.mark.parametrize(("driver", "more"), [("mysql+pymysql", "&read_timeout=2"), ("postgresql+psycopg", "")])
def test_a_server_that_never_answers_ends_the_batch_within_the_bound(driver: str, more: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"{driver}://user@127.0.0.1:{silent.getsockname()[1]}/shop?connect_timeout=2{more}"

        with pytest.raises(SinkError, match=r"batch 0 was refused by table prices at .*: (Operational|Connection)"):
            SqlSink(address, "prices", tries=1)(frame(PRICES, BATCH), 0)
