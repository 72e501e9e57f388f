"""Which rows a ledger lets in, and the staging tables of executors, without a JVM."""

from __future__ import annotations

import pyarrow as pa
import pytest
import sqlalchemy as sa
from arrow_frames import PRICES, frame

from databases import TestDatabase
from penstock.database_url import parse_database_url
from penstock.errors import SinkError
from penstock.spark_sink import SqlSink
from penstock.spark_sink.queries.restarts import is_permanent
from penstock.spark_sink.sinks.sql.rows import staging


def test_a_ledger_that_does_not_know_queries_is_refused(way: tuple[TestDatabase, str]) -> None:
    database, staged = way
    sink = SqlSink(database.url, "events", staging=staged)  # type: ignore[arg-type] # as above
    database.execute("CREATE TABLE penstock_ledger (target TEXT, topic TEXT, n INTEGER)")

    for ask in (lambda: sink(frame(PRICES, [(0, 0, "a", 1)]), 0), sink.position):
        with pytest.raises(SinkError, match=r"penstock_ledger lacks the column query.*another ledger_table") as caught:
            ask()
        assert is_permanent(caught.value)


def test_a_staging_table_that_a_crash_has_emptied_is_noticed(postgresql: TestDatabase) -> None:
    def empty() -> None:
        table = postgresql.rows("SELECT tablename FROM pg_tables WHERE starts_with(tablename, 'penstock_stage')")[0][0]
        postgresql.execute(f"TRUNCATE {table}")

    sink = SqlSink(postgresql.url, "events")
    with pytest.raises(SinkError, match="holds 0 rows where its tasks had copied 4"):
        sink(frame(PRICES, [(0, n, "a", 1) for n in range(4)], between=empty), 0)

    assert postgresql.rows("SELECT * FROM events") == []
    assert sink.position() == {}


def test_staging_tables_of_a_driver_that_is_gone_are_removed_and_those_of_a_live_one_stay(
    postgresql: TestDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    columns = pa.schema([("id", pa.string())])
    prefix = staging.stage_prefix("events", "penstock_ledger")
    url = parse_database_url(postgresql.url)
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as gone:
        left = staging.create_stage(gone, prefix, None, columns)
    with engine.connect() as living:
        kept = staging.create_stage(living, prefix, None, columns)
        SqlSink(postgresql.url, "events")(frame(PRICES, [(0, 0, "a", 1)]), 0)
        tables = postgresql.rows("SELECT tablename FROM pg_tables WHERE starts_with(tablename, 'penstock_stage')")

    assert tables == [(kept.name,)]
    assert f"the staging table {left.name} was left by a driver that is gone" in caplog.text
