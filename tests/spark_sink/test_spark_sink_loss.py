"""What a stream's planning does about logs that were cut, begin late or are gone, on real Kafka, without Spark."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from kafka_tools import ANSWER_S
from penstock.clients.requests.topics import TopicSpec, ensure_topics, partition_counts
from penstock.devbroker import DevBroker
from penstock.errors import SourceError, TopicNotFoundError
from penstock.spark_sink.source.offsets.planning import OffsetRange
from penstock.spark_sink.source.options.options import SourceOptions
from penstock.spark_sink.source.partition_reader import read_ranges
from penstock.spark_sink.source.stream_reader import StreamReader
from penstock.spark_sink.source.tasks import source_schema
from raw_produce import produce_raw
from waiting import wait_until

NewTopic = Callable[..., str]
Write = Callable[..., None]


def reader_of(broker: DevBroker, *, lenient: bool = True, **options: str) -> StreamReader:
    servers = broker.bootstrap_servers
    regardless = "false" if lenient else "true"
    return StreamReader(
        SourceOptions.parse(
            {
                "kafka.bootstrap.servers": servers,
                "failOnDataLoss": regardless,
                "fetchOffset.retryIntervalMs": "10",
                **options,
            }
        )
    )


def delete(broker: DevBroker, admin: AdminClient, topic: str) -> None:
    admin.delete_topics([topic])[topic].result(ANSWER_S)
    wait_until(lambda: topic not in partition_counts(admin, broker.bootstrap_servers))


def cut(admin: AdminClient, topic: str, offset: int) -> None:
    part = TopicPartition(topic, 0, offset)
    assert admin.delete_records([part])[part].result(ANSWER_S).low_watermark == offset


def ranges(reader: StreamReader, start: dict[str, dict[str, int]], end: dict[str, dict[str, int]]) -> list[OffsetRange]:
    return [part for task in reader.partitions(start, end) for part in task.value]


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
        assert ranges(reader, start, end) == [OffsetRange(topic, 0, 400, 450)]
    assert f"{topic}[0]: offsets 10 to 399 are gone" in caplog.text


@pytest.mark.parametrize("how", ["subscribe", "assign"])
def test_a_topic_deleted_under_a_query_stops_it_or_keeps_its_place_as_told(  # noqa: PLR0917 - fixtures
    broker: DevBroker, admin: AdminClient, new_topic: NewTopic, write: Write, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    kept, lost = new_topic(), new_topic()
    for topic in (kept, lost):
        write(topic, 0, [(None, b"x")] * 20)
    chosen = {"subscribe": f"{kept},{lost}"} if how == "subscribe" else {"assign": f'{{"{kept}":[0],"{lost}":[0]}}'}
    lenient, strict = (reader_of(broker, lenient=one, **chosen) for one in (True, False))
    start = {topic: {"0": 5} for topic in (kept, lost)}
    end = lenient.latestOffset(start, ReadAllAvailable())
    assert strict.latestOffset(start, ReadAllAvailable()) == end == {topic: {"0": 20} for topic in (kept, lost)}
    delete(broker, admin, lost)

    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        goes_on = lenient.latestOffset(end, ReadAllAvailable())
        # After a restart Spark plans the batch that was under way again, by the offsets of its checkpoint.
        again = ranges(reader_of(broker, **chosen), start, end)

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
        done_again = ranges(reader_of(broker, subscribe=topic), *planned)

    assert done_again == [OffsetRange(topic, 0, 10, 30)]
    assert f"{topic}[0] was to be read up to offset 1000, but its log ends at 30" in caplog.text
    with pytest.raises(SourceError, match="its log ends at 30: the topic was made anew or its log was cut"):
        reader_of(broker, lenient=False, subscribe=topic).partitions(*planned)


def test_a_pattern_leaves_kafkas_own_topics_out(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    # So that there are topics of Kafka's own.
    reader_of(broker, subscribe=topic).initialOffset()

    # Other tests make and delete topics of the same broker.
    pattern = rf"{topic}|__.*"
    chosen = reader_of(broker, subscribePattern=pattern, startingOffsets="earliest").initialOffset()

    assert topic in chosen
    assert not [name for name in chosen if name in {"__consumer_offsets", "__transaction_state"}]


def test_a_header_whose_name_is_no_text_costs_the_headers_of_its_record_only(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce_raw(broker.bootstrap_servers, topic, [(b"k", [(b"\xff\xfe", b"lost")]), (b"k", [(b"name", b"kept")])])
    options = SourceOptions.parse(
        {"kafka.bootstrap.servers": broker.bootstrap_servers, "subscribe": topic, "includeHeaders": "true"}
    )
    schema = to_arrow_schema(source_schema(include_headers=True), timezone="UTC")

    rows = [row for batch in read_ranges(options, schema, [OffsetRange(topic, 0, 0, 2)]) for row in batch.to_pylist()]

    assert [[one["key"] for one in row["headers"]] for row in rows] == [["penstock-headers-lost"], ["name"]]
    assert [row["key"] for row in rows] == [b"k", b"k"]


def test_a_topic_made_anew_under_a_running_query_is_read_from_its_beginning(
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
    assert ranges(lenient, turned, after) == [OffsetRange(topic, 0, 0, 30)]
    assert f"{topic}[0] was read up to offset 20, but the topic was deleted and made anew" in caplog.text
    with pytest.raises(SourceError, match=r"\[0\] was read up to offset 20, but the topic was deleted and made anew"):
        strict.latestOffset(before, ReadAllAvailable())
