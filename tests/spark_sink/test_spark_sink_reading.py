"""One task's reading on real Kafka, without Spark around it: what happens when a range cannot be read as planned."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from pyspark.sql.pandas.types import to_arrow_schema

from kafka_tools import NewTopic, Write
from penstock.devbroker import DevBroker
from penstock.errors import SourceError
from penstock.spark_sink.source import partition_reader as reading
from penstock.spark_sink.source import record_columns
from penstock.spark_sink.source.offsets.planning import OffsetRange
from penstock.spark_sink.source.options.options import SourceOptions
from penstock.spark_sink.source.planning.offset_reader import OffsetReader
from penstock.spark_sink.source.tasks import source_schema
from waiting import wait_until

SCHEMA = to_arrow_schema(source_schema(include_headers=False), timezone="UTC")


def options_for(broker: DevBroker, topic: str, **options: str) -> SourceOptions:
    """Return the options of a query over one topic."""
    return SourceOptions.parse({"kafka.bootstrap.servers": broker.bootstrap_servers, "subscribe": topic, **options})


def offsets_read(options: SourceOptions, wanted: OffsetRange) -> list[int]:
    """Read a range and return its rows' offsets."""
    return [
        offset for batch in reading.read_ranges(options, SCHEMA, [wanted]) for offset in batch["offset"].to_pylist()
    ]


def test_offsets_that_vanish_between_planning_and_reading_are_named_or_passed_over(
    broker: DevBroker, admin: AdminClient, new_topic: NewTopic, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic()
    write(topic, 0, [(None, b"%d" % n) for n in range(100)])
    planned = OffsetRange(topic, 0, 10, 90)
    gone = TopicPartition(topic, 0, 40)
    assert next(iter(admin.delete_records([gone]).values())).result(20).low_watermark == 40

    with pytest.raises(SourceError, match=r"\[0\]: offsets from 10 are not in the log, which begins at 40"):
        offsets_read(options_for(broker, topic), planned)
    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        rest = offsets_read(options_for(broker, topic, failOnDataLoss="false"), planned)

    assert rest == list(range(40, 90))
    assert "which begins at 40; going on without them" in caplog.text


def test_a_range_that_ends_among_aborted_records_ends_at_the_first_record_past_it(
    broker: DevBroker, new_topic: NewTopic, write: Write, write_transaction: Write
) -> None:
    topic = new_topic()
    write(topic, 0, [(None, b"before")] * 3)
    write_transaction([(topic, 0, b"aborted")] * 5, commit=False)
    write(topic, 0, [(None, b"after")] * 3)

    assert offsets_read(options_for(broker, topic), OffsetRange(topic, 0, 0, 6)) == [0, 1, 2]
    assert offsets_read(options_for(broker, topic), OffsetRange(topic, 0, 5, 8)) == []
    assert offsets_read(options_for(broker, topic), OffsetRange(topic, 0, 6, 11)) == [9, 10]


@pytest.mark.thorough  # it takes the twenty seconds of the option
def test_an_open_transaction_ends_the_plan_and_stops_a_task_that_is_sent_past_it(
    broker: DevBroker, new_topic: NewTopic, write: Write, open_transaction: Callable[[str, int], Producer]
) -> None:
    topic = new_topic()
    write(topic, 0, [(None, b"committed")] * 3)
    producer = open_transaction(topic, 0)
    options = options_for(broker, topic, **{"kafkaConsumer.pollTimeoutMs": "20000"})

    ends = OffsetReader(options).latest([(topic, 0)])
    with pytest.raises(SourceError, match=r"nothing came at offset 3 for 20 s"):
        offsets_read(options, OffsetRange(topic, 0, 0, 5))
    producer.abort_transaction(30)

    assert ends == {(topic, 0): 3}
    wait_until(lambda: OffsetReader(options).latest([(topic, 0)]) == {(topic, 0): 5})
    assert offsets_read(options, OffsetRange(topic, 0, 0, 5)) == [0, 1, 2]


def test_record_batches_are_bounded_in_rows_and_in_bytes(
    broker: DevBroker, new_topic: NewTopic, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = new_topic(), new_topic()
    write(small, 0, [(None, b"x")] * 5_000)
    write(large, 0, [(None, b"x" * 100_000)] * 100)
    monkeypatch.setattr(record_columns, "BATCH_ROWS", 1_000)
    monkeypatch.setattr(record_columns, "BATCH_BYTES", 1_000_000)

    by_rows = list(reading.read_ranges(options_for(broker, small), SCHEMA, [OffsetRange(small, 0, 0, 5_000)]))
    by_bytes = list(reading.read_ranges(options_for(broker, large), SCHEMA, [OffsetRange(large, 0, 0, 100)]))

    assert sum(batch.num_rows for batch in by_rows) == 5_000
    assert len(by_rows) > 1
    assert sum(batch.num_rows for batch in by_bytes) == 100
    # The first call does not know the size of the records yet; from then on a batch holds what fits.
    assert max(batch.nbytes for batch in by_bytes[1:]) < 2_000_000


def test_ranges_of_one_task_end_each_at_its_own_end_and_keep_their_order(
    broker: DevBroker, admin: AdminClient, new_topic: NewTopic, write: Write, write_transaction: Write
) -> None:
    topic, other = new_topic(partitions=3), new_topic()
    for partition in range(3):
        write(topic, partition, [(None, b"%d" % n) for n in range(400)])
    write(other, 0, [(None, b"before")] * 3)
    write_transaction([(other, 0, b"aborted")] * 5, commit=False)
    assert next(iter(admin.delete_records([TopicPartition(topic, 1, 40)]).values())).result(20).low_watermark == 40
    wanted = [OffsetRange(other, 0, 0, 9), *(OffsetRange(topic, number, 10, 100 * number + 90) for number in range(3))]

    found: dict[tuple[str, int], list[int]] = {}
    for batch in reading.read_ranges(options_for(broker, topic, failOnDataLoss="false"), SCHEMA, wanted):
        for row in batch.to_pylist():
            assert row["topic"] == other or row["value"] == b"%d" % row["offset"]
            found.setdefault((row["topic"], row["partition"]), []).append(row["offset"])

    assert found == {
        (other, 0): [0, 1, 2],
        (topic, 0): list(range(10, 90)),
        (topic, 1): list(range(40, 190)),
        (topic, 2): list(range(10, 290)),
    }
