"""Where a query begins that has no checkpoint, and which sinks need one; Spark and Kafka are not started."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import ConfigurationError
from penstock.spark_sink import SqlSink
from penstock.spark_sink.queries import query
from penstock.spark_sink.queries import starting_offsets as starting
from penstock.spark_sink.queries.query import start_sink
from penstock.spark_sink.queries.sink_specs import SinkSpec
from penstock.spark_sink.queries.starting_offsets import begin_at, refuse_forgetful, starting_options
from penstock.spark_sink.sinks.handlers.sink import HandlerSink
from penstock.spark_sink.source import source
from penstock.spark_sink.source.offsets.planning import Offsets, TopicPartition
from penstock.spark_sink.source.options.options import SourceOptions
from penstock.spark_sink.source.planning.offset_reader import Topics

PARTS = [("orders", 0), ("orders", 1), ("payments", 0)]


class Kept:
    """A sink whose ledger says what the test wants."""

    def __init__(self, **offsets: Offsets) -> None:
        self._offsets = offsets

    def position_of(self, query: str, partitions: Iterable[TopicPartition]) -> Offsets:
        known = self._offsets.get(query, {})
        return {part: known[part] for part in partitions if part in known}

    def __call__(self, _batch: object, _batch_id: int) -> None: ...


@pytest.mark.parametrize(
    ("otherwise", "payments"),
    [("earliest", -2), ("latest", -1), ('{"payments": {"0": 7}, "orders": {"0": 1, "1": 1}}', 7)],
)
def test_a_query_begins_where_the_ledger_says_and_elsewhere_as_told(otherwise: str, payments: int) -> None:
    begins = json.loads(begin_at(otherwise, PARTS, {("orders", 0): 42}))

    # Of a topic that the ledger knows, a partition without an entry is new or was empty: its rows must not be lost.
    assert begins == {"orders": {"0": 42, "1": -2}, "payments": {"0": payments}}


def test_a_wrong_beginning_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="starting_offsets must be earliest, latest or JSON"):
        begin_at("newest", PARTS, {("orders", 0): 42})


@pytest.fixture
def options_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(starting.clients, "admin", lambda *_: None)
    monkeypatch.setattr(starting, "require_topics", lambda *_, **__: {"orders": 2, "payments": 1})

    def make(sink: object, **options: str) -> dict[str, str]:
        spec = SinkSpec(
            topics=("orders", "payments"),
            function=sink,
            rows=None,
            trigger="once",
            name="shop-orders",
            checkpoint_location=None,
            starting_offsets="latest",
            options=options,
        )
        return starting_options(spec, "127.0.0.1:1", {})

    return make


def test_the_ledger_counts_before_all_that_the_options_say_of_the_beginning(options_of: Any) -> None:
    sink = Kept(**{"shop-orders": {("orders", 0): 42, ("orders", 1): 5, ("payments", 0): 3}})

    found = options_of(sink, startingTimestamp="1700000000000", startingOffsets="earliest", maxOffsetsPerTrigger="10")

    begins = json.loads(found.pop("startingoffsets"))
    assert begins == {"orders": {"0": 42, "1": 5}, "payments": {"0": 3}}
    assert found == {"maxoffsetspertrigger": "10"}


def test_an_empty_ledger_another_querys_and_none_leave_the_beginning_as_told(options_of: Any) -> None:
    others = Kept(another={("orders", 0): 42})

    assert options_of(others) == options_of(Kept()) == options_of(print) == {"startingoffsets": "latest"}
    assert options_of(others, startingTimestamp="7")["startingtimestamp"] == "7"


def test_a_sink_without_a_ledger_is_refused_without_a_checkpoint() -> None:
    refuse_forgetful("orders", SqlSink("sqlite:///shop.db", table="orders"))
    refuse_forgetful("orders", Kept())
    handlers = HandlerSink.__new__(HandlerSink)

    for forgetful in (print, handlers):
        with pytest.raises(ConfigurationError, match="the sink of the query orders has no ledger, and the query no ch"):
            refuse_forgetful("orders", forgetful)


@pytest.mark.parametrize("folder", [None, "/checkpoints"])
def test_start_sink_takes_the_sessions_folder_of_checkpoints_for_one(
    monkeypatch: pytest.MonkeyPatch, folder: str | None
) -> None:
    started: list[object] = []
    monkeypatch.setattr(query, "start_query", lambda *_, **__: started.append(folder))
    session: Any = SimpleNamespace(
        conf=SimpleNamespace(get=lambda name, _default: folder if "checkpoint" in name else 0)
    )

    def start() -> None:
        start_sink(session, "orders", print, bootstrap_servers="127.0.0.1:1", name="orders")

    if folder is None:
        with pytest.raises(ConfigurationError, match="has no ledger"):
            start()
    else:
        start()
    assert started == ([folder] if folder else [])


class Logs:
    """One topic whose log begins and ends where the test says."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last

    def partitions(self) -> list[TopicPartition]:
        return [("orders", 0)]

    def topics(self, _expected: object = ()) -> Topics:
        return Topics({"orders": 1}, {}, {})

    def earliest(self, parts: Iterable[TopicPartition]) -> Offsets:
        return dict.fromkeys(parts, self._first)

    def latest(self, parts: Iterable[TopicPartition]) -> Offsets:
        return dict.fromkeys(parts, self._last)

    at_times = latest


@pytest.mark.parametrize(
    ("options", "first", "told"),
    [({}, 3, True), ({}, 9, False), ({"startingOffsets": "latest"}, 3, False)],
)
def test_a_query_that_begins_at_the_end_by_default_says_what_it_leaves_out(
    caplog: pytest.LogCaptureFixture, options: dict[str, str], first: int, *, told: bool
) -> None:
    settings = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "orders", **options}
    reader = source.StreamReader(SourceOptions.parse(settings))
    logs: Any = Logs(first, 9)
    reader._kafka = logs

    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        assert reader.initialOffset() == {"orders": {"0": 9}}

    assert ("the query over subscribe=orders begins at the end of the logs" in caplog.text) is told
