"""The inbox knows which messages were handled: over every kind of connection, on every database."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pymysql.cursors
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from databases import Connect, TestDatabase, driver_connect, new_database, path_of
from penstock import Message, create_inbox_table, inbox
from penstock.consumer.retry_topics import ORIGIN, RetriedRecord
from penstock.errors import ConfigurationError
from penstock.message import FixedRecord, calling_handlers_of
from penstock.transactions import inboxes
from penstock.transactions.connections import Kind, is_lock_error
from penstock.transactions.inboxes import InboxTrimmer
from waiting import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "exactly-once-database.md"
FIRST = FixedRecord("orders", 0, 7, b"k", b"v", (), 1_700_000_000_000)


@pytest.fixture(autouse=True)
def in_a_handler() -> Iterator[None]:
    with calling_handlers_of("shop"):
        yield


def prepare(database: TestDatabase) -> None:
    with closing(driver_connect(database)()) as connection:
        create_inbox_table(connection)
        create_inbox_table(connection)


def messages(offsets: Sequence[int], **fields: Any) -> list[Message]:
    return [Message(replace(FIRST, record_offset=offset, **fields)) for offset in offsets]


def handled(connect: Connect, message: Any, end: str = "commit", **options: Any) -> Any:
    """Return the inbox's answer in a transaction that ends this way."""
    with closing(connect()) as connection:
        answer = inbox(connection, message, **options)
        getattr(connection, end)()
    return answer


def offsets_in(database: TestDatabase) -> list[int]:
    return [offset for (offset,) in database.rows("SELECT message_offset FROM penstock_inbox ORDER BY message_offset")]


def test_a_message_is_new_until_a_transaction_has_committed_it(connect: Connect) -> None:
    message = Message(FIRST)

    assert handled(connect, message, end="rollback") is True
    assert handled(connect, message) is True
    assert [handled(connect, message) for _ in range(2)] == [False] * 2


def test_of_a_batch_those_are_returned_that_are_new(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inboxes, "_ROWS", 4)
    assert handled(connect, messages([3, 1, 2])) != []

    batch = messages([9, 3, 5, 2, 4, 1, 8, 7, 6])
    new = handled(connect, [*batch, *messages([9, 3])])

    assert new == [message for message in batch if message.offset > 3]
    assert handled(connect, batch) == []
    assert handled(connect, []) == []


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_second_transaction_with_a_message_waits_for_the_first(
    database: TestDatabase, simple: Connect, end: str
) -> None:
    message = Message(FIRST)
    with concurrent.futures.ThreadPoolExecutor() as pool, closing(simple()) as zombie:
        assert inbox(zombie, message)
        waiting = pool.submit(handled, simple, [message], group="shop")
        if database.kind == "postgresql":
            waiters = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"
            wait_until(lambda: database.rows(waiters) == [(1,)])
        assert not waiting.done()

        getattr(zombie, end)()

        assert waiting.result(60) == ([] if end == "commit" else [message])


def test_a_second_transaction_fails_where_it_may_not_wait(database: TestDatabase, simple: Connect) -> None:
    impatient = {
        "sqlite": lambda: sqlite3.connect(path_of(database), timeout=0.05),
        "postgresql": driver_connect(database, options="-c lock_timeout=50ms"),
        "mariadb": driver_connect(database, init_command="SET SESSION innodb_lock_wait_timeout = 1"),
    }[database.kind]
    with closing(simple()) as zombie:
        assert inbox(zombie, Message(FIRST))

        with pytest.raises(Exception) as caught:  # noqa: PT011 - each driver has its own
            handled(impatient, Message(FIRST))

        assert is_lock_error(caught.value)
        zombie.commit()
    assert handled(impatient, Message(FIRST)) is False


@pytest.mark.parametrize(
    ("other", "options"),
    [
        (FIRST, {"group": "audit"}),
        (replace(FIRST, topic_name="refunds"), {}),
        (replace(FIRST, partition_number=1), {}),
        (replace(FIRST, record_offset=8), {}),
        # The topic was deleted and made again.
        (replace(FIRST, timestamp_ms=1_700_000_000_001), {}),
        (replace(FIRST, timestamp_ms=None), {}),
    ],
    ids=["group", "topic", "partition", "offset", "timestamp", "no timestamp"],
)
def test_another_message_is_new(tmp_path: Path, other: FixedRecord, options: dict[str, str]) -> None:
    database = TestDatabase("sqlite", f"sqlite:///{tmp_path / 'test.db'}")
    prepare(database)
    connect = driver_connect(database)
    assert handled(connect, Message(FIRST)) is True

    assert handled(connect, Message(other), **options) is True
    assert handled(connect, Message(other), **options) is False
    assert handled(connect, Message(FIRST)) is False


@pytest.mark.parametrize("time", [FIRST.timestamp_ms, None])
def test_a_message_of_a_retry_topic_is_the_one_that_it_was(tmp_path: Path, time: int | None) -> None:
    database = TestDatabase("sqlite", f"sqlite:///{tmp_path / 'test.db'}")
    prepare(database)
    connect = driver_connect(database)
    first = replace(FIRST, timestamp_ms=time)
    origin = (ORIGIN, f"orders/0/7/{-1 if time is None else time}".encode())
    waited = replace(
        FIRST, topic_name="retry.shop.orders.1s", record_offset=0, timestamp_ms=9, record_headers=(origin,)
    )
    assert handled(connect, Message(first)) is True

    assert handled(connect, Message(RetriedRecord.of(waited, "orders"))) is False


