"""The handler sink on real Spark: order under skew, a restart in the middle of a batch, dead letters, bad input."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from handler_log import judge, logging_handler, read_log
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from kafka_tools import Recorder, produce, read_all
from penstock.app import App
from penstock.consumer import handler, retry
from penstock.dead_letters.headers import read as read_headers
from penstock.devbroker import DevBroker
from penstock.errors import SinkError
from penstock.message import DecodedMessage, Message
from penstock.spark_sink import HandlerSink
from penstock.spark_sink.queries.restarts import is_permanent
from telemetry_tools import TRACE, Recorded, traceparent
from waiting import wait_until

NewTopic = Callable[..., str]

ROWS = 1500


def keys_under_skew() -> list[bytes]:
    """Return keys of which one has 20 %."""
    return [b"hot" if n % 5 == 0 else b"k%d" % (n * 7 % 97) for n in range(ROWS)]


def offsets_by_key(broker: DevBroker, topic: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for message in read_all(broker.bootstrap_servers, topic):
        found[message.key().decode()].append(message.offset())
    return {key: sorted(offsets) for key, offsets in found.items()}


@pytest.mark.timeout(400)
def test_a_key_with_a_fifth_of_all_keeps_its_order_through_failures_and_a_stop_in_the_middle_of_a_batch(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic = new_topic(partitions=2)
    produce(broker.bootstrap_servers, topic, [(key, b"x") for key in keys_under_skew()], headers=[traceparent()])
    log, checkpoint = tmp_path / "log", tmp_path / "checkpoint"
    log.mkdir()
    recorded = Recorded()
    # The second batch is the one that is stopped: a third of partition 0 is in each.
    hold_at = sum(one.partition() == 0 for one in read_all(broker.bootstrap_servers, topic)) // 2
    work = logging_handler(log, fails_once=50, hold_at=hold_at)
    sink = HandlerSink(
        {topic: handler(work, retry_policy=retry(3, wait=lambda _: 0.05))},
        group="skew",
        parallelism=2,
        telemetry=recorded.telemetry(),
    )

    def start() -> StreamingQuery:
        frame = (
            spark.readStream.format("penstock")
            .option("kafka.bootstrap.servers", broker.bootstrap_servers)
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", str(ROWS // 3))
            .option("includeHeaders", "true")
            .load()
        )
        writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint))
        return writer.trigger(availableNow=True).start()

    first = start()
    wait_until(lambda: (log / "held").exists() or not first.isActive, timeout=120)
    assert first.isActive, first.exception()
    first.stop()
    begun, committed = ({one.name for one in (checkpoint / name).glob("[0-9]*")} for name in ("offsets", "commits"))
    # Nothing of the stopped batch is at work any more, so that what comes again meets nobody (I1).
    held = int((log / "held").read_text())
    wait_until(lambda: not Path(f"/proc/{held}").exists())
    before = read_log(log)
    (log / "go").touch()
    second = start()
    assert second.awaitTermination(120)

    assert second.exception() is None
    # The fault: a batch was begun, messages of it were handled, and it was not finished.
    assert len(begun - committed) == 1
    handled = read_log(log)
    assert len(handled) > ROWS
    assert [one for one in handled if one.pid == held] == [one for one in before if one.pid == held]
    judge(handled, offsets_by_key(broker, topic), restarts=1)
    report = sink.last_report
    assert report is not None
    assert report.failed == report.retried > 0
    assert report.rows == report.handled
    assert report.heaviest_lane_share >= 0.19
    assert 1.0 <= report.skew <= 2.0
    (skew,) = recorded.points("penstock.spark.handler.skew")
    assert skew.value == pytest.approx(report.skew)
    assert dict(skew.attributes) == {"messaging.consumer.group.name": "skew"}
    # One trace: the batch is linked to those who sent its messages.
    last = recorded.spans("process skew")[-1]
    assert [f"{link.context.trace_id:032x}" for link in last.links] == [TRACE]
    assert (last.attributes or {})["messaging.batch.message_count"] == report.rows


def frame_of(spark: SparkSession, broker: DevBroker, *topics: str, headers: bool = True) -> DataFrame:
    return (
        spark.read.format("penstock")
        .option("kafka.bootstrap.servers", broker.bootstrap_servers)
        .option("subscribe", ",".join(topics))
        .option("includeHeaders", str(headers).lower())
        .load()
    )


def test_async_and_batch_handlers_keep_their_order_their_filter_and_their_dead_letters_on_executors(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    prices, orders = new_topic(partitions=2), new_topic()
    for account in (b"one", b"two"):
        records = [(b"%d" % n, account) for n in range(20)]
        produce(broker.bootstrap_servers, prices, records, headers=[("account", account)])
    produce(
        broker.bootstrap_servers, orders, [(b"k%d" % (n % 3), b'{"n": %d}' % n) for n in range(25)] + [(b"k0", b"{")]
    )
    where = str(tmp_path)

    def log(name: str, *what: object) -> None:
        with open(f"{where}/{name}", "a") as file:  # noqa: PTH123 - executors cannot import this file
            file.write(f"{what!r}\n")

    async def price(message: Message) -> None:
        import asyncio

        await asyncio.sleep(0.001)
        if message.key == b"7":
            raise ValueError("no such price")
        log(message.value.decode(), message.partition, message.offset)

    def store(messages: list[DecodedMessage]) -> None:
        log("orders", [message.body["n"] for message in messages])

    policy = retry(2, wait=lambda _: 0.01)
    sink = HandlerSink(
        {
            prices: handler(price, key="header:account", retry_policy=policy, on_failure="dead_letter"),
            orders: handler(
                store,
                batch=10,
                decoder="json",
                on_failure="dead_letter",
                dead_letter_topic=f"lost.{orders}",
                dead_letter_format="spring",
                filter=lambda message: message.offset != 4,
            ),
        },
        group="billing",
        parallelism=2,
        bootstrap_servers=broker.bootstrap_servers,
    )

    sink(frame_of(spark, broker, prices, orders), 0)

    report = sink.last_report
    assert report is not None
    assert (report.rows, report.handled, report.dead_letters, report.filtered) == (66, 62, 3, 1)
    for account in ("one", "two"):
        places = [eval(line) for line in (tmp_path / account).read_text().splitlines()]  # noqa: S307 - written above
        # By a header the key is spread over partitions: each partition's in order.
        assert len(places) == 19
        for partition in (0, 1):
            offsets = [offset for number, offset in places if number == partition]
            assert offsets == sorted(offsets)
    stored = [n for line in (tmp_path / "orders").read_text().splitlines() for n in eval(line)[0]]  # noqa: S307 - the same
    for key in range(3):
        assert [n for n in stored if n % 3 == key] == [n for n in range(key, 25, 3) if n != 4]
    letters = read_all(broker.bootstrap_servers, f"dlq.{prices}")
    assert sorted((one.key(), one.value()) for one in letters) == [(b"7", b"one"), (b"7", b"two")]
    for letter in letters:
        origin = read_headers(letter.headers())
        assert origin is not None
        assert (origin.topic, origin.group, origin.attempts, origin.exception) == (
            *(prices, "billing", 2, "builtins.ValueError"),
        )
        assert dict(letter.headers())["account"] == letter.value()
    (lost,) = read_all(broker.bootstrap_servers, f"lost.{orders}")
    origin = read_headers(lost.headers())
    assert origin is not None
    assert (lost.value(), origin.topic, origin.offset) == (b"{", orders, 25)


def test_what_is_wrong_is_told_in_a_sentence_that_names_the_place_or_the_remedy(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"secret key", b"secret value")])
    frame = frame_of(spark, broker, topic)

    def fails(_: Message) -> None:
        raise ValueError("no")

    (tmp_path / "not_shipped.py").write_text("def work(message):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import not_shipped

    def sink(function: Callable[..., object], of: str = topic) -> HandlerSink:
        return HandlerSink({of: handler(function, retry_policy=retry(1))}, group="told", parallelism=1)

    with pytest.raises(
        SinkError, match=rf"batch 4: .*fails failed {topic}\[0\]@0 1 times, last with ValueError"
    ) as told:
        sink(fails)(frame, 4)
    assert "secret" not in str(told.value)
    with pytest.raises(SinkError, match=r"cannot import not_shipped, .* --py-files"):
        sink(not_shipped.work)(frame, 5)
    with pytest.raises(SinkError, match=rf"rows of topic {topic}, which has no handler in this sink") as unfit:
        sink(fails, of="another")(frame, 6)
    assert is_permanent(unfit.value)
    with pytest.raises(SinkError, match="has no column headers"):
        sink(fails)(frame_of(spark, broker, topic, headers=False), 7)


def test_an_app_has_one_topic_handled_by_its_consumer_and_another_by_spark_each_once(
    spark: SparkSession, broker: DevBroker, new_topic: NewTopic, tmp_path: Path
) -> None:
    here, there = new_topic(), new_topic()
    for topic in (here, there):
        produce(broker.bootstrap_servers, topic, [(b"k%d" % n, b"x") for n in range(20)])
    app = App("both", bootstrap_servers=broker.bootstrap_servers, workers=2)
    seen = Recorder()
    app.handler(here)(seen)
    app.handler(there)(logging_handler(tmp_path))
    sink = app.handler_sink(there, parallelism=1)

    @app.sink(
        there,
        sink=sink,
        trigger="1 second",
        checkpoint_location=str(tmp_path / "checkpoint"),
        options={"includeHeaders": "true"},
    )
    def as_they_are(messages: DataFrame) -> DataFrame:
        return messages

    with app.start():
        wait_until(lambda: len(read_log(tmp_path)) >= 20 and len(seen.calls) >= 20, timeout=120)

    assert sorted(one.offset for one in read_log(tmp_path)) == list(range(20))
    assert {one.pid for one in read_log(tmp_path)}.isdisjoint({os.getpid()})
    assert len(seen.calls) == 20
    assert str(sink.last_report).startswith("batch 0: 20 messages in 1 of 1 tasks, 20 handled")
