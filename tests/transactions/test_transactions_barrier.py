"""The barrier knows how a local transaction ended: over every kind of connection, on every database."""

from __future__ import annotations

import concurrent.futures
import sqlite3
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psycopg
import pymysql.cursors
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.pool import NullPool

from databases import Connect, TestDatabase, connect_by, driver_connect, new_database, path_of
from penstock.errors import ConfigurationError, TransactionRefusedError
from penstock.transactions import TransactionalProducer
from penstock.transactions.barriers import BarrierCheck, barrier, barrier_check, clean_barrier, create_barrier_table
from penstock.transactions.connections import Kind
from penstock.transactions.model import HalfMessage, TransactionState
from penstock.transactions.wire.ids import new_id
from waiting import wait_until

COMMIT, ROLLBACK, UNKNOWN = TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN


def prepare(database: TestDatabase) -> None:
    with closing(driver_connect(database)()) as connection:
        create_barrier_table(connection)
        create_barrier_table(connection)
    database.execute("CREATE TABLE orders (tx TEXT)")


def half_of(transaction_id: str) -> HalfMessage:
    return HalfMessage("orders", b"key", b"value", (), transaction_id, 0)


def asked(connect: Connect, transaction_id: str, lock_timeout: float = 0.1) -> TransactionState:
    return barrier_check(connect, lock_timeout=lock_timeout)(half_of(transaction_id))


def insert_order(connection: Any, transaction_id: str) -> None:
    statement = f"INSERT INTO orders VALUES ('{transaction_id}')"  # noqa: S608 - an id is no injection
    if isinstance(connection, (sqlite3.Connection, psycopg.Connection, pymysql.connections.Connection)):
        connection.cursor().execute(statement)
    else:
        connection.execute(sa.text(statement))


@contextmanager
def local_transaction(connect: Connect, transaction_id: str) -> Iterator[Any]:
    """Pass the barrier and write an order; the test commits, or not."""
    with closing(connect()) as connection:
        barrier(connection, transaction_id)
        insert_order(connection, transaction_id)
        yield connection
        # A server may notice only later that a connection was closed.
        connection.rollback()


def test_the_check_of_a_committed_transaction_says_commit_however_often(
    connect: Connect, database: TestDatabase
) -> None:
    tx = new_id()
    with local_transaction(connect, tx) as connection:
        connection.commit()

    assert [asked(connect, tx) for _ in range(3)] == [COMMIT] * 3
    assert database.rows("SELECT tx FROM orders") == [(tx,)]


def test_the_check_of_one_that_rolled_back_or_never_ran_says_rollback(connect: Connect, database: TestDatabase) -> None:
    rolled_back, never_ran = new_id(), new_id()
    with local_transaction(connect, rolled_back) as connection:
        connection.rollback()

    assert [asked(connect, rolled_back) for _ in range(2)] == [ROLLBACK] * 2
    assert [asked(connect, never_ran) for _ in range(2)] == [ROLLBACK] * 2


def test_the_barrier_of_a_running_transaction_blocks_the_check(connect: Connect, database: TestDatabase) -> None:
    tx = new_id()
    with local_transaction(connect, tx) as connection:
        assert asked(connect, tx) is UNKNOWN
        assert asked(driver_connect(database), tx) is UNKNOWN
        connection.commit()

    assert asked(connect, tx) is COMMIT


def test_a_check_that_waits_hears_how_the_running_transaction_ends(database: TestDatabase, simple: Connect) -> None:
    committing, leaving = new_id(), new_id()
    for tx, end, answer in ((committing, "commit", COMMIT), (leaving, "rollback", ROLLBACK)):
        with concurrent.futures.ThreadPoolExecutor() as pool, local_transaction(simple, tx) as connection:
            waiting = pool.submit(asked, simple, tx, 60.0)
            if database.kind == "postgresql":
                waiters = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"
                wait_until(lambda waiters=waiters: database.rows(waiters) == [(1,)])
            assert not waiting.done()
            getattr(connection, end)()
            assert waiting.result(60) is answer


def test_a_poisoned_barrier_stops_a_late_local_transaction(connect: Connect, database: TestDatabase) -> None:
    tx = new_id()
    assert asked(connect, tx) is ROLLBACK

    with closing(connect()) as connection:
        with pytest.raises(TransactionRefusedError, match=tx):
            barrier(connection, tx)
        connection.rollback()

    assert asked(connect, tx) is ROLLBACK
    assert database.rows("SELECT tx FROM orders") == []


def test_a_barrier_is_passed_once_and_a_second_try_is_left_to_the_check(connect: Connect) -> None:
    left: list[str] = []
    tx = SimpleNamespace(transaction_id=new_id(), unknown=lambda: left.append("unknown"))
    with local_transaction(connect, tx.transaction_id) as connection:
        connection.commit()

    with closing(connect()) as again, pytest.raises(TransactionRefusedError, match="before"):
        barrier(again, tx)

    assert left == ["unknown"]
    assert asked(connect, tx.transaction_id) is COMMIT


