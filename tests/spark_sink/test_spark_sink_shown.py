"""What sinks, options, rows and queries show of themselves holds no secret and no payload."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from confluent_kafka import Producer

from databases import new_database
from kafka_tools import read_all
from penstock.consumer import handler
from penstock.devbroker import DevBroker, spark_environment
from penstock.spark_sink import DeadLetters, DeltaSink, IcebergSink, KafkaSink, SqlSink
from penstock.spark_sink.sinks.handlers.sink import HandlerSink
from penstock.spark_sink.sinks.kafka_ledger import Target
from penstock.spark_sink.sinks.kafka_publisher import Row
from penstock.spark_sink.sinks.sql.dead_letters import Rejected
from penstock.spark_sink.source.options import SourceOptions

CHILD = Path(__file__).with_name("secrets_child.py")
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


@pytest.mark.thorough
@pytest.mark.timeout(400)  # it starts a Spark of its own
def test_secrets_stay_out_of_plans_logs_events_errors_and_checkpoints(
    broker: DevBroker,
    new_topic: Callable[..., str],
    open_transaction: Callable[[str, int], Producer],
    postgresql_url: str,
    tmp_path: Path,
) -> None:
    topic, copy = new_topic(), new_topic()
    producer = open_transaction(topic, 0)
    database = new_database(postgresql_url)
    database.execute("CREATE TABLE letters (value BYTEA PRIMARY KEY CHECK (length(value) = 0))")
    # The server asks for no password, so that any will do.
    address = sa.make_url(database.url).set(password=CANARY).update_query_dict({"sslpassword": CANARY})
    url = address.render_as_string(hide_password=False)

    child = subprocess.run(
        [sys.executable, str(CHILD), broker.bootstrap_servers, topic, str(tmp_path), CANARY, url, copy],
        env={**os.environ, **spark_environment(), "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    producer.abort_transaction(30)

    assert child.returncode == 0, child.stderr[-2_000:]
    printed = json.loads(child.stdout.splitlines()[-1])
    events = b"".join(path.read_bytes() for path in (tmp_path / "events").rglob("*") if path.is_file())
    checkpoint = [path.read_bytes() for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    # Each place was looked at, and something was there.
    assert "penstock" in printed["plan"]
    assert "no-such-topic" in printed["error"]
    assert topic in printed["progress"]
    assert b"SparkListenerSQLExecutionStart" in events
    assert database.rows("SELECT next_offset FROM penstock_ledger") == [(1,)]
    assert [m.value() for name in (copy, f"dlq.{topic}") for m in read_all(broker.bootstrap_servers, name)] == [
        b"open"
    ] * 2
    assert "batch 0 was refused by table t at postgresql+psycopg://127.0.0.1:1/db" in printed["sinks"][0]
    assert any(topic.encode() in note for note in checkpoint)
    assert f"{topic}:0 waits at offset 0: a transaction is open there" in child.stderr
    for place in (child.stderr, child.stdout, events.decode(errors="replace"), *map(repr, checkpoint)):
        assert CANARY not in place
