"""`DeltaSink` on real Delta tables: each row once (I9), a batch whole or not at all, repeated or doubled."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from arrow_frames import PRICES, frame
from deltalake import DeltaTable, write_deltalake
from pyspark.sql.types import DataType, DayTimeIntervalType, YearMonthIntervalType

from penstock.errors import ConfigurationError, SinkError
from penstock.spark_sink import DeltaSink
from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks import delta_sink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NUMBER = {"n": pa.int32()}


def numbers(first: int, last: int) -> list[tuple[int, int, int]]:
    """Return rows of one column that repeats the offset."""
    return [(0, offset, offset) for offset in range(first, last + 1)]


def found(path: Path, *columns: str) -> list[tuple[Any, ...]]:
    """Return what a reader that knows nothing of penstock sees."""
    table = DeltaTable(path).to_pyarrow_table()
    return sorted(tuple(row[name] for name in columns) for row in table.to_pylist())


def test_the_newest_row_of_a_key_wins_within_and_across_batches(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path), ["The id"], name="prices")
    columns = {"The id": pa.string(), 'a "price".x': pa.int32(), "order": pa.string()}

    sink(frame(columns, [(0, 5, "a", 5, "x"), (0, 7, "a", 7, "y"), (0, 6, "a", 6, "z"), (1, 0, "b", 1, "")]), 0)
    sink(frame(columns, [(0, 6, "a", 6, "late"), (0, 8, "b'", None, "w"), (1, 1, "b", 3, "'; DROP TABLE x")]), 1)

    assert DeltaTable(tmp_path).to_pyarrow_table().sort_by("The id").to_pylist() == [
        {"The id": "a", 'a "price".x': 7, "order": "y"},
        {"The id": "b", 'a "price".x': 3, "order": "'; DROP TABLE x"},
        {"The id": "b'", 'a "price".x': None, "order": "w"},
    ]


def test_a_foreign_writer_in_between_makes_a_batch_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = DeltaSink(str(tmp_path), name="q")
    sink(frame(NUMBER, numbers(0, 4)), 0)
    foreign = pa.table({"n": pa.array([-1], pa.int32())})
    looks: list[tuple[int, int]] = []
    ledger_read = delta_sink.warn_left_out

    def interfere(*what: Any) -> None:
        ledger_read(*what)
        looks.append((DeltaTable(tmp_path).version(), len(found(tmp_path, "n"))))
        if len(looks) == 1:
            write_deltalake(tmp_path, foreign, mode="append")

    monkeypatch.setattr(delta_sink, "warn_left_out", interfere)
    sink(frame(NUMBER, numbers(5, 9)), 1)

    assert looks == [(1, 5), (2, 6)]  # at the second look, the foreign row and nothing of the batch
    assert found(tmp_path, "n") == [(n,) for n in range(-1, 10)]


def test_a_table_that_does_not_fit_is_told_column_by_column(tmp_path: Path) -> None:
    DeltaSink(str(tmp_path), name="q")(frame({**PRICES, "extra": pa.int32()}, [(0, 0, "a", 1, 2)]), 0)
    unfit = frame({**PRICES, "id": pa.int64(), "more": pa.string()}, [(0, 1, 1, 1, "canary-4711")])

    with pytest.raises(SinkError, match=r"table .* does not fit the frame") as caught:
        DeltaSink(str(tmp_path), name="q").check(unfit.schema)
    with pytest.raises(SinkError, match=r"does not fit the frame"):
        DeltaSink(str(tmp_path), name="q")(unfit, 1)

    assert "the table lacks the frame's column more" in str(caught.value)
    assert "the frame lacks the table's column extra" in str(caught.value)
    assert "column id is string in the table and long in the frame" in str(caught.value)


@pytest.mark.parametrize("key", [(), ("t",)])
def test_large_types_of_arrow_are_taken(tmp_path: Path, key: tuple[str, ...]) -> None:
    sink = DeltaSink(str(tmp_path), key, name="q", keep_position=True)
    small = frame({"t": pa.string(), "b": pa.binary()}, [(0, 0, "x", b"x")])
    large: Any = frame({"t": pa.large_string(), "b": pa.large_binary()}, [(0, 0, "x", b"x"), (0, 1, "y", b"y")])
    # As with `spark.sql.execution.arrow.useLargeVarTypes`.
    large.rows = large.rows.set_column(0, "topic", large.rows["topic"].cast(pa.large_string()))

    sink(small, 0)
    sink.check(small.schema)
    sink(large, 1)

    assert found(tmp_path, "t", "b", "offset", "topic") == [("x", b"x", 0, "orders"), ("y", b"y", 1, "orders")]


@pytest.mark.parametrize("key", [(), ("n",)])
def test_columns_that_are_new_are_added_where_that_is_asked_for(tmp_path: Path, key: tuple[str, ...]) -> None:
    DeltaSink(str(tmp_path), key, name="q")(frame(NUMBER, [(0, 0, 0), (0, 1, 1)]), 0)
    more = {"some": pa.list_(pa.string()), **NUMBER, "offset too": pa.int64()}
    batch = frame(more, [(0, 2, ["x"], 2, 2), (0, 3, None, 3, None)])

    with pytest.raises(SinkError, match="the table lacks the frame's column some"):
        DeltaSink(str(tmp_path), key, name="q").check(batch.schema)
    sink = DeltaSink(str(tmp_path), key, name="q", evolve=True)
    sink.check(batch.schema)
    sink(batch, 1)
    sink(batch, 1)

    assert found(tmp_path, "n", "some", "offset too") == [
        (0, None, None), (1, None, None), (2, ["x"], 2), (3, None, None)
    ]  # fmt: skip
    with pytest.raises(SinkError, match="the table lacks the frame's column id"):
        DeltaSink(str(tmp_path), ["id"], name="q", evolve=True).check(frame({**more, "id": pa.string()}, []).schema)


#: A value of each type that a frame may have.
TYPES = {
    "bool": "true", "i8": "1Y", "i16": "1S", "i32": "1", "i64": "1L", "f32": "1.5F", "f64": "1.5D",
    "dec": "cast(9.25 AS DECIMAL(12, 2))", "text": "'a'", "bin": "X'00ff'", "day": "DATE'2013-01-01'",
    "at": "TIMESTAMP'2013-01-01 12:00:00 UTC'", "wall": "TIMESTAMP_NTZ'2013-01-01 12:00:00'",
    "many": "array(TIMESTAMP'2013-01-01 12:00:00 UTC')", "by_name": "map('a', 1)", "whole": "named_struct('n', 1)",
}  # fmt: skip


@pytest.mark.thorough
def test_every_type_is_stored_and_the_table_fits_the_next_batch(spark: SparkSession, tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path / "lake"), name="types")
    values = ", ".join(f"{value} AS {name}" for name, value in TYPES.items())

    for offset in range(2):
        batch = spark.sql(f"SELECT {values}, 'orders' AS topic, 0 AS partition, {offset}L AS offset")
        sink.check(batch.schema)
        sink(batch, offset)

    noon = datetime(2013, 1, 1, 12, tzinfo=UTC)
    held = {
        "bool": True, "i8": 1, "i16": 1, "i32": 1, "i64": 1, "f32": 1.5, "f64": 1.5, "dec": Decimal("9.25"),
        "text": "a", "bin": b"\x00\xff", "day": date(2013, 1, 1), "at": noon, "wall": noon.replace(tzinfo=None),
        "many": [noon], "by_name": [("a", 1)], "whole": {"n": 1},
    }  # fmt: skip
    assert DeltaTable(tmp_path / "lake").to_pyarrow_table().to_pylist() == [held, held]


def strict(columns: dict[str, pa.DataType], rows: list[tuple[Any, ...]]) -> Any:
    """Return a frame whose own columns are never NULL, as those of literals are."""
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
def test_a_column_that_was_never_null_may_be_null_in_the_next_batch(tmp_path: Path, key: tuple[str, ...]) -> None:
    sink, nothing = DeltaSink(str(tmp_path), key, name="q"), ([None], [("k", None)], {"a": None})

    sink(strict({**NUMBER, **STRICT_WITHIN, "s": pa.string()}, [(0, 0, 0, [1], [("k", 1)], {"a": 1}, "x")]), 0)
    loose = frame({**NUMBER, **WITHIN, "s": pa.string()}, [(0, 1, 1, *nothing, None)])
    sink.check(loose.schema)
    sink(loose, 1)
    sink(strict({**NUMBER, **STRICT_WITHIN, "s": pa.string()}, [(0, 2, 2, [3], [("k", 3)], {"a": 3}, "z")]), 2)

    assert found(tmp_path, "n", "many", "by_name", "whole", "s") == [
        (0, [1], [("k", 1)], {"a": 1}, "x"), (1, *nothing, None), (2, [3], [("k", 3)], {"a": 3}, "z")
    ]  # fmt: skip


@pytest.mark.parametrize("key", [(), ("n",)])
def test_a_null_that_the_table_forbids_is_named_by_its_row(tmp_path: Path, key: tuple[str, ...]) -> None:
    kinds = [
        pa.field("n", pa.int32()),
        pa.field("s", pa.string(), nullable=False),
        *map(pa.field, *zip(*STRICT_WITHIN.items(), strict=True)),
    ]
    DeltaTable.create(tmp_path, pa.schema(kinds))
    sink, columns = DeltaSink(str(tmp_path), key, name="q"), {**NUMBER, "s": pa.string(), **WITHIN}
    good = (0, 0, 0, "x", [1], [("k", 1)], {"a": 1})

    sink.check(frame(columns, []).schema)
    sink(frame(columns, [good]), 0)
    with pytest.raises(
        SinkError, match=r"column s is NOT NULL in table .* NULL in 1 rows, the first from orders\[0\] offset 2"
    ):
        sink(frame(columns, [(0, 1, 1, "y", *good[4:]), (0, 2, 2, None, *good[4:])]), 1)
    for within in ([None], good[5], good[6]), (good[4], [("k", None)], good[6]), (*good[4:6], {"a": None}):
        with pytest.raises(SinkError, match="compare the rows with its column types"):
            sink(frame(columns, [(0, 3, 3, "z", *within)]), 2)

    assert found(tmp_path, "n", "s", "many", "by_name", "whole") == [good[2:]]


def test_names_that_differ_only_in_case_are_refused(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path), name="q", evolve=True)
    twins = frame({"price": pa.int32(), "Price": pa.int32()}, [(0, 0, 1, 2)])

    for refused in (lambda: sink.check(twins.schema), lambda: sink(twins, 0)):
        with pytest.raises(SchemaMismatchError, match="has Price and price, which differ only in case"):
            refused()
    sink(frame({"price": pa.int32()}, [(0, 0, 1)]), 0)
    with pytest.raises(SchemaMismatchError, match="lacks the frame's column Price, and has price, which differs only"):
        sink(frame({"Price": pa.int32()}, [(0, 1, 1)]), 1)


@pytest.mark.parametrize("kind", [DayTimeIntervalType(), YearMonthIntervalType()])
def test_a_type_that_delta_does_not_know_is_told_at_the_start(tmp_path: Path, kind: DataType) -> None:
    with pytest.raises(SinkError, match=r"the frame.*(column span is duration|YearMonthInterval).*cast it or leave"):
        DeltaSink(str(tmp_path), name="q").check(frame(NUMBER, []).schema.add("span", kind))


def test_zero_of_either_sign_is_one_key(tmp_path: Path) -> None:
    sink, columns = DeltaSink(str(tmp_path), ["k", "of"], name="q"), {"k": pa.float64(), "of": pa.float32(), **NUMBER}

    sink(frame(columns, [(0, 0, 0.0, -0.0, 1), (0, 1, -0.0, 0.0, 2)]), 0)
    sink(frame(columns, [(0, 2, -0.0, -0.0, 3), (0, 3, -1.5, 0.0, 4)]), 1)

    assert found(tmp_path, "k", "of", "n") == [(-1.5, 0.0, 4), (0.0, 0.0, 3)]


def test_a_table_that_forgets_its_ledger_is_refused(tmp_path: Path) -> None:
    setting = "delta.setTransactionRetentionDuration"
    DeltaTable.create(tmp_path, pa.schema([("n", pa.int32())]), configuration={setting: "interval 1 day"})
    sink, batch = DeltaSink(str(tmp_path), name="q"), frame(NUMBER, [(0, 0, 1)])

    with pytest.raises(ConfigurationError, match=f"has {setting}, .* unset it"):
        sink.check(batch.schema)
    with pytest.raises(ConfigurationError, match=f"has {setting}, .* unset it"):
        sink(batch, 0)

    assert found(tmp_path, "n") == []


def test_rows_that_break_a_rule_of_the_table_are_refused_without_their_values(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path), name="q")
    sink(frame(NUMBER, [(0, 0, 1)]), 0)
    DeltaTable(tmp_path).alter.add_constraint({"small": "n < 10"})

    with pytest.raises(SinkError, match=r"batch 6 was refused by table") as caught:
        sink(frame(NUMBER, [(0, 1, 2), (0, 2, 4711)]), 6)

    assert "4711" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert found(tmp_path, "n") == [(1,)]


def test_frames_a_sink_cannot_store_are_refused_with_a_sentence(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path / "lake"), ["id"], name="q")
    batch: Any = frame(PRICES, [(0, 3, None, 1)])
    bare = batch.rows.drop_columns("offset")

    sink.check(batch.schema)
    with pytest.raises(SinkError, match=r"column id is part of the key .* the first from orders\[0\] offset 3"):
        sink(batch, 0)
    with pytest.raises(SinkError, match="lacks offset, id"):
        sink.check(replace(batch, rows=bare.drop_columns("id")).schema)
    with pytest.raises(SinkError, match=r"column offset of the frame for table .* is NULL in 1 rows"):
        sink(replace(batch, rows=bare.append_column("offset", pa.nulls(1, pa.int64()))), 0)
    with pytest.raises(SinkError, match="no column to store"):
        DeltaSink(str(tmp_path / "lake"), name="q").check(frame({}, []).schema)
    sink(frame(PRICES, []), 0)
    with pytest.raises(
        SinkError, match=r"batch 3 has \d+ bytes in 2 rows, .* of at most max_batch_bytes=9; nothing of it"
    ):
        DeltaSink(str(tmp_path / "lake"), name="q", max_batch_bytes=9)(frame(NUMBER, numbers(0, 1)), 3)
    assert found(tmp_path / "lake", "id") == []


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"path": ""}, "path must be a name"),
        ({"name": " "}, "name must be a name"),
        ({"key": ["offset"]}, "set keep_position"),
        ({"max_batch_bytes": 0}, "max_batch_bytes must be a whole number"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        DeltaSink(**{"path": "lake", "name": "q"} | settings)
