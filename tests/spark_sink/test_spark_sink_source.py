"""The source on real Kafka and real Spark: what it reads equals what a plain consumer reads."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from source_batches import Batches, Read, Row, _bytes, plain, run

from kafka_tools import NewTopic, Write, read_all
from penstock.devbroker import DevBroker
from waiting import wait_until


def consumed(broker: DevBroker, topic: str) -> list[Row]:
    """Read a topic to its end with a plain read_committed consumer."""
    found = read_all(broker.bootstrap_servers, topic)
    return sorted((topic, one.partition() or 0, one.offset() or 0, one.key(), one.value()) for one in found)


def test_batch_and_stream_read_what_a_plain_consumer_reads(  # noqa: PLR0917 - fixtures
    broker: DevBroker, new_topic: NewTopic, write: Write, write_transaction: Write, read: Read, tmp_path: Path
) -> None:
    topic = new_topic(partitions=3)
    write(topic, 0, [(b"k", b"plain"), (None, b"no key"), (b"k", None), (b"\xff\xfe", b"\xc3\x28 no utf-8")])
    write_transaction([(topic, n % 3, b"committed-%d" % n) for n in range(50)], commit=True)
    write_transaction([(topic, n % 3, b"aborted-%d" % n) for n in range(50)], commit=False)
    write(topic, 1, [(b"after", b"abort")])
    batches = Batches()

    frame = read(subscribe=topic)
    run(read(stream=True, subscribe=topic, startingOffsets="earliest"), batches, tmp_path)

    expected = consumed(broker, topic)
    assert len(expected) == 55
    assert plain(frame) == expected
    assert batches.all == expected
    assert not any((row[4] or b"").startswith(b"aborted") for row in expected)


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
def test_markers_and_aborted_records_at_the_tail_of_every_partition_do_not_hold_the_query(
    broker: DevBroker, new_topic: NewTopic, write_transaction: Write, read: Read, tmp_path: Path
) -> None:
    topic = new_topic(partitions=8)
    write_transaction([(topic, n % 8, b"kept") for n in range(80)], commit=True)
    write_transaction([(topic, n % 8, b"aborted") for n in range(80)], commit=False)
    batches = Batches()
    # Whoever waits for a record that does not come waits for ten minutes, which is longer than the query is given.
    patient = {"kafkaConsumer.pollTimeoutMs": "600000"}
    frame = read(stream=True, subscribe=topic, startingOffsets="earliest", **patient)

    query = run(frame, batches, tmp_path)

    last_rows = {number: max(row[2] for row in batches.all if row[1] == number) for number in range(8)}
    ends = json.loads(query.lastProgress["sources"][0]["endOffset"])[topic]
    # The fault happened: past the last row of each partition lie a marker, ten aborted records and a marker.
    assert {number: end - last_rows[int(number)] for number, end in ends.items()} == {str(n): 13 for n in range(8)}
    assert batches.all == consumed(broker, topic)


def test_a_stopped_query_goes_on_where_it_was(
    broker: DevBroker, new_topic: NewTopic, write: Write, read: Read, tmp_path: Path
) -> None:
    topic = new_topic(partitions=2)
    write(topic, 0, [(None, b"first")])
    batches = Batches()
    run(read(stream=True, subscribe=topic, startingOffsets="earliest"), batches, tmp_path)
    write(topic, 1, [(None, b"second")])

    run(read(stream=True, subscribe=topic, startingOffsets="earliest"), batches, tmp_path)

    assert [[row[4] for row in batch] for batch in batches.rows] == [[b"first"], [b"second"]]


@pytest.mark.thorough
def test_a_partition_added_while_running_is_read_from_its_beginning(  # noqa: PLR0917 - fixtures
    broker: DevBroker, admin: AdminClient, new_topic: NewTopic, write: Write, read: Read, tmp_path: Path
) -> None:
    topic = new_topic(partitions=1)
    write(topic, 0, [(None, b"before")])
    batches = Batches()
    writer = read(stream=True, subscribe=topic, startingOffsets="earliest").writeStream.foreachBatch(batches)
    query = writer.option("checkpointLocation", str(tmp_path)).trigger(processingTime="100 milliseconds").start()
    try:
        wait_until(lambda: len(batches.all) == 1, timeout=150)

        admin.create_partitions([NewPartitions(topic, 2)])[topic].result(20)
        wait_until(lambda: len(admin.list_topics(topic, timeout=30).topics[topic].partitions) == 2)
        write(topic, 1, [(None, b"new-%d" % n) for n in range(5)])
        wait_until(lambda: len(batches.all) == 6, timeout=150)
    finally:
        query.stop()

    assert batches.all == consumed(broker, topic)


@pytest.mark.thorough
def test_batch_positions_assignment_pattern_and_task_count(new_topic: NewTopic, write: Write, read: Read) -> None:
    topic = new_topic(partitions=2)
    for partition in (0, 1):
        write(topic, partition, [(None, b"%d" % n) for n in range(10)])

    between = read(
        subscribe=topic,
        startingOffsets=json.dumps({topic: {"0": 2, "1": -2}}),
        endingOffsets=json.dumps({topic: {"0": 5, "1": -1}}),
    )
    assigned = read(assign=json.dumps({topic: [1]}), minPartitions="4")
    matched = read(subscribePattern=topic[:-1] + "[" + topic[-1] + "]")

    assert [row[1:3] for row in plain(between)] == [(0, 2), (0, 3), (0, 4), *((1, n) for n in range(10))]
    assert assigned.rdd.getNumPartitions() == 4
    assert [row[2] for row in plain(assigned)] == list(range(10))
    assert matched.count() == 20


@pytest.mark.thorough
def test_what_is_wrong_crosses_spark_as_a_sentence(read: Read, spark: SparkSession) -> None:
    with pytest.raises(PySparkException, match="topics that do not exist: no-such-topic"):
        read(subscribe="no-such-topic").count()
    with pytest.raises(PySparkException, match="did you mean startingOffsets"):
        read(subscribe="orders", startingOffset="earliest")
    with pytest.raises(PySparkException, match=r"kafka\.sasl\.jaas\.config is the Java client's") as refused:
        read(subscribe="orders", **{"kafka.sasl.jaas.config": "canary-4711"}).count()
    assert "canary-4711" not in str(refused.value)
    with pytest.raises(PySparkException, match="has the columns key, value, topic"):
        spark.read.format("penstock").schema("id INT").options(
            **{"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "orders"}
        ).load().count()
