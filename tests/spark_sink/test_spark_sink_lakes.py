"""`DeltaSink` and `IcebergSink` on real tables: each row once (I9), a batch whole or not at all."""

from __future__ import annotations

import math
import threading
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from arrow_frames import PRICES, frame
from lakes import LAKES, Lake
from pyspark.sql.types import DataType, DayTimeIntervalType, YearMonthIntervalType

from penstock.errors import ConfigurationError, SinkError
from penstock.spark_sink import LedgerEntry
from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks import lake_sink

NUMBER = {"n": pa.int32()}


@pytest.fixture(params=LAKES)
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    """A lake of each format, without a table."""
    return LAKES[request.param](tmp_path)


def numbers(first: int, last: int) -> list[tuple[int, int, int]]:
    """Return rows of one column that repeats the offset."""
    return [(0, offset, offset) for offset in range(first, last + 1)]


def test_the_newest_row_of_a_key_wins_within_and_across_batches(lake: Lake) -> None:
    sink = lake.sink(["The id"])
    columns = {"The id": pa.string(), 'a "price".x': pa.int32(), "order": pa.string()}

    sink(frame(columns, [(0, 5, "a", 5, "x"), (0, 7, "a", 7, "y"), (0, 6, "a", 6, "z"), (1, 0, "b", 1, "")]), 0)
    sink(frame(columns, [(0, 6, "a", 6, "late"), (0, 8, "b'", None, "w"), (1, 1, "b", 3, "'; DROP TABLE x")]), 1)

    assert lake.rows().sort_by("The id").to_pylist() == [
        {"The id": "a", 'a "price".x': 7, "order": "y"},
        {"The id": "b", 'a "price".x': 3, "order": "'; DROP TABLE x"},
        {"The id": "b'", 'a "price".x': None, "order": "w"},
    ]


