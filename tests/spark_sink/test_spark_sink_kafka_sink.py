"""`KafkaSink` from a stream into real Kafka: each row once (I9) for read_committed readers, in its key's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.types import MapType, StringType, StructType

from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError, SinkError, TopicNotFoundError
from penstock.spark_sink import KafkaSink
from penstock.spark_sink.sinks.kafka_publisher import Row
from penstock.spark_sink.sinks.kafka_sink import PIECE_BYTES, PIECE_ROWS, pieces

FrameOf = Callable[..., DataFrame]


@pytest.fixture
def sink_to(broker: DevBroker, ledger_topic: str) -> Callable[..., KafkaSink]:
    """Return a function that makes a sink: `sink_to(topic)`, whose name is the topic's."""

    def make(topic: str, /, **settings: Any) -> KafkaSink:
        settings = {"topic": topic, "name": topic, "ledger_topic": ledger_topic, "parallelism": 2} | settings
        return KafkaSink(broker.bootstrap_servers, **settings)

    return make


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "why"), [(None, "is NULL"), (b"\xff", "has text that is not UTF-8")])
def test_a_row_without_a_readable_topic_ends_its_batch_and_is_named(
    new_topic: Callable[..., str], frame_of: FrameOf, sink_to: Callable[..., KafkaSink], name: bytes | None, why: str
) -> None:
    sink, rows = sink_to(new_topic(), topic=None), frame_of("value STRING, name BINARY", [(0, 1, "a", name)])

    with pytest.raises(SinkError, match=f"batch 3: target_topic {why} in a row from orders:0@1 for sink"):
        sink(rows.selectExpr("*", "CAST(name AS STRING) AS target_topic"), 3)


def schema_of(**columns: str) -> StructType:
    """Return a frame's schema: its position, and columns by their types."""
    found = StructType()
    for name, kind in {"topic": "string", "partition": "integer", "offset": "long", **columns}.items():
        if kind:
            found.add(name, kind)
    return found


def test_frames_and_topics_that_cannot_be_are_refused_at_the_start(
    new_topic: Callable[..., str], sink_to: Callable[..., KafkaSink]
) -> None:
    topic = new_topic()
    sink, schema = sink_to(topic), schema_of(key="string", value="string")

    sink.check(schema)
    with pytest.raises(SinkError, match="lacks offset, value"):
        sink.check(schema_of(key="string", offset=""))
    with pytest.raises(SinkError, match="lacks target_topic"):
        sink_to(topic, topic=None).check(schema)
    with pytest.raises(SinkError, match=r"column key of the frame .* is int; messages are text or bytes"):
        sink.check(schema_of(key="integer", value="string"))
    with pytest.raises(SinkError, match=r"column headers of the frame .* is map<string,string>"):
        sink.check(schema_of(value="string").add("headers", MapType(StringType(), StringType())))
    with pytest.raises(TopicNotFoundError, match="no-such-topic"):
        sink_to("no-such-topic").check(schema)
    with pytest.raises(ConfigurationError, match="has 1 partitions, a ledger needs 16"):
        sink_to(topic, ledger_topic=new_topic()).check(schema)
    with pytest.raises(ConfigurationError, match=r"has cleanup\.policy=delete: Kafka deletes the ledger"):
        sink_to(topic, ledger_topic=new_topic(16)).check(schema)


def test_a_transaction_takes_whole_offsets_up_to_its_bound() -> None:
    def row(offset: int, size: int = 1) -> Row:
        return Row(("orders", 0), offset, "t", None, b"x" * size, ())

    many = [row(n // 3) for n in range(PIECE_ROWS + 2)]
    large = [row(0, PIECE_BYTES), row(0), row(1), row(2)]

    assert [len(piece) for piece in pieces(many)] == [PIECE_ROWS + 2]  # the last offset's three rows stay together
    assert [len(piece) for piece in pieces([*many, row(9_999)])] == [PIECE_ROWS + 2, 1]
    assert [[one.offset for one in piece] for piece in pieces(large)] == [[0, 0], [1, 2]]
    assert list(pieces([])) == []


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"name": ""}, "name must be a name"),
        ({"topic": "ledger", "ledger_topic": "ledger"}, "must differ"),
        ({"parallelism": 0}, "parallelism"),
        ({"config": {"transactional.id": "canary-4711"}}, r"config\['transactional.id'\] belongs to KafkaSink"),
        ({"config": {"oauth_cb": print}}, "cannot travel to Spark's executors; name the function as text"),
        ({"config": {"error_cb": print}}, "cannot travel to Spark's executors"),
    ],
)
def test_a_wrong_setting_is_named_without_secrets(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named) as caught:
        KafkaSink(**{"bootstrap_servers": "127.0.0.1:1", "topic": "t", "name": "n"} | settings)

    assert "canary-4711" not in str(caught.value)
