"""What `SqlSink` makes of rows (I9), without a JVM: frames are Arrow tables whose tasks run in this process."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pyarrow as pa
import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark import TaskContext
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from databases import TestDatabase, new_database
from penstock.database_url import parse_database_url
from penstock.errors import SinkError
from penstock.spark_sink import DeadLetters, SqlSink
from penstock.spark_sink.queries.restarts import is_permanent
from penstock.spark_sink.sinks.sink import ledger_positions
from penstock.spark_sink.sinks.sql.databases.postgresql import PostgreSql
from penstock.spark_sink.sinks.sql.rows import deduplication as reducing
from penstock.spark_sink.sinks.sql.rows import staging
from penstock.spark_sink.sinks.sql.rows.row_validator import Rejected

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_attempts = itertools.count(1)


@dataclass
class ArrowFrame:
    """A frame in place of Spark's: each part is one task; a part that is lost runs twice and counts once.

    `between` is called when all tasks are done and nothing is merged.
    """

    rows: pa.Table
    parts: int = 2
    lost: bool = False
    between: Callable[[], object] = lambda: None
    run: str | None = None
    query: str = ""
    answers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def schema(self) -> StructType:
        """Spark's types of the columns."""
        return from_arrow_schema(self.rows.schema)

    @property
    def sparkSession(self) -> mock.Mock:  # noqa: N802 - Spark's name
        """A session that knows query and run, as Spark's does inside of a query."""
        number, run = "0", self.run or "some run"
        properties = {
            "streaming.sql.batchId": number,
            "spark.jobGroup.id": run,
            "sql.streaming.queryId": "some id",
            "spark.job.description": f"{self.query}\nid = some id\nrunId = {run}\nbatch = {number}",
        }
        if not self.run and not self.query:
            properties = {}
        return mock.Mock(**{"sparkContext.getLocalProperty.side_effect": properties.get})

    def toArrow(self) -> pa.Table:  # noqa: N802 - Spark's name
        """All rows."""
        return self.rows

    def coalesce(self, _parts: int) -> ArrowFrame:
        """The same frame."""
        return self

    def mapInArrow(self, task: Any, _schema: str) -> ArrowFrame:  # noqa: N802 - Spark's name
        """Run the task on every part."""
        self.answers = []
        size = max(1, math.ceil(self.rows.num_rows / self.parts))
        for start in range(0, self.rows.num_rows, size):
            for attempt in range(2 if self.lost else 1):
                context = mock.Mock(**{"taskAttemptId.return_value": next(_attempts)})
                with mock.patch.object(TaskContext, "get", return_value=context):
                    found = [one for part in task(iter(self.rows.slice(start, size).to_batches(3))) for one in
                             part.to_pylist()]  # fmt: skip
                if attempt == 0:
                    self.answers += found
        self.between()
        return self

    def collect(self) -> list[dict[str, Any]]:
        """What the tasks that count answered."""
        return self.answers


def frame(columns: dict[str, pa.DataType], rows: Sequence[tuple[Any, ...]], **options: Any) -> DataFrame:
    """Return a frame of rows `(partition, offset, values...)` of the topic orders."""
    schema = pa.schema([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), *columns.items()])
    table = pa.Table.from_pylist(
        [dict(zip(schema.names, ("orders", *row), strict=True)) for row in rows], schema=schema
    )
    made: Any = ArrowFrame(table, **options)
    return made  # type: ignore[no-any-return] # stands for Spark's frame


@dataclass(frozen=True)
class Letters(DeadLetters):
    """Dead letters that are kept in a list."""

    bootstrap_servers: str = "nowhere:1"
    written: list[Rejected] = field(default_factory=list)

    def write(self, rejected: Iterable[Rejected]) -> None:
        """Keep them."""
        self.written.extend(rejected)


PRICES = {"id": pa.string(), "price": pa.int64()}
GONE = {**PRICES, "gone": pa.bool_()}


@pytest.fixture(params=["sqlite", "driver", "executors"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[TestDatabase, str]:
    """Each way that rows go: a database, and the sink's `staging`."""
    if request.param == "sqlite":
        return TestDatabase("sqlite", f"sqlite:///{tmp_path / 'test.db'}"), "executors"
    return new_database(request.getfixturevalue("postgresql_url")), request.param


@pytest.fixture
def postgresql(postgresql_url: str) -> TestDatabase:
    return new_database(postgresql_url)


#: A message of one of three keys, which share no partition: its value, refused from 90 on, and whether it deletes.
MESSAGES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99), st.booleans()), min_size=1, max_size=40)


