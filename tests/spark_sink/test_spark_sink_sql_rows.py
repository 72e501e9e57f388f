"""What `SqlSink` makes of rows (I9), without a JVM: frames are Arrow tables whose tasks run in this process."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from arrow_frames import GONE, PRICES, Letters, frame
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import StructType

from databases import TestDatabase
from kafka_tools import read_all
from penstock.dead_letters.headers import DeadLetterOrigin, read
from penstock.devbroker import DevBroker
from penstock.errors import SinkError
from penstock.spark_sink import DeadLetters, SqlSink
from penstock.spark_sink.sinks.sql import rows as reducing
from penstock.spark_sink.sinks.sql.dead_letters import Rejected

#: A message of one of three keys, which share no partition: its value, refused from 90 on, and whether it deletes.
MESSAGES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99), st.booleans()), min_size=1, max_size=40)


@settings(max_examples=30)
@example([(1, 69, True), (1, 54, True), (1, 61, True)], [], "newest")  # two spellings, which the table takes for one
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
        database.execute(f"CREATE TABLE prices (id TEXT COLLATE NOCASE NOT NULL, price INTEGER{bound}{key})")
        sink = SqlSink(
            database.url,
            "prices",
            [] if mode == "append" else ["id"],
            sum_columns=["price"] if mode == "add" else [],
            delete="gone" if mode == "delete" else None,
            dead_letters=letters,
        )
        names = [f"{'kK'[price % 2]}ey-{key}" for key, price, _ in messages]
        rows = [(key, n, names[n], price, gone) for n, (key, price, gone) in enumerate(messages)]
        columns = GONE if mode == "delete" else PRICES
        # Pieces of a few rows, so that what is reduced meets what comes later.
        with mock.patch.object(reducing, "_PIECE_ROWS", 6):
            for start, end in itertools.pairwise([0, *ends]):
                # Each batch begins below where the one before it ended: that much is repeated.
                sink(frame(columns, [row[: 2 + len(columns)] for row in rows[max(0, start - 3) : end]]), 0)
        found = database.rows("SELECT lower(id), price FROM prices ORDER BY id, rowid")

    table, log, refused = dict[str, int](), list[tuple[str, int]](), []
    for partition, offset, spelled, price, gone in rows:
        name = spelled.lower()
        if mode == "delete" and gone:
            table.pop(name, None)
        elif price >= 90 and mode != "add":
            refused.append((partition, offset))
        else:
            table[name] = price + (table.get(name, 0) if mode == "add" else 0)
            log.append((name, price))
    assert found == sorted(log, key=lambda one: one[0]) if mode == "append" else found == sorted(table.items())
    written = [(letter.partition, letter.offset) for letter in letters.written]
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


#: Rows that are refused, and what one of the databases says of each.
REFUSED: list[tuple[tuple[Any, ...], str]] = [
    ((None, "x", 1), "is part of the key and is NULL"),
    (("check", "x", 4711), "23514|CHECK|4025"),
    (("empty", None, 1), "23502|NOTNULL|1048, Column 'name'"),
    (("long", "xxxx", 1), "not be kept as character varying(3)|CHECK|not be kept as VARCHAR(3)"),
    (("wide", "x", 2**40), "22003|CHECK|1264|4025"),
]


def test_refused_rows_are_dead_letters_the_others_and_those_before_them_stand(way: tuple[TestDatabase, str]) -> None:
    database, staged = way
    letters = Letters()
    database.execute(
        "CREATE TABLE prices (id VARCHAR(20) PRIMARY KEY, name VARCHAR(3) NOT NULL CHECK (length(name) <= 3), "
        "n INTEGER CHECK (n < 4000))"
    )
    good = [(0, n, key, "old", n) for n, key in enumerate(["check", "empty", "long", "wide"])]
    bad = [(0, 10 + n, *row) for n, (row, _) in enumerate(REFUSED)]
    columns = {"id": pa.string(), "name": pa.string(), "n": pa.int64()}

    sink = SqlSink(database.url, "prices", ["id"], staging=staged, dead_letters=letters)  # type: ignore[arg-type] # as above
    sink(frame(columns, [*good, *bad, (1, 0, "other", "x", 9)]), 5)

    assert database.rows("SELECT id, name, n FROM prices ORDER BY n") == [*(row[2:] for row in good), ("other", "x", 9)]
    assert [(letter.partition, letter.offset) for letter in letters.written] == [row[:2] for row in bad]
    for letter, (_, reasons) in zip(letters.written, REFUSED, strict=True):
        assert any(reason in letter.reason for reason in reasons.split("|"))
        assert "4711" not in letter.reason
    assert {part: entry.end for part, entry in sink.ledger()[""].items()} == {
        ("orders", 0): bad[-1][1] + 1, ("orders", 1): 1
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["append", "newest", "add"])
def test_a_message_with_a_refused_row_is_left_out_whole_and_stored_once_when_replayed(
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
    # and both rows are refused.
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
    # A batch of Arrow that is applied already, and what `penstock dlq replay` sends, corrected.
    again = [(0, 0, "a", 1), (0, 2, "d", 4), (0, 4, "f", 7)]
    sink(frame(PRICES, [*again, (0, 10, "b", 2), (0, 10, "c", 3), (0, 10, "e", 5), (0, 11, "g", 8)]), 1)

    assert stored == [("a", 1), ("d", 4), ("f", 7)]
    assert {letter.offset for letter in letters.written} == {1, 3, 5}
    assert database.rows("SELECT id, price FROM prices ORDER BY id") == [
        ("a", 1), ("b", 2), ("c", 3), ("d", 4), ("e", 5), ("f", 7), ("g", 8)
    ]  # fmt: skip


def test_more_refused_rows_than_allowed_end_the_batch_and_write_nothing(way: tuple[TestDatabase, str]) -> None:
    database, staged = way
    letters = Letters()
    database.execute("CREATE TABLE prices (id VARCHAR(9) PRIMARY KEY, price INTEGER CHECK (price < 10))")
    sink = SqlSink(database.url, "prices", ["id"], dead_letters=letters, max_rejects=2, staging=staged)  # type: ignore[arg-type] # as above

    with pytest.raises(SinkError, match=r"a row from orders:0@1 .* max_rejects=2") as caught:
        sink(frame(PRICES, [(0, n, f"key-{n}", 4711 if n else 1) for n in range(9)]), 0)

    assert "4711" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert letters.written == []
    assert database.rows("SELECT * FROM prices") == []
    assert sink.ledger() == {}


def test_a_key_in_two_spellings_is_one_and_a_reference_is_checked_with_its_row(postgresql: TestDatabase) -> None:
    letters = Letters()
    postgresql.execute(
        'CREATE SCHEMA "odd name"',
        "CREATE TABLE hosts (host INET PRIMARY KEY)",
        "INSERT INTO hosts VALUES ('10.0.0.1'), ('10.0.0.2')",
        'CREATE TABLE "odd name".things (id UUID PRIMARY KEY, '
        "host INET REFERENCES hosts DEFERRABLE INITIALLY DEFERRED)",
    )
    columns, one = {"id": pa.string(), "host": pa.string()}, "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
    sink = SqlSink(postgresql.url, "things", ["id"], schema="odd name", dead_letters=letters)

    rows = [(0, 0, one.upper(), "10.0.0.1"), (0, 1, one, "10.0.0.2"), (0, 2, "no uuid", None), (0, 3, one, "10.9.9.9")]
    sink(frame(columns, rows), 0)

    assert postgresql.rows('SELECT id::text, host::text FROM "odd name".things') == [(one, "10.0.0.2/32")]
    assert [letter.offset for letter in letters.written] == [2, 3]
    assert postgresql.rows('SELECT next_offset FROM "odd name".penstock_ledger') == [(4,)]


def test_a_check_at_the_start_makes_the_tables_and_stores_nothing(way: tuple[TestDatabase, str]) -> None:
    database, staged = way
    fitting = frame(PRICES, []).schema
    SqlSink(database.url, "prices", ["id"], staging=staged, dead_letters=Letters()).check(fitting)  # type: ignore[arg-type] # as above

    assert database.rows("SELECT id, price FROM prices") == []
    assert database.rows("SELECT * FROM penstock_ledger") == []
    with pytest.raises(SinkError, match="delete names price, which is not boolean"):
        SqlSink(database.url, "prices", ["id"], delete="price").check(fitting)
    with pytest.raises(SinkError, match="several columns called price"):
        SqlSink(database.url, "prices", ["id"]).check(StructType([*fitting.fields, fitting["price"]]))


def test_a_refused_row_s_message_is_written_as_it_was_and_one_that_is_gone_with_its_place(
    broker: DevBroker, new_topic: Callable[..., str], write: Callable[..., None]
) -> None:
    topic = new_topic(partitions=1)
    write(topic, 0, [(b"k0", b"v0"), (b"k1", b"\xff\x00"), (None, None)], headers=[("trace", b"\xfe")])
    letters = DeadLetters(broker.bootstrap_servers)

    rejected = [Rejected(topic, 0, 1, "23514"), Rejected(topic, 0, 1, "again"), Rejected(topic, 0, 99, "gone")]
    letters.write(rejected)
    letters.write([])

    found = {}
    for message in read_all(broker.bootstrap_servers, f"dlq.{topic}"):
        headers = message.headers() or []
        origin = read(headers)
        assert origin is not None
        found[origin.offset] = (origin, message.key(), message.value(), headers)
    assert sorted(found) == [1, 99]
    first, *kept, headers = found[1]
    assert kept == [b"k1", b"\xff\x00"]
    assert headers[0] == ("trace", b"\xfe")
    kind = "penstock.errors.SinkError"
    assert first == DeadLetterOrigin(topic, 0, 1, "penstock-spark", 1, kind, "23514", f"{kind}: 23514\n")
    gone, *kept, _ = found[99]
    assert (gone.message, *kept) == ("gone", None, None)


def test_dead_letters_that_cannot_be_written_hold_the_batch(
    broker: DevBroker, new_topic: Callable[..., str], write: Callable[..., None], tmp_path: Path
) -> None:
    topic, small = new_topic(), new_topic(config={"max.message.bytes": "200"})
    write(topic, 0, [(b"k", b"v" * 1000)])
    database = TestDatabase("sqlite", f"sqlite:///{tmp_path / 'test.db'}")
    database.execute("CREATE TABLE prices (id TEXT PRIMARY KEY, price INTEGER CHECK (price < 10))")
    batch: Any = frame(PRICES, [(0, 0, "bad", 4711), (0, 1, "good", 1)])
    places = batch.rows.schema.get_field_index("topic")
    batch.rows = batch.rows.set_column(places, "topic", [[topic, topic]])
    sink = SqlSink(database.url, "prices", ["id"], dead_letters=DeadLetters(broker.bootstrap_servers, small))

    with pytest.raises(SinkError, match=rf"could not be written to {small}: {topic}:0@0.*MSG_SIZE") as caught:
        sink(batch, 0)

    assert "4711" not in str(caught.value)
    assert database.rows("SELECT * FROM prices") == []
    assert sink.ledger() == {}
