"""The source on real Kafka and real Spark: what it reads equals what a plain consumer reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from streams import read_to_end

from kafka_tools import NewTopic, Write, read_all
from penstock.devbroker import DevBroker

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
