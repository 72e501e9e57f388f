"""One task's reading without Spark around it: on real Kafka, and about errors, with clients that are none."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient
from source_tasks import batches_read, offsets_read, options_for, rows_of

from fixed_consumer import FixedConsumer, end, failed, record
from kafka_tools import NewTopic, Write
from penstock.clients import factory as making
from penstock.clients.reading import NotReadInTimeError, PartitionReader
from penstock.clients.rights import MissingRightError
from penstock.devbroker import DevBroker
from penstock.errors import MessageFormatError, SourceError
from penstock.spark_sink.sinks.sql import dead_letters
from penstock.spark_sink.source import columns
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.plan import OffsetRange
from raw_produce import produce_raw

PASSING = [KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError._TRANSPORT, KafkaError.UNKNOWN_TOPIC_OR_PART]
WAITED_OUT = [*PASSING, KafkaError.GROUP_AUTHORIZATION_FAILED]


def offsets_of(monkeypatch: pytest.MonkeyPatch, consumer: FixedConsumer, end: int, **options: str) -> list[Any]:
    return values_read(monkeypatch, consumer, end, "offset", **options)


def values_read(
    monkeypatch: pytest.MonkeyPatch, consumer: FixedConsumer, end: int, column: str, **options: str
) -> list[Any]:
    """Read a range and return a column, of numbers."""
    monkeypatch.setattr(making, "Consumer", Mock(return_value=consumer, left_out=()))
    settings = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "orders", "fetchOffset.retryIntervalMs": "0"}
    batches = batches_read(SourceOptions.parse({**settings, **options}), OffsetRange("orders", 0, 0, end))
    return [value for batch in batches for value in batch[column].cast("int64").to_pylist()]


def letter(monkeypatch: pytest.MonkeyPatch, consumer: FixedConsumer) -> bytes | None:
    """Return the value of the message at offset 5, as a dead letter has it."""
    monkeypatch.setattr(making, "Consumer", Mock(return_value=consumer, left_out=()))
    reader = PartitionReader("127.0.0.1:1", {}, "letters")
    return dead_letters._read(reader, "orders", 0, 5).value()


@pytest.mark.parametrize("code", WAITED_OUT)
def test_a_task_goes_on_when_an_error_has_passed_or_is_about_a_group(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    consumer = FixedConsumer(record(0), failed(code), record(1), failed(code), record(2))

    assert offsets_of(monkeypatch, consumer, 3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (KafkaError.NOT_LEADER_FOR_PARTITION, SourceError, r"nothing came at offset 1 for 0.05 s \(.*NOT_LEADER_FOR"),
        (KafkaError.INVALID_REQUEST, SourceError, r"reading at offset 1 failed: .*INVALID_REQUEST"),
        (
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            MissingRightError,
            r"offsets 0 to 2 cannot be read: .* the permission Read on",
        ),
    ],
)
def test_a_task_that_cannot_go_on_says_why(
    monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        offsets_of(monkeypatch, FixedConsumer(record(0), failed(code)), 3, **{"kafkaConsumer.pollTimeoutMs": "50"})


@pytest.mark.parametrize("claimed", [1_760_000_000_000_000_000, 2**63 - 1, 2**63 // 1_000 + 1])
def test_a_timestamp_that_spark_cannot_hold_is_named_or_null(monkeypatch: pytest.MonkeyPatch, claimed: int) -> None:
    def read(**options: str) -> list[int | None]:
        strange, latest = record(1, stamp_ms=claimed), record(2, stamp_ms=2**63 // 1_000)
        return values_read(monkeypatch, FixedConsumer(record(0), strange, latest), 3, "timestamp", **options)

    with pytest.raises(MessageFormatError, match=rf"orders:0@1 has the timestamp {claimed}.*OutOfRange=null"):
        read()
    assert read(timestampOutOfRange="null") == [1_000_000, None, 2**63 // 1_000 * 1_000]


def test_where_a_log_begins_is_asked_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    passing = [KafkaException(KafkaError(code)) for code in PASSING]
    consumer = FixedConsumer(failed(KafkaError._AUTO_OFFSET_RESET), record(7), first_offset=[*passing, 7])

    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        assert offsets_of(monkeypatch, consumer, 8, failOnDataLoss="false") == [7]

    assert [part.offset for part in consumer.assigned] == [0, 7]
    assert "which begins at 7; going on, as failOnDataLoss=false says" in caplog.text


@pytest.mark.parametrize(
    ("found", "value"),
    [
        *(
            ([failed(code), failed(code), record(5)], b"x")
            for code in (*PASSING, KafkaError.GROUP_AUTHORIZATION_FAILED)
        ),
        *(([gone], None) for gone in (failed(KafkaError.OFFSET_OUT_OF_RANGE), end(5), record(6))),
    ],
)
def test_the_message_for_a_dead_letter_is_waited_for_unless_it_is_gone(
    monkeypatch: pytest.MonkeyPatch, found: list[Message], value: bytes | None
) -> None:
    assert letter(monkeypatch, FixedConsumer(*found)) == value


def test_a_message_that_does_not_come_or_may_not_be_read_becomes_no_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "_READ_S", 0.05)
    with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        letter(monkeypatch, FixedConsumer(failed(KafkaError.TOPIC_AUTHORIZATION_FAILED)))
    with pytest.raises(NotReadInTimeError, match=r"within 0.05 s: .*LEADER_NOT_AVAILABLE"):
        letter(monkeypatch, FixedConsumer(failed(KafkaError.LEADER_NOT_AVAILABLE)))


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
    assert next(iter(admin.delete_records([TopicPartition(topic, 1, 40)]).values())).result(60).low_watermark == 40
    wanted = [OffsetRange(other, 0, 0, 9), *(OffsetRange(topic, number, 10, 100 * number + 90) for number in range(3))]

    found = rows_of(batches_read(options_for(broker, topic, failOnDataLoss="false"), *wanted))

    assert {part: list(rows) for part, rows in found.items()} == {
        (other, 0): [0, 1, 2],
        (topic, 0): list(range(10, 90)),
        (topic, 1): list(range(40, 190)),
        (topic, 2): list(range(10, 290)),
    }
    assert all(value == b"%d" % offset for rows in found.values() for offset, value in rows.items())
    for start, until, offsets in ((0, 6, [0, 1, 2]), (5, 8, []), (6, 11, [9, 10])):
        assert offsets_read(options_for(broker, aborted), OffsetRange(aborted, 0, start, until)) == offsets


def test_a_header_whose_name_is_no_text_costs_the_headers_of_its_record_only(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce_raw(broker.bootstrap_servers, topic, [(b"k", [(b"\xff\xfe", b"lost")]), (b"k", [(b"name", b"kept")])])
    options = options_for(broker, topic, includeHeaders="true")

    rows = [row for batch in batches_read(options, OffsetRange(topic, 0, 0, 2)) for row in batch.to_pylist()]

    assert [[header["key"] for header in row["headers"]] for row in rows] == [["penstock-headers-lost"], ["name"]]
    assert [row["key"] for row in rows] == [b"k", b"k"]
