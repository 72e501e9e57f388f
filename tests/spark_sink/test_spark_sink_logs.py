"""What planning does about logs that were cut, are hidden, gone or behind a transaction, with brokers that are none."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest
from confluent_kafka import KafkaError
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows
from source_tasks import Clock, FakeBrokers, batch_over, ranges, stream_over

from penstock.clients.rights import MissingRightError
from penstock.errors import ConfigurationError, SourceError
from penstock.spark_sink.errors import DataLossError
from penstock.spark_sink.source.brokers import REPEAT_S, STALLED_S, StalledLogs
from penstock.spark_sink.source.plan import Log
from penstock.spark_sink.source.source import StreamReader

UNKNOWN, FORBIDDEN = KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED
ALL = ReadAllAvailable()
LENIENT = {"failOnDataLoss": "false"}
#: Readable up to offset 5, where a transaction is open, and written up to 11.
OPEN = Log(0, 5, 11)


def two_topics() -> FakeBrokers:
    return FakeBrokers(kept=Log(0, 20, 20), lost=Log(0, 20, 20))


def at(**offsets: int) -> Mapping[str, Mapping[str, int]]:
    return {topic: {"0": offset} for topic, offset in offsets.items()}


def rows(reader: StreamReader, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    return [(part.topic, part.start, part.end) for part in ranges(reader.partitions(start, end))]


@pytest.mark.parametrize("limit", [ALL, ReadMaxRows(100)])
def test_a_topic_that_was_gone_for_a_while_is_read_on_where_it_was(
    caplog: pytest.LogCaptureFixture, limit: ReadLimit
) -> None:
    brokers = two_topics()
    reader = stream_over(brokers, **LENIENT)
    before = reader.latestOffset(at(kept=0, lost=0), limit)
    brokers.hidden = {"lost": UNKNOWN}
    brokers.log_of["kept"] = Log(0, 30, 30)

    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        without = reader.latestOffset(before, limit)
        read_without = rows(reader, before, without)
        again = reader.latestOffset(without, limit)
        after_a_restart = stream_over(brokers, **LENIENT).latestOffset(without, limit)
        brokers.hidden.clear()
        brokers.log_of["lost"] = Log(0, 25, 25)
        back = reader.latestOffset(again, limit)

    assert without == again == after_a_restart == at(kept=30, lost=20)
    assert read_without == [("kept", 20, 30)]
    assert rows(reader, again, back) == [("lost", 20, 25)]
    assert sum("lost:0 was read up to offset 20" in line for line in caplog.messages) == 2  # once a run
    # Known to be missing, it is not asked for with patience, which the others would have to have.
    assert brokers.expected[1:3] == [{"kept", "lost"}, {"kept"}]


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (UNKNOWN, DataLossError, "and exists no more; check the topic"),
        (FORBIDDEN, MissingRightError, "and cannot be read now.*--operation Read --topic 'lost'"),
        (KafkaError.LEADER_NOT_AVAILABLE, SourceError, "and cannot be seen now: .*LEADER_NOT_AVAILABLE"),
    ],
)
def test_a_topic_that_is_not_to_be_seen_ends_the_query(code: int, kind: type[Exception], said: str) -> None:
    brokers = two_topics()
    brokers.hidden = {"lost": code}
    end = at(kept=20, lost=20)

    # One that is only hidden does, whatever is said of losses.
    for options in ({},) if code == UNKNOWN else ({}, LENIENT):
        with pytest.raises(kind, match=rf"lost:0 was read up to offset 20 {said}"):
            stream_over(brokers, **options).latestOffset(end, ALL)
        with pytest.raises(kind, match=rf"lost:0 was to be read up to offset 20 {said}"):
            stream_over(brokers, **options).partitions(at(kept=5, lost=5), end)
    assert rows(stream_over(brokers), at(kept=5, lost=20), end) == [("kept", 5, 20)]
    if code == UNKNOWN:
        assert rows(stream_over(brokers, **LENIENT), at(kept=5, lost=5), end) == [("kept", 5, 20)]


def test_a_checkpoint_of_other_topics_is_refused_as_that() -> None:
    brokers = FakeBrokers(orders=Log(0, 3, 3))
    clear = "as this query has subscribe=orders; give the query a checkpointLocation of its own, or set failOnDataLoss"

    with pytest.raises(DataLossError, match=rf"gone:0 was read up to offset 2 and is read no more, {clear}"):
        stream_over(brokers).latestOffset(at(orders=1, gone=2), ALL)
    with pytest.raises(DataLossError, match=rf"gone:0 was to be read up to offset 2 and is read no more, {clear}"):
        stream_over(brokers).partitions(at(gone=1), at(gone=2))
    assert stream_over(brokers, **LENIENT).latestOffset(at(gone=2), ALL) == at(orders=3)


def test_what_a_log_has_lost_is_reported_and_no_limit_is_spent_on_it(caplog: pytest.LogCaptureFixture) -> None:
    reader = stream_over(FakeBrokers(orders=Log(400, 500, 500)), **LENIENT)

    assert reader.latestOffset(at(orders=10), ReadMaxRows(50)) == at(orders=450)
    assert reader.latestOffset({}, ReadMaxRows(50)) == at(orders=450), "of a partition that is new"
    assert rows(reader, at(orders=10), at(orders=450)) == [("orders", 400, 450)]
    assert "orders:0: offsets 10 to 399 are gone" in caplog.text


def test_a_position_past_the_log_is_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    brokers = FakeBrokers(orders=Log(0, 30, 30))

    with pytest.raises(DataLossError, match="is to be read from offset 31, but its log ends at 30: the topic was crea"):
        stream_over(brokers).latestOffset(at(orders=31), ALL)
    with pytest.raises(DataLossError, match="is to be read up to offset 1000, but its log ends at 30"):
        stream_over(brokers).partitions(at(orders=10), at(orders=1_000))
    assert stream_over(brokers, **LENIENT).latestOffset(at(orders=31), ALL) == at(orders=30)
    assert rows(stream_over(brokers, **LENIENT), at(orders=10), at(orders=1_000)) == [("orders", 10, 30)]
    assert "orders:0 is to be read up to offset 1000, but its log ends at 30" in caplog.text


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"endingOffsets": "99"}, "orders:0 is to be read up to offset 99, but its log ends at 11"),
        ({"endingOffsets": "99", **LENIENT}, [(0, 5)]),
        ({"startingOffsets": "12"}, "orders:0 is to be read from offset 12, but its log ends at 11"),
        ({"startingOffsets": "12", **LENIENT}, []),
        ({"startingOffsets": "8"}, []),
        ({"startingOffsets": "4", "endingOffsets": "2"}, "its start lies past its end; give an earlier start"),
        ({"endingOffsets": "8"}, "up to offset 8, but a transaction is open at offset 5: what lies behind it can be"),
        ({"startingOffsets": "1", "endingOffsets": "5", "minPartitions": "2"}, [(1, 3), (3, 5)]),
    ],
)
def test_a_batch_query_reads_what_there_is_between_its_positions_or_says_why_not(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], found: str | list[tuple[int, int]]
) -> None:
    positions = {name: json.dumps(at(orders=int(options[name]))) for name in options if name.endswith("ingOffsets")}
    reader = batch_over(monkeypatch, FakeBrokers(orders=OPEN), **options | positions)

    if isinstance(found, str):
        with pytest.raises((SourceError, ConfigurationError)) as raised:
            reader.partitions()
        assert found in str(raised.value)
    else:
        assert [(part.start, part.end) for part in ranges(reader.partitions())] == found


@pytest.mark.parametrize("limit", [ALL, ReadMaxRows(3)])
@pytest.mark.parametrize("options", [{}, LENIENT])
def test_a_stream_ahead_of_an_open_transaction_waits_where_it_is(
    caplog: pytest.LogCaptureFixture, limit: ReadLimit, options: dict[str, str]
) -> None:
    clock, brokers = Clock(), FakeBrokers(orders=OPEN)
    reader = stream_over(brokers, clock, startingOffsets=json.dumps(at(orders=8)), **options)
    start = reader.initialOffset()

    waits = reader.latestOffset(start, limit)
    clock.now += STALLED_S

    assert start == waits == reader.latestOffset(waits, limit) == at(orders=8)
    assert reader.reportLatestOffset() == at(orders=5)
    assert reader.partitions(start, waits) == stream_over(brokers, **options).partitions(start, waits) == []
    assert "orders:0 waits at offset 5: a transaction is open there; 6 offsets wait behind it" in caplog.text
    # A batch that is done again, planned over uncommitted reads, would be cut short for ever.
    with pytest.raises(
        SourceError, match=r"up to offset 11, but a transaction is open at offset 5.*; start the query again"
    ):
        stream_over(brokers, **options).partitions(at(orders=0), at(orders=11))
    fixed = stream_over(brokers, **options)
    fixed.prepareForTriggerAvailableNow()
    assert fixed.latestOffset(waits, limit) == waits
    brokers.log_of["orders"] = Log(0, 12, 12)
    end = at(orders=11 if isinstance(limit, ReadMaxRows) else 12)
    assert reader.latestOffset(waits, limit) == end
    assert rows(reader, waits, end) == [("orders", 8, end["orders"]["0"])]


@pytest.mark.parametrize(
    ("options", "first", "warns"),
    [({}, 3, True), ({}, 9, False), ({"startingOffsets": "latest"}, 3, False)],
)
def test_a_query_that_begins_at_the_end_by_default_says_what_it_leaves_out(
    caplog: pytest.LogCaptureFixture, options: dict[str, str], first: int, *, warns: bool
) -> None:
    assert stream_over(FakeBrokers(orders=Log(first, 9, 9)), **options).initialOffset() == at(orders=9)

    assert ("the query over subscribe=orders begins at the end of the logs" in caplog.text) is warns


def test_only_a_log_that_stands_still_with_something_behind_is_named_and_not_again_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    stalled = StalledLogs(clock)

    for second in range(int(STALLED_S + REPEAT_S) + 2):
        clock.now = float(second)
        still = {("still", number): Log(0, 3, 120) for number in range(100)}
        stalled.watch({**still, ("idle", 0): Log(0, 7, 7), ("moving", 0): Log(0, second, 900)})

    assert len(caplog.messages) == 2
    assert "still:0 waits at offset 3: a transaction is open there; 117 offsets wait behind it" in caplog.messages[0]
    assert "; so do 99 other partitions. To find the producer" in caplog.messages[0]
    assert "--topic still --partition 0" in caplog.messages[0]
