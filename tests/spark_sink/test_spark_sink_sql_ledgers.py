"""Which rows a ledger lets in, and the staging tables of executors, without a JVM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa
from arrow_frames import PRICES, frame

from databases import TestDatabase
from penstock.database_url import parse_database_url
from penstock.errors import SinkError
from penstock.spark_sink import SqlSink
from penstock.spark_sink.queries.restarts import is_permanent
from penstock.spark_sink.sinks.sink import ledger_positions
from penstock.spark_sink.sinks.sql.rows import staging


def test_a_second_call_in_a_batch_and_rows_held_back_are_errors_and_a_new_run_is_not(
    way: tuple[TestDatabase, str],
) -> None:
    database, staged = way
    sink = SqlSink(database.url, "events", staging=staged)  # type: ignore[arg-type] # as above
    sink(frame(PRICES, [(0, 0, "a", 1), (0, 5, "b", 1)], run="first"), 7)

    with pytest.raises(SinkError, match=r"batch 7 was given to table events twice: rows of orders\[0\] are stored"):
        sink(frame(PRICES, [(0, 3, "late", 1)], run="first"), 7)
    with pytest.raises(SinkError, match=r"batch 8 holds rows of orders\[0\] that lie below those of batch 7"):
        sink(frame(PRICES, [(0, 5, "late", 1), (0, 6, "c", 1)], run="first"), 8)
    sink(frame(PRICES, [(0, 5, "b", 1), (0, 6, "c", 1)], run="second"), 7)

    assert database.rows("SELECT id FROM events ORDER BY id") == [("a",), ("b",), ("c",)]
    assert database.rows("SELECT batch FROM penstock_ledger") == [("second/7",)]


def test_what_another_copy_of_the_query_has_stored_is_not_taken_for_this_one_s(way: tuple[TestDatabase, str]) -> None:
    database, staged = way
    sink = SqlSink(database.url, "events", staging=staged)  # type: ignore[arg-type] # as above
    sink(frame(PRICES, [(0, offset, f"row{offset}", 1) for offset in range(4)], run="ahead"), 1)

    sink(frame(PRICES, [(0, 0, "row0", 1), (0, 1, "row1", 1), (1, 0, "other", 1)], run="behind"), 1)
    sink(frame(PRICES, [(0, 2, "row2", 1), (0, 3, "row3", 1), (0, 4, "row4", 1)], run="behind"), 2)

    stored = database.rows("SELECT id FROM events ORDER BY id")
    assert stored == [("other",), ("row0",), ("row1",), ("row2",), ("row3",), ("row4",)]


def test_two_queries_feed_one_table_and_each_has_a_ledger_of_its_own(way: tuple[TestDatabase, str]) -> None:
    database, staged = way
    sink = SqlSink(database.url, "events", staging=staged)  # type: ignore[arg-type] # as above
    for start in ("first", "second"):
        for name, offsets in (("even", (0, 2, 4)), ("<br/>odd", (1, 3))):
            rows = [(0, offset, f"row{offset}", 1) for offset in offsets]
            sink(frame(PRICES, rows, query=name, run=f"{start} of {name}"), 0)
    replace(sink, name="even")(frame(PRICES, [(0, 4, "row4", 1), (0, 6, "row6", 1)]), 1)

    assert database.rows("SELECT id FROM events ORDER BY id") == [(f"row{n}",) for n in (0, 1, 2, 3, 4, 6)]
    assert ledger_positions(sink, "even", [("orders", 0), ("orders", 1)]) == {("orders", 0): 7}
    assert ledger_positions(sink, "<br/>odd", [("orders", 0)]) == sink.position("<br/>odd") == {("orders", 0): 4}
    assert sink.position() == {}
    assert ledger_positions(sink.position, "even", [("orders", 0)]) is None  # what has no ledger


def test_a_ledger_that_does_not_know_queries_is_refused(way: tuple[TestDatabase, str]) -> None:
    database, staged = way
    sink = SqlSink(database.url, "events", staging=staged)  # type: ignore[arg-type] # as above
    database.execute("CREATE TABLE penstock_ledger (target TEXT, topic TEXT, n INTEGER)")

    for ask in (lambda: sink(frame(PRICES, [(0, 0, "a", 1)]), 0), sink.position):
        with pytest.raises(SinkError, match=r"penstock_ledger lacks the column query.*another ledger_table") as caught:
            ask()
        assert is_permanent(caught.value)


def test_what_a_lost_task_has_copied_is_not_stored(postgresql: TestDatabase) -> None:
    batch: Any = frame(PRICES, [(0, n, f"key-{n}", n) for n in range(8)], lost=True)
    staged: list[int] = []

    def count() -> None:
        table = postgresql.rows("SELECT tablename FROM pg_tables WHERE starts_with(tablename, 'penstock_stage')")[0][0]
        staged.append(postgresql.rows(f"SELECT count(*) FROM {table}")[0][0])  # noqa: S608 - the sink's own name

    batch.between = count
    SqlSink(postgresql.url, "events")(batch, 0)

    assert staged == [16]  # each row really was there twice
    assert postgresql.rows("SELECT id, price FROM events ORDER BY id") == [(f"key-{n}", n) for n in range(8)]


def test_a_ledger_that_moves_while_a_batch_is_staged_has_it_staged_anew(
    postgresql: TestDatabase, caplog: pytest.LogCaptureFixture
) -> None:
    sink = SqlSink(postgresql.url, "totals", ["id"], sum_columns=["price"])
    sink(frame(PRICES, [(0, 0, "a", 1)]), 0)
    others = iter([frame(PRICES, [(0, 1, "a", 10), (0, 2, "a", 10)])])
    batch: Any = frame(PRICES, [(0, n, "a", 10) for n in range(1, 5)])

    def store() -> None:
        for other in others:  # once: before the batch is merged for the first time
            sink(other, 3)

    batch.between = store

    sink(batch, 1)

    assert "is staged anew: another writer has moved its ledger" in caplog.text
    assert "2 of 4 rows for table totals were applied before" in caplog.text
    assert postgresql.rows("SELECT price FROM totals") == [(41,)]


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
