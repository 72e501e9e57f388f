"""What sinks, options and rows show of themselves holds no secret and no payload."""

from __future__ import annotations

import pickle

import pytest

from penstock.consumer import handler
from penstock.spark_sink import DeadLetters, DeltaSink, IcebergSink, KafkaSink, SqlSink
from penstock.spark_sink.sinks.handlers.engine import TaskWork
from penstock.spark_sink.sinks.handlers.sink import HandlerSink
from penstock.spark_sink.sinks.kafka_ledger import Target
from penstock.spark_sink.sinks.kafka_publisher import Row
from penstock.spark_sink.sinks.sql.rows import Rejected
from penstock.spark_sink.source.options import SourceOptions

CANARY = "canary-of-a-secret"
CONFIG = {"sasl.password": CANARY, "ssl.key.password": CANARY}


def nothing(_message: object) -> None:
    """A handler."""


def test_nothing_that_is_shown_holds_a_secret_or_a_payload() -> None:
    letters = DeadLetters("127.0.0.1:1", config=CONFIG)
    options = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "orders", "kafka.sasl.password": CANARY}
    shown = [
        letters,
        KafkaSink("127.0.0.1:1", "copies", name="q", config=CONFIG),
        SqlSink(f"postgresql://clerk:{CANARY}@127.0.0.1/db", "orders", dead_letters=letters),
        DeltaSink("table", name="q", storage_options={"AWS_SECRET_ACCESS_KEY": CANARY}),
        IcebergSink("db.orders", {"uri": f"postgresql://clerk:{CANARY}@127.0.0.1/db"}, name="q"),
        HandlerSink({"orders": handler(nothing)}, group="g", parallelism=1, config=CONFIG),
        TaskWork("g", {}, producer=CONFIG),
        Target("127.0.0.1:1", CONFIG, "q", "ledger"),
        SourceOptions.parse(options),
        Row(("orders", 0), 7, "copies", CANARY.encode(), CANARY.encode(), [("trace", CANARY.encode())]),
        Rejected("orders", 0, 7, "CheckViolation"),
    ]

    for one in shown:
        for text in (repr(one), str(one), f"{one}"):
            assert CANARY not in text
            assert type(one).__name__ in repr(one)


@pytest.mark.parametrize(
    "sink",
    [
        KafkaSink("127.0.0.1:1", "copies", name="q", config=CONFIG),
        SqlSink("postgresql://clerk@127.0.0.1/db", "orders", ["id"], dead_letters=DeadLetters("127.0.0.1:1")),
        DeltaSink("table", name="q", storage_options={"AWS_REGION": "here"}),
        IcebergSink("db.orders", {"type": "glue"}, ["id"], name="q"),
    ],
    ids=lambda sink: type(sink).__name__,
)
def test_a_sink_can_be_pickled(sink: object) -> None:
    assert pickle.loads(pickle.dumps(sink)) == sink  # noqa: S301 - the test's own bytes
