"""A log with everything that has no row: compacted offsets, aborted records, markers, an open transaction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from confluent_kafka import Producer

from databases import new_database
from kafka_tools import read_all
from penstock.devbroker import DevBroker, spark_environment

CHILD = Path(__file__).with_name("secrets_child.py")
CANARY = "canary-4711"


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
    told = json.loads(child.stdout.splitlines()[-1])
    events = b"".join(path.read_bytes() for path in (tmp_path / "events").rglob("*") if path.is_file())
    checkpoint = [path.read_bytes() for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    # Each place was looked at, and something was there.
    assert "penstock" in told["plan"]
    assert "no-such-topic" in told["error"]
    assert topic in told["progress"]
    assert b"SparkListenerSQLExecutionStart" in events
    assert database.rows("SELECT next_offset FROM penstock_ledger") == [(1,)]
    assert [m.value() for name in (copy, f"dlq.{topic}") for m in read_all(broker.bootstrap_servers, name)] == [
        b"open"
    ] * 2
    assert "batch 0 was refused by table t at postgresql+psycopg://127.0.0.1:1/db" in told["sinks"][0]
    assert any(topic.encode() in note for note in checkpoint)
    assert f"{topic}[0] waits at offset 0: a transaction is open there" in child.stderr
    for place in (child.stderr, child.stdout, events.decode(errors="replace"), *map(repr, checkpoint)):
        assert CANARY not in place
