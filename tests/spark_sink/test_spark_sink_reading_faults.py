"""What reading a range, and a message for a dead letter, does about errors that pass, with clients that are none."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message
from source_tasks import batches_read

from fixed_consumer import FixedConsumer, end, failed, record
from penstock.clients import factory as making
from penstock.clients.reading import PartitionReader
from penstock.clients.rights import MissingRightError
from penstock.errors import MessageFormatError, SinkError, SourceError
from penstock.spark_sink.sinks.sql import dead_letters
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.plan import OffsetRange

PASSING = [KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError._TRANSPORT, KafkaError.UNKNOWN_TOPIC_OR_PART]
WAITED_OUT = [*PASSING, KafkaError.GROUP_AUTHORIZATION_FAILED]


def offsets_read(monkeypatch: pytest.MonkeyPatch, consumer: FixedConsumer, end: int, **options: str) -> list[Any]:
    return values_read(monkeypatch, consumer, end, "offset", **options)


def values_read(
    monkeypatch: pytest.MonkeyPatch, consumer: FixedConsumer, end: int, column: str, **options: str
) -> list[Any]:
    """Read a range and return a column, of numbers."""
    monkeypatch.setattr(making, "Consumer", lambda _: consumer)
    settings = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "orders", "fetchOffset.retryIntervalMs": "0"}
    batches = batches_read(SourceOptions.parse({**settings, **options}), OffsetRange("orders", 0, 0, end))
    return [value for batch in batches for value in batch[column].cast("int64").to_pylist()]


def letter(monkeypatch: pytest.MonkeyPatch, consumer: FixedConsumer) -> bytes | None:
    """Return the value of the message at offset 5, as a dead letter has it."""
    monkeypatch.setattr(making, "Consumer", lambda _: consumer)
    reader = PartitionReader("127.0.0.1:1", {}, "letters", dead_letters._not_read)
    return dead_letters._read(reader, "orders", 0, 5).value()


@pytest.mark.parametrize("code", WAITED_OUT)
def test_a_task_goes_on_when_an_error_has_passed_or_is_about_a_group(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    consumer = FixedConsumer(record(0), failed(code), record(1), failed(code), record(2))

    assert offsets_read(monkeypatch, consumer, 3) == [0, 1, 2]


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
        offsets_read(monkeypatch, FixedConsumer(record(0), failed(code)), 3, **{"kafkaConsumer.pollTimeoutMs": "50"})


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
        assert offsets_read(monkeypatch, consumer, 8, failOnDataLoss="false") == [7]

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


def test_a_message_that_may_not_be_read_becomes_no_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        letter(monkeypatch, FixedConsumer(failed(KafkaError.TOPIC_AUTHORIZATION_FAILED)))


def test_a_dead_letter_whose_message_does_not_come_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "_READ_S", 0.05)
    with pytest.raises(SinkError, match=r"within 0.05 s: .*LEADER_NOT_AVAILABLE"):
        letter(monkeypatch, FixedConsumer(failed(KafkaError.LEADER_NOT_AVAILABLE)))