def test_the_first_one_wins_when_local_transactions_and_checks_race(database: TestDatabase, simple: Connect) -> None:
    ids = [new_id() for _ in range(40)]
    together = threading.Barrier(2)
    refused: list[str] = []

    def run(tx: str) -> None:
        together.wait(60)
        try:
            with local_transaction(simple, tx) as connection:
                connection.commit()
        except TransactionRefusedError:
            refused.append(tx)

    def ask(tx: str) -> TransactionState:
        together.wait(60)
        return asked(simple, tx, 60.0)

    answers = {}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for tx in ids:
            running, answer = pool.submit(run, tx), pool.submit(ask, tx)
            running.result(60)
            answers[tx] = answer.result(60)

    stored = {tx for (tx,) in database.rows("SELECT tx FROM orders")}
    assert stored == {tx for tx, answer in answers.items() if answer is COMMIT}
    assert set(refused) == {tx for tx, answer in answers.items() if answer is ROLLBACK}
    assert stored | set(refused) == set(ids)


def test_a_connection_that_commits_by_itself_is_refused(database: TestDatabase) -> None:
    prepare(database)
    if database.kind == "sqlite":
        with closing(sqlite3.connect(path_of(database), isolation_level=None)) as bare:
            with pytest.raises(ConfigurationError, match="autocommit"):
                barrier(bare, new_id())
            bare.execute("BEGIN")
            barrier(bare, new_id())
            bare.execute("COMMIT")
    else:
        with closing(driver_connect(database, autocommit=True)()) as driver:
            with pytest.raises(ConfigurationError, match="autocommit"):
                barrier(driver, new_id())
            driver.cursor().execute("BEGIN")
            barrier(driver, new_id())
            driver.commit()
    engine = sa.create_engine(database.url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="autocommit"):
        barrier(connection, new_id())
    with Session(engine) as session, pytest.raises(ConfigurationError, match="autocommit"):
        barrier(session, new_id())

    assert database.rows("SELECT count(*) FROM penstock_barrier") == [(1,)]


def test_sqlalchemys_recipe_of_an_own_begin_is_a_transaction(tmp_path: Any) -> None:
    database = TestDatabase("sqlite", f"sqlite:///{tmp_path / 'test.db'}")
    prepare(database)
    engine = sa.create_engine(database.url, poolclass=NullPool, connect_args={"isolation_level": None})
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))

    with engine.connect() as connection:
        barrier(connection, new_id())
        connection.rollback()

    assert database.rows("SELECT count(*) FROM penstock_barrier") == [(0,)]


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE", "AUTOCOMMIT"])
def test_the_check_does_not_mind_the_isolation_level_of_its_connection(postgresql_url: str, level: str) -> None:
    database = new_database(postgresql_url)
    prepare(database)
    connect = connect_by("connection", database, isolation_level=level)
    bare = driver_connect(database, autocommit=level == "AUTOCOMMIT")
    committed, running = new_id(), new_id()
    with local_transaction(driver_connect(database), committed) as connection:
        connection.commit()

    with local_transaction(driver_connect(database), running):
        for way in (connect, bare):
            assert asked(way, running) is UNKNOWN
            assert asked(way, committed) is COMMIT
    for way in (connect, bare):
        assert asked(way, running) is ROLLBACK


def test_a_check_wants_a_connection_of_its_own(database: TestDatabase) -> None:
    prepare(database)
    used = scoped_session(connect_by("session", database))
    driver = driver_connect(database)()
    for connection in (used, driver):
        barrier(connection, tx := new_id())
        with pytest.raises(ConfigurationError, match="should be new"):
            asked(lambda connection=connection: connection, tx)

    assert database.rows("SELECT * FROM penstock_barrier") == []


def test_names_are_quoted_and_may_have_a_schema(postgresql_url: str) -> None:
    database = new_database(postgresql_url)
    database.execute('CREATE SCHEMA "Sales; DROP"')
    names = {"table": 'the "Barrier"', "schema": "Sales; DROP"}
    tx = new_id()
    with closing(driver_connect(database)()) as connection:
        create_barrier_table(connection, **names)
        barrier(connection, tx, **names)
        connection.commit()

    assert barrier_check(driver_connect(database), **names)(half_of(tx)) is COMMIT
    assert database.rows('SELECT id, state FROM "Sales; DROP"."the ""Barrier"""') == [(tx, "COMMITTED")]


def test_rows_as_dictionaries_are_no_hindrance(database: TestDatabase) -> None:
    prepare(database)

    def sqlite() -> sqlite3.Connection:
        connection = sqlite3.connect(path_of(database))
        connection.row_factory = lambda _, row: {"row": row}
        connection.text_factory = bytes
        return connection

    connect = {
        "sqlite": sqlite,
        "postgresql": driver_connect(database, row_factory=psycopg.rows.dict_row),
        "mariadb": driver_connect(database, cursorclass=pymysql.cursors.DictCursor),
    }[database.kind]
    tx = new_id()
    with local_transaction(connect, tx) as connection:
        connection.commit()

    assert asked(connect, tx) is COMMIT
    assert asked(connect, new_id()) is ROLLBACK


