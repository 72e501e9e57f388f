"""Where a query begins that has no checkpoint, and which sinks need one; Spark and Kafka are not started."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession
from source_tasks import FakeBrokers

from penstock.consumer import handler
from penstock.errors import ConfigurationError
from penstock.spark_sink import DataLossError, SqlSink
from penstock.spark_sink.ledger.rules import LedgerEntry
from penstock.spark_sink.queries import start as starting
from penstock.spark_sink.queries.sink_specs import SinkSpec
from penstock.spark_sink.queries.start import beginning, checkpoint_of, has_progress
from penstock.spark_sink.sinks.handlers.sink import HandlerSink
from penstock.spark_sink.sinks.sink import Entries, LedgerSink
from penstock.spark_sink.source.plan import Log, Offsets


class Kept(LedgerSink):
    """A sink whose ledger says what the test wants."""

    name = None
    ledger_key = "kept"

    def __init__(self, **offsets: Offsets) -> None:
        self._offsets = offsets

    def ledger(self) -> dict[str, Entries]:
        return {
            query: {part: LedgerEntry(end) for part, end in offsets.items()} for query, offsets in self._offsets.items()
        }

    def _change_ledger(self, *_given: object) -> None:
        raise AssertionError

    def __call__(self, _batch: object, _batch_id: int) -> None: ...


@pytest.fixture
def begins(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that tells where the query shop-orders begins, on logs from 3 to 90."""
    log = Log(3, 90, 90)
    brokers = FakeBrokers(counts={"orders": 2}, orders=log, payments=log)
    monkeypatch.setattr(starting, "OffsetReader", lambda _: brokers)

    def make(sink: object, otherwise: str = "latest", progress: bool | None = False, **options: str) -> Any:
        spec = SinkSpec(
            topics=("orders", "payments"),
            function=sink,
            rows=None,
            trigger="once",
            name="shop-orders",
            checkpoint_location=None,
            starting_offsets=otherwise,
            options=options,
        )
        servers = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "orders,payments"}
        begun, entries = beginning(spec, servers, progress=progress)
        return {key: value for key, value in begun.items() if key not in servers}, entries

    return make


@pytest.mark.parametrize(
    ("otherwise", "new"), [("earliest", 3), ("latest", 90), ('{"payments": {"0": 7}, "orders": {"0": 1, "1": 7}}', 7)]
)
def test_a_query_begins_where_the_ledger_says_or_else_at_its_option(begins: Any, otherwise: str, new: int) -> None:
    options, entries = begins(Kept(**{"shop-orders": {("orders", 0): 42}}), otherwise)

    assert json.loads(options["startingoffsets"]) == {"orders": {"0": 42, "1": new}, "payments": {"0": new}}
    assert entries == {
        ("orders", 1): LedgerEntry(new, new, "orders now"),
        ("payments", 0): LedgerEntry(new, new, "payments now"),
    }


def test_the_ledger_counts_before_all_that_the_options_say_of_the_beginning(begins: Any) -> None:
    sink = Kept(**{"shop-orders": {("orders", 0): 42, ("orders", 1): 5, ("payments", 0): 3}})

    options, entries = begins(
        sink, startingTimestamp="1700000000000", startingOffsets="earliest", maxOffsetsPerTrigger="10"
    )

    at = json.loads(options.pop("startingoffsets"))
    assert at == {"orders": {"0": 42, "1": 5}, "payments": {"0": 3}}
    assert options == {"maxoffsetspertrigger": "10"}
    assert entries == {}


def test_a_query_that_nothing_was_stored_of_begins_where_it_began_first(begins: Any, tmp_path: Path) -> None:
    sink = SqlSink(f"sqlite:///{tmp_path}/shop.db", table="orders")
    first, entries = begins(sink)
    sink.begin_ledger("shop-orders", entries)

    again = begins(sink, "earliest")

    assert first == {"startingoffsets": '{"orders": {"0": 90, "1": 90}, "payments": {"0": 90}}'}
    assert again == (first, {})


def test_a_partition_that_came_since_and_a_topic_that_was_created_again_are_read_from_the_beginning(
    begins: Any, tmp_path: Path
) -> None:
    sink = SqlSink(f"sqlite:///{tmp_path}/shop.db", table="orders")
    sink.begin_ledger(
        "shop-orders",
        {("orders", 0): LedgerEntry(42, 30, "orders now"), ("payments", 0): LedgerEntry(42, 30, "payments before")},
    )

    options, entries = begins(sink)
    with pytest.raises(DataLossError, match="topic payments was deleted and created again since the query shop-orders"):
        begins(sink, progress=True)

    assert json.loads(options["startingoffsets"]) == {"orders": {"0": 42, "1": 3}, "payments": {"0": 3}}
    assert entries.keys() == {("orders", 1), ("payments", 0)}
    assert begins(sink, progress=True, failOnDataLoss="false")[1]["payments", 0].topic_id == "payments now"


def test_where_a_checkpoint_counts_or_cannot_be_looked_at_nothing_is_written(begins: Any) -> None:
    sink = Kept(**{"shop-orders": {("orders", 0): 42}})

    assert begins(sink, progress=True) == begins(print) == ({"startingoffsets": "latest"}, {})
    assert begins(sink, progress=None) == (begins(sink)[0], {})


def test_a_checkpoint_has_progress_when_it_has_offsets(spark: SparkSession, tmp_path: Path) -> None:
    place = str(tmp_path / "c")
    found = [has_progress(spark, None), has_progress(spark, place)]
    (tmp_path / "c" / "offsets").mkdir(parents=True)
    (tmp_path / "c" / "offsets" / ".0.crc").touch()
    found.append(has_progress(spark, place))
    (tmp_path / "c" / "offsets" / "0").touch()

    assert [*found, has_progress(spark, place)] == [False, False, False, True]
    assert has_progress(spark, "nosuch://there/c") is None


def checkpoint(sink: object, folder: str | None = None, location: str | None = None) -> str | None:
    """Return the checkpoint of a query into a sink, in a session with a folder for checkpoints or with none."""
    session: Any = SimpleNamespace(conf={starting.CHECKPOINTS: folder})
    function: Any = sink
    return checkpoint_of(
        session, SinkSpec(topics=("t",), function=function, name="orders", checkpoint_location=location)
    )


def test_a_sink_without_a_ledger_is_refused_without_a_checkpoint() -> None:
    batches = SqlSink("sqlite:///shop.db", "totals", ["id"], mode="batch")
    handlers = HandlerSink({"orders": handler(lambda _: None)}, group="g", parallelism=1)

    for sink in (SqlSink("sqlite:///shop.db", table="orders"), Kept()):
        assert checkpoint(sink) is None
    for forgetful in (print, handlers, batches):
        with pytest.raises(ConfigurationError, match="the sink of the query orders has no ledger, and the query no ch"):
            checkpoint(forgetful)
        assert checkpoint(forgetful, folder="/all") == "/all/orders"
        assert checkpoint(forgetful, folder="/all", location="/own") == "/own"
