"""Tests of `IcebergSink` alone: its ledger among other writers' snapshots, and the files that an upsert rewrites."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from arrow_frames import frame
from lakes import IcebergLake
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import IntegerType, NestedField

from penstock.errors import ConfigurationError, SinkError
from penstock.spark_sink import IcebergSink, LedgerEntry
from penstock.spark_sink.sinks.iceberg_sink import _ledger_of, _text_of

NUMBER = {"n": pa.int32()}
FOREIGN = pa.table({"n": pa.array([-1], pa.int32())})
PLACE = ("orders", 0)


@pytest.fixture
def lake(tmp_path: Path) -> IcebergLake:
    """A lake without a table."""
    return IcebergLake(tmp_path)


def batch(number: int, run: str = "r") -> Any:
    """Return a batch of two offsets."""
    first = 2 * number
    rows = [(0, offset, offset) for offset in (first, first + 1)]
    return frame(NUMBER, rows, run=run, batch=number, plan={PLACE: (first, first + 2)})


def test_a_ledger_is_found_behind_other_writers_and_when_its_snapshot_has_expired(lake: IcebergLake) -> None:
    sink = lake.sink()
    sink(batch(0), 0)
    for _ in range(2):
        lake.append(FOREIGN)
    with lake.table() as table, table.transaction() as transaction:
        transaction.remove_properties("penstock.ledger")
    behind_others = sink.ledger_entries("", [PLACE])
    sink.write_ledger("other", {PLACE: LedgerEntry(9)})  # which sets the property again
    for _ in range(2):
        lake.append(FOREIGN)
    lake.maintain()
    with lake.table() as table:
        assert [snapshot.summary.get("penstock.ledger") for snapshot in table.snapshots() if snapshot.summary] == [None]

    sink(batch(0, "again"), 0)
    sink(batch(1, "again"), 1)

    assert behind_others[PLACE].end == 2
    assert lake.found("n") == [*[(-1,)] * 4, (0,), (1,), (2,), (3,)]


def test_a_ledger_that_cannot_be_found_is_not_taken_for_an_empty_one(lake: IcebergLake) -> None:
    sink = lake.sink()
    sink(batch(0), 0)
    for _ in range(2):
        lake.append(FOREIGN)
    lake.maintain()
    with lake.table() as table:
        for former in table.metadata.metadata_log:
            Path(former.metadata_file.removeprefix("file://")).unlink()

    for asked in (lambda: sink(batch(1), 1), sink.ledger, lambda: sink.write_ledger("q", {PLACE: LedgerEntry(2)})):
        with pytest.raises(SinkError, match=r"no snapshot of table db.events holds the ledger .* UNSET TBLPROPERTIES"):
            asked()
    with lake.table() as table, table.transaction() as transaction:
        transaction.remove_properties("penstock.ledger")
    sink.write_ledger("q", {PLACE: LedgerEntry(2)})
    sink(batch(1), 1)

    assert lake.found("n") == [(-1,), (-1,), (0,), (1,), (2,), (3,)]


def test_a_table_that_was_rolled_back_has_the_ledger_of_its_rows(lake: IcebergLake) -> None:
    sink = lake.sink()
    for number in (0, 1):
        sink(batch(number), number)
    with lake.table() as table:
        first = table.history()[0].snapshot_id
        table.manage_snapshots().rollback_to_snapshot(first).commit()

    with pytest.raises(SinkError, match=r"starts at offset 4 of orders:0.* offsets 2 to 3 would be missing"):
        sink(batch(2), 2)
    for number in (1, 2):
        sink(batch(number, "again"), number)

    assert lake.found("n") == [(n,) for n in range(6)]


def test_an_upsert_writes_only_the_files_again_that_hold_its_keys_in_one_snapshot(lake: IcebergLake) -> None:
    columns = {"day": pa.int32(), "id": pa.int32(), "n": pa.int32()}
    fields = [NestedField(place, name, IntegerType(), required=False) for place, name in enumerate(columns, 1)]
    lake.make(Schema(*fields), partition_spec=PartitionSpec(PartitionField(1, 1000, IdentityTransform(), "day")))
    sink = lake.sink(["day", "id"])

    def files() -> set[str]:
        with lake.table() as table:
            return {task.file.file_path for task in table.scan().plan_files()}

    sink(frame(columns, [(0, 0, 1, 1, 0), (0, 1, 1, 2, 1), (0, 2, 2, 1, 2)]), 0)
    before = files()
    sink(frame(columns, [(0, 3, 1, 2, 3), (0, 4, 3, 2, 4)]), 1)

    assert lake.found("day", "id", "n") == [(1, 1, 0), (1, 2, 3), (2, 1, 2), (3, 2, 4)]
    assert len(before & files()) == 1
    with lake.table() as table:
        assert len(table.snapshots()) == 2
        assert table.properties.keys() == {"penstock.ledger"}, "the library's tries are switched off in our memory only"


def test_many_keys_are_found_by_their_bounds(lake: IcebergLake) -> None:
    sink = lake.sink(["n"])
    for number, keys in enumerate((range(1000), range(500, 1500))):
        sink(frame(NUMBER, [(0, 1000 * number + place, key) for place, key in enumerate(keys)]), number)

    assert lake.found("n") == [(n,) for n in range(1500)]


def test_a_ledger_is_kept_as_it_is() -> None:
    ledger = {
        "a/query": {("orders", n): LedgerEntry(2**40 + n, None if n else 7, "topic", "query", 3) for n in range(3)},
        "": {("orders", 0): LedgerEntry(0), ("payments", 11): LedgerEntry(9, 1)},
    }

    assert _ledger_of(_text_of({**ledger, "nothing": {}})) == ledger
    many = {("orders", n): LedgerEntry(10**9, 10**9, None, "q" * 36, 10**6) for n in range(200)}
    assert len(_text_of({"q": many})) < 6_000


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"table": "orders"}, "without a namespace"),
        ({"table": ""}, "table must be a name"),
        ({"catalog": {}}, "catalog is empty"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        IcebergSink(**{"table": "db.orders", "catalog": {"type": "sql"}, "name": "q"} | settings)


@pytest.mark.parametrize("uri", ["nonsense://clerk:canary@127.0.0.1/db", "sqlite:////not/there/canary.db"])
def test_a_catalogue_that_is_not_reached_is_reported_without_its_properties(uri: str) -> None:
    sink = IcebergSink("db.orders", {"type": "sql", "uri": uri, "warehouse": "file:///not/there"}, name="q")

    for asked in (lambda: sink.check(frame(NUMBER, []).schema), lambda: sink(batch(0), 0), sink.ledger):
        with pytest.raises(SinkError, match=r"table db.orders .*compare .* the sink's settings") as caught:
            asked()
        assert "canary" not in str(caught.value)
        assert caught.value.__cause__ is None


def test_a_commit_that_was_left_behind_and_succeeds_later_is_stored_once(
    lake: IcebergLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = lake.sink()
    sink(batch(0), 0)
    answered, committed, commit_table = threading.Event(), threading.Event(), SqlCatalog.commit_table

    def hanging(*given: Any) -> Any:
        assert answered.wait(60)
        response = commit_table(*given)
        committed.set()
        return response

    with monkeypatch.context() as patched:
        patched.setattr(SqlCatalog, "commit_table", hanging)
        with pytest.raises(SinkError, match="it did not come to an end in 8 s, and was left behind"):
            lake.sink(timeout_s=8)(batch(1), 1)
        before = lake.found("n")
        answered.set()
        assert committed.wait(60)
    sink(batch(1, "again"), 1)

    assert before == [(0,), (1,)]
    assert lake.found("n") == [(n,) for n in range(4)]
