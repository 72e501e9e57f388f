"""`SqlSink` on real SQLite and PostgreSQL: exactly-once by deed (I9), types, names and refusals."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import sqlalchemy as sa
from checkpoints import lose_commit
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's customary name
from pyspark.sql.streaming.query import StreamingQuery

from databases import TestDatabase, new_database
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError, SinkError
from penstock.spark_sink import SqlSink, start_sink

FrameOf = Callable[..., DataFrame]


def test_the_newest_row_of_a_key_wins_within_and_across_batches(database: TestDatabase, frame_of: FrameOf) -> None:
    sink = SqlSink(database.url, "prices", ["id"])

    sink(frame_of("id STRING, price INT", [(0, 5, "a", 5), (0, 7, "a", 7), (0, 6, "a", 6), (1, 0, "b", 1)]), 0)
    sink(frame_of("id STRING, price INT", [(0, 8, "a", None), (1, 1, "c", 3)]), 1)

    assert database.rows("SELECT id, price FROM prices ORDER BY id") == [("a", None), ("b", 1), ("c", 3)]
    assert database.rows('SELECT * FROM penstock_ledger ORDER BY "partition"') == [
        ("", "prices", "orders", 0, 9, None),
        ("", "prices", "orders", 1, 2, None),
    ]
    assert sink.position() == {("orders", 0): 9, ("orders", 1): 2}


def test_totals_are_added_once_whatever_is_replayed(
    database: TestDatabase, frame_of: FrameOf, caplog: pytest.LogCaptureFixture
) -> None:
    sink = SqlSink(database.url, "totals", ["id"], sum_columns=["flights", "delay"])
    columns = "id STRING, flights INT, delay DOUBLE, last STRING"
    first = frame_of(columns, [(0, 0, "a", 1, 1.5, "x"), (0, 1, "a", 1, None, "y"), (0, 2, "b", 1, None, "z")])
    overlapping = frame_of(columns, [(0, 2, "b", 1, None, "z"), (0, 3, "a", 1, 2.0, "w")])

    sink(first, 0)
    sink(first, 0)
    sink(overlapping, 1)

    assert database.rows("SELECT id, flights, delay, last FROM totals ORDER BY id") == [
        ("a", 3, 3.5, "w"),
        ("b", 1, None, "z"),
    ]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "batch 0: 3 of 3 rows for table totals were applied before" in warnings[0]
    assert "batch 1: 1 of 2 rows for table totals were applied before" in warnings[1]
    assert "orders[0] up to offset 2" in warnings[1]


def test_without_a_key_rows_are_appended_once_and_keep_their_place_if_asked(
    database: TestDatabase, frame_of: FrameOf
) -> None:
    sink = SqlSink(database.url, "events", keep_position=True)
    # One message may give several rows.
    batch = frame_of("name STRING", [(0, 0, "same"), (0, 0, "same"), (0, 1, "")])

    sink(batch, 0)
    sink(batch, 0)

    assert database.rows('SELECT name, topic, "partition", "offset" FROM events ORDER BY 4, 1') == [
        ("same", "orders", 0, 0),
        ("same", "orders", 0, 0),
        ("", "orders", 0, 1),
    ]


def test_every_type_comes_back_as_it_was(database: TestDatabase, frame_of: FrameOf) -> None:
    instant = datetime(2013, 1, 1, 5, 15, 0, 120, tzinfo=UTC)
    columns = (
        "id BIGINT, b BOOLEAN, i8 TINYINT, i16 SMALLINT, i32 INT, f DOUBLE, d DECIMAL(12,2), t STRING, "
        "bin BINARY, day DATE, at TIMESTAMP, wall TIMESTAMP_NTZ"
    )
    text = "quote ' \" , \n back\\slash \\N é \u4e2d"
    row = (2**62, True, 1, 2, 3, 0.1, Decimal("9999999.25"), text, b"\x00\xff\\x", date(2013, 1, 1), instant)
    wall = instant.replace(tzinfo=None)

    SqlSink(database.url, "types", ["id"])(frame_of(columns, [(0, 0, *row, wall), (0, 1, 1, *[None] * 11)]), 0)

    found = database.rows("SELECT * FROM types ORDER BY id DESC")
    if database.kind == "sqlite":
        stored = (*row[:6], 9999999.25, *row[7:9], "2013-01-01", *["2013-01-01 05:15:00.000120"] * 2)
        assert found[0] == stored
    else:
        assert found[0] == (*row, wall)
    assert found[1] == (1, *[None] * 11)


@pytest.mark.parametrize("staged", ["executors", "driver"])
def test_times_are_in_utc_whatever_the_zones_of_database_and_session(
    postgresql_url: str, spark: SparkSession, frame_of: FrameOf, staged: Any
) -> None:
    database = new_database(postgresql_url)
    name = sa.make_url(database.url).database
    database.execute(
        "CREATE TABLE times (at timestamp, at_zone timestamptz, wall timestamp, wall_zone timestamptz)",
        f"ALTER DATABASE {name} SET timezone TO 'Asia/Tokyo'",
    )
    noon = datetime(2020, 1, 1, 12, tzinfo=UTC)
    wall = noon.replace(tzinfo=None)
    columns = "at TIMESTAMP, at_zone TIMESTAMP, wall TIMESTAMP_NTZ, wall_zone TIMESTAMP_NTZ"

    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        SqlSink(database.url, "times", staging=staged)(frame_of(columns, [(0, 0, noon, noon, wall, wall)]), 0)
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")

    assert database.rows("SHOW timezone") == [("Asia/Tokyo",)]
    assert database.rows("SELECT * FROM times") == [(wall, noon, wall, noon)]


def test_names_and_values_that_look_like_sql_are_names_and_values(database: TestDatabase, frame_of: FrameOf) -> None:
    table = 'order"; DROP TABLE x; --'
    columns = '`select` STRING, `a"b` INT, `with space` STRING, `100%s` INT, `Upper:case` INT'
    values = ("'; DROP TABLE penstock_ledger; --", 1, '"; --', 2, 3)
    sink = SqlSink(database.url, table, ["select", 'a"b'], sum_columns=["100%s"], ledger_table='led"ger')

    sink(frame_of(columns, [(0, 0, *values)]), 0)
    sink(frame_of(columns, [(0, 1, *values)]), 1)

    quoted = table.replace('"', '""')
    assert database.rows(f'SELECT * FROM "{quoted}"') == [(*values[:3], 4, 3)]  # noqa: S608 - the test's own name
    assert database.rows('SELECT next_offset FROM "led""ger"') == [(2,)]


def test_a_table_that_does_not_fit_is_told_column_by_column(database: TestDatabase, frame_of: FrameOf) -> None:
    database.execute("CREATE TABLE prices (id INTEGER PRIMARY KEY, needed TEXT NOT NULL, extra TEXT)")
    frame = frame_of("id STRING, price INT", [(0, 0, "a", 1)])

    with pytest.raises(SinkError, match="table prices does not fit the frame") as caught:
        SqlSink(database.url, "prices", ["id"])(frame, 0)

    assert "lacks the frame's column price" in str(caught.value)
    assert "column id is INTEGER in the table and TEXT in the frame" in str(caught.value)
    assert "column needed must not be empty" in str(caught.value)
    assert "extra" not in str(caught.value)


def test_an_existing_table_is_used_if_it_fits(database: TestDatabase, frame_of: FrameOf) -> None:
    database.execute(
        "CREATE TABLE prices (id VARCHAR(10), price INTEGER, seen INTEGER DEFAULT 7, UNIQUE (id))",
        "CREATE TABLE loose (id VARCHAR(10), price INTEGER)",
    )
    frame = frame_of("id STRING, price INT", [(0, 0, "a", 1)])

    SqlSink(database.url, "prices", ["id"])(frame, 0)

    assert database.rows("SELECT * FROM prices") == [("a", 1, 7)]
    with pytest.raises(SinkError, match=r"no primary key or unique index on \(id\)"):
        SqlSink(database.url, "loose", ["id"])(frame, 0)


def test_frames_a_sink_cannot_store_are_refused_with_a_sentence(database: TestDatabase, frame_of: FrameOf) -> None:
    sink = SqlSink(database.url, "prices", ["id"])
    frame = frame_of("id STRING, price INT", [(0, 3, None, 1)])

    with pytest.raises(
        SinkError, match=r"a row from orders\[0\] offset 3 \(column id is part of the key and is NULL\).*dead_letters"
    ):
        sink(frame, 0)
    with pytest.raises(SinkError, match="lacks offset"):
        sink(frame.drop("offset"), 0)
    with pytest.raises(SinkError, match=r"column offset of the frame for table .* is NULL in 1 rows"):
        sink(frame.withColumn("offset", F.lit(None).cast("bigint")), 0)
    with pytest.raises(SinkError, match=r"column tags has the type list<.*to_json"):
        sink(frame_of("id STRING, tags ARRAY<INT>", [(0, 3, "a", [1])]), 0)
    with pytest.raises(SinkError, match="sum_columns names price, which holds no numbers"):
        SqlSink(database.url, "prices", ["id"], sum_columns=["price"])(frame.withColumn("price", F.lit("x")), 0)
    with pytest.raises(SinkError, match="keep_position is off"):
        SqlSink(database.url, "prices", ["offset"])(frame, 0)


def test_a_refusal_of_the_database_keeps_values_to_itself(database: TestDatabase, frame_of: FrameOf) -> None:
    database.execute("CREATE TABLE prices (id VARCHAR(20) PRIMARY KEY, price INTEGER CHECK (price < 10))")
    frame = frame_of("id STRING, price INT", [(0, 0, "canary-4711", 4711), (0, 1, "b", 1)])

    with pytest.raises(SinkError, match=r"batch 6 was refused by table prices: .*nothing of the batch") as caught:
        SqlSink(database.url, "prices", ["id"])(frame, 6)

    assert "4711" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert database.rows("SELECT * FROM prices") == []


def test_two_copies_of_a_query_by_mistake_apply_each_row_once(database: TestDatabase, frame_of: FrameOf) -> None:
    sink = SqlSink(database.url, "totals", ["id"], sum_columns=["n"])
    frame = frame_of("id STRING, n INT", [(n % 3, n, f"key-{n % 5}", 1) for n in range(300)])
    together = Barrier(4)

    def store(copy: int) -> None:
        together.wait(30)
        sink(frame, copy)

    with ThreadPoolExecutor(4) as copies:
        list(copies.map(store, range(4)))

    assert database.rows("SELECT id, n FROM totals ORDER BY id") == [(f"key-{n}", 60) for n in range(5)]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"url": "nonsense canary-4711"}, "url is not a database address"),
        ({"url": "mysql://user:canary-4711@host/db"}, "mysql"),
        ({"url": "sqlite://"}, "in memory"),
        ({"table": ""}, "table"),
        ({"table": "penstock_ledger"}, "must differ"),
        ({"sum_columns": ["n"]}, "sum_columns needs a key"),
        ({"key": ["id"], "sum_columns": ["id"]}, "part of the key"),
        ({"delete": "gone"}, "delete needs a key"),
        ({"key": ["id"], "delete": "gone", "sum_columns": ["n"]}, "goes with no sum_columns"),
        ({"key": ["id"], "delete": "id"}, "delete names id"),
        ({"schema": "other"}, "an SQLite file has none"),
        ({"max_rejects": 0}, "max_rejects"),
        ({"staging": "nowhere"}, "staging must be"),
    ],
)
def test_a_wrong_setting_is_named_without_secrets(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named) as caught:
        SqlSink(**{"url": "sqlite:///x.db", "table": "t"} | settings)

    assert "canary-4711" not in str(caught.value)


def test_a_sink_can_be_pickled_and_does_not_show_its_address() -> None:
    sink = SqlSink("postgresql://user:canary-4711@127.0.0.1/db", "t", ["id"], sum_columns=("n",))

    assert pickle.loads(pickle.dumps(sink)) == sink  # noqa: S301 - the test's own bytes
    assert "canary-4711" not in repr(sink)


def test_an_unreachable_database_is_told_without_its_password(frame_of: FrameOf, tmp_path: Path) -> None:
    frame = frame_of("id STRING", [(0, 0, "a")])
    address = (
        "postgresql://user:canary-4711@127.0.0.1:1/db?password=canary-4712&sslpassword=canary-4713&user=canary-4714"
    )

    with pytest.raises(SinkError, match=r"refused by table t at postgresql\+psycopg://127.0.0.1:1/db: ") as pg:
        SqlSink(address, "t", ["id"], tries=1)(frame, 0)
    with pytest.raises(SinkError, match=r"at postgresql\+psycopg://127.0.0.1,127.0.0.1:1,2/: ") as query:
        SqlSink("postgresql://?host=127.0.0.1,127.0.0.1&port=1,2&password=canary-4711", "t").position()
    with pytest.raises(SinkError, match="unable to open database file"):
        SqlSink(f"sqlite:///{tmp_path}/no/such/folder.db", "t", ["id"])(frame, 0)

    assert "canary" not in f"{pg.value} {query.value}"


class Pipeline:
    """A query from a topic into totals per key, started as often as a test wants."""

    def __init__(self, spark: SparkSession, broker: DevBroker, topic: str, database: TestDatabase) -> None:
        self.spark, self.broker, self.topic, self.database = spark, broker, topic, database
        self.batches: list[int] = []
        #: Options of the sink.
        self.options: dict[str, Any] = {}

    def store(self, batch: DataFrame, batch_id: int) -> None:
        """Store one batch; remembered before it is stored, as a started batch."""
        self.batches.append(batch_id)
        frame = batch.select(
            F.col("key").cast("string").alias("id"),
            F.lit(1).alias("n"),
            F.col("value").cast("string").alias("last"),
            "topic",
            "partition",
            "offset",
        )
        SqlSink(self.database.url, "totals", ["id"], sum_columns=["n"], **self.options)(frame, batch_id)

    def run(self, checkpoint: Path) -> StreamingQuery:
        """Run the query until it has read what is there."""
        query = start_sink(
            self.spark,
            self.topic,
            self.store,
            bootstrap_servers=self.broker.bootstrap_servers,
            trigger="available now",
            name=self.topic,
            checkpoint_location=str(checkpoint),
        )
        assert query.awaitTermination(150)
        return query

    def table(self) -> list[tuple[Any, ...]]:
        """Return the table of totals."""
        return self.database.rows("SELECT id, n, last FROM totals ORDER BY id")


@pytest.fixture
def pipeline(spark: SparkSession, broker: DevBroker, new_topic: Callable[..., str], database: TestDatabase) -> Pipeline:
    """A pipeline over a topic of two partitions."""
    return Pipeline(spark, broker, new_topic(partitions=2), database)


def expected(rows: Sequence[tuple[bytes, bytes]]) -> list[tuple[str, int, str]]:
    """Fold rows by a plain loop."""
    totals: dict[str, tuple[int, str]] = {}
    for key, value in rows:
        totals[key.decode()] = (totals.get(key.decode(), (0, ""))[0] + 1, value.decode())
    return [(key, *total) for key, total in sorted(totals.items())]


ROWS = [(b"key-%d" % (n % 7), b"value-%d" % n) for n in range(100)]


def test_a_replayed_batch_and_a_lost_checkpoint_change_nothing(
    pipeline: Pipeline, write: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(pipeline.topic, 0, ROWS[:60])
    pipeline.run(tmp_path / "checkpoint")
    write(pipeline.topic, 0, ROWS[60:])
    query = pipeline.run(tmp_path / "checkpoint")
    assert pipeline.table() == expected(ROWS)
    # What tells a repetition from a second call: the run of the query, which is another one after each start.
    assert pipeline.database.rows("SELECT query, batch FROM penstock_ledger") == [(pipeline.topic, f"{query.runId}/1")]

    lose_commit(tmp_path / "checkpoint", 1)
    pipeline.run(tmp_path / "checkpoint")

    assert pipeline.batches == [0, 1, 1]  # the batch really came twice
    assert "40 of 40 rows for table totals were applied before" in caplog.text
    assert pipeline.table() == expected(ROWS)

    pipeline.run(tmp_path / "another checkpoint")

    assert pipeline.batches == [0, 1, 1, 0]
    assert "100 of 100 rows for table totals were applied before" in caplog.text
    assert pipeline.table() == expected(ROWS)


#: What makes the database fail at the last step of a batch, when its rows are merged already, and what ends that.
CRASHES = {
    "sqlite": (
        """CREATE TRIGGER crash BEFORE UPDATE ON penstock_ledger WHEN NEW.next_offset > 60
        BEGIN SELECT RAISE(ABORT, 'crash'); END""",
        "DROP TRIGGER crash",
    ),
    "postgresql": (
        """CREATE FUNCTION crash() RETURNS trigger LANGUAGE plpgsql AS
        'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NEW; END';
        CREATE TRIGGER crash BEFORE UPDATE ON penstock_ledger FOR EACH ROW
        WHEN (NEW.next_offset > 60) EXECUTE FUNCTION crash()""",
        "DROP TRIGGER crash ON penstock_ledger",
    ),
}


def test_a_crash_in_the_middle_of_the_transaction_stores_nothing_and_the_next_run_completes(
    pipeline: Pipeline, write: Callable[..., None], tmp_path: Path
) -> None:
    database = pipeline.database
    # A connection that is lost is tried again: each of these fails.
    pipeline.options["tries"] = 2
    write(pipeline.topic, 0, ROWS[:60])
    pipeline.run(tmp_path)
    failing, mended = CRASHES[database.kind]
    database.execute(failing)
    write(pipeline.topic, 0, ROWS[60:])

    with pytest.raises(Exception, match="was refused by table totals"):
        pipeline.run(tmp_path)
    after_crash = pipeline.table()
    database.execute(mended)
    pipeline.run(tmp_path)

    assert pipeline.batches == [0, 1, 1]  # the second batch really failed and came again
    assert after_crash == expected(ROWS[:60])
    assert pipeline.table() == expected(ROWS)
