"""What a stream's planning does about topics that are not to be seen, with a view on brokers that the test makes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from penstock.clients.rights import MissingRightError
from penstock.spark_sink.source.brokers import Topics
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.plan import Offsets, TopicPartition
from penstock.spark_sink.source.stream import StreamReader

UNKNOWN, FORBIDDEN = KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED
ALL = ReadAllAvailable()


class Brokers:
    """Topics of one partition: where their logs end, their ids, and why some cannot be seen."""

    def __init__(self, **ends: int) -> None:
        self.ends = dict(ends)
        self.ids = {topic: f"first-{topic}" for topic in ends}
        self.hidden: dict[str, int] = {}
        self.expected: list[set[str]] = []

    def topics(self, expected: Collection[str] = ()) -> Topics:
        self.expected.append(set(expected))
        seen = self.ends.keys() - self.hidden.keys()
        refused = {topic: KafkaException(KafkaError(code)) for topic, code in self.hidden.items()}
        return Topics(dict.fromkeys(seen, 1), {topic: self.ids[topic] for topic in seen}, refused)

    def latest(self, parts: Iterable[TopicPartition]) -> Offsets:
        return {part: self.ends[part[0]] for part in parts if self._asked(part)}

    def earliest(self, parts: Iterable[TopicPartition]) -> Offsets:
        return {part: 0 for part in parts if self._asked(part)}

    written = latest

    def _asked(self, part: TopicPartition) -> bool:
        assert part[0] not in self.hidden, "a broker was asked for offsets of a topic that it does not show"
        return True


def reader_of(brokers: Brokers, *, lenient: bool = True) -> StreamReader:
    given = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "kept,lost"}
    reader = StreamReader(SourceOptions.parse(given | {"failOnDataLoss": "false" if lenient else "true"}))
    as_reader: Any = brokers
    reader._kafka = as_reader
    return reader


def at(**offsets: int) -> Mapping[str, Mapping[str, int]]:
    return {topic: {"0": offset} for topic, offset in offsets.items()}


def rows(reader: StreamReader, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    return [(part.topic, part.start, part.end) for task in reader.partitions(start, end) for part in task.value]


@pytest.mark.parametrize("limit", [ALL, ReadMaxRows(100)])
@pytest.mark.parametrize("code", [UNKNOWN, FORBIDDEN, KafkaError.LEADER_NOT_AVAILABLE])
def test_a_topic_that_was_hidden_for_a_while_is_read_on_where_it_was(
    caplog: pytest.LogCaptureFixture, code: int, limit: Any
) -> None:
    brokers = Brokers(kept=20, lost=20)
    reader = reader_of(brokers)
    before = reader.latestOffset(at(kept=0, lost=0), limit)
    brokers.hidden = {"lost": code}
    brokers.ends |= {"kept": 30}

    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        without = reader.latestOffset(before, limit)
        read_without = rows(reader, before, without)
        again = reader.latestOffset(without, limit)
        after_a_restart = reader_of(brokers).latestOffset(without, limit)
        brokers.hidden.clear()
        brokers.ends |= {"lost": 25}
        back = reader.latestOffset(again, limit)

    assert without == again == after_a_restart == at(kept=30, lost=20)
    assert read_without == [("kept", 20, 30)]
    assert rows(reader, again, back) == [("lost", 20, 25)]
    assert sum("lost[0] was read up to offset 20" in line for line in caplog.messages) == 2  # once a run
    assert "lost[0] is back; the query goes on at offset 20" in caplog.text
    # Known to be missing, it is not asked for with patience, which the others would have to have.
    assert brokers.expected[1:3] == [{"kept", "lost"}, {"kept"}]


def test_a_topic_that_may_not_be_seen_ends_a_strict_query_and_is_not_called_gone() -> None:
    brokers = Brokers(kept=20, lost=20)
    strict = reader_of(brokers, lenient=False)
    brokers.hidden = {"lost": FORBIDDEN}

    with pytest.raises(MissingRightError) as failure:
        strict.latestOffset(at(kept=20, lost=20), ALL)

    assert "lost[0] was read up to offset 20 and cannot be read now" in str(failure.value)
    assert "--operation Read --topic 'lost'" in str(failure.value)
    assert "failOnDataLoss" not in str(failure.value), "another start may mend it"


def test_a_batch_that_is_done_again_waits_for_a_topic_that_is_hidden() -> None:
    brokers = Brokers(kept=20, lost=20)
    brokers.hidden = {"lost": FORBIDDEN}

    with pytest.raises(MissingRightError, match=r"lost\[0\] was to be read up to offset 20 and cannot be read now"):
        reader_of(brokers).partitions(at(kept=5, lost=5), at(kept=20, lost=20))
    assert rows(reader_of(brokers), at(kept=5, lost=20), at(kept=20, lost=20)) == [("kept", 5, 20)]
