"""The source on real Kafka: what it reads on Spark, and where a query begins, ends and waits, planned without Spark."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.datasource import ReadAllAvailable
from source_tasks import options_for, ranges
from streams import read_to_end

from kafka_tools import ANSWER_S, NewTopic, Write, read_all, wait_for_markers
from penstock.clients.topics import TopicSpec, ensure_topics, partition_counts
from penstock.devbroker import DevBroker
from penstock.errors import SourceError
from penstock.spark_sink.source.plan import OffsetRange
from penstock.spark_sink.source.source import BatchReader, StreamReader
from waiting import wait_until

Read = Callable[..., DataFrame]
Row = tuple[int, int, bytes | None, bytes | None]


def consumed(broker: DevBroker, topic: str) -> list[Row]:
    """Read a topic to its end with a plain read_committed consumer."""
    found = read_all(broker.bootstrap_servers, topic)
    return sorted((record.partition() or 0, record.offset() or 0, record.key(), record.value()) for record in found)


def collected(frame: DataFrame) -> list[Row]:
    rows = frame.select("partition", "offset", "key", "value").orderBy("partition", "offset").collect()
    return [(row.partition, row.offset, _bytes(row.key), _bytes(row.value)) for row in rows]


def _bytes(value: bytearray | None) -> bytes | None:
    return None if value is None else bytes(value)


def test_batch_and_stream_read_what_a_plain_consumer_reads(  # noqa: PLR0917 - fixtures
    broker: DevBroker, new_topic: NewTopic, write: Write, write_transaction: Write, read: Read, tmp_path: Path
) -> None:
    topic, streamed = new_topic(partitions=3), list[Row]()
    write(topic, 0, [(b"k", b"plain"), (None, b"no key"), (b"k", None), (b"\xff\xfe", b"\xc3\x28 no utf-8")])
    write_transaction([(topic, n % 3, b"committed-%d" % n) for n in range(50)], commit=True)
    write_transaction([(topic, n % 3, b"aborted-%d" % n) for n in range(50)], commit=False)
    write(topic, 1, [(b"after", b"abort")])

    stream = read(stream=True, subscribe=topic, startingOffsets="earliest").writeStream
    writer = stream.foreachBatch(lambda batch, _: streamed.extend(collected(batch)))
    read_to_end(writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start)

    expected = consumed(broker, topic)
    assert len(expected) == 55
    assert collected(read(subscribe=topic)) == streamed == expected
    assert not any((row[3] or b"").startswith(b"aborted") for row in expected)


def test_the_columns_are_those_of_sparks_own_source(new_topic: NewTopic, write: Write, read: Read) -> None:
    topic = new_topic()
    headers = [(f"name-{n}", b"%d" % n) for n in range(999)] + [("empty", None)]
    before = time.time()
    write(topic, 0, [(b"k", b"v")], headers=headers)

    frame = read(subscribe=topic, includeHeaders="true")
    row = frame.collect()[0]

    assert frame.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
        "timestampType:int,headers:array<struct<key:string,value:binary>>>"
    )
    assert [(header.key, _bytes(header.value)) for header in row.headers] == headers
    assert row.timestampType == 0
    assert abs(row.timestamp.timestamp() - before) < 60


@pytest.mark.thorough
def test_what_is_wrong_crosses_spark_as_a_sentence(read: Read) -> None:
    with pytest.raises(PySparkException, match="topics that do not exist: no-such-topic"):
        read(subscribe="no-such-topic").count()
    with pytest.raises(PySparkException, match="did you mean startingOffsets"):
        read(subscribe="orders", startingOffset="earliest")
    with pytest.raises(PySparkException, match=r"Instead of the Java client's sasl\.jaas\.config set") as refused:
        read(subscribe="orders", **{"kafka.sasl.jaas.config": "canary-4711"}).count()
    assert "canary-4711" not in str(refused.value)


#: The times of the messages, in milliseconds since the epoch.
FIRST_MS, STEP_MS = 1_700_000_000_000, 1_000


def planned(broker: DevBroker, **options: str) -> dict[int, tuple[int, int]]:
    """Return the range that a batch query reads of each partition."""
    found = ranges(BatchReader(options_for(broker, **options)).partitions())
    return {part.partition: (part.start, part.end) for part in found}


@pytest.fixture
def timed(broker: DevBroker, new_topic: NewTopic) -> str:
    """A topic with ten messages a second apart in partition 0, and five in partition 1."""
    # They are years old: with Kafka's week of retention they would be gone at its next look, every five minutes.
    topic = new_topic(partitions=2, config={"retention.ms": "-1"})
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    for partition, count in ((0, 10), (1, 5)):
        for number in range(count):
            producer.produce(topic, b"x", partition=partition, timestamp=FIRST_MS + number * STEP_MS)
    assert producer.flush(30) == 0
    return topic


def at(seconds: float) -> str:
    return str(FIRST_MS + int(seconds * STEP_MS))


def test_a_query_begins_and_ends_at_times(broker: DevBroker, timed: str) -> None:
    between = planned(broker, subscribe=timed, startingTimestamp=at(1.5), endingTimestamp=at(4))
    to_the_end = planned(broker, subscribe=timed, startingTimestamp=at(3), endingTimestamp=str(2**63 - 1))
    past_the_last_of_one = planned(broker, subscribe=timed, startingTimestamp=at(7))

    assert between == {0: (2, 4), 1: (2, 4)}
    assert to_the_end == {0: (3, 10), 1: (3, 5)}
    assert past_the_last_of_one == {0: (7, 10)}, "it begins at the end of partition 1"


def test_committed_reads_end_where_a_transaction_is_open_and_go_on_when_it_has_ended(
    broker: DevBroker, new_topic: NewTopic, write: Write, open_transaction: Callable[[str, int], Producer]
) -> None:
    topic = new_topic()
    write(topic, 0, [(None, b"before")] * 5)
    producer = open_transaction(topic, 0)
    write(topic, 0, [(None, b"behind")] * 5)
    uncommitted = planned(broker, subscribe=topic, **{"kafka.isolation.level": "read_uncommitted"})
    reader, behind = StreamReader(options_for(broker, topic)), {topic: {"0": 8}}

    assert uncommitted == {0: (0, 11)}
    assert planned(broker, subscribe=topic) == {0: (0, 5)}
    assert reader.latestOffset(behind, ReadAllAvailable()) == behind
    producer.commit_transaction(30)
    wait_for_markers(broker.bootstrap_servers, topic)
    assert reader.latestOffset(behind, ReadAllAvailable()) == {topic: {"0": 12}}


def test_a_topic_that_is_deleted_keeps_its_place_and_one_created_again_is_read_from_its_beginning(
    broker: DevBroker, admin: AdminClient, new_topic: NewTopic, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic()
    write(topic, 0, [(None, b"x")] * 20)
    lenient, strict = (
        StreamReader(options_for(broker, topic, **{"failOnDataLoss": on_loss, "fetchOffset.retryIntervalMs": "10"}))
        for on_loss in ("false", "true")
    )
    before = lenient.latestOffset({topic: {"0": 5}}, ReadAllAvailable())
    assert strict.latestOffset({topic: {"0": 5}}, ReadAllAvailable()) == before == {topic: {"0": 20}}
    admin.delete_topics([topic])[topic].result(ANSWER_S)
    wait_until(lambda: topic not in partition_counts(admin))

    assert lenient.latestOffset(before, ReadAllAvailable()) == before
    assert f"{topic}:0 was read up to offset 20 and exists no more" in caplog.text
    ensure_topics(admin, [TopicSpec(topic, 1)])
    write(topic, 0, [(None, b"y")] * 30)
    turned = lenient.latestOffset(before, ReadAllAvailable())
    after = lenient.latestOffset(turned, ReadAllAvailable())

    assert (turned, after) == ({topic: {"0": -2}}, {topic: {"0": 30}})
    assert ranges(lenient.partitions(turned, after)) == [OffsetRange(topic, 0, 0, 30)]
    again = r":0 was read up to offset 20, but the topic was deleted and created again"
    assert again.replace("\\", "") in caplog.text
    with pytest.raises(SourceError, match=again):
        strict.latestOffset(before, ReadAllAvailable())
