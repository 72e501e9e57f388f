"""Queries that begin, end or go on behind a transaction that is open, on real Kafka, planned without Spark."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
from confluent_kafka import Producer
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, ReadMinRows
from source_tasks import Clock, options_for, ranges

from kafka_tools import wait_for_markers
from penstock.devbroker import DevBroker
from penstock.errors import SourceError
from penstock.spark_sink.source.batch import BatchReader
from penstock.spark_sink.source.brokers import OffsetReader
from penstock.spark_sink.source.open_transactions import REPEAT_S, STALLED_S, OpenTransactions
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.plan import OffsetRange, Offsets, TopicPartition
from penstock.spark_sink.source.stream import StreamReader

Begin = Callable[[str, int], Producer]
UNCOMMITTED = {"kafka.isolation.level": "read_uncommitted"}


class Log:
    """A topic whose partition 0 is readable up to offset 5, where a transaction is open, and written up to 11."""

    def __init__(self, broker: DevBroker, topic: str, producer: Producer) -> None:
        self._broker = broker
        self.topic = topic
        self._producer = producer

    def options(self, **options: str) -> SourceOptions:
        return options_for(self._broker, self.topic, **options)

    def at(self, offset: int) -> dict[str, dict[str, int]]:
        return {self.topic: {"0": offset}}

    def range(self, start: int, end: int) -> OffsetRange:
        return OffsetRange(self.topic, 0, start, end)

    def batch(self, **options: str) -> list[OffsetRange]:
        return ranges(BatchReader(self.options(**options)).partitions())

    def end_transaction(self) -> None:
        self._producer.commit_transaction(30)
        wait_for_markers(self._broker.bootstrap_servers, self.topic)


@pytest.fixture
def log(broker: DevBroker, new_topic: Callable[..., str], write: Callable[..., None], open_transaction: Begin) -> Log:
    topic = new_topic()
    write(topic, 0, [(None, b"before")] * 5)
    producer = open_transaction(topic, 0)
    write(topic, 0, [(None, b"behind")] * 5)
    return Log(broker, topic, producer)


@pytest.mark.parametrize(
    ("limit", "regardless"), [(ReadAllAvailable(), "true"), (ReadMaxRows(3), "false"), (ReadMinRows(1), "true")]
)
def test_a_stream_ahead_of_an_open_transaction_waits_where_it_is(
    log: Log, caplog: pytest.LogCaptureFixture, limit: ReadLimit, regardless: str
) -> None:
    clock = Clock()
    reader = StreamReader(log.options(startingOffsets=json.dumps(log.at(8)), failOnDataLoss=regardless), clock)
    start = reader.initialOffset()

    waits = reader.latestOffset(start, limit)
    clock.now += STALLED_S
    assert reader.latestOffset(waits, limit) == waits

    assert start == waits == reader.reportLatestOffset() == log.at(8)
    assert reader.partitions(start, waits) == []
    assert StreamReader(log.options(failOnDataLoss=regardless)).partitions(start, waits) == []  # after a restart
    (warning,) = caplog.messages
    assert warning.startswith(
        f"{log.topic}[0] waits at offset 5: a transaction is open there, whose first message is of"
    )
    assert "6 offsets wait behind it" in warning
    log.end_transaction()
    end = reader.latestOffset(waits, limit)
    assert end == (log.at(11) if isinstance(limit, ReadMaxRows) else log.at(12))
    assert ranges(reader.partitions(waits, end)) == [log.range(8, end[log.topic]["0"])]


def test_a_checkpoint_of_uncommitted_reads_goes_on_when_the_transaction_has_ended(log: Log) -> None:
    uncommitted = StreamReader(log.options(**UNCOMMITTED, startingOffsets="earliest"))
    start = uncommitted.initialOffset()
    noted = uncommitted.latestOffset(start, ReadAllAvailable())
    assert noted == log.at(11)

    committed, fixed = StreamReader(log.options()), StreamReader(log.options())
    fixed.prepareForTriggerAvailableNow()

    assert committed.latestOffset(noted, ReadAllAvailable()) == noted
    assert fixed.latestOffset(noted, ReadAllAvailable()) == noted
    # A batch under way would be cut short for ever, whatever is said of losses.
    for regardless in ("true", "false"):
        with pytest.raises(SourceError, match=r"was to be read up to offset 11, but a transaction is open at offset 5"):
            StreamReader(log.options(failOnDataLoss=regardless)).partitions(start, noted)


def test_past_what_is_written_it_is_a_loss_still(log: Log) -> None:
    with pytest.raises(SourceError, match="was read up to offset 12, but its log ends at 11: the topic was"):
        StreamReader(log.options()).latestOffset(log.at(12), ReadAllAvailable())


def test_a_batch_behind_an_open_transaction_reads_nothing_and_names_it(
    log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    behind = json.dumps(log.at(8))

    assert log.batch(startingOffsets=behind) == []
    assert f"{log.topic}[0] waits at offset 5: a transaction is open there" in caplog.text
    assert log.batch(startingOffsets=behind, **UNCOMMITTED) == [log.range(8, 11)]


def test_a_batch_that_is_to_end_behind_an_open_transaction_says_what_it_cannot_read_yet(
    log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    behind = json.dumps(log.at(8))
    reason = r"endingOffsets is 8, but a transaction is open at offset 5: what lies behind it can be read when it has"

    with pytest.raises(SourceError, match=rf"{reason} ended; start the query again then, or set failOnDataLoss"):
        log.batch(endingOffsets=behind)

    assert log.batch(endingOffsets=behind, failOnDataLoss="false") == [log.range(0, 5)]
    assert "endingOffsets is 8, but a transaction is open at offset 5" in caplog.text
    log.end_transaction()
    assert log.batch(endingOffsets=behind) == [log.range(0, 8)]


STILL, IDLE, MOVING = ("orders", 0), ("orders", 1), ("orders", 2)


class FixedLogs:
    """Logs that end where a test says; it counts the questions."""

    def __init__(self, ends: Offsets) -> None:
        self.ends = ends
        self.asked: list[list[TopicPartition]] = []
        self.looked_up: list[list[TopicPartition]] = []
        self.broken = False

    def written(self, partitions: Iterable[TopicPartition]) -> Offsets:
        if self.broken:
            raise SourceError("no leader")
        self.asked.append(sorted(partitions))
        return {part: self.ends[part] for part in self.asked[-1]}

    def timestamps_ms(self, offsets: Offsets) -> dict[TopicPartition, int]:
        self.looked_up.append(sorted(offsets))
        return {STILL: 1_700_000_000_000} if STILL in offsets else {}


def as_reader(logs: Any) -> OffsetReader:
    return logs  # type: ignore[no-any-return] # it answers as one


def test_only_a_log_that_stands_still_with_something_behind_is_named_and_not_again_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, logs = Clock(), FixedLogs({STILL: 120, IDLE: 7, MOVING: 900})
    transactions = OpenTransactions(as_reader(logs), clock)

    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        for second in range(int(STALLED_S + REPEAT_S) + 2):
            clock.now = float(second)
            transactions.watch({STILL: 3, IDLE: 7, MOVING: second})

    assert logs.asked == [[STILL, IDLE]] * 2
    assert logs.looked_up == [[STILL]] * 2
    assert len(caplog.messages) == 2
    assert "orders[0] waits at offset 3: a transaction is open there" in caplog.messages[0]
    assert "first message is of 2023-11-14 22:13:20 UTC; 117 offsets wait behind it" in caplog.messages[0]
    assert "--topic orders --partition 0" in caplog.messages[0]


def test_many_partitions_that_wait_cost_one_look_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    stable = {("orders", number): 3 for number in range(100)}
    logs = FixedLogs(dict.fromkeys(stable, 120))
    transactions = OpenTransactions(as_reader(logs), clock)

    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        for second in range(int(STALLED_S) + 30):
            clock.now = float(second)
            # They come to a stand one after another.
            transactions.watch({part: 3 if second > part[1] else 2 for part in stable})

    assert len(logs.looked_up) == len(caplog.messages) == 1
    assert len(logs.looked_up[0]) <= 5
    clock.now += REPEAT_S
    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        transactions.watch(stable)
        transactions.warn(stable)
    assert "; so do orders[1] at offset 3, orders[2] at offset 3" in caplog.messages[-1]
    assert caplog.messages[-1].count("orders[") == 5
    assert "and 95 more." in caplog.messages[-1]


def test_an_open_transaction_whose_producer_claims_a_time_of_no_calendar_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for claimed in (1_760_000_000_000_000, 2**63 - 1):  # in microseconds, say
        with mock.patch.object(FixedLogs, "timestamps_ms", return_value={STILL: claimed}):
            assert OpenTransactions(as_reader(FixedLogs({STILL: 120}))).warn({STILL: 3})

        assert f"whose first message is of {claimed} ms after 1970" in caplog.messages[-1]


def test_a_broker_that_does_not_answer_costs_the_query_nothing(caplog: pytest.LogCaptureFixture) -> None:
    logs = FixedLogs({STILL: 120})
    logs.broken = True

    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        OpenTransactions(as_reader(logs)).warn({STILL: 3})

    assert not caplog.messages