def test_an_asynchronous_connection_is_used_within_run_sync(postgresql_url: str) -> None:
    database = new_database(postgresql_url)
    prepare(database)

    async def handle() -> bool:
        engine = create_async_engine(database.url)
        async with engine.begin() as connection:
            is_new: bool = await connection.run_sync(inbox, Message(FIRST))
        await engine.dispose()
        return is_new

    assert [asyncio.run(handle()) for _ in range(2)] == [True, False]


def test_a_connection_that_commits_by_itself_is_refused(database: TestDatabase) -> None:
    prepare(database)
    engine = sa.create_engine(database.url, isolation_level="AUTOCOMMIT")

    with engine.connect() as connection, pytest.raises(ConfigurationError, match="autocommit"):
        inbox(connection, Message(FIRST))

    assert offsets_in(database) == []
    engine.dispose()


def test_connections_that_return_texts_and_rows_in_their_own_way_are_no_hindrance(
    database: TestDatabase, simple: Connect
) -> None:
    def sqlite() -> sqlite3.Connection:
        connection = sqlite3.connect(path_of(database))
        connection.row_factory = lambda _, row: {"row": row}
        connection.text_factory = bytes
        return connection

    connect = {
        "sqlite": sqlite,
        "postgresql": driver_connect(database, row_factory=psycopg.rows.dict_row),
        "mariadb": driver_connect(database, cursorclass=pymysql.cursors.DictCursor, use_unicode=False),
    }[database.kind]
    handled(connect, messages([1]))

    assert [message.offset for message in handled(connect, messages([1, 2]))] == [2]


def test_the_documented_statement_makes_the_table(database: TestDatabase) -> None:
    kind = Kind("mysql" if database.kind == "mariadb" else database.kind)
    statement = inboxes.STATEMENTS[kind].format("penstock_inbox").strip()
    assert statement.replace("IF NOT EXISTS ", "") in PAGE.read_text()

    database.execute(statement)

    assert handled(driver_connect(database), messages([1])) != []


def test_names_are_quoted_and_may_have_a_schema(postgresql_url: str) -> None:
    database = new_database(postgresql_url)
    database.execute('CREATE SCHEMA "Sales; DROP"')
    names = {"table": 'the "Inbox"', "schema": "Sales; DROP"}
    with closing(driver_connect(database)()) as connection:
        create_inbox_table(connection, **names)
    connect = driver_connect(database)

    assert [handled(connect, Message(FIRST), **names) for _ in range(2)] == [True, False]
    assert InboxTrimmer(connect, timedelta(days=1), **names).trim("shop", {("orders", 0): 99}) == 0


def test_old_records_below_the_committed_offset_are_trimmed(
    database: TestDatabase, simple: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inboxes, "_DELETED_AT_ONCE", 3)
    for fields in ({}, {"partition_number": 1}, {"topic_name": "refunds"}):
        handled(simple, messages(range(10), **fields))
    handled(simple, messages([1]), group="audit")
    database.execute("UPDATE penstock_inbox SET at = at - 7200 WHERE message_offset <> 5")
    kept = InboxTrimmer(simple, timedelta(hours=1), "penstock_inbox", None)

    assert kept.trim("shop", {("orders", 0): 8, ("refunds", 0): 0}) == 7

    ours = "SELECT message_offset FROM penstock_inbox WHERE consumer_group = 'shop'"
    first = f"{ours} AND topic = 'orders' AND partition_number = 0 ORDER BY message_offset"
    assert database.rows(first) == [(5,), (8,), (9,)]
    assert len(offsets_in(database)) == 3 + 2 * 10 + 1
    assert kept.trim("shop", {("orders", 0): 8}) == 0


def test_an_app_trims_its_inboxes_and_goes_on_after_a_failure(
    database: TestDatabase, simple: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(inboxes, "_TRIM_INTERVAL_S", 0.01)
    handled(simple, messages([1, 2, 3]))
    database.execute("UPDATE penstock_inbox SET at = at - 7200")
    failures = [OSError("the database is away")]

    def connect() -> Any:
        if failures:
            raise failures.pop()
        return simple()

    trimmer = InboxTrimmer(connect, timedelta(hours=1), "penstock_inbox", None)

    trimmer.start("shop", lambda: {("orders", 0): 3})
    try:
        wait_until(lambda: offsets_in(database) == [3])
    finally:
        trimmer.stop()

    assert "trimming failed: OSError: the database is away" in caplog.text


def test_wrong_arguments_are_explained(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "test.db")) as connection:
        with pytest.raises(ConfigurationError, match="create_inbox_table"):
            inbox(connection, Message(FIRST))
        create_inbox_table(connection)
        with pytest.raises(ConfigurationError, match=r"must be a penstock\.Message"):
            inbox(connection, "orders")  # type: ignore[call-overload] # the mistake
        with pytest.raises(ConfigurationError, match="256 characters"):
            inbox(connection, Message(FIRST), group="g" * 256)
        with concurrent.futures.ThreadPoolExecutor() as pool, pytest.raises(ConfigurationError, match="group=context"):
            pool.submit(inbox, connection, Message(FIRST)).result()
    with pytest.raises(ConfigurationError, match="give a connection"):
        inbox(object(), Message(FIRST))
    for keep in (0, timedelta(0)):
        with pytest.raises(ConfigurationError, match="keep"):
            InboxTrimmer(dict, keep, "t", None)  # type: ignore[arg-type] # the mistake
