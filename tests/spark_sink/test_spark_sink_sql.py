"""`SqlSink` on real SQLite, PostgreSQL and MariaDB: exactly-once by deed (I9), types, names and refusals."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from arrow_frames import PRICES, frame

from databases import TestDatabase
from penstock.errors import ConfigurationError, SinkError
from penstock.spark_sink import DeadLetters, LedgerEntry, SqlSink
from penstock.spark_sink.queries.supervise import FailureKind, kind_of


def test_every_type_comes_back_as_it_was(database: TestDatabase) -> None:
    instant = datetime(2013, 1, 1, 5, 15, 0, 120, tzinfo=UTC)
    columns = {
        "id": pa.int64(), "b": pa.bool_(), "i8": pa.int8(), "i16": pa.int16(), "i32": pa.int32(), "f": pa.float64(),
        "d": pa.decimal128(12, 2), "t": pa.string(), "bin": pa.binary(), "day": pa.date32(),
        "at": pa.timestamp("us", "UTC"), "wall": pa.timestamp("us"),
    }  # fmt: skip
    text = "quote ' \" , \n back\\slash \\N é \u4e2d"
    row = (2**62, True, 1, 2, 3, 0.1, Decimal("9999999.25"), text, b"\x00\xff\\x", date(2013, 1, 1), instant)
    wall = instant.replace(tzinfo=None)

    SqlSink(database.url, "types", ["id"])(frame(columns, [(0, 0, *row, wall), (0, 1, 1, *[None] * 11)]), 0)

    found = database.rows("SELECT * FROM types ORDER BY id DESC")
    if database.kind == "sqlite":
        stored = (*row[:6], 9999999.25, *row[7:9], "2013-01-01", *["2013-01-01 05:15:00.000120"] * 2)
        assert found[0] == stored
    else:
        # MariaDB has no times with a zone.
        assert found[0] == (*(row if database.kind == "postgresql" else (*row[:-1], wall)), wall)
    assert found[1] == (1, *[None] * 11)


def test_names_and_values_that_look_like_sql_are_names_and_values(database: TestDatabase) -> None:
    table = 'order"; DROP TABLE x; --'
    names = ["select", 'a"b', "with space", "100%s", "Upper:case"]
    columns = {name: pa.string() if name in ("select", "with space") else pa.int32() for name in names}
    values = ("'; DROP TABLE penstock_ledger; --", 1, '"; --', 2, 3)
    sink = SqlSink(database.url, table, ["select", 'a"b'], sum_columns=["100%s"], ledger_table='led"ger')

    sink(frame(columns, [(0, 0, *values)]), 0)
    sink(frame(columns, [(0, 1, *values)]), 1)

    quoted = table.replace('"', '""')
    assert database.rows(f'SELECT * FROM "{quoted}"') == [(*values[:3], 4, 3)]  # noqa: S608 - the test's own name
    assert database.rows('SELECT next_offset FROM "led""ger"') == [(2,)]


def test_a_table_that_does_not_fit_is_reported_column_by_column(database: TestDatabase) -> None:
    database.execute("CREATE TABLE prices (id INTEGER PRIMARY KEY, needed TEXT NOT NULL, extra TEXT)")

    with pytest.raises(SinkError, match="table prices does not fit the frame") as caught:
        SqlSink(database.url, "prices", ["id"])(frame(PRICES, [(0, 0, "a", 1)]), 0)

    assert "lacks the frame's column price" in str(caught.value)
    assert "column id is INTEGER in the table and TEXT in the frame" in str(caught.value)
    assert "column needed must not be empty" in str(caught.value)
    assert "extra" not in str(caught.value)


def test_frames_a_sink_cannot_store_are_refused_with_a_sentence(database: TestDatabase) -> None:
    sink = SqlSink(database.url, "prices", ["id"])
    null: Any = frame(PRICES, [(0, 3, None, 1)])
    unplaced, lost = (replace(null, rows=null.rows.drop_columns("offset")) for _ in range(2))
    lost.rows = lost.rows.append_column("offset", pa.nulls(1, pa.int64()))

    with pytest.raises(
        SinkError, match=r"a row from orders:0@3 \(column id is part of the key and is NULL\).*dead_letters"
    ):
        sink(null, 0)
    with pytest.raises(SinkError, match="lacks offset"):
        sink(unplaced, 0)
    with pytest.raises(SinkError, match=r"column offset of the frame for table .* is NULL in 1 rows"):
        sink(lost, 0)
    with pytest.raises(SinkError, match=r"column tags has the type list<.*to_json"):
        sink(frame({"id": pa.string(), "tags": pa.list_(pa.int32())}, [(0, 3, "a", [1])]), 0)
    with pytest.raises(SinkError, match="sum_columns names price, a string of the frame"):
        SqlSink(database.url, "prices", ["id"], sum_columns=["price"]).check(
            frame({"id": pa.string(), "price": pa.string()}, []).schema
        )
    if database.kind == "sqlite":
        with pytest.raises(SinkError, match="sum_columns names d, a decimal128"):
            SqlSink(database.url, "sums", ["id"], sum_columns=["d"]).check(
                frame({"id": pa.string(), "d": pa.decimal128(9, 2)}, []).schema
            )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"url": "nonsense canary-4711"}, "url is not a database address"),
        ({"url": "mysql://user:p@x/canary-4711@host/db"}, "with %40 for an @ in a password"),
        ({"url": "postgresql://user:p@x:canary-4711@host/db"}, "with %40 for an @ in a password"),
        ({"url": "oracle://user:canary-4711@host/db"}, "oracle"),
        ({"url": "mysql://user:canary-4711@host"}, "no database"),
        ({"url": "sqlite://"}, "in memory"),
        ({"table": ""}, "table"),
        ({"table": "penstock_ledger"}, "must differ"),
        ({"sum_columns": ["n"]}, "sum_columns needs a key"),
        ({"key": ["id"], "sum_columns": ["id"]}, "part of the key"),
        ({"delete": "gone"}, "delete needs a key"),
        ({"key": ["id"], "delete": "gone", "sum_columns": ["n"]}, "goes with no sum_columns"),
        ({"key": ["id"], "delete": "id"}, "delete names id"),
        ({"schema": "other"}, "a file of SQLite has none"),
        ({"max_rejects": 0}, "max_rejects"),
        ({"staging": "nowhere"}, "staging must be"),
        ({"table": "main.t"}, "give the schema of a server separately"),
        ({"mode": "batch", "keep_position": True}, "no message; leave out keep_position"),
        ({"mode": "batch", "key": ["id"], "sum_columns": ["n"]}, "no message; leave out sum_columns"),
        ({"mode": "batch", "dead_letters": DeadLetters("127.0.0.1:1")}, "no message; leave out dead_letters"),
    ],
)
def test_a_wrong_setting_is_named_without_secrets(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named) as caught:
        SqlSink(**{"url": "sqlite:///x.db", "table": "t"} | settings)

    assert "canary-4711" not in str(caught.value)


def test_an_unreachable_database_is_reported_without_its_password(tmp_path: Path) -> None:
    batch = frame(PRICES, [(0, 0, "a", 1)])
    address = (
        "postgresql://user:canary-4711@127.0.0.1:1/db?password=canary-4712&sslpassword=canary-4713&user=canary-4714"
    )

    with pytest.raises(SinkError, match=r"refused by table t at postgresql\+psycopg://127.0.0.1:1/db: ") as pg:
        SqlSink(address, "t", ["id"], tries=1)(batch, 0)
    with pytest.raises(SinkError, match=r"at postgresql\+psycopg://127.0.0.1,127.0.0.1:1,2/: ") as query:
        SqlSink("postgresql://?host=127.0.0.1,127.0.0.1&port=1,2&password=canary-4711", "t").ledger()
    with pytest.raises(SinkError, match=r"at mysql\+pymysql://127.0.0.1:1/db: OperationalError, 2003, Can't") as mysql:
        SqlSink("mariadb://canary-4711:canary-4712@127.0.0.1:1/db", "t", tries=1)(batch, 0)
    with pytest.raises(SinkError, match="unable to open database file"):
        SqlSink(f"sqlite:///{tmp_path}/no/such/folder.db", "t", ["id"])(batch, 0)

    assert "canary" not in f"{pg.value} {query.value} {mysql.value}"


def test_a_ledger_that_does_not_know_queries_is_refused(database: TestDatabase) -> None:
    sink = SqlSink(database.url, "events")
    database.execute("CREATE TABLE penstock_ledger (target TEXT, topic TEXT, n INTEGER)")

    for ask in (lambda: sink(frame(PRICES, [(0, 0, "a", 1)]), 0), sink.ledger):
        with pytest.raises(SinkError, match=r"penstock_ledger lacks the column query.*another ledger_table") as caught:
            ask()
        assert kind_of(caught.value) is FailureKind.PERMANENT


def test_a_former_ledger_is_carried_over(database: TestDatabase) -> None:
    sink = SqlSink(database.url, "events", keep_position=True)
    database.execute(
        """CREATE TABLE penstock_ledger (query VARCHAR(99), target VARCHAR(99), topic VARCHAR(99), "partition" INTEGER,
        next_offset BIGINT NOT NULL, batch TEXT, PRIMARY KEY (query, target, topic, "partition"))""",
        "INSERT INTO penstock_ledger VALUES ('q', 'events', 'orders', 0, 5, 'run/3')",
    )
    (before,) = sink.ledger()["q"].items()
    for batch, (rows, plan) in enumerate([([(0, 4, "a", 1), (0, 7, "b", 2)], (3, 9)), ([(0, 9, "c", 3)], (9, 12))], 4):
        sink(frame(PRICES, rows, query="q", batch=batch, plan={("orders", 0): plan}), batch)
    with pytest.raises(SinkError, match="offsets 12 to 12 would be missing"):
        sink(frame(PRICES, [(0, 14, "d", 4)], query="q", batch=6, plan={("orders", 0): (13, 15)}), 6)

    assert before == (("orders", 0), LedgerEntry(5))
    assert database.rows('SELECT id FROM events ORDER BY "offset"') == [("b",), ("c",)]
    assert database.rows("SELECT start_offset, next_offset, batch_id FROM penstock_ledger") == [(9, 12, 5)]


def test_a_position_in_the_key_is_stored(database: TestDatabase) -> None:
    sink = SqlSink(database.url, "log", ["partition", "offset"])

    sink(frame(PRICES, [(0, 3, "a", 1), (1, 3, "b", 2)]), 0)

    assert database.rows('SELECT * FROM log ORDER BY "partition"') == [(0, 3, "a", 1), (1, 3, "b", 2)]
