"""Tests of `DeltaSink` alone; `test_spark_sink_lakes` has those that it shares with `IcebergSink`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from arrow_frames import frame
from deltalake import DeltaTable
from lakes import DeltaLake

from penstock.errors import ConfigurationError, SinkError
from penstock.spark_sink import DeltaSink, LedgerEntry

NUMBER: dict[str, Any] = {"n": pa.int32()}


@pytest.fixture
def lake(tmp_path: Path) -> DeltaLake:
    """A lake without a table."""
    return DeltaLake(tmp_path)


def test_a_table_that_forgets_its_ledger_is_refused(lake: DeltaLake) -> None:
    setting = "delta.setTransactionRetentionDuration"
    lake.make(pa.schema(list(NUMBER.items())), configuration={setting: "interval 1 day"})
    sink, batch = lake.sink(), frame(NUMBER, [(0, 0, 1)])

    for refused in (lambda: sink.check(batch.schema), lambda: sink(batch, 0)):
        with pytest.raises(ConfigurationError, match=f"has {setting}, .* unset it"):
            refused()

    assert lake.found("n") == []


def test_a_table_that_was_restored_is_refused_until_its_ledger_is_set(lake: DeltaLake) -> None:
    sink = lake.sink()
    for number in (0, 1):
        sink(frame(NUMBER, [(0, number, number)]), number)
    DeltaTable(sink.path).restore(1)
    lake.append(pa.table({"n": pa.array([-1], pa.int32())}))

    for refused in (lambda: sink(frame(NUMBER, [(0, 2, 2)]), 2), lambda: sink.ledger_entries("", [("orders", 0)])):
        with pytest.raises(SinkError, match=r"was restored \(RESTORE\) after its version 2, the last of query q"):
            refused()
    sink.write_ledger("q", {("orders", 0): LedgerEntry(1)})
    sink(frame(NUMBER, [(0, 1, 1), (0, 2, 2)]), 2)

    assert lake.found("n") == [(-1,), (0,), (1,), (2,)]


def test_rows_that_break_a_rule_of_the_table_are_refused_without_their_values(lake: DeltaLake) -> None:
    sink = lake.sink()
    sink(frame(NUMBER, [(0, 0, 1)]), 0)
    DeltaTable(sink.path).alter.add_constraint({"small": "n < 10"})

    with pytest.raises(SinkError, match=r"batch 6 was refused by table") as caught:
        sink(frame(NUMBER, [(0, 1, 2), (0, 2, 4711)]), 6)

    assert "4711" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert lake.found("n") == [(1,)]


@contextmanager
def as_anybody() -> Iterator[None]:
    """Act as a user without privileges; root may write everywhere."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_folder_without_permissions_is_named_and_its_ledger_is_no_empty_one() -> None:
    # Not in pytest's own folder, which no other user may read.
    with tempfile.TemporaryDirectory(prefix="penstock-closed-") as folder:
        closed = Path(folder)
        sink = DeltaSink(str(closed / "table"), name="q")
        closed.chmod(0o555)
        try:
            with as_anybody(), pytest.raises(SinkError, match=r"penstock-closed-.* permission to read and to write"):
                sink.check(frame(NUMBER, []).schema)
            closed.chmod(0o000)
            with as_anybody(), pytest.raises(SinkError, match=r"the ledger of table .* cannot be read"):
                sink.ledger_entries("", [("orders", 0)])
        finally:
            closed.chmod(0o755)