def test_a_foreign_writer_in_between_makes_an_upsert_begin_again(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = lake.sink(("n",))
    sink(frame(NUMBER, numbers(0, 4)), 0)
    looks: list[list[tuple[int]]] = []
    ledger_read = lake_sink.warn_left_out

    def interfere(*what: Any) -> None:
        ledger_read(*what)
        looks.append(lake.found("n"))
        if len(looks) == 1:
            lake.append(pa.table({"n": pa.array([-1], pa.int32())}))

    monkeypatch.setattr(lake_sink, "warn_left_out", interfere)
    sink(frame(NUMBER, numbers(5, 9)), 1)

    first = [(n,) for n in range(5)]
    assert looks == [first, [(-1,), *first]]  # at the second look, the foreign row and nothing of the batch
    assert lake.found("n") == [(n,) for n in range(-1, 10)]


def test_a_try_that_does_not_return_is_left_behind_and_the_next_one_stores(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, answered = lake.sink(timeout_s=0.2), threading.Event()

    with monkeypatch.context() as patched:
        patched.setattr(type(sink), "_opened", lambda *_given: answered.wait(60))
        for asked in (lambda: sink(frame(NUMBER, numbers(0, 4)), 0), sink.ledger):
            with pytest.raises(SinkError, match=r"table .*: it did not come to an end in 0\.2 s.*raise timeout_s"):
                asked()
        answered.set()
    lake.sink()(frame(NUMBER, numbers(0, 4)), 0)

    assert lake.found("n") == [(n,) for n in range(5)]


def test_the_entries_of_all_queries_are_listed_set_and_removed(lake: Lake) -> None:
    one, other = lake.sink(name="one/of"), lake.sink(name="other")
    assert one.ledger() == {}
    with pytest.raises(SinkError, match="there is no table"):
        one.write_ledger("one/of", {("orders", 0): LedgerEntry(1)})
    one(frame(NUMBER, numbers(0, 4), run="r", plan={("orders", 0): (0, 5), ("orders", 1): (0, 0)}), 0)
    other(frame(NUMBER, numbers(0, 1)), 7)

    before = {query: {part: entry.end for part, entry in some.items()} for query, some in one.ledger().items()}
    lake.maintain()
    other.write_ledger("one/of", {("orders", 0): LedgerEntry(2, 2), ("orders", 1): None})
    other.write_ledger("other", {("orders", 0): None})
    one(frame(NUMBER, numbers(2, 5), run="again"), 0)
    after = {query: {part: entry.end for part, entry in some.items()} for query, some in other.ledger().items()}

    assert before == {"one/of": {("orders", 0): 5, ("orders", 1): 0}, "other": {("orders", 0): 2}}
    assert after == {"one/of": {("orders", 0): 6}}
    assert other.ledger_entries("", [("orders", 0)]) == {}
    assert lake.found("n") == sorted((n,) for n in (*range(5), 0, 1, *range(2, 6)))


def test_a_table_that_does_not_fit_is_named_column_by_column(lake: Lake) -> None:
    lake.sink()(frame({**PRICES, "extra": pa.int32()}, [(0, 0, "a", 1, 2)]), 0)
    unfit = frame({**PRICES, "id": pa.int64(), "more": pa.string()}, [(0, 1, 1, 1, "canary-4711")])

    with pytest.raises(SinkError, match=r"table .* does not fit the frame") as caught:
        lake.sink().check(unfit.schema)
    with pytest.raises(SinkError, match=r"does not fit the frame"):
        lake.sink()(unfit, 1)

    assert "the table lacks the frame's column more" in str(caught.value)
    assert "the frame lacks the table's column extra" in str(caught.value)
    assert "column id is string in the table and int64 in the frame" in str(caught.value)


@pytest.mark.parametrize("key", [(), ("t",)])
def test_large_types_of_arrow_are_taken(lake: Lake, key: tuple[str, ...]) -> None:
    sink = lake.sink(key, keep_position=True)
    small = frame({"t": pa.string(), "b": pa.binary()}, [(0, 0, "x", b"x")])
    large: Any = frame({"t": pa.large_string(), "b": pa.large_binary()}, [(0, 0, "x", b"x"), (0, 1, "y", b"y")])
    # As with `spark.sql.execution.arrow.useLargeVarTypes`.
    large.rows = large.rows.set_column(0, "topic", large.rows["topic"].cast(pa.large_string()))

    sink(small, 0)
    sink.check(small.schema)
    sink(large, 1)

    assert lake.found("t", "b", "offset", "topic") == [("x", b"x", 0, "orders"), ("y", b"y", 1, "orders")]


@pytest.mark.parametrize("key", [(), ("n",)])
def test_columns_that_are_new_are_added_where_that_is_asked_for(lake: Lake, key: tuple[str, ...]) -> None:
    lake.sink(key)(frame(NUMBER, [(0, 0, 0), (0, 1, 1)]), 0)
    more = {"some": pa.list_(pa.string()), **NUMBER, "offset too": pa.int64()}
    batch = frame(more, [(0, 2, ["x"], 2, 2), (0, 3, None, 3 if not key else 1, None)])

    with pytest.raises(SinkError, match="the table lacks the frame's column some"):
        lake.sink(key).check(batch.schema)
    sink = lake.sink(key, evolve=True)
    sink.check(batch.schema)
    sink(batch, 1)
    sink(batch, 1)

    replaced = [(0, None, None), (1, None, None), (2, ["x"], 2)]
    assert lake.found("n", "some", "offset too") == (replaced if key else [*replaced, (3, None, None)])
    with pytest.raises(SinkError, match="the table lacks the frame's column id"):
        lake.sink(["id"], evolve=True).check(frame({**more, "id": pa.string()}, []).schema)
    with pytest.raises(SchemaMismatchError, match="lacks the frame's column N, and has n, which differs only"):
        lake.sink(evolve=True).check(frame({"N": pa.int32()}, []).schema)


#: Two values of each type that a frame may have. All but those with others within may be keys.
TYPES: dict[str, tuple[pa.DataType, Any, Any]] = {
    "truth": (pa.bool_(), True, False),
    "tiny": (pa.int8(), 1, -2),
    "small": (pa.int16(), 1, 2),
    "whole": (pa.int64(), 1, 2),
    "decimal": (pa.decimal128(9, 2), Decimal("1.50"), Decimal("2.50")),
    "single": (pa.float32(), 1.5, 2.5),
    "zero": (pa.float64(), -0.0, 1.5),
    "nan": (pa.float64(), math.nan, 1.5),
    "text": (pa.string(), "a", "b"),
    "bytes": (pa.binary(), b"\x00", b"\xff"),
    "day": (pa.date32(), date(2013, 1, 1), date(2013, 1, 2)),
    "instant": (pa.timestamp("us", "UTC"), datetime(2013, 1, 1, tzinfo=UTC), datetime(2013, 1, 2, tzinfo=UTC)),
    "wall": (pa.timestamp("us"), datetime(2013, 1, 1), datetime(2013, 1, 2)),  # noqa: DTZ001 - a time without a zone
    "many": (pa.list_(pa.timestamp("us", "UTC")), [datetime(2013, 1, 1, tzinfo=UTC)], []),
    "by_name": (pa.map_(pa.string(), pa.int32()), [("a", 1)], []),
    "within": (pa.struct({"n": pa.int32()}), {"n": 1}, {"n": None}),
}
NESTED = ("many", "by_name", "within")


def test_every_type_is_stored_may_be_in_a_key_and_fits_the_next_batch(lake: Lake) -> None:
    sink = lake.sink([name for name in TYPES if name not in NESTED])
    columns = {name: kind for name, (kind, *_) in TYPES.items()} | NUMBER
    first, second = ([values[n] for _, *values in TYPES.values()] for n in (0, 1))
    positive = [abs(value) if name == "zero" else value for name, value in zip(TYPES, first, strict=True)]

    sink(frame(columns, [(0, 0, *first, 1), (0, 1, *second, 2), (0, 2, *positive, 3)]), 0)
    sink.check(frame(columns, []).schema)
    sink(frame(columns, [(0, 3, *first, 4)]), 1)

    def shown(values: Any) -> list[Any]:
        return [str(value) if isinstance(value, float) else value for value in values]  # NaN is one text

    stored = lake.rows().sort_by("n").to_pylist()
    assert [shown(row.values()) for row in stored] == [shown([*second, 2]), shown([*positive, 4])]


def strict(columns: dict[str, pa.DataType], rows: list[tuple[Any, ...]]) -> Any:
    """Return a frame whose own columns are never NULL, as columns of literals are."""
    made: Any = frame(columns, rows)
    kinds = [pa.field(one.name, one.type, nullable=one.name not in columns) for one in made.rows.schema]
    made.rows = made.rows.cast(pa.schema(kinds))
    return made


WITHIN = {
    "many": pa.list_(pa.int32()),
    "by_name": pa.map_(pa.string(), pa.int32()),
    "whole": pa.struct({"a": pa.int32()}),
}
STRICT_WITHIN = {
    "many": pa.list_(pa.field("element", pa.int32(), nullable=False)),
    "by_name": pa.map_(pa.string(), pa.field("value", pa.int32(), nullable=False)),
    "whole": pa.struct([pa.field("a", pa.int32(), nullable=False)]),
}


@pytest.mark.parametrize("key", [(), ("n",)])
def test_a_column_that_was_never_null_may_be_null_in_the_next_batch(lake: Lake, key: tuple[str, ...]) -> None:
    sink, nothing = lake.sink(key), ([None], [("k", None)], {"a": None})

    sink(strict({**NUMBER, **STRICT_WITHIN, "s": pa.string()}, [(0, 0, 0, [1], [("k", 1)], {"a": 1}, "x")]), 0)
    loose = frame({**NUMBER, **WITHIN, "s": pa.string()}, [(0, 1, 1, *nothing, None)])
    sink.check(loose.schema)
    sink(loose, 1)
    sink(strict({**NUMBER, **STRICT_WITHIN, "s": pa.string()}, [(0, 2, 2, [3], [("k", 3)], {"a": 3}, "z")]), 2)

    assert lake.found("n", "many", "by_name", "whole", "s") == [
        (0, [1], [("k", 1)], {"a": 1}, "x"), (1, *nothing, None), (2, [3], [("k", 3)], {"a": 3}, "z")
    ]  # fmt: skip


@pytest.mark.parametrize("key", [(), ("n",)])
def test_a_null_that_the_table_forbids_is_named_by_its_row(lake: Lake, key: tuple[str, ...]) -> None:
    kinds = [
        pa.field("n", pa.int32()),
        pa.field("s", pa.string(), nullable=False),
        *map(pa.field, *zip(*STRICT_WITHIN.items(), strict=True)),
    ]
    lake.make(pa.schema(kinds))
    sink, columns = lake.sink(key), {**NUMBER, "s": pa.string(), **WITHIN}
    good = (0, 0, 0, "x", [1], [("k", 1)], {"a": 1})

    sink(frame(columns, [good]), 0)
    with pytest.raises(SinkError, match=r"column s is NOT NULL in table .* NULL in 1 rows, the first from orders:0@2"):
        sink(frame(columns, [(0, 1, 1, "y", *good[4:]), (0, 2, 2, None, *good[4:])]), 1)
    foreign: Any = frame(columns, [(0, n, n, "y", *good[4:]) for n in (1, 2)])
    foreign.rows = foreign.rows.set_column(4, "s", pa.array([b"y", b"\xff"]).view(pa.string()))
    with pytest.raises(SinkError, match=r"column s for table .* not UTF-8 in 1 rows, the first from orders:0@2"):
        sink(foreign, 1)
    for within in ([None], good[5], good[6]), (good[4], [("k", None)], good[6]), (*good[4:6], {"a": None}):
        with pytest.raises(SinkError, match="compare the rows with its column types"):
            sink(frame(columns, [(0, 3, 3, "z", *within)]), 2)

    assert lake.found("n", "s", "many", "by_name", "whole") == [good[2:]]


@pytest.mark.parametrize("kind", [DayTimeIntervalType(), YearMonthIntervalType()])
def test_a_type_that_the_format_does_not_know_is_named_at_the_start(lake: Lake, kind: DataType) -> None:
    with pytest.raises(SinkError, match=r"the frame.*(column span is duration|YearMonthInterval).*cast it or leave"):
        lake.sink().check(frame(NUMBER, []).schema.add("span", kind))


def test_frames_a_sink_cannot_store_are_refused_with_a_sentence(lake: Lake) -> None:
    sink = lake.sink(["id"])
    batch: Any = frame(PRICES, [(0, 3, None, 1)])

    sink.check(batch.schema)
    with pytest.raises(SinkError, match=r"column id is part of the key .* the first from orders:0@3"):
        sink(batch, 0)
    with pytest.raises(SinkError, match="lacks offset, id"):
        sink.check(batch.schema[:2])
    with pytest.raises(SinkError, match="no column to store"):
        lake.sink().check(frame({}, []).schema)
    sink(frame(PRICES, []), 0)
    with pytest.raises(
        SinkError, match=r"batch 3 has \d+ bytes in 2 rows, .* of at most max_batch_bytes=9; nothing of it"
    ):
        lake.sink(max_batch_bytes=9)(frame(NUMBER, numbers(0, 1)), 3)
    assert lake.found("id") == []


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"name": " "}, "name must be a name"),
        ({"key": ["offset"]}, "set keep_position"),
        ({"max_batch_bytes": 0}, "max_batch_bytes must be a whole number"),
        ({"timeout_s": 0}, "timeout_s must be a number above zero"),
    ],
)
def test_a_wrong_setting_is_named(lake: Lake, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        lake.sink(**settings)
