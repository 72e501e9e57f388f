"""Tables that `SqlSink` makes and changes, and the values it keeps in them, without a JVM."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa
from arrow_frames import PRICES, Letters, frame

from databases import TestDatabase
from penstock.errors import SinkError
from penstock.spark_sink import SqlSink
from penstock.spark_sink.errors import SchemaMismatchError


def test_names_that_differ_only_in_case_are_refused(database: TestDatabase) -> None:
    sink = SqlSink(database.url, "prices", evolve=True)
    sink(frame(PRICES, [(0, 0, "a", 1)]), 0)

    with pytest.raises(
        SchemaMismatchError, match="frame for table prices has Price and price, which differ only in case"
    ):
        sink.check(frame({**PRICES, "Price": pa.int64()}, []).schema)
    with pytest.raises(SchemaMismatchError, match="lacks the frame's column Price, and has price, which differs only"):
        sink.check(frame({"id": pa.string(), "Price": pa.int64()}, []).schema)


def test_totals_have_room_for_what_is_added(database: TestDatabase) -> None:
    letters = Letters()
    columns = {"id": pa.string(), "n": pa.int32(), "of": pa.float32()}
    sink = SqlSink(database.url, "totals", ["id"], sum_columns=["n", "of"], dead_letters=letters)
    largest = 2**31 - 1

    for number, part in enumerate([0.5, None, 0.5]):
        rows = [(0, number, "a", largest, part), (0, number, "b", None, None)]
        sink(frame(columns, rows), number)
        sink(frame(columns, rows), number)  # it comes again
    assert database.rows("SELECT n, of FROM totals ORDER BY id") == [(3 * largest, 1.0), (None, None)]
    database.execute("DELETE FROM totals WHERE id = 'b'", "UPDATE totals SET n = 9223372036854775806")
    sink(frame(columns, [(0, 3, "a", 1, 0.5), (0, 4, "a", 1, 0.5)]), 3)

    assert database.rows("SELECT n, of FROM totals") == [(2**63 - 1, 1.5)]  # to the last one that it holds
    assert [letter.offset for letter in letters.written] == [4]


def test_a_table_with_its_schema_s_name_is_that_table(server: TestDatabase) -> None:
    database = str(sa.make_url(server.url).database)
    other, own = f"other_{database}", "public" if server.kind == "postgresql" else database
    server.execute(f"CREATE SCHEMA {other}")  # in MariaDB a database
    batch = frame(PRICES, [(0, 0, "a", 1)])

    for staged in ("executors", "driver"):
        options: Any = {"staging": staged, "ledger_table": f"{staged}_ledger"}
        SqlSink(server.url, f"{other}.prices", ["id"], **options)(batch, 0)
        SqlSink(server.url, f"{own}.prices", ["id"], **options)(batch, 0)
        SqlSink(server.url, "odd.name", ["id"], schema=other, **options)(batch, 0)

    for table in (f"{other}.prices", f"{own}.prices", f'{other}."odd.name"'):
        assert server.rows(f"SELECT id, price FROM {table}") == [("a", 1)]  # noqa: S608 - the test's own names


@pytest.mark.parametrize("staged", ["driver", "executors"])
def test_columns_that_are_new_are_added_where_that_is_asked_for(database: TestDatabase, staged: Any) -> None:
    more = {**PRICES, '100%s "new': pa.string(), "sum": pa.int32()}
    sink = SqlSink(database.url, "prices", ["id"], staging=staged)
    sink(frame(PRICES, [(0, 0, "a", 1)]), 0)
    with pytest.raises(SinkError, match="the table lacks the frame's column sum"):
        sink(frame(more, [(0, 1, "b", 2, "x", 3)]), 1)
    evolving = SqlSink(database.url, "prices", ["id"], sum_columns=["sum"], evolve=True, staging=staged)

    evolving.check(frame(more, []).schema)
    evolving(frame(more, [(0, 1, "b", 2, "x", 3)]), 1)
    sink(frame(PRICES, [(0, 2, "c", 4)]), 2)

    assert database.rows("SELECT * FROM prices ORDER BY id") == [
        ("a", 1, None, None), ("b", 2, "x", 3), ("c", 4, None, None)
    ]  # fmt: skip
    with pytest.raises(SinkError, match="the table lacks the frame's column part"):
        SqlSink(database.url, "prices", ["id", "part"], evolve=True).check(
            frame({**more, "part": pa.string()}, []).schema
        )
