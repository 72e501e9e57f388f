"""Folders that may not be written are named, before a library says so in its own words."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.sql.types import IntegerType, LongType, StringType, StructType

from penstock.clients.rights import MissingRightError
from penstock.spark_sink import DeltaSink, ParquetSink
from penstock.spark_sink.sinks.sink import ledger_positions

SCHEMA = (
    StructType()
    .add("topic", StringType())
    .add("partition", IntegerType())
    .add("offset", LongType())
    .add("id", StringType())
)


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


@pytest.fixture
def closed() -> Iterator[Path]:
    """A folder that may be looked at and not be written. Not in pytest's own, into which nobody else may look."""
    with tempfile.TemporaryDirectory(prefix="penstock-closed-") as folder:
        path = Path(folder)
        path.chmod(0o555)
        yield path
        path.chmod(0o755)


def delta(folder: Path) -> DeltaSink:
    return DeltaSink(str(folder), name="q")


def parquet(folder: Path) -> ParquetSink:
    return ParquetSink(str(folder), name="q")


@pytest.mark.parametrize("sink_of", [delta, parquet])
def test_a_folder_that_may_not_be_written_is_named_at_the_start(
    closed: Path, sink_of: Callable[[Path], DeltaSink | ParquetSink]
) -> None:
    for folder in (closed, closed / "not" / "there"):
        with as_anybody(), pytest.raises(MissingRightError) as told:
            sink_of(folder).check(SCHEMA)

        assert f"{folder} cannot be written: " in str(told.value)
        assert str(told.value).endswith(f":rwx '{closed}'")


@pytest.mark.parametrize("sink_of", [delta, parquet])
def test_a_ledger_in_a_folder_that_may_not_be_read_is_no_empty_one(
    closed: Path, sink_of: Callable[[Path], DeltaSink | ParquetSink]
) -> None:
    with as_anybody():
        assert ledger_positions(sink_of(closed / "not-there"), "q", [("t", 0)]) == {}
    closed.chmod(0o000)

    with as_anybody(), pytest.raises(MissingRightError, match="lacks the right rx on folder"):
        ledger_positions(sink_of(closed), "q", [("t", 0)])
    with as_anybody(), pytest.raises(MissingRightError, match="lacks the right rx on folder"):
        ledger_positions(sink_of(closed / "below"), "q", [("t", 0)])


@pytest.mark.parametrize("sink_of", [delta, parquet])
def test_a_folder_that_is_not_there_and_may_be_made_is_no_error(
    tmp_path: Path, sink_of: Callable[[Path], DeltaSink | ParquetSink]
) -> None:
    sink_of(tmp_path / "a" / "b").check(SCHEMA)
