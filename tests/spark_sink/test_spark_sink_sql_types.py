"""Which types of columns `SqlSink` fills from which types of a frame: values are stored as they are, or refused."""

from __future__ import annotations

import math
import re
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from arrow_frames import Letters, frame

from databases import TestDatabase
from penstock.errors import SinkError
from penstock.spark_sink import SqlSink
from penstock.spark_sink.queries.supervise import FailureKind, kind_of

INSTANT, WALL_CLOCK = pa.timestamp("us", "UTC"), pa.timestamp("us")
TENTH = datetime(2013, 1, 1, 12, 0, 0, 100_000)  # noqa: DTZ001 - of a wall clock
Pairs = list[tuple[str, pa.DataType, list[tuple[Any, str | None]]]]
#: A column of PostgreSQL, a type of the frame, and values with the texts of what the column then holds: None where the
#: row is refused. Without values, the check refuses the pair.
PAIRS: Pairs = [
    ("SMALLINT", pa.int64(), [(2**15 - 1, "32767"), (2**15, None)]),
    ("NUMERIC(5, -2)", pa.int64(), [(1_200, "1200"), (1_250, None)]),
    ("REAL", pa.int32(), []),
    ("DOUBLE PRECISION", pa.int64(), []),
    ("BOOLEAN", pa.int32(), []),
    ("BIGINT", pa.decimal128(9, 2), []),
    ("BIGINT", pa.decimal128(38, 0), [(Decimal(2**63 - 1), str(2**63 - 1)), (Decimal(2**63), None)]),
    ("NUMERIC(9, 2)", pa.decimal128(9, 4), [(Decimal("1.2300"), "1.23"), (Decimal("1.2345"), None)]),
    ("REAL", pa.decimal128(9, 2), []),
    ("DOUBLE PRECISION", pa.decimal128(38, 20), []),
    ("INTEGER", pa.float64(), []),
    ("NUMERIC(9, -2)", pa.float64(), []),
    ("REAL", pa.float64(), []),
    ("DOUBLE PRECISION", pa.float32(), [(0.1, "0.10000000149011612")]),
    ("DOUBLE PRECISION", pa.float64(), [(0.1 + 0.2, "0.30000000000000004"), (math.nan, "NaN"), (math.inf, "Infinity")]),
    ("NUMERIC", pa.float64(), []),
    ("INTEGER", pa.bool_(), []),
    ("BOOLEAN", pa.bool_(), [(True, "true")]),
    ("TIMESTAMPTZ(1)", INSTANT, [(TENTH, "2013-01-01 21:00:00.1+09"), (TENTH + timedelta(microseconds=1), None)]),
    ("TIMESTAMP(0)", INSTANT, [(TENTH.replace(microsecond=0), "2013-01-01 12:00:00"), (TENTH, None)]),
    ("TIMESTAMPTZ", INSTANT, [(253_402_300_799_999_999, "10000-01-01 08:59:59.999999+09"),
                              (-62_135_596_800_000_000, "0001-01-01 09:18:59+09:18:59"),
                              (253_402_300_800_000_000, None), (-62_135_596_800_000_001, None)]),
    ("TIMESTAMPTZ", WALL_CLOCK, [(TENTH, "2013-01-01 21:00:00.1+09")]),
    ("TIMESTAMP", WALL_CLOCK, [(TENTH, "2013-01-01 12:00:00.1"), (2**63 - 1, None)]),
    ("DATE", pa.date32(), [(date.max, "9999-12-31"), (2_932_897, None), (-719_163, None)]),
    ("DATE", WALL_CLOCK, []),
    ("TIMESTAMP", pa.date32(), []),
    ("BYTEA", pa.binary(), [(b"\x00\xff", "\\x00ff")]),
    ("BYTEA", pa.string(), []),
    ("INTEGER", pa.string(), []),
    ("TEXT", pa.string(), [("a ", "a "), ("a\0b", None)]),
    ("VARCHAR(3)", pa.string(), [("ab ", "ab "), ("abcd", None), ("abc ", None)]),
    ("CHAR(3)", pa.string(), [("ab", "ab"), ("ab ", None), ("abc ", None), ("abcd", None)]),
    ("NAME", pa.string(), [("a" * 63, "a" * 63), ("a" * 64, None)]),
    ('"char"', pa.string(), [("a", "a"), ("ab", None), ("\u00e9", None)]),
    ("BIT(3)", pa.string(), [("101", "101"), ("1011", None), ("10", None)]),
    ("BIT VARYING(3)", pa.string(), [("10", "10"), ("1011", None)]),
    ("TIME(0)", pa.string(), [("12:00:00", "12:00:00"), ("12:00:00.5", None), ("12:00", None),
                              ("12:00+01", None)]),
    ("TIMETZ(1)", pa.string(), [("12:00:00.1+01", "12:00:00.1+01"), ("12:00:00.12+01", None), ("12:00", None)]),
    ("INTERVAL", pa.string(), [("01:00:00", "01:00:00"), ("1 hour", None), ("1 day 12:00:00.5", "1 day 12:00:00.5"),
                               ("0.3333 years", None)]),
    ("DATERANGE", pa.string(), [("[2013-01-01,2013-02-01)", "[2013-01-01,2013-02-01)"), ("[2013-01-01 12:00,)", None)]),
    ("MONEY", pa.string(), [("$12.34", "$12.34"), ("$12.345", None)]),
    ("POINT", pa.string(), [("(1.5,2)", "(1.5,2)"), ("(0.12345678901234567891,2)", None)]),
    ("UUID", pa.string(), [("6BA7B810-9DAD-11D1-80B4-00C04FD430C8", "6ba7b810-9dad-11d1-80b4-00c04fd430c8")]),
    ("JSONB", pa.string(), [('{"n":1}', '{"n": 1}'), ("{", None)]),
    ("INTEGER[]", pa.string(), [("{1, 2}", "{1,2}"), ("{1.5}", None)]),
    ("VARCHAR(3)[]", pa.string(), [("{ab,abc}", "{ab,abc}"), ("{abcd}", None)]),
    ("DOUBLE PRECISION[]", pa.string(), [("{1.5}", "{1.5}"), ("{0.12345678901234567891}", None)]),
    ("text_mood", pa.string(), [("good", "good"), ("better", None)]),
    ("character_price", pa.string(), [("1.25", "1.25"), ("1.255", None)]),
    ("name_short", pa.string(), [("abc", "abc"), ("abcd", None)]),
]  # fmt: skip


