"""Dead letters of refused rows: the messages as they were in Kafka, acknowledged before the table changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from arrow_frames import PRICES, frame

from databases import TestDatabase
from kafka_tools import read_all
from penstock.dead_letters.headers import DeadLetterOrigin, read
from penstock.devbroker import DevBroker
from penstock.errors import SinkError
from penstock.spark_sink import DeadLetters, SqlSink
from penstock.spark_sink.sinks.sql.dead_letters import Rejected


def test_a_refused_row_s_message_is_written_as_it_was_and_one_that_is_gone_with_its_place(
    broker: DevBroker, new_topic: Callable[..., str], write: Callable[..., None]
) -> None:
    topic = new_topic(partitions=1)
    write(topic, 0, [(b"k0", b"v0"), (b"k1", b"\xff\x00"), (None, None)], headers=[("trace", b"\xfe")])
    letters = DeadLetters(broker.bootstrap_servers)

    rejected = [Rejected(topic, 0, 1, "23514"), Rejected(topic, 0, 1, "again"), Rejected(topic, 0, 99, "gone")]
    letters.write(rejected)
    letters.write([])

    found = {}
    for message in read_all(broker.bootstrap_servers, f"dlq.{topic}"):
        headers = message.headers() or []
        origin = read(headers)
        assert origin is not None
        found[origin.offset] = (origin, message.key(), message.value(), headers)
    assert sorted(found) == [1, 99]
    first, *kept, headers = found[1]
    assert kept == [b"k1", b"\xff\x00"]
    assert headers[0] == ("trace", b"\xfe")
    assert first == DeadLetterOrigin(topic, 0, 1, "penstock-spark", 1, "penstock.errors.SinkError", "23514", None)
    gone, *kept, _ = found[99]
    assert (gone.message, *kept) == ("gone", None, None)


def test_dead_letters_that_cannot_be_written_hold_the_batch(
    broker: DevBroker, new_topic: Callable[..., str], write: Callable[..., None], tmp_path: Path
) -> None:
    topic, small = new_topic(), new_topic(config={"max.message.bytes": "200"})
    write(topic, 0, [(b"k", b"v" * 1000)])
    database = TestDatabase("sqlite", f"sqlite:///{tmp_path / 'test.db'}")
    database.execute("CREATE TABLE prices (id TEXT PRIMARY KEY, price INTEGER CHECK (price < 10))")
    batch: Any = frame(PRICES, [(0, 0, "bad", 4711), (0, 1, "good", 1)])
    places = batch.rows.schema.get_field_index("topic")
    batch.rows = batch.rows.set_column(places, "topic", [[topic, topic]])
    sink = SqlSink(database.url, "prices", ["id"], dead_letters=DeadLetters(broker.bootstrap_servers, small))

    with pytest.raises(SinkError, match=rf"could not be written to {small}: {topic}:0@0.*MSG_SIZE") as caught:
        sink(batch, 0)

    assert "4711" not in str(caught.value)
    assert database.rows("SELECT * FROM prices") == []
    assert sink.ledger() == {}
