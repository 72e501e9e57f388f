"""A log with everything that has no row: compacted offsets, aborted records, markers, an open transaction."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from pyspark.sql import DataFrame
from pyspark.sql.streaming.datasource import ReadAllAvailable

from databases import new_database
from kafka_tools import ANSWER_S, ends, produce, read_all
from penstock.devbroker import DevBroker, spark_environment
from penstock.spark_sink.source.options.options import SourceOptions
from penstock.spark_sink.source.stream_reader import StreamReader
from waiting import wait_until

CHILD = Path(__file__).with_name("secrets_child.py")
CANARY = "canary-4711"

COMPACTED = {
    "cleanup.policy": "compact",
    "segment.ms": "100",
    "min.cleanable.dirty.ratio": "0.001",
    "max.compaction.lag.ms": "100",
}
KEYS = [b"k%d" % number for number in range(50)]

Place = tuple[int, int, bytes | None, bytes | None]


def plain(servers: str, topic: str) -> list[Place]:
    """Return what a plain read_committed client reads."""
    found = read_all(servers, topic, left_open=True)
    return sorted((m.partition() or 0, m.offset() or 0, m.key(), m.value()) for m in found)


def with_holes(servers: str, admin: AdminClient, topic: str) -> None:
    """Write to partition 0 until Kafka's cleaner has made holes in it, then keep the log as it is."""
    written = 0

    def has_holes() -> bool:
        nonlocal written
        # Only a write begins the next segment, and only segments no longer written to are compacted.
        produce(servers, topic, [(b"once %d" % written, b"x"), *((key, b"x") for key in KEYS)], partition=0)
        written += 1 + len(KEYS)
        return written > 10 * len(KEYS) and len(read_all(servers, topic)) < written // 2

    wait_until(has_holes, 90, interval=0.2)
    stop = ConfigEntry("cleanup.policy", "delete", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[stop])
    admin.incremental_alter_configs([resource])[resource].result(ANSWER_S)
    readings = [plain(servers, topic)]

    def stays() -> bool:
        readings.append(plain(servers, topic))
        return len(readings) > 2 and readings[-1] == readings[-2] == readings[-3]

    wait_until(stays, interval=1.0)  # what the cleaner had begun is done


def test_rows_are_those_of_a_plain_client_and_the_open_transaction_is_named(  # noqa: PLR0917 - fixtures
    broker: DevBroker,
    admin: AdminClient,
    new_topic: Callable[..., str],
    write: Callable[..., None],
    write_transaction: Callable[..., None],
    open_transaction: Callable[[str, int], Producer],
    read: Callable[..., DataFrame],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    servers = broker.bootstrap_servers
    topic = new_topic(partitions=2, config=COMPACTED)
    with_holes(servers, admin, topic)
    write_transaction([(topic, n % 2, b"committed") for n in range(20)], commit=True)
    write_transaction([(topic, n % 2, b"aborted") for n in range(20)], commit=False)
    producer = open_transaction(topic, 1)
    write(topic, 1, [(b"behind", b"waits")] * 3)
    expected = plain(servers, topic)
    options = SourceOptions.parse({"kafka.bootstrap.servers": servers, "subscribe": topic})
    seen: list[Place] = []

    def places(frame: DataFrame) -> list[Place]:
        rows = frame.select("partition", "offset", "key", "value").collect()
        return sorted((r[0], r[1], r[2] and bytes(r[2]), r[3] and bytes(r[3])) for r in rows)

    def stream() -> list[Place]:
        seen.clear()
        query = (
            read(stream=True, subscribe=topic, startingOffsets="earliest")
            .writeStream.foreachBatch(lambda frame, _: seen.extend(places(frame)))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(150)
        return sorted(seen)

    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        reader = StreamReader(options)
        reader.prepareForTriggerAvailableNow()
        planned = reader.latestOffset({}, ReadAllAvailable())[topic]

    try:
        assert places(read(subscribe=topic)) == expected
        assert stream() == expected
        # The faults happened: offsets without a record, a tail without a row, and rows behind the open transaction.
        offsets = [offset for partition, offset, _, _ in expected if partition == 0]
        assert len(offsets) < (offsets[-1] - offsets[0]) // 2
        assert planned["0"] == ends(servers, topic, 2)[0] > offsets[-1] + 2
        written = read_all(servers, topic, committed_only=False)
        assert planned["1"] == max(m.offset() or 0 for m in written if m.partition() == 1) - 3
        assert f"{topic}[1] waits at offset {planned['1']}: a transaction is open there" in caplog.text
        assert "4 offsets wait behind it" in caplog.text
        assert f"{topic}[0] waits" not in caplog.text
    finally:
        producer.commit_transaction(30)
    wait_until(lambda: len(plain(servers, topic)) == len(expected) + 4)
    # The query goes on behind what it waited for.
    assert [place[3] for place in stream()] == [b"open", b"waits", b"waits", b"waits"]


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