#: The same for MariaDB.
MARIADB_PAIRS: Pairs = [
    ("TINYINT UNSIGNED", pa.int64(), [(255, "255"), (256, None), (-1, None)]),
    ("BIGINT", pa.decimal128(38, 0), [(Decimal(2**63 - 1), str(2**63 - 1)), (Decimal(2**63), None)]),
    ("BIGINT", pa.decimal128(9, 2), []),
    ("DECIMAL(9, 2)", pa.decimal128(9, 4), [(Decimal("1.2300"), "1.23"), (Decimal("1.2345"), None)]),
    ("DECIMAL(9, 2)", pa.float64(), []),
    ("FLOAT", pa.int32(), []),
    ("DOUBLE", pa.int64(), []),
    ("DOUBLE", pa.decimal128(15, 2), []),
    ("FLOAT", pa.float32(), [(0.5, "0.5")]),
    ("FLOAT", pa.float64(), []),
    ("FLOAT(7, 2)", pa.float32(), []),
    ("DOUBLE", pa.float64(), [(0.1 + 0.2, "0.30000000000000004"), (math.nan, None), (-math.inf, None),
                              (5e-324, "5e-324")]),
    ("DOUBLE(9, 2)", pa.float64(), []),
    ("INTEGER", pa.float64(), []),
    ("BOOLEAN", pa.bool_(), [(True, "1"), (False, "0")]),
    ("BIT(1)", pa.bool_(), [(True, "\x01")]),
    ("BIT(24)", pa.string(), []),
    ("DECIMAL(9, 2)", pa.bool_(), []),
    ("DATETIME", INSTANT, [(TENTH.replace(microsecond=0), "2013-01-01 12:00:00"), (TENTH, None)]),
    ("DATETIME(6)", INSTANT, [(253_402_300_799_999_999, "9999-12-31 23:59:59.999999"),
                              (-62_135_596_800_000_000, "0001-01-01 00:00:00.000000"), (2**63 - 1, None)]),
    ("TIMESTAMP(6) NULL", INSTANT, [(TENTH, "2013-01-01 12:00:00.100000"), (0, None), (2**31 * 1_000_000, None),
                                    (1_000_000, "1970-01-01 00:00:01.000000")]),
    ("DATE", pa.date32(), [(date.max, "9999-12-31"), (date.min, "0001-01-01"), (2_932_897, None)]),
    ("DATETIME", pa.date32(), []),
    ("LONGBLOB", pa.binary(), [(b"a\x00", "a\x00")]),
    ("VARBINARY(3)", pa.binary(), [(b"ab\x00", "ab\x00"), (b"abc\x00", None)]),
    ("BINARY(3)", pa.binary(), [(b"abc", "abc"), (b"ab", None), (b"abcd", None)]),
    ("BLOB", pa.string(), []),
    ("INTEGER", pa.string(), []),
    ("TEXT", pa.string(), [("a\0 ", "a\0 "), ("\U0001f600", "\U0001f600")]),
    ("TINYTEXT", pa.string(), [("\u00e9" * 127, "\u00e9" * 127), ("\u00e9" * 128, None), ("a" * 255 + " ", None)]),
    ("VARCHAR(3)", pa.string(), [("ab ", "ab "), ("abcd", None), ("abc ", None)]),
    ("VARCHAR(3) CHARACTER SET latin1", pa.string(), [("\u00e9", "\u00e9"), ("\u4e2d", None)]),
    ("TINYTEXT CHARACTER SET latin1", pa.string(), [("\u00e9" * 255, "\u00e9" * 255), ("\u00e9" * 255 + " ", None)]),
    ("CHAR(3)", pa.string(), [("ab", "ab"), ("ab ", None), ("abc ", None), ("abcd", None)]),
    ("ENUM('a', 'it''s')", pa.string(), [("a", "a"), ("it's", "it's"), ("A", None), ("a ", None), ("1", None),
                                         ("", None)]),
    ("SET('a', 'b')", pa.string(), []),
    ("TIME", pa.string(), []),
    ("YEAR", pa.string(), []),
    ("JSON", pa.string(), [('{"n": 1.0}', '{"n": 1.0}'), ("{", None)]),
    ("UUID", pa.string(), [("6BA7B810-9DAD-11D1-80B4-00C04FD430C8", "6ba7b810-9dad-11d1-80b4-00c04fd430c8"),
                           ("x", None)]),
    ("POINT", pa.string(), []),
]  # fmt: skip