@settings(max_examples=30)
@given(MESSAGES, st.lists(st.integers(0, 40), max_size=4), st.sampled_from(["newest", "delete", "add", "append"]))
def test_the_table_is_that_of_a_plain_loop_whatever_is_cut_repeated_reduced_and_refused(
    messages: list[tuple[int, int, bool]], cuts: list[int], mode: str
) -> None:
    ends = sorted({min(cut, len(messages)) for cut in cuts} | {len(messages)})
    letters = Letters()
    with tempfile.TemporaryDirectory() as folder:
        database = TestDatabase("sqlite", f"sqlite:///{folder}/test.db")
        key = "" if mode == "append" else ", PRIMARY KEY (id)"
        bound = "" if mode == "add" else " CHECK (price < 90)"
        database.execute(f"CREATE TABLE prices (id TEXT NOT NULL, price INTEGER{bound}{key})")
        sink = SqlSink(
            database.url,
            "prices",
            [] if mode == "append" else ["id"],
            sum_columns=["price"] if mode == "add" else [],
            delete="gone" if mode == "delete" else None,
            dead_letters=letters,
        )
        rows = [(key, offset, f"key-{key}", price, gone) for offset, (key, price, gone) in enumerate(messages)]
        columns = GONE if mode == "delete" else PRICES
        width = 2 + len(columns)
        # Pieces of a few rows, so that what is reduced meets what comes later.
        with mock.patch.object(reducing, "_PIECE_ROWS", 6):
            for start, end in itertools.pairwise([0, *ends]):
                # Each batch begins below where the one before it ended: that much is repeated.
                sink(frame(columns, [row[:width] for row in rows[max(0, start - 3) : end]]), 0)
        found = database.rows("SELECT id, price FROM prices ORDER BY id, rowid")

    table: dict[str, int] = {}
    log: list[tuple[str, int]] = []
    refused = []
    for partition, offset, name, price, gone in rows:
        if mode == "delete" and gone:
            table.pop(name, None)
        elif price >= 90 and mode != "add":
            refused.append((partition, offset))
        else:
            table[name] = price + (table.get(name, 0) if mode == "add" else 0)
            log.append((name, price))
    assert found == sorted(log, key=lambda one: one[0]) if mode == "append" else found == sorted(table.items())
    written = [(one.partition, one.offset) for one in letters.written]
    # Of a row that a newer one of its batch replaces it need not be noticed that it would have been refused.
    assert set(written) == set(refused) if mode == "append" else set(written) <= set(refused)
    assert len(written) == len(set(written))


def test_a_tombstone_deletes_its_key_wherever_it_stands(way: tuple[TestDatabase, str]) -> None:
    database, staged = way
    sink = SqlSink(database.url, "prices", ["id"], delete="gone", staging=staged)  # type: ignore[arg-type] # a parameter

    first = frame(
        GONE, [(0, 0, "a", 1, None), (0, 1, "b", 1, False), (0, 2, "c", 1, False), (0, 3, "b", None, True),
               (0, 4, "d", None, True), (0, 5, "c", None, True), (0, 6, "c", 2, False)]
    )  # fmt: skip
    sink(first, 0)
    assert database.rows("SELECT * FROM prices ORDER BY id") == [("a", 1), ("c", 2)]

    sink(frame(GONE, [(0, 7, "a", None, True), (0, 8, "b", 3, False)]), 1)
    sink(first, 2)

    assert database.rows("SELECT * FROM prices ORDER BY id") == [("b", 3), ("c", 2)]


#: Columns, the table for them, and rows of which some are refused; the last of each key that is not is expected.
REFUSED: list[tuple[str, tuple[Any, ...]]] = [
    ("is part of the key and is NULL", (None, "x", 1, 1.0)),
    ("is not UTF-8", (b"bad\xff", "x", 1, 1.0)),
    ("23514|CHECK", ("check", "x", 4711, 1.0)),
    ("23502|NOTNULL", ("empty", None, 1, 1.0)),
    ("22001|CHECK", ("long", "xxxx", 1, 1.0)),
]


