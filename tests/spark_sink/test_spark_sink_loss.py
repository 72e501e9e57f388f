"""What a stream's planning does about logs that were cut, begin late or are gone, on real Kafka, without Spark."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from source_tasks import options_for, ranges

from kafka_tools import ANSWER_S
from penstock.clients.requests.topics import TopicSpec, ensure_topics, partition_counts
from penstock.devbroker import DevBroker
from penstock.errors import SourceError, TopicNotFoundError
from penstock.spark_sink.source.plan import OffsetRange
from penstock.spark_sink.source.stream import StreamReader
from waiting import wait_until

NewTopic = Callable[..., str]
Write = Callable[..., None]


def reader_of(broker: DevBroker, *, lenient: bool = True, **options: str) -> StreamReader:
    regardless = "false" if lenient else "true"
    given = {"failOnDataLoss": regardless, "fetchOffset.retryIntervalMs": "10", **options}
    return StreamReader(options_for(broker, **given))


def delete(broker: DevBroker, admin: AdminClient, topic: str) -> None:
    admin.delete_topics([topic])[topic].result(ANSWER_S)
    wait_until(lambda: topic not in partition_counts(admin, broker.bootstrap_servers))


def cut(admin: AdminClient, topic: str, offset: int) -> None:
    part = TopicPartition(topic, 0, offset)
    assert admin.delete_records([part])[part].result(ANSWER_S).low_watermark == offset


def test_a_limit_is_not_spent_on_offsets_that_are_gone(
    broker: DevBroker, admin: AdminClient, new_topic: NewTopic, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic()
    write(topic, 0, [(None, b"x")] * 500)
    cut(admin, topic, 400)
    reader = reader_of(broker, subscribe=topic)
    start = {topic: {"0": 10}}

    end = reader.latestOffset(start, ReadMaxRows(50))
    of_a_new_partition = reader.latestOffset({}, ReadMaxRows(50))

    assert end == of_a_new_partition == {topic: {"0": 450}}
    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        assert ranges(reader.partitions(start, end)) == [OffsetRange(topic, 0, 400, 450)]
    assert f"{topic}[0]: offsets 10 to 399 are gone" in caplog.text


def test_a_topic_deleted_under_a_query_stops_it_or_keeps_its_place_as_told(
    broker: DevBroker, admin: AdminClient, new_topic: NewTopic, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    kept, lost = new_topic(), new_topic()
    for topic in (kept, lost):
        write(topic, 0, [(None, b"x")] * 20)
    chosen = {"subscribe": f"{kept},{lost}"}
    lenient, strict = (reader_of(broker, lenient=one, **chosen) for one in (True, False))
    start = {topic: {"0": 5} for topic in (kept, lost)}
    end = lenient.latestOffset(start, ReadAllAvailable())
    assert strict.latestOffset(start, ReadAllAvailable()) == end == {topic: {"0": 20} for topic in (kept, lost)}
    delete(broker, admin, lost)

    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        goes_on = lenient.latestOffset(end, ReadAllAvailable())
        # After a restart Spark plans the batch that was under way again, by the offsets of its checkpoint.
        again = ranges(reader_of(broker, **chosen).partitions(start, end))

    # It keeps its place: in what brokers say it could be missing for a moment only.
    assert goes_on == end
    assert again == [OffsetRange(kept, 0, 5, 20)]
    assert f"{lost}[0] was read up to offset 20 and exists no more" in caplog.text
    assert f"{lost}[0] was to be read up to offset 20 and exists no more" in caplog.text
    with pytest.raises(SourceError, match=r"\[0\] was read up to offset 20 and exists no more; check the topic"):
        strict.latestOffset(end, ReadAllAvailable())
    with pytest.raises(SourceError, match="was to be read up to offset 20 and exists no more"):
        reader_of(broker, lenient=False, **chosen).partitions(start, end)
    with pytest.raises(TopicNotFoundError, match=lost):
        reader_of(broker, **chosen).initialOffset()


def test_a_batch_planned_past_a_log_that_was_cut_since_ends_where_the_log_does(
    broker: DevBroker, new_topic: NewTopic, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic()
    write(topic, 0, [(None, b"x")] * 30)
    planned = {topic: {"0": 10}}, {topic: {"0": 1_000}}

    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        done_again = ranges(reader_of(broker, subscribe=topic).partitions(*planned))

    assert done_again == [OffsetRange(topic, 0, 10, 30)]
    assert f"{topic}[0] was to be read up to offset 1000, but its log ends at 30" in caplog.text
    with pytest.raises(SourceError, match="its log ends at 30: the topic was created again or its log was cut"):
        reader_of(broker, lenient=False, subscribe=topic).partitions(*planned)


def test_a_topic_created_again_under_a_running_query_is_read_from_its_beginning(
    broker: DevBroker, admin: AdminClient, new_topic: NewTopic, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic()
    write(topic, 0, [(None, b"x")] * 20)
    lenient, strict = (reader_of(broker, lenient=one, subscribe=topic) for one in (True, False))
    before = lenient.latestOffset({topic: {"0": 5}}, ReadAllAvailable())
    assert strict.latestOffset({topic: {"0": 5}}, ReadAllAvailable()) == before == {topic: {"0": 20}}
    delete(broker, admin, topic)
    ensure_topics(admin, broker.bootstrap_servers, [TopicSpec(topic, 1)])
    write(topic, 0, [(None, b"y")] * 30)

    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        turned = lenient.latestOffset(before, ReadAllAvailable())
        after = lenient.latestOffset(turned, ReadAllAvailable())

    assert (turned, after) == ({topic: {"0": 0}}, {topic: {"0": 30}})
    assert ranges(lenient.partitions(turned, after)) == [OffsetRange(topic, 0, 0, 30)]
    assert f"{topic}[0] was read up to offset 20, but the topic was deleted and created again" in caplog.text
    with pytest.raises(
        SourceError, match=r"\[0\] was read up to offset 20, but the topic was deleted and created again"
    ):
        strict.latestOffset(before, ReadAllAvailable())
