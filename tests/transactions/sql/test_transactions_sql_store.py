"""The SQL store beyond the suite of all stores: the first decision, kept rows, and a database that is away."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any
from unittest import mock

import pytest
import sqlalchemy as sa
from confluent_kafka.admin import AdminClient
from conformance.store_cases import NO_CHECKS, SqlBench, decide, settled

from databases import TestDatabase
from kafka_tools import read_all
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.clients.transactional.writer import TransactionalWriter
from penstock.errors import (
    BrokerConnectionError,
    ConfigurationError,
    DecisionNotStoredError,
    HalfNotStoredError,
    StoreConnectionError,
)
from penstock.transactions import Coordinator, TransactionalProducer, new_id
from penstock.transactions.core.check_plan import CheckPolicy
from penstock.transactions.stores.relayed_store import decision
from penstock.transactions.stores.shard_coordinator import ShardCoordinator
from penstock.transactions.stores.shards import CheckTerms
from penstock.transactions.stores.sql import schema, writing
from penstock.transactions.stores.sql.backlog import SqlBacklog
from penstock.transactions.stores.sql.store import SqlStore
from penstock.transactions.stores.store_coordinator import CoordinatorOptions
from penstock.transactions.wire.ops import Author, Verdict
from waiting import wait_until

COMMIT, ROLLBACK = Verdict.COMMIT, Verdict.ROLLBACK
#: What no database does differently is tried on one.
POSTGRESQL, SQLITE = (pytest.mark.parametrize("database", [kind], indirect=True) for kind in ("postgresql", "sqlite"))


def test_the_first_decision_wins_under_concurrent_updates(sql_bench: SqlBench) -> None:
    other = sql_bench.make_store()
    other.start()
    prepared = [sql_bench.prepare(sql_bench.half(b"%d" % number)) for number in range(60)]
    together = threading.Barrier(2)

    def run(store: SqlStore, verdict: Verdict) -> None:
        together.wait(30)
        for stored_half in prepared:
            decide(store, stored_half, verdict)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run, sql_bench.sql_store, COMMIT), pool.submit(run, other, ROLLBACK)]:
            done.result(120)
    other.stop(30)
    states = dict(sql_bench.database.rows("SELECT id, state FROM penstock_tx"))
    committed = {one.halves[0].value for one in prepared if states[one.halves[0].transaction_id] == COMMIT}
    assert set(states.values()) <= {int(COMMIT), int(ROLLBACK)}

    statistics = settled(
        sql_bench.coordinator(**NO_CHECKS),
        committed=len(committed),
        rolled_back=len(prepared) - len(committed),
        refused=60,
    )

    assert sql_bench.database.rows("SELECT count(*) FROM penstock_refusal") == [(0,)]
    assert statistics.committed + statistics.rolled_back == 60
    assert sorted(sql_bench.seen()) == sorted(committed)


def test_settled_transactions_leave_nothing_behind(sql_bench: SqlBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.transactions.stores.sql.shards._SETTLED_KEPT_S", 0.0)
    monkeypatch.setattr("penstock.transactions.stores.shard_coordinator._TRIM_INTERVAL_S", 0.2)
    coordinator = sql_bench.coordinator(**NO_CHECKS)

    for number in range(20):
        sql_bench.send((COMMIT, ROLLBACK)[number % 2], sql_bench.half(b"%d" % number))
    settled(coordinator, committed=10, rolled_back=10)

    wait_until(lambda: sql_bench.database.rows("SELECT count(*) FROM penstock_tx") == [(0,)])
    done = f"{sql_bench.prefix}.sql-{sql_bench.sql_store.uuid}.done"
    wait_until(lambda: read_all(sql_bench.servers, done) == [])


@pytest.mark.thorough
@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_a_purge_of_many_rows_ends_when_the_leases_are_due(
    sql_bench: SqlBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.transactions.stores.sql.shards._PURGE_LIMIT", 10)
    store = sql_bench.sql_store
    shards = store.open_shards(CheckTerms(CheckPolicy(600.0, 600.0, 1), session_s=600.0), lambda: None)
    with contextlib.closing(shards):
        with store.database.begin() as connection:
            store.database.draw_numbers(connection, 35)

        shards.purge()
        assert sql_bench.database.rows("SELECT count(*) FROM penstock_number") == [(25,)]
        shards.renew()
        shards.purge()
        assert sql_bench.database.rows("SELECT count(*) FROM penstock_number") == [(0,)]


def test_errors_of_the_database_keep_payloads_to_themselves(
    sql_bench: SqlBench, caplog: pytest.LogCaptureFixture
) -> None:
    secret = b"the-secret-payload"
    sql_bench.store.require_target(sql_bench.topic, None)
    sql_bench.database.execute("ALTER TABLE penstock_tx RENAME TO elsewhere")

    with pytest.raises(HalfNotStoredError) as caught:
        sql_bench.prepare(sql_bench.half(secret, key=b"the-secret-key"))

    sql_bench.database.execute("ALTER TABLE elsewhere RENAME TO penstock_tx")
    text = f"{caught.value} {caplog.text}"
    assert "did not run" in str(caught.value)
    assert "secret" not in text
    assert sql_bench.database.rows("SELECT count(*) FROM penstock_tx") == [(0,)]


def test_wrong_addresses_and_a_lost_database_are_reported_without_the_password() -> None:
    for url in ("nonsense://u:hidden@h/d", "no address: hidden", "sqlite://", "oracle://u:hidden@h/d"):
        with pytest.raises(ConfigurationError, match="url") as caught:
            SqlStore(url, bootstrap_servers="127.0.0.1:1")
        assert "hidden" not in str(caught.value)
    for option in ("postgresql://h/d?port=x", "mysql://h/d?connect_timeout=x", "sqlite:///file.db?timeout=x"):
        with pytest.raises(ConfigurationError, match=r"option in the query of url.*x"):
            SqlStore(option, bootstrap_servers="127.0.0.1:1")
    store = SqlStore("postgresql://user:hidden@127.0.0.1:1/none", bootstrap_servers="127.0.0.1:1")
    refused = SqlStore("mysql://user:hidden@127.0.0.1:1/none?unknown=1", bootstrap_servers="127.0.0.1:1")
    for ask in (store.start, Coordinator(store=store).start, refused.start):
        with pytest.raises(StoreConnectionError, match="address") as caught:
            ask()
        assert "hidden" not in str(caught.value)
        # It is no broker that is away.
        assert not isinstance(caught.value, BrokerConnectionError)


@contextlib.contextmanager
def locked(database: TestDatabase) -> Iterator[None]:
    """Be another one who writes into an SQLite file, and does not end."""
    other = sqlite3.connect(database.url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.rollback()
        other.close()


@SQLITE
def test_what_a_locked_database_has_not_taken_at_the_stop_is_reported_as_not_stored(sql_bench: SqlBench) -> None:
    producer = TransactionalProducer("orders", store=sql_bench.make_store()).start()
    producer.send(sql_bench.topic, value=b"before")

    with locked(sql_bench.database):
        sent = [producer.submit(sql_bench.topic, value=b"%d" % number) for number in range(1000)]
        producer.stop(0.5)
        for future in sent:
            with pytest.raises(HalfNotStoredError, match="stopped"):
                future.result(0)

    # Also those that were being written are not stored when the database goes on.
    settled(sql_bench.coordinator(transaction_timeout=600.0), committed=1)
    assert sql_bench.seen() == [b"before"]


@SQLITE
def test_what_a_locked_database_does_not_take_in_time_is_reported_and_its_half_is_rolled_back(
    sql_bench: SqlBench,
) -> None:
    producer = TransactionalProducer("orders", store=sql_bench.make_store(), send_timeout=3).start()

    transaction = producer.transaction(sql_bench.topic, value=b"its decision came late")
    transaction.__enter__()
    with locked(sql_bench.database), pytest.raises(DecisionNotStoredError, match=r"did not answer within 3 s"):
        transaction.__exit__(None, None, None)
    wait_until(lambda: producer.statistics().in_flight == 0)
    with locked(sql_bench.database), pytest.raises(HalfNotStoredError, match=r"did not answer within 3 s"):
        producer.send(sql_bench.topic, value=b"its half came late")
    wait_until(lambda: producer.statistics().in_flight == 0)

    # What is not known to be decided may be decided; what is not known to be stored is never seen.
    settled(sql_bench.coordinator(**NO_CHECKS), committed=1, rolled_back=1)
    assert sql_bench.seen() == [b"its decision came late"]
    producer.stop()


def test_one_that_is_answered_while_its_check_is_sent_again_is_not_checked_once_more(
    sql_bench: SqlBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = sql_bench.sql_store
    half = sql_bench.prepare(sql_bench.half(b"v")).halves[0]
    monkeypatch.setattr("penstock.transactions.stores.sql.shards._CHECK_S", 0.0)
    options = CoordinatorOptions(transaction_timeout=1e-6, check_interval=1e-6, check_max=1, session_timeout=600.0)
    coordinator = ShardCoordinator(store, options)
    shards = store.open_shards(coordinator._terms, lambda: None)
    shards.renew()

    def has_asked() -> bool:
        coordinator._check(shards)
        return shards.counts.checks + shards.counts.no_producer > 0

    wait_until(has_asked)
    (first,) = store.checks(half.group).take(10)
    begin = store.database.begin

    def after_the_answer() -> contextlib.AbstractContextManager[sa.Connection]:
        with mock.patch.object(store.database, "begin", begin):
            store.answer(first, Verdict.UNKNOWN, Author.CHECK)
        return begin()

    with mock.patch.object(store.database, "begin", side_effect=after_the_answer) as begun:
        wait_until(lambda: has_asked() and begun.called)

    assert first.check_number == 1
    assert store.checks(half.group).take(0.3) == []


def test_a_backlog_is_taken_in_portions_by_number_and_by_bytes(sql_bench: SqlBench) -> None:
    store, values = sql_bench.sql_store, [b"%d" % number * 1_000 for number in range(5)]
    for value in values:
        sql_bench.send(COMMIT, sql_bench.half(value, key=b"k"))
    shards = store.open_shards(CheckTerms(CheckPolicy(600.0, 600.0, 1), session_s=600.0), lambda: None)
    with contextlib.closing(shards):
        shards.renew()
        backlog = shards.backlog(0)

        def taken(limit: int, room_bytes: int) -> list[bytes | None]:
            return [message.value for entry in backlog._take(limit, room_bytes) for message in entry.addressed]

        assert taken(3, 1 << 20) == values[:3]
        assert taken(100, 2_500) == values[:2]
        # A single one goes whatever its size.
        assert taken(100, 10) == values[:1]


def test_a_cancellation_under_way_when_its_message_is_due_is_waited_for(sql_bench: SqlBench) -> None:
    due_at = time.time() + 3.0
    store, half = sql_bench.sql_store, sql_bench.half(b"v", deliver_at_ms=int(due_at * 1000))
    sql_bench.send(COMMIT, half)
    cancels = decision(half.transaction_id, half.group, ROLLBACK, Author.PRODUCER)._replace(cancels=True)
    shards = store.open_shards(CheckTerms(CheckPolicy(600.0, 600.0, 1), session_s=600.0), lambda: None)
    with contextlib.closing(shards), ThreadPoolExecutor(1) as pool:
        shards.renew()
        backlog = shards.backlog(0)
        with store.database.begin() as connection:
            assert writing.decide(store.database, connection, cancels).refused is None
            time.sleep(due_at + 0.1 - time.time())
            taking = pool.submit(backlog._take, 100, 1 << 20)
            wait([taking], 0.5)

        assert COMMIT not in [pending.verdict for pending in taking.result(30)]


def plan_of(engine: sa.Engine, statement: str, parameters: Any) -> str:
    """Return how a database runs a query: in words, or with the rows that it looks at."""
    how = {"sqlite": "QUERY PLAN", "postgresql": "(ANALYZE, FORMAT JSON)", "mysql": "FORMAT=JSON"}
    explain = f"EXPLAIN {how[engine.name]}"
    with engine.connect() as connection:
        return json.dumps([list(row) for row in connection.exec_driver_sql(f"{explain} {statement}", parameters)])


def test_what_waits_for_its_time_or_is_held_is_not_looked_at_each_time(sql_bench: SqlBench) -> None:
    store, tx = sql_bench.sql_store, schema.tx
    for name, values in (("delayed", {"deliver_at_ms": 1 << 42}), ("refused", {})):
        sql_bench.send(COMMIT, sql_bench.half(name.encode(), **values))
    shards = store.open_shards(CheckTerms(CheckPolicy(600.0, 600.0, 1), session_s=600.0), lambda: None)
    with contextlib.closing(shards):
        shards.renew()
        backlog = shards.backlog(0)
        (refused,) = backlog._take(100, 1 << 20)
        backlog._write_held({refused.transaction_id: "t: it is full"})
        with store.database.begin() as connection:
            for row in connection.execute(sa.select(tx)).mappings().all():
                more = [{**row, "id": new_id(), "decided_seq": 1_000 + number} for number in range(2_000)]
                connection.execute(tx.insert(), more)
        is_mysql = store.database.kind == "mysql"
        with store.database.engine.connect() as connection:
            connection.exec_driver_sql(f"ANALYZE {'TABLE' if is_mysql else ''} penstock_tx")
            connection.commit()
        asked: list[tuple[str, Any]] = []
        sa.event.listen(
            store.database.engine,
            "before_cursor_execute",
            lambda _connection, _cursor, statement, parameters, *_: asked.append((statement, parameters)),
        )

        assert list(backlog._take(100, 1 << 20)) == []
        assert store.checks("orders").take(0) == []

        queries = [one for one in asked if "FROM penstock_tx" in one[0]]
        plans = [plan_of(store.database.engine, *query) for query in queries]
    ready, checks = plans
    assert "penstock_tx_ready" in ready
    assert is_mysql or "publish_at_ms <" in ready or "publish_at_ms<" in ready
    assert "penstock_tx_asked" in checks


def test_a_line_is_searched_once_for_its_first_waiting_transaction(sql_bench: SqlBench) -> None:
    store = sql_bench.sql_store
    for value, verdict in ((b"1", COMMIT), (b"2", COMMIT), (b"3", COMMIT), (b"undecided", None), (b"behind", COMMIT)):
        sql_bench.send(verdict, sql_bench.half(value, order_key=b"k"))
    shards = store.open_shards(CheckTerms(CheckPolicy(600.0, 600.0, 1), session_s=600.0), lambda: None)
    with contextlib.closing(shards):
        shards.renew()
        backlog = shards.backlog(0)
        taken = [entry.half.value for entry in backlog._take(100, 1 << 20)]
        ready = backlog._ready.compile(store.database.engine, compile_kwargs={"literal_binds": True})
        plan = json.loads(plan_of(store.database.engine, str(ready), None))
        held = [one.held_by for one in store.administration().pending()]
        held_by_key = shards.statistics().held_by_key

    assert taken == [b"1", b"2", b"3"]
    searches = re.findall(r"'Alias': 'waiting'.*?'Actual Loops': ([\d.]+)", str(plan))
    assert list(map(float, searches)) == [1.0] * (store.database.kind == "postgresql")
    assert len(set(held[1:])) == 1
    assert held[0] is None
    assert held_by_key == 3


def test_an_error_of_the_database_that_passes_costs_no_transactional_id(
    sql_bench: SqlBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = sql_bench.coordinator(**NO_CHECKS)
    sql_bench.send(COMMIT, sql_bench.half(b"0"))
    settled(coordinator, committed=1)
    opened, published = mock.Mock(), SqlBacklog._write_published
    errors = [sa.exc.OperationalError("UPDATE", {}, Exception("the server restarts")) for _ in range(2)]

    def failing(self: SqlBacklog, names: Any) -> None:
        if errors:
            raise errors.pop()
        published(self, names)

    monkeypatch.setattr(TransactionalWriter, "open", opened)
    monkeypatch.setattr(SqlBacklog, "_write_published", failing)
    sql_bench.send(COMMIT, sql_bench.half(b"1"))
    statistics = settled(coordinator, committed=2)

    assert not errors
    assert not opened.called
    assert statistics.recoveries == 0
    assert sql_bench.seen() == [b"0", b"1"]


def test_an_error_of_the_database_that_passes_does_not_end_the_trials_of_a_target(
    sql_bench: SqlBench, admin: AdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, taken = f"later.{sql_bench.topic}", SqlBacklog._take_held
    coordinator = sql_bench.coordinator(**NO_CHECKS)
    sql_bench.send(COMMIT, sql_bench.half(b"v", topic=target))
    wait_until(lambda: coordinator.statistics().held)
    errors = [sa.exc.OperationalError("UPDATE", {}, Exception("the server restarts"))]

    def failing(self: SqlBacklog, ids: Any) -> Any:
        if errors:
            raise errors.pop()
        return taken(self, ids)

    monkeypatch.setattr(SqlBacklog, "_take_held", failing)
    ensure_topics(admin, [TopicSpec(target, 1)])
    settled(coordinator, committed=1)

    assert not errors
    assert sql_bench.seen(target) == [b"v"]


def test_ages_and_times_are_by_the_databases_clock_not_the_operators(
    sql_bench: SqlBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql_bench.prepare(sql_bench.half(b"young"))
    sql_bench.send(COMMIT, sql_bench.half(b"late", deliver_at_ms=int(time.time() * 1000) + 1_800_000))
    administration, now = sql_bench.sql_store.administration(), time.time()

    for off_s in (-3600.0, 3600.0):
        monkeypatch.setattr(time, "time", lambda off_s=off_s: now + off_s)
        shown = administration.pending()

        assert all(0 <= one.age_s < 600 for one in shown)
        assert [one.waits_for for one in shown] == ["", "its time"]