def test_refused_rows_are_dead_letters_the_others_and_those_before_them_stand(way: tuple[TestDatabase, str]) -> None:
    database, staged = way
    letters = Letters()
    database.execute(
        "CREATE TABLE prices (id VARCHAR(20) PRIMARY KEY, name VARCHAR(3) NOT NULL CHECK (length(name) <= 3), "
        "n INTEGER CHECK (n < 4000), share DOUBLE PRECISION)"
    )
    columns = {"id": pa.string(), "name": pa.string(), "n": pa.int64(), "share": pa.float64()}
    good = [(0, n, key, "old", n, math.inf) for n, key in enumerate(["check", "empty", "long", "nul", "wide", "last"])]
    bad = [(0, 10 + n, *row) for n, (_, row) in enumerate(REFUSED)]
    if database.kind == "postgresql":
        bad += [(0, 20, "nul", "a\0b", 1, 1.0), (0, 21, "wide", "x", 2**40, 1.0)]
    batch = frame(columns, [*good, *((*row[:2], row[2] if isinstance(row[2], str) else None, *row[3:]) for row in bad),
                            (1, 0, "other", "x", 1, math.nan)])  # fmt: skip
    made: Any = batch
    place = made.rows.schema.get_field_index("id")
    ids = [*(row[2].encode() for row in good), *(row[2].encode() if isinstance(row[2], str) else row[2] for row in bad)]
    made.rows = made.rows.set_column(place, "id", pa.array([*ids, b"other"], pa.binary()).view(pa.string()))

    sink = SqlSink(database.url, "prices", ["id"], staging=staged, dead_letters=letters)  # type: ignore[arg-type] # as above
    sink(batch, 5)

    rest = [("check", "old", 0), ("empty", "old", 1), ("last", "old", 5), ("long", "old", 2), ("nul", "old", 3)]
    # NaN is a number to PostgreSQL, and nothing to SQLite.
    kept, lost = ([("other", "x", 1)], []) if database.kind == "postgresql" else ([], [(1, 0)])
    assert database.rows("SELECT id, name, n FROM prices ORDER BY id") == [*rest, *kept, ("wide", "old", 4)]
    assert [(one.partition, one.offset) for one in letters.written] == [*((0, row[1]) for row in bad), *lost]
    assert [math.isnan(share) for (share,) in database.rows("SELECT share FROM prices WHERE id = 'other'")] == [
        True for _ in kept
    ]
    told = {one.offset: one.reason for one in letters.written if one.partition == 0}
    for number, (reason, _) in enumerate(REFUSED):
        assert any(part in told[10 + number] for part in reason.split("|"))
    assert "4711" not in str(told)
    assert sink.position() == {("orders", 0): bad[-1][1] + 1, ("orders", 1): 1}


@pytest.mark.parametrize("mode", ["append", "newest", "add"])
def test_a_message_of_which_one_row_is_refused_is_left_out_whole_and_stored_once_when_replayed(
    way: tuple[TestDatabase, str], mode: str
) -> None:
    database, staged = way
    letters = Letters()
    key = "" if mode == "append" else ", PRIMARY KEY (id)"
    database.execute(f"CREATE TABLE prices (id VARCHAR(20), price BIGINT CHECK (price < 90){key})")
    sink = SqlSink(
        database.url,
        "prices",
        [] if mode == "append" else ["id"],
        sum_columns=["price"] if mode == "add" else [],
        dead_letters=letters,
        staging=staged,  # type: ignore[arg-type] # as above
    )
    # A row before and a row behind the refused one, in other parts of the frame; one that is screened, and one message
    # of which both rows are refused.
    screened, both = (b"bad\xff", b"good"), [(0, 5, "p", 91), (0, 5, "q", 92)]
    batch: Any = frame(
        PRICES,
        [(0, 0, "a", 1), (0, 1, "b", 2), (0, 1, "c", 99), (0, 2, "d", 4), (0, 1, "e", 5), (0, 3, "x", 6),
         (0, 4, "f", 7), (0, 3, "g", 8), *both],
    )  # fmt: skip
    place = batch.rows.schema.get_field_index("id")
    ids = [screened[0] if one == "x" else one.encode() for one in batch.rows["id"].to_pylist()]
    batch.rows = batch.rows.set_column(place, "id", pa.array(ids, pa.binary()).view(pa.string()))

    sink(batch, 0)
    stored = database.rows("SELECT id, price FROM prices ORDER BY id")
    # What `penstock dlq replay` sends, mended.
    sink(frame(PRICES, [(0, 10, "b", 2), (0, 10, "c", 3), (0, 10, "e", 5), (0, 11, "g", 8)]), 1)

    assert stored == [("a", 1), ("d", 4), ("f", 7)]
    assert {one.offset for one in letters.written} == {1, 3, 5}
    assert database.rows("SELECT id, price FROM prices ORDER BY id") == [
        ("a", 1), ("b", 2), ("c", 3), ("d", 4), ("e", 5), ("f", 7), ("g", 8)
    ]  # fmt: skip


