"""The handler sink on real Spark: order under skew, a restart in the middle of a batch, dead letters, bad input."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from handler_log import judge, logging_handler, read_log
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery
from streams import SPARK_S, read_to_end

from kafka_tools import produce, read_all
from penstock.consumer import handler, retry
from penstock.devbroker import DevBroker
from penstock.spark_sink import HandlerSink
from telemetry_tools import Recorded
from waiting import wait_until

NewTopic = Callable[..., str]

ROWS = 1500


def keys_under_skew() -> list[bytes]:
    """Return keys; 20 % of them are one key."""
    return [b"hot" if n % 5 == 0 else b"k%d" % (n * 7 % 97) for n in range(ROWS)]


def offsets_by_key(broker: DevBroker, topic: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for message in read_all(broker.bootstrap_servers, topic):
        found[message.key().decode()].append(message.offset())
    return {key: sorted(offsets) for key, offsets in found.items()}


@pytest.mark.thorough
def test_a_key_with_a_fifth_of_all_keeps_its_order_through_failures_and_a_stop_in_the_middle_of_a_batch(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic = new_topic(partitions=2)
    produce(broker.bootstrap_servers, topic, [(key, b"x") for key in keys_under_skew()])
    log, checkpoint = tmp_path / "log", tmp_path / "checkpoint"
    log.mkdir()
    recorded = Recorded()
    # The second batch is the one that is stopped: a third of partition 0 is in each.
    hold_at = sum(message.partition() == 0 for message in read_all(broker.bootstrap_servers, topic)) // 2
    work = logging_handler(log, fails_once=50, hold_at=hold_at)
    sink = HandlerSink(
        {topic: handler(work, retry=retry(3, wait=lambda _: 0.05))},
        group="skew",
        parallelism=2,
        headers=False,
        telemetry=recorded.telemetry(),
    )

    def start() -> StreamingQuery:
        frame = (
            spark.readStream.format("penstock")
            .option("kafka.bootstrap.servers", broker.bootstrap_servers)
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", str(ROWS // 3))
            .load()
        )
        writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint))
        return writer.trigger(availableNow=True).start()

    def held() -> StreamingQuery | None:
        """Return the query that holds; one whose source Spark could not start is followed by another."""
        query = start()
        wait_until(lambda: (log / "held").exists() or not query.isActive, timeout=SPARK_S)
        return query if query.isActive else None

    wait_until(held, timeout=SPARK_S).stop()
    begun, committed = ({path.name for path in (checkpoint / name).glob("[0-9]*")} for name in ("offsets", "commits"))
    # No task of the stopped batch runs any more, so repeated messages overlap with none (I1).
    killed = int((log / "held").read_text())
    wait_until(lambda: not Path(f"/proc/{killed}").exists())
    before = read_log(log)
    (log / "go").touch()
    second = read_to_end(start)

    assert second.exception() is None
    # The fault: a batch was begun, messages of it were handled, and it was not finished.
    assert len(begun - committed) == 1
    handled = read_log(log)
    assert len(handled) > ROWS
    assert [one for one in handled if one.pid == killed] == [one for one in before if one.pid == killed]
    judge(handled, offsets_by_key(broker, topic), restarts=1)
    report = sink.last_report
    assert report is not None
    assert report.failed == report.retried > 0
    assert report.rows == report.handled
    counted = recorded.points("penstock.spark.handler.messages")
    outcomes = {point.attributes["penstock.spark.handler.outcome"]: point.value for point in counted}
    assert {point.attributes["messaging.consumer.group.name"] for point in counted} == {"skew"}
    assert outcomes["retried"] == outcomes["failed"] >= report.failed
