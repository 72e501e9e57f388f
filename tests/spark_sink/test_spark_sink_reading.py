"""One task's reading on real Kafka, without Spark around it: what happens when a range cannot be read as planned."""

from __future__ import annotations

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from source_tasks import batches_read, offsets_read, options_for, rows_of

from kafka_tools import NewTopic, Write
from penstock.devbroker import DevBroker
from penstock.spark_sink.source import columns
from penstock.spark_sink.source.plan import OffsetRange
from raw_produce import produce_raw


def test_record_batches_are_bounded_in_rows_and_in_bytes(
    broker: DevBroker, new_topic: NewTopic, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = new_topic(), new_topic()
    write(small, 0, [(None, b"x")] * 5_000)
    write(large, 0, [(None, b"x" * 100_000)] * 100)
    monkeypatch.setattr(columns, "BATCH_ROWS", 1_000)
    monkeypatch.setattr(columns, "BATCH_BYTES", 1_000_000)

    by_rows = batches_read(options_for(broker, small), OffsetRange(small, 0, 0, 5_000))
    by_bytes = batches_read(options_for(broker, large), OffsetRange(large, 0, 0, 100))

    assert sum(batch.num_rows for batch in by_rows) == 5_000
    assert len(by_rows) > 1
    assert sum(batch.num_rows for batch in by_bytes) == 100
    assert max(batch.nbytes for batch in by_bytes) < 2_000_000


def test_ranges_of_one_task_end_each_at_its_own_end_and_keep_their_order(
    broker: DevBroker, admin: AdminClient, new_topic: NewTopic, write: Write, write_transaction: Write
) -> None:
    """Of one topic, one range ends among aborted records and another begins there."""
    topic, other, aborted = new_topic(partitions=3), new_topic(), new_topic()
    for partition in range(3):
        write(topic, partition, [(None, b"%d" % n) for n in range(400)])
    for name in (other, aborted):
        write(name, 0, [(None, b"%d" % n) for n in range(3)])
        write_transaction([(name, 0, b"aborted")] * 5, commit=False)
    write(aborted, 0, [(None, b"%d" % n) for n in (9, 10, 11)])
    assert next(iter(admin.delete_records([TopicPartition(topic, 1, 40)]).values())).result(20).low_watermark == 40
    wanted = [OffsetRange(other, 0, 0, 9), *(OffsetRange(topic, number, 10, 100 * number + 90) for number in range(3))]

    found = rows_of(batches_read(options_for(broker, topic, failOnDataLoss="false"), *wanted))

    assert {part: list(rows) for part, rows in found.items()} == {
        (other, 0): [0, 1, 2],
        (topic, 0): list(range(10, 90)),
        (topic, 1): list(range(40, 190)),
        (topic, 2): list(range(10, 290)),
    }
    assert all(value == b"%d" % offset for rows in found.values() for offset, value in rows.items())
    for start, end, offsets in ((0, 6, [0, 1, 2]), (5, 8, []), (6, 11, [9, 10])):
        assert offsets_read(options_for(broker, aborted), OffsetRange(aborted, 0, start, end)) == offsets


def test_a_header_whose_name_is_no_text_costs_the_headers_of_its_record_only(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce_raw(broker.bootstrap_servers, topic, [(b"k", [(b"\xff\xfe", b"lost")]), (b"k", [(b"name", b"kept")])])
    options = options_for(broker, topic, includeHeaders="true")

    rows = [row for batch in batches_read(options, OffsetRange(topic, 0, 0, 2)) for row in batch.to_pylist()]

    assert [[header["key"] for header in row["headers"]] for row in rows] == [["penstock-headers-lost"], ["name"]]
    assert [row["key"] for row in rows] == [b"k", b"k"]
