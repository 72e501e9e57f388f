"""`DeltaSink` on real Delta tables: each row once (I9), a batch whole or not at all, repeated or doubled."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from threading import Barrier
from typing import Any

import pyarrow as pa
import pytest
from arrow_frames import frame
from checkpoints import lose_commit
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name under which everybody knows it

from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError, SinkError
from penstock.spark_sink import DeltaSink, start_sink
from penstock.spark_sink.sinks import delta_sink
from penstock.spark_sink.sinks.sink import ledger_positions

FrameOf = Callable[..., DataFrame]

NUMBER = {"n": pa.int32()}


def numbers(first: int, last: int) -> list[tuple[int, int, int]]:
    """Return rows of one column that repeats the offset."""
    return [(0, offset, offset) for offset in range(first, last + 1)]


def found(path: Path, *columns: str) -> list[tuple[Any, ...]]:
    """Return what a reader that knows nothing of penstock sees."""
    table = DeltaTable(path).to_pyarrow_table()
    return sorted(tuple(row[name] for name in columns) for row in table.to_pylist())


def test_a_replayed_batch_and_a_lost_checkpoint_store_nothing_twice(
    spark: SparkSession, broker: DevBroker, new_topic: Callable[..., str], write: Callable[..., None], tmp_path: Path
) -> None:
    topic, lake, seen = new_topic(partitions=2), tmp_path / "lake", list[int]()
    sink = DeltaSink(str(lake), name="copy")

    def store(batch: DataFrame, batch_id: int) -> None:
        seen.append(batch_id)
        sink(batch.withColumn("n", F.col("value").cast("string").cast("int")), batch_id)

    def run(checkpoint: str) -> None:
        query = start_sink(
            spark,
            topic,
            store,
            bootstrap_servers=broker.bootstrap_servers,
            trigger="available now",
            name=topic,
            checkpoint_location=str(tmp_path / checkpoint),
        )
        assert query.awaitTermination(150)

    for start in (0, 60):
        for partition in (0, 1):
            write(topic, partition, [(None, b"%d" % n) for n in range(start + partition, start + 60, 2)])
        run("checkpoint")
    lose_commit(tmp_path / "checkpoint", 1)
    run("checkpoint")
    after_replay = found(lake, "n")
    run("another checkpoint")

    assert seen == [0, 1, 1, 0]  # the batches really came twice
    assert after_replay == found(lake, "n") == [(n,) for n in range(120)]
    assert [DeltaTable(lake).transaction_version(f"copy/{topic}/{part}") for part in (0, 1)] == [60, 60]
    assert DeltaTable(lake).version() == 2  # made, and two batches: what was repeated made no commit


def test_the_newest_row_of_a_key_wins_within_and_across_batches(frame_of: FrameOf, tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path), ["The id"], name="prices")
    columns = '`The id` STRING, `a "price".x` INT, `order` STRING'

    sink(frame_of(columns, [(0, 5, "a", 5, "x"), (0, 7, "a", 7, "y"), (0, 6, "a", 6, "z"), (1, 0, "b", 1, "")]), 0)
    sink(frame_of(columns, [(0, 6, "a", 6, "late"), (0, 8, "b'", None, "w"), (1, 1, "b", 3, "'; DROP TABLE x")]), 1)

    assert DeltaTable(tmp_path).to_pyarrow_table().sort_by("The id").to_pylist() == [
        {"The id": "a", 'a "price".x': 7, "order": "y"},
        {"The id": "b", 'a "price".x': 3, "order": "'; DROP TABLE x"},
        {"The id": "b'", 'a "price".x': None, "order": "w"},
    ]


def test_a_second_call_in_a_batch_and_rows_held_back_are_errors_and_a_new_run_is_not(tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path), name="q")
    sink(frame(NUMBER, [(0, 0, 0), (0, 5, 5)], run="first"), 7)

    with pytest.raises(SinkError, match=r"batch 7 was given to table .* twice: rows of orders\[0\] are stored"):
        sink(frame(NUMBER, [(0, 3, 3)], run="first"), 7)
    with pytest.raises(SinkError, match=r"batch 8 holds rows of orders\[0\] that lie below those of batch 7"):
        sink(frame(NUMBER, [(0, 5, 5), (0, 6, 6)], run="first"), 8)
    sink(frame(NUMBER, [(0, 5, 5), (0, 6, 6)], run="second"), 7)
    sink(frame(NUMBER, [(0, 6, 6), (0, 7, 7)]), 0)

    assert found(tmp_path, "n") == [(0,), (5,), (6,), (7,)]
    assert ledger_positions(sink, "", [("orders", 0), ("orders", 1)]) == {("orders", 0): 8}
    assert ledger_positions(DeltaSink(str(tmp_path / "none"), name="q"), "", [("orders", 0)]) == {}


def test_a_commit_that_is_not_heard_of_is_no_second_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, store, tries = DeltaSink(str(tmp_path), name="q"), DeltaSink._store, list[bool]()

    def unheard(self: DeltaSink, *what: Any, again: bool) -> None:
        tries.append(again)
        store(self, *what, again=again)
        if not again:
            raise CommitFailedError("the answer is lost")

    monkeypatch.setattr(DeltaSink, "_store", unheard)
    sink(frame(NUMBER, [(0, 0, 0)], run="first"), 7)

    assert tries == [False, True]
    assert found(tmp_path, "n") == [(0,)]


@pytest.mark.parametrize("key", [(), ("n",)])
def test_two_copies_of_a_query_by_mistake_store_each_row_once(
    frame_of: FrameOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: tuple[str, ...]
) -> None:
    sink, together, refused = DeltaSink(str(tmp_path), key, name="q", keep_position=True), Barrier(2), list[str]()
    store = DeltaSink._store
    ledger_read = delta_sink.warn_replayed
    waits = [True, True]

    def meet(*what: Any) -> None:
        ledger_read(*what)
        if waits:
            waits.pop()
            together.wait(60)  # both have read the same ledger, and neither has committed

    def watched(self: DeltaSink, *what: Any, **how: Any) -> None:
        try:
            store(self, *what, **how)
        except CommitFailedError as error:
            refused.append(str(error))
            raise

    monkeypatch.setattr(delta_sink, "warn_replayed", meet)
    monkeypatch.setattr(DeltaSink, "_store", watched)
    frames = [frame_of("n INT", numbers(0, 69)), frame_of("n INT", numbers(0, 99))]
    with ThreadPoolExecutor(2) as copies:
        list(copies.map(lambda frame: sink(frame, 0), frames))

    assert len(refused) == 1  # one of the two really came second
    assert found(tmp_path, "n", "offset") == [(n, n) for n in range(100)]


def test_a_foreign_writer_in_between_makes_a_batch_begin_anew(
    frame_of: FrameOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = DeltaSink(str(tmp_path), name="q")
    sink(frame_of("n INT", numbers(0, 4)), 0)
    foreign = pa.table({"n": pa.array([-1], pa.int32())})
    looks: list[tuple[int, int]] = []
    ledger_read = delta_sink.warn_replayed

    def interfere(*what: Any) -> None:
        ledger_read(*what)
        looks.append((DeltaTable(tmp_path).version(), len(found(tmp_path, "n"))))
        if len(looks) == 1:
            write_deltalake(tmp_path, foreign, mode="append")

    monkeypatch.setattr(delta_sink, "warn_replayed", interfere)
    sink(frame_of("n INT", numbers(5, 9)), 1)

    assert looks == [(1, 5), (2, 6)]  # at the second look, the foreign row and nothing of the batch
    assert found(tmp_path, "n") == [(n,) for n in range(-1, 10)]


def test_a_table_that_does_not_fit_is_told_column_by_column(frame_of: FrameOf, tmp_path: Path) -> None:
    DeltaSink(str(tmp_path), name="q")(frame_of("id STRING, price INT, extra INT", [(0, 0, "a", 1, 2)]), 0)
    frame = frame_of("id BIGINT, price INT, more STRING", [(0, 1, 1, 1, "canary-4711")])

    with pytest.raises(SinkError, match=r"table .* does not fit the frame") as caught:
        DeltaSink(str(tmp_path), name="q").check(frame.schema)
    with pytest.raises(SinkError, match=r"does not fit the frame"):
        DeltaSink(str(tmp_path), name="q")(frame, 1)

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


def test_a_query_stores_every_type_and_finds_its_table_fitting_at_the_next_start(
    spark: SparkSession, broker: DevBroker, new_topic: Callable[..., str], write: Callable[..., None], tmp_path: Path
) -> None:
    topic, sink = new_topic(), DeltaSink(str(tmp_path / "lake"), name="types")

    for _ in range(2):
        write(topic, 0, [(None, b"x")])
        query = start_sink(
            spark,
            topic,
            sink,
            rows=lambda messages: messages.selectExpr(
                *(f"{value} AS {name}" for name, value in TYPES.items()), "topic", "partition", "offset"
            ),
            bootstrap_servers=broker.bootstrap_servers,
            trigger="available now",
            name=topic,
            checkpoint_location=str(tmp_path / "checkpoint"),
        )
        assert query.awaitTermination(90)

    noon = datetime(2013, 1, 1, 12, tzinfo=UTC)
    values = {
        "bool": True, "i8": 1, "i16": 1, "i32": 1, "i64": 1, "f32": 1.5, "f64": 1.5, "dec": Decimal("9.25"),
        "text": "a", "bin": b"\x00\xff", "day": date(2013, 1, 1), "at": noon, "wall": noon.replace(tzinfo=None),
        "many": [noon], "by_name": [("a", 1)], "whole": {"n": 1},
    }  # fmt: skip
    assert DeltaTable(tmp_path / "lake").to_pyarrow_table().to_pylist() == [values, values]


@pytest.mark.parametrize("kind", ["INTERVAL DAY TO SECOND", "INTERVAL YEAR TO MONTH"])
def test_a_type_that_delta_does_not_know_is_told_at_the_start(frame_of: FrameOf, tmp_path: Path, kind: str) -> None:
    with pytest.raises(SinkError, match=r"the frame.*(column span is duration|YearMonthInterval).*cast it or leave"):
        DeltaSink(str(tmp_path), name="q").check(frame_of(f"n INT, span {kind}", []).schema)


def test_zero_of_either_sign_is_one_key(frame_of: FrameOf, tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path), ["k", "of"], name="q")

    sink(frame_of("k DOUBLE, of FLOAT, n INT", [(0, 0, 0.0, -0.0, 1), (0, 1, -0.0, 0.0, 2)]), 0)
    sink(frame_of("k DOUBLE, of FLOAT, n INT", [(0, 2, -0.0, -0.0, 3), (0, 3, -1.5, 0.0, 4)]), 1)

    assert found(tmp_path, "k", "of", "n") == [(-1.5, 0.0, 4), (0.0, 0.0, 3)]


def test_a_table_that_forgets_its_ledger_is_refused(frame_of: FrameOf, tmp_path: Path) -> None:
    setting = "delta.setTransactionRetentionDuration"
    DeltaTable.create(tmp_path, pa.schema([("n", pa.int32())]), configuration={setting: "interval 1 day"})
    sink, frame = DeltaSink(str(tmp_path), name="q"), frame_of("n INT", [(0, 0, 1)])

    with pytest.raises(ConfigurationError, match=f"has {setting}, .* unset it"):
        sink.check(frame.schema)
    with pytest.raises(ConfigurationError, match=f"has {setting}, .* unset it"):
        sink(frame, 0)

    assert found(tmp_path, "n") == []


def test_rows_that_break_a_rule_of_the_table_are_refused_without_their_values(
    frame_of: FrameOf, tmp_path: Path
) -> None:
    sink = DeltaSink(str(tmp_path), name="q")
    sink(frame_of("n INT", [(0, 0, 1)]), 0)
    DeltaTable(tmp_path).alter.add_constraint({"small": "n < 10"})

    with pytest.raises(SinkError, match=r"batch 6 was refused by table") as caught:
        sink(frame_of("n INT", [(0, 1, 2), (0, 2, 4711)]), 6)

    assert "4711" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert found(tmp_path, "n") == [(1,)]


def test_frames_a_sink_cannot_store_are_refused_with_a_sentence(frame_of: FrameOf, tmp_path: Path) -> None:
    sink = DeltaSink(str(tmp_path / "lake"), ["id"], name="q")
    frame = frame_of("id STRING, n INT", [(0, 3, None, 1)])

    sink.check(frame.schema)
    with pytest.raises(SinkError, match=r"column id is part of the key .* the first from orders\[0\] offset 3"):
        sink(frame, 0)
    with pytest.raises(SinkError, match="lacks offset, id"):
        sink.check(frame.drop("offset", "id").schema)
    with pytest.raises(SinkError, match=r"column offset of the frame for table .* is NULL in 1 rows"):
        sink(frame.withColumn("offset", F.lit(None).cast("bigint")), 0)
    with pytest.raises(SinkError, match="no column to store"):
        DeltaSink(str(tmp_path / "lake"), name="q").check(frame.drop("id", "n").schema)
    sink(frame_of("id STRING, n INT", []), 0)
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"path": ""}, "path must be a name"),
        ({"name": " "}, "name must be a name"),
        ({"key": ["offset"]}, "set keep_position"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        DeltaSink(**{"path": "lake", "name": "q"} | settings)


def test_a_sink_can_be_pickled_and_does_not_show_its_settings() -> None:
    sink = DeltaSink("s3://bucket/lake", name="q", storage_options={"AWS_SECRET_ACCESS_KEY": "canary-4711"})

    assert pickle.loads(pickle.dumps(sink)) == sink  # noqa: S301 - the test's own bytes
    assert "canary-4711" not in repr(sink)