#: The same for SQLite, whose numbers hold 15 digits.
SQLITE_PAIRS: Pairs = [
    ("TEXT", pa.decimal128(38, 18), [(Decimal("12345678901234567890.123456789012345678"),
                                      "12345678901234567890.123456789012345678"),
                                     (Decimal("0.000000000000000001"), "0.000000000000000001")]),
    ("NUMERIC", pa.decimal128(15, 2), [(Decimal("1234567890123.45"), "1234567890123.45"), (Decimal("0.01"), "0.01")]),
    ("NUMERIC", pa.decimal128(16, 2), []),
    ("TEXT", pa.decimal128(20, 0), [(Decimal(10**19 + 1), "10000000000000000001"), (Decimal(-1), "-1")]),
    ("REAL", pa.int64(), []),
    ("REAL", pa.decimal128(9, 2), []),
    ("INTEGER", pa.float64(), []),
    ("INTEGER", pa.bool_(), [(True, "1"), (False, "0")]),
    ("REAL", pa.float64(), [(1.5, "1.5"), (math.nan, None), (math.inf, "Inf")]),
]  # fmt: skip


#: The table of pairs of each database, what it begins with, and a value of a column as a text. That PostgreSQL is in
#: another zone must not show in times without one.
PAIRS_OF = {
    "postgresql": (
        PAIRS,
        [
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %%I SET timezone TO Japan', current_database()); END $$",
            "CREATE TYPE text_mood AS ENUM ('good', 'bad')",
            "CREATE DOMAIN character_price AS NUMERIC(9, 2)",
            "CREATE DOMAIN name_short AS VARCHAR(3)",
        ],
        "{}::text",
    ),
    "mariadb": (MARIADB_PAIRS, [], "CAST({} AS CHAR)"),
    "sqlite": (SQLITE_PAIRS, [], "CAST({} AS TEXT)"),
}


@pytest.mark.parametrize(
    ("database", "staged"),
    [
        ("postgresql", "executors"),
        ("mariadb", "executors"),
        ("sqlite", "driver"),
        pytest.param("postgresql", "driver", marks=pytest.mark.thorough),
    ],
    indirect=["database"],
)
def test_columns_keep_what_they_take_and_the_rest_is_refused(database: TestDatabase, staged: Any) -> None:
    pairs, types, text_of = PAIRS_OF[database.kind]
    takes = [(f"n{number}", *pair) for number, pair in enumerate(pairs) if pair[2]]
    refuses = [(f"n{number}", *pair) for number, pair in enumerate(pairs) if not pair[2]]
    database.execute(
        *types,
        f"CREATE TABLE takes (id INT, {', '.join(f'{name} {column}' for name, column, *_ in takes)})",
        f"CREATE TABLE refuses ({', '.join(f'{name} {column}' for name, column, *_ in refuses)})",
    )
    letters = Letters()
    sink = SqlSink(database.url, "takes", staging=staged, dead_letters=letters)
    # A row for each value, in which all other columns are empty.
    values = [(name, value, text) for name, *_, given in takes for value, text in given]
    rows = [
        (0, place, place, *(value if name == own else None for own, *_ in takes))
        for place, (name, value, _) in enumerate(values)
    ]
    batch = frame({"id": pa.int32(), **{name: kind for name, _, kind, _ in takes}}, rows)

    sink.check(batch.schema)
    sink(batch, 0)
    with pytest.raises(SinkError, match="refuses does not fit") as caught:
        SqlSink(database.url, "refuses").check(frame({name: kind for name, _, kind, _ in refuses}, []).schema)

    texts = ", ".join(text_of.format(name) for name, *_ in takes)
    stored = dict(database.rows(f"SELECT id, coalesce({texts}) FROM takes"))  # type: ignore[arg-type] # noqa: S608 - the test's own
    of = {name: (column, str(kind)) for name, column, kind, _ in takes}
    found = [(*of[name], value, stored.get(place)) for place, (name, value, _) in enumerate(values)]
    assert str(found) == str([(*of[name], value, text) for name, value, text in values])  # NaN is one text
    assert {letter.offset for letter in letters.written} == {n for n, (*_, text) in enumerate(values) if text is None}
    assert set(re.findall(r"column (n\d+) is", str(caught.value))) == {name for name, *_ in refuses}
    assert kind_of(caught.value) is FailureKind.PERMANENT