def test_what_is_old_can_be_cleaned_and_what_is_young_stays(database: TestDatabase, simple: Connect) -> None:
    old, young = new_id(), new_id()
    for tx in (old, young):
        with local_transaction(simple, tx) as connection:
            connection.commit()
    database.execute(f"UPDATE penstock_barrier SET at = at - 7200 WHERE id = '{old}'")  # noqa: S608 - an id is no injection

    with closing(simple()) as connection:
        assert clean_barrier(connection, timedelta(hours=1)) == 1
        assert clean_barrier(connection, timedelta(hours=1)) == 0

    assert database.rows("SELECT id FROM penstock_barrier") == [(young,)]


def test_a_pooled_connection_comes_back_with_its_own_timeouts(database: TestDatabase) -> None:
    prepare(database)
    engine = sa.create_engine(database.url, pool_size=1, max_overflow=0)
    query = {
        "sqlite": "PRAGMA busy_timeout",
        "postgresql": "SHOW lock_timeout",
        "mariadb": "SELECT @@innodb_lock_wait_timeout",
    }[database.kind]

    def setting() -> object:
        with engine.connect() as connection:
            return connection.exec_driver_sql(query).scalar()

    before = setting()
    with local_transaction(driver_connect(database), running := new_id()):
        assert asked(engine.connect, running) is UNKNOWN
        assert setting() == before
    assert asked(engine.connect, running) is ROLLBACK
    assert setting() == before
    engine.dispose()


def test_a_database_that_fails_is_an_error_of_the_check_and_no_answer(tmp_path: Any) -> None:
    (tmp_path / "no.db").write_bytes(b"no database" * 100)
    no_database = barrier_check(lambda: sqlite3.connect(tmp_path / "no.db"))

    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        no_database(half_of(new_id()))


def test_a_missing_table_is_reported_with_the_function_that_makes_it(database: TestDatabase) -> None:
    for connect in (driver_connect(database), connect_by("connection", database)):
        with closing(connect()) as connection, pytest.raises(ConfigurationError, match="create_barrier_table"):
            barrier(connection, new_id())
        with pytest.raises(ConfigurationError, match="create_barrier_table"):
            barrier_check(connect)(half_of(new_id()))


def test_a_check_without_a_limit_waits_half_as_long_as_it_may_take(database: TestDatabase) -> None:
    prepare(database)
    check = barrier_check(driver_connect(database)).within(1.0)

    with local_transaction(driver_connect(database), running := new_id()):
        assert check(half_of(running)) is UNKNOWN

    # On SQLite a writer locks the whole database: a check does not wait for it.
    assert check._wait_s(Kind.SQLITE) == pytest.approx(0.1)
    assert check._wait_s(Kind.POSTGRESQL) == pytest.approx(0.5)
    assert barrier_check(lambda: None, lock_timeout=3.0).within(1.0)._wait_s(Kind.SQLITE) == pytest.approx(3.0)


def test_a_producer_tells_the_check_of_a_barrier_how_long_it_may_take() -> None:
    check, mocked = barrier_check(lambda: None), mock.Mock()

    def check_in_use(given: Any) -> object:
        producer = TransactionalProducer("orders", bootstrap_servers="127.0.0.1:9", check=given, check_timeout=4.0)
        assert producer._core._checks is not None
        return producer._core._checks._check

    bounded = check_in_use(check)
    assert isinstance(bounded, BarrierCheck)
    assert check_in_use(mocked) is mocked
    assert (check.check_timeout, bounded.check_timeout) == (30.0, 4.0)


@pytest.mark.parametrize("age", [0.0, 3600.0, 7, None])
def test_an_age_without_a_unit_is_refused_with_an_example(tmp_path: Any, age: Any) -> None:
    with (
        closing(sqlite3.connect(tmp_path / "test.db")) as connection,
        pytest.raises(ConfigurationError, match=r"must be a timedelta, as timedelta\(days=7\)"),
    ):
        clean_barrier(connection, age)


def test_wrong_arguments_are_reported(tmp_path: Any) -> None:
    with closing(sqlite3.connect(tmp_path / "test.db")) as connection:
        create_barrier_table(connection)
        with pytest.raises(ConfigurationError, match="no transaction's id"):
            barrier(connection, str(uuid.uuid4()))
        with pytest.raises(ConfigurationError, match="name"):
            barrier(connection, new_id(), table="")
    with pytest.raises(ConfigurationError, match="give a connection"):
        barrier(object(), new_id())
    with pytest.raises(ConfigurationError, match="connect must be"):
        barrier_check("sqlite:///test.db")  # type: ignore[arg-type] # the mistake
    with pytest.raises(ConfigurationError, match="lock_timeout"):
        barrier_check(lambda: None, lock_timeout=0)
