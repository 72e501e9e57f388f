"""`SqlSink` and a database that fails for a moment: deadlocks, lost connections, commits that nobody heard of."""

from __future__ import annotations

import secrets
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
import tenacity
from arrow_frames import PRICES, Letters, frame

from databases import TestDatabase
from penstock.errors import SinkError
from penstock.spark_sink import SqlSink
from penstock.spark_sink.sinks.sql import sink as sql_sink
from penstock.spark_sink.sinks.sql.databases.errors import is_transient, refused
from penstock.spark_sink.sinks.sql.databases.postgresql import PostgreSql


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_sink, "_WAIT", tenacity.wait_none())


def failing(database: TestDatabase, times: int, how: str) -> None:
    """Have the database do something at the first changes of the ledger."""
    database.execute(
        "CREATE SEQUENCE met",  # which no rollback takes back
        f"""CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN IF nextval('met') <= {times} THEN {how}; END IF; RETURN NEW; END $$""",
        """CREATE TABLE penstock_ledger (query TEXT, target TEXT, topic TEXT, partition INT, next_offset BIGINT,
        batch TEXT, PRIMARY KEY (query, target, topic, partition))""",
        "CREATE TRIGGER fail BEFORE UPDATE ON penstock_ledger FOR EACH ROW EXECUTE FUNCTION fail()",
    )


BATCH = [(0, 0, "a", 1), (0, 1, "b", 2), (0, 2, "a", 3)]


@pytest.mark.parametrize("staged", ["driver", "executors"])
@pytest.mark.parametrize(
    "how",
    [
        "RAISE EXCEPTION USING ERRCODE = '40P01'",
        "RAISE EXCEPTION USING ERRCODE = '40001'",
        "PERFORM pg_terminate_backend(pg_backend_pid())",
    ],
)
def test_a_deadlock_a_conflict_and_a_lost_connection_are_tried_again(
    postgresql: TestDatabase, staged: Any, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    failing(postgresql, 2, how)
    sink = SqlSink(postgresql.url, "totals", ["id"], sum_columns=["price"], staging=staged)

    sink(frame(PRICES, BATCH, run="first", query="q"), 0)

    assert postgresql.rows("SELECT nextval('met')") == [(4,)]  # it really failed twice
    assert postgresql.rows("SELECT id, price FROM totals ORDER BY id") == [("a", 4), ("b", 2)]
    assert caplog.text.count("batch 0 for table totals is tried again") == 2


def test_a_database_that_goes_on_failing_ends_the_batch(postgresql: TestDatabase) -> None:
    failing(postgresql, 99, "RAISE EXCEPTION USING ERRCODE = '40P01'")
    sink = SqlSink(postgresql.url, "totals", ["id"], tries=3)

    with pytest.raises(SinkError, match=r"batch 0 was refused by table totals .*40P01"):
        sink(frame(PRICES, BATCH), 0)

    assert postgresql.rows("SELECT nextval('met')") == [(4,)]
    assert postgresql.rows("SELECT * FROM totals") == []


def test_a_task_that_loses_its_connection_has_the_batch_staged_anew(
    postgresql: TestDatabase, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage, lost = PostgreSql.stage, [True]

    def lose(*what: Any) -> None:
        if lost:
            lost.pop()
            raise sa.exc.DBAPIError("COPY", None, psycopg.OperationalError("the connection is lost"))
        stage(*what)

    monkeypatch.setattr(PostgreSql, "stage", lose)

    SqlSink(postgresql.url, "events")(frame(PRICES, BATCH), 0)

    assert not lost
    assert "is tried again" in caplog.text
    assert postgresql.rows("SELECT price FROM events ORDER BY price") == [(1,), (2,), (3,)]


@pytest.mark.parametrize("staged", ["driver", "executors"])
def test_a_key_that_no_index_holds_is_a_dead_letter(postgresql: TestDatabase, staged: Any) -> None:
    letters, long = Letters(), secrets.token_hex(9_000)  # it can hardly be compressed
    sink = SqlSink(postgresql.url, "prices", ["id"], dead_letters=letters, staging=staged)

    sink(frame(PRICES, [(0, 0, "a", 1), (0, 1, long, 2), (0, 2, "b", 3)]), 0)

    assert postgresql.rows("SELECT id, price FROM prices ORDER BY id") == [("a", 1), ("b", 3)]
    assert [(one.offset, "54000" in one.reason) for one in letters.written] == [(1, True)]


def test_a_server_s_answer_does_not_tell_who_the_user_is(postgresql: TestDatabase) -> None:
    address = sa.make_url(postgresql.url).set(username="canary_4711").render_as_string(hide_password=False)

    with pytest.raises(SinkError, match=r'role "..." does not exist') as caught:
        SqlSink(address, "prices").check(frame(PRICES, []).schema)

    assert "canary" not in str(caught.value)
    other = psycopg.OperationalError("FATALE : l'authentification de « canary-4711 » a échoué")  # another language
    told = refused(sa.exc.OperationalError("", None, other), "t", sa.make_url("postgresql:///d?user=canary-4711"), None)
    assert "l'authentification de « ... » a échoué" in str(told)


@pytest.mark.parametrize(
    ("state", "transient"),
    [("40P01", True), ("40001", True), ("08006", True), ("57P01", True), ("53300", True), ("25006", True),
     ("23505", False), ("42P01", False), ("28P01", False), ("54000", False), ("57014", False)],
)  # fmt: skip
def test_what_is_transient_is_told_by_sqlstate(state: str, transient: bool) -> None:
    error = psycopg.errors.lookup(state)()

    assert is_transient(sa.exc.DBAPIError("", None, error)) is transient
    assert not is_transient(sa.exc.ProgrammingError("", None, psycopg.ProgrammingError("no state")))
    assert not is_transient(SinkError("the connection is lost"))