def test_more_refused_rows_than_allowed_end_the_batch_and_write_nothing(way: tuple[TestDatabase, str]) -> None:
    database, staged = way
    letters = Letters()
    database.execute("CREATE TABLE prices (id VARCHAR(9) PRIMARY KEY, price INTEGER CHECK (price < 10))")
    sink = SqlSink(database.url, "prices", ["id"], dead_letters=letters, max_rejects=2, staging=staged)  # type: ignore[arg-type] # as above

    with pytest.raises(SinkError, match=r"a row from orders\[0\] offset 1 .* max_rejects=2") as caught:
        sink(frame(PRICES, [(0, n, f"key-{n}", 4711 if n else 1) for n in range(9)]), 0)

    assert "4711" not in str(caught.value)
    assert letters.written == []
    assert database.rows("SELECT * FROM prices") == []
    assert not any(sink.position().values())


def test_nan_in_a_total_of_sqlite_is_refused_and_no_sum_is_lost(tmp_path: Path) -> None:
    database = TestDatabase("sqlite", f"sqlite:///{tmp_path / 'test.db'}")
    letters = Letters()
    columns = {"id": pa.string(), "n": pa.float64(), "big": pa.int64()}
    sink = SqlSink(database.url, "totals", ["id"], sum_columns=["n", "big"], dead_letters=letters)

    sink(frame(columns, [(0, 0, "a", 1.5, 2**62), (0, 1, "a", math.nan, 1), (0, 2, "a", 2.0, -(2**62))]), 0)

    assert database.rows("SELECT id, n, big FROM totals") == [("a", 3.5, 0)]
    assert [one.offset for one in letters.written] == [1]


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
        left = staging.create_stage(PostgreSql(), gone, prefix, None, columns)
    with engine.connect() as living:
        kept = staging.create_stage(PostgreSql(), living, prefix, None, columns)
        SqlSink(postgresql.url, "events")(frame(PRICES, [(0, 0, "a", 1)]), 0)
        tables = postgresql.rows("SELECT tablename FROM pg_tables WHERE starts_with(tablename, 'penstock_stage')")

    assert tables == [(kept.name,)]
    assert f"the staging table {left.name} was left by a driver that is gone" in caplog.text


def test_texts_are_read_into_json_uuid_inet_and_enum_columns_and_what_cannot_be_read_is_refused(
    postgresql: TestDatabase,
) -> None:
    letters = Letters()
    postgresql.execute(
        'CREATE SCHEMA "odd name"',
        "CREATE TYPE mood AS ENUM ('good', 'bad')",
        "CREATE TABLE hosts (host INET PRIMARY KEY)",
        "INSERT INTO hosts VALUES ('10.0.0.1'), ('10.0.0.2')",
        'CREATE TABLE "odd name".things (id UUID PRIMARY KEY, doc JSONB, '
        "host INET REFERENCES hosts DEFERRABLE INITIALLY DEFERRED, feels mood)",
    )
    columns = {"id": pa.string(), "doc": pa.string(), "host": pa.string(), "feels": pa.string()}
    one = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
    sink = SqlSink(postgresql.url, "things", ["id"], schema="odd name", dead_letters=letters)

    # The same id in two spellings: one key to the table, two to the frame.
    rows = [(0, 0, one.upper(), '{"n": 1}', "10.0.0.1", "bad"), (0, 1, one, '{"n": 2}', "10.0.0.2", "good")]
    sink(frame(columns, [*rows, (0, 2, one, "{", "10.0.0.2", "good"), (0, 3, "no uuid", "{}", None, None),
                         (0, 4, one, "{}", "10.9.9.9", None)]), 0)  # fmt: skip

    assert postgresql.rows('SELECT id::text, doc, host::text, feels::text FROM "odd name".things') == [
        (one, {"n": 2}, "10.0.0.2/32", "good")
    ]
    assert [one.offset for one in letters.written] == [2, 3, 4]
    assert postgresql.rows('SELECT next_offset FROM "odd name".penstock_ledger') == [(5,)]


def test_a_check_at_the_start_makes_the_tables_or_says_what_differs(way: tuple[TestDatabase, str]) -> None:
    database, _ = way
    fitting = frame(PRICES, []).schema
    SqlSink(database.url, "prices", ["id"]).check(fitting)

    assert database.rows("SELECT id, price FROM prices") == []
    with pytest.raises(SinkError, match=r"no primary key or unique index on \(price\)"):
        SqlSink(database.url, "prices", ["price"]).check(fitting)
    with pytest.raises(SinkError, match="lacks the frame's column gone"):
        SqlSink(database.url, "prices", ["id"]).check(frame(GONE, []).schema)
    with pytest.raises(SinkError, match="delete names price, which is not boolean"):
        SqlSink(database.url, "prices", ["id"], delete="price").check(fitting)
    with pytest.raises(SinkError, match="several columns called price"):
        SqlSink(database.url, "prices", ["id"]).check(StructType([*fitting.fields, fitting["price"]]))
