"""What `ParquetSink` asks of the files that Spark has written, without a JVM: are they there, do they fit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from penstock.errors import SinkError
from penstock.spark_sink import ParquetSink
from penstock.spark_sink.ledger.state import OffsetStatistics, Span
from penstock.spark_sink.queries.restarts import is_permanent
from penstock.spark_sink.sinks import parquet_sink


@dataclass
class FileFrame:
    """A frame in place of Spark's, which writes the `parts` that it is told as files, and no others."""

    columns_of: Mapping[str, pa.DataType]
    first: int
    rows: int
    parts: Mapping[str, int] = field(default_factory=dict)
    storageLevel: str = "kept by the test"  # noqa: N815 - Spark's name
    sparkSession: Any = field(default_factory=lambda: mock.Mock(spec=[]))  # noqa: N815 - Spark's name

    @property
    def schema(self) -> StructType:
        """Spark's types of the columns."""
        place = {"topic": pa.string(), "partition": pa.int32(), "offset": pa.int64()}
        return from_arrow_schema(pa.schema([*place.items(), *self.columns_of.items()]))

    @property
    def columns(self) -> list[str]:
        """Their names."""
        return list(self.schema.names)

    @property
    def write(self) -> FileFrame:
        """The writer, which is the frame."""
        return self

    def select(self, *_columns: str) -> FileFrame:
        """The same frame."""
        return self

    def partitionBy(self, *_columns: str) -> FileFrame:  # noqa: N802 - Spark's name
        """The same writer."""
        return self

    def parquet(self, folder: str) -> None:
        """Write the files."""
        for name, rows in (self.parts or {"part-0.parquet": self.rows}).items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table({one: pa.nulls(rows, kind) for one, kind in self.columns_of.items()}), path)

    def offset_statistics(self, ledger: Mapping[tuple[str, int], int], _target: str) -> OffsetStatistics:
        """Count the rows, none of which is stored."""
        assert ledger.get(("orders", 0), 0) <= self.first
        return OffsetStatistics(self.rows, {("orders", 0): Span(self.first, self.first + self.rows - 1)})


def store(folder: Path, frame: FileFrame, split_by: Sequence[str] = ()) -> None:
    """Have the sink store a frame."""
    made: Any = frame
    with mock.patch.object(parquet_sink, "offset_statistics", lambda batch, *what: batch.offset_statistics(*what)):
        ParquetSink(str(folder), split_by)(made, 0)


NUMBER = {"n": pa.int32()}


@pytest.mark.parametrize(
    "parts",
    [
        {"_SUCCESS.d/part-0.parquet": 10},  # what readers pass over
        {"part-0.parquet": 4},
        {"part-0.parquet": 10, "_k=1/part-1.parquet": 1},
    ],
)
def test_a_batch_of_which_the_driver_does_not_see_all_files_does_not_move_the_ledger(
    tmp_path: Path, parts: dict[str, int]
) -> None:
    frame = FileFrame(NUMBER, 0, 10)

    with pytest.raises(
        SinkError, match=r"of 10 rows .* the driver sees \d+; name a file system .* all executors share"
    ):
        store(tmp_path, replace(frame, parts=parts))

    assert ParquetSink(str(tmp_path)).position() == {}
    assert list(tmp_path.glob("penstock_batch=*")) == []
    store(tmp_path, replace(frame, parts={"k=1/part-0.parquet": 3, "_k=2/part-0.parquet": 7}))
    assert ParquetSink(str(tmp_path)).position() == {("orders", 0): 10}


def test_a_column_whose_type_has_changed_is_refused_and_others_may_come_and_go(tmp_path: Path) -> None:
    wide = {"n": pa.int32(), "day": pa.date32()}
    store(tmp_path, FileFrame(wide, 0, 10))
    store(tmp_path, FileFrame({"n": pa.int32(), "more": pa.list_(pa.int64())}, 10, 10))

    changed: Any = FileFrame({"n": pa.int64(), "day": pa.string()}, 20, 10)
    for ask in (lambda: store(tmp_path, changed), lambda: ParquetSink(str(tmp_path)).check(changed.schema)):
        with pytest.raises(SinkError, match=r"does not fit the frame: .*; nobody could read both") as caught:
            ask()
        assert "column n is int in the folder and bigint in the frame" in str(caught.value)
        assert "column day is date in the folder and string in the frame" in str(caught.value)  # of the first batch
        assert is_permanent(caught.value)

    assert ParquetSink(str(tmp_path)).position() == {("orders", 0): 20}
    ParquetSink(str(tmp_path)).check(FileFrame(wide, 20, 10).schema)


def test_a_folder_that_is_split_in_another_way_is_refused(tmp_path: Path) -> None:
    columns = {"n": pa.int32(), "day": pa.date32()}
    store(tmp_path, FileFrame(columns, 0, 10), ["day"])

    with pytest.raises(SinkError, match=r"the folder is split by \(day\), and the frame by \(\)"):
        store(tmp_path, FileFrame(columns, 10, 10))


def test_a_ledger_of_another_format_is_refused(tmp_path: Path) -> None:
    store(tmp_path, FileFrame(NUMBER, 0, 10))
    (tmp_path / "penstock_batch=1" / "_ledger.json").write_text(json.dumps({"format": 1, "next_offsets": {}}))

    with pytest.raises(SinkError, match="is a ledger of format 1, and this version of penstock knows 2"):
        store(tmp_path, FileFrame(NUMBER, 10, 10))
