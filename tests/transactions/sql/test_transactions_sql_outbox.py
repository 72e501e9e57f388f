"""The outbox: a message is published if, and only if, the user's own SQL transaction commits."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from conformance.store_cases import NO_CHECKS, SqlBench, settled
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import NullPool

from databases import TestDatabase, driver_connect
from penstock.errors import ConfigurationError, TopicNotFoundError
from penstock.transactions.wire.ops import Verdict
from waiting import wait_until


def connect_by(way: str, database: TestDatabase, **more: Any) -> Callable[[], Any]:
    if way == "driver":
        return driver_connect(database, **more)
    engine = sa.create_engine(database.url, poolclass=NullPool)
    return engine.connect if way == "connection" else sessionmaker(engine)


@pytest.mark.parametrize("way", ["driver", "connection", "session"])
def test_an_outbox_row_is_published_iff_its_sql_transaction_commits(sql_bench: SqlBench, way: str) -> None:
    coordinator = sql_bench.coordinator(**NO_CHECKS)
    connect = connect_by(way, sql_bench.database)
    store = sql_bench.sql_store
    for number in range(6):
        with closing(connect()) as connection:
            outbox = store.outbox(connection)
            outbox.send(sql_bench.topic, key="k", value=f"{number}.1", headers={"h": "1", "none": None})
            outbox.send(sql_bench.topic, key=None, value=None, partition=0)
            if number % 2:
                connection.commit()
            else:
                connection.rollback()
    statistics = settled(coordinator, committed=6)

    keyed = [message for message in sql_bench.messages() if message.key() is not None]
    assert statistics.committed == 6
    assert [message.value() for message in keyed] == [b"1.1", b"3.1", b"5.1"]
    assert {(message.key(), *message.headers()) for message in keyed} == {(b"k", ("h", b"1"), ("none", None))}
    assert len(sql_bench.messages()) == 6
    assert sql_bench.database.rows("SELECT count(*) FROM penstock_tx WHERE halves IS NOT NULL") == [(0,)]


@pytest.mark.thorough
@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_an_outbox_transaction_that_stays_open_delays_neither_settlement_nor_purge(
    sql_bench: SqlBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.transactions.stores.sql.shards._SETTLED_KEPT_S", 0.0)
    monkeypatch.setattr("penstock.transactions.stores.shard_coordinator._TRIM_INTERVAL_S", 0.2)
    coordinator = sql_bench.coordinator(**NO_CHECKS)
    with closing(driver_connect(sql_bench.database)()) as user:
        for number in range(20):
            sql_bench.send(Verdict.COMMIT, sql_bench.half(b"%d" % number))
            if number == 10:
                sql_bench.sql_store.outbox(user).send(sql_bench.topic, value=b"open")

        settled(coordinator, committed=20)
        wait_until(
            lambda: sql_bench.database.rows("SELECT 1 FROM penstock_tx UNION ALL SELECT 2 FROM penstock_number") == []
        )

    assert "lost its store" not in caplog.text


@pytest.mark.parametrize("way", ["driver", "connection", "session"])
def test_an_outbox_without_the_stores_tables_says_what_makes_them(sql_bench: SqlBench, way: str) -> None:
    store = sql_bench.make_store()

    with closing(connect_by(way, sql_bench.database)()) as connection:
        with pytest.raises(
            ConfigurationError,
            match=r"tables of the SQL store are not there.*penstock tx create-tables --sql URL",
        ):
            store.outbox(connection).send(sql_bench.topic, value="v")
        connection.rollback()


def test_an_outbox_refuses_what_it_could_not_keep(sql_bench: SqlBench, tmp_path: Any) -> None:
    store = sql_bench.sql_store
    options: dict[str, Any] = {"isolation_level": None} if sql_bench.database.kind == "sqlite" else {"autocommit": True}
    alone = connect_by("driver", sql_bench.database, **options)()
    with closing(alone), pytest.raises(ConfigurationError, match="autocommit"):
        store.outbox(alone).send(sql_bench.topic, value="v")
    with closing(connect_by("driver", sql_bench.database)()) as connection:
        with pytest.raises(TopicNotFoundError, match="there-is-none"):
            store.outbox(connection).send("there-is-none", value="v")
        with pytest.raises(ConfigurationError, match="belongs to the store"):
            store.outbox(connection).send(f"{sql_bench.prefix}.discarded", value="v")
        with pytest.raises(ConfigurationError, match="penstock-"):
            store.outbox(connection).send(sql_bench.topic, value="v", headers={"penstock-tx": "forged"})
    if sql_bench.database.kind != "sqlite":
        with (
            closing(sqlite3.connect(tmp_path / "other.db")) as other,
            pytest.raises(ConfigurationError, match="one database"),
        ):
            store.outbox(other)

    assert sql_bench.database.rows("SELECT count(*) FROM penstock_tx") == [(0,)]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_an_outbox_on_a_store_that_was_not_started_writes_into_the_shards_that_the_tables_have(
    sql_bench: SqlBench,
) -> None:
    coordinator = sql_bench.coordinator(**NO_CHECKS)
    sql_bench.shards = 4
    idle = sql_bench.make_store()

    with closing(connect_by("driver", sql_bench.database)()) as connection:
        for number in range(20):
            idle.outbox(connection).send(sql_bench.topic, key=f"{number}", value=f"{number}")
        connection.commit()

    assert sql_bench.database.rows("SELECT DISTINCT shard FROM penstock_tx") == [(0,)]
    settled(coordinator, committed=20)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_an_outbox_whose_connection_leads_to_a_database_without_tables_says_so(
    sql_bench: SqlBench, tmp_path: Path
) -> None:
    with (
        closing(sqlite3.connect(tmp_path / "another.db")) as another,
        pytest.raises(ConfigurationError, match="in the database of the connection"),
    ):
        sql_bench.sql_store.outbox(another).send(sql_bench.topic, value="v")
