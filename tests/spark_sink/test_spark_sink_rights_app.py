"""An app's sinks on a secured broker, with the least rights: what becomes of the queries when one is taken away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from canary import PAYLOAD
from databases import new_database
from penstock import Message, RunningApp
from penstock.app import App
from penstock.clients.rights import MissingRightError
from penstock.consumer import retry
from penstock.devbroker import DevBroker, User
from penstock.spark_sink import DeadLetters, KafkaSink, SqlSink, start_sink
from penstock.spark_sink.monitoring.progress import SinkState
from penstock.spark_sink.queries import restarts
from rights import Right, give, on_group, on_topic, on_transactional_id, take
from waiting import wait_until

#: Seconds that Spark may take for some batches on a machine that has other things to do.
SPARK_S = 150.0


def ends(secured: DevBroker, topic: str) -> int:
    """Return how many messages a topic of one partition holds, markers of transactions included."""
    consumer_config: Any = {**secured.admin_config, "bootstrap.servers": secured.bootstrap_servers, "group.id": "ends"}
    consumer = Consumer(consumer_config)
    try:
        return consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=30)[1]
    finally:
        consumer.close()


def done(running: RunningApp, messages: int) -> bool:
    """Tell whether all sinks run, and have stored so many messages."""
    return all(
        one.state is SinkState.RUNNING and [part.position for part in one.partitions] == [messages]
        for one in running.sinks()
    )


def waiting(running: RunningApp, right: Right, *names: str) -> bool:
    """Tell whether the queries of these names wait for a right, and say so."""
    said = f"--operation {right.operation.capitalize()} --topic '{right.name}'"
    found = [one for one in running.sinks() if one.name in names and one.state is SinkState.WAITING]
    errors = [one.last_error or "" for one in found]
    assert all(error.startswith("MissingRightError: ") and said in error for error in errors), errors
    return len(found) == len(names)


class Shop:
    """Topics, a user with the least rights, and what is sent."""

    def __init__(self, secured: DevBroker, new_topic: Callable[..., str], new_user: Callable[..., User]) -> None:
        self.secured = secured
        self.orders, self.copies = new_topic(), new_topic()
        self.letters, self.ledger = f"dlq.{self.orders}", f"{self.orders}-ledger"
        secured.create_topic(self.letters, 1)
        secured.create_topic(self.ledger, 16)
        self.read = on_topic(self.orders, "READ")
        self.write_copies = on_topic(self.copies, "WRITE")
        self.write_letters = on_topic(self.letters, "WRITE")
        self.user = new_user(
            *self.read,
            *self.write_copies,
            *self.write_letters,
            *on_topic(self.ledger, "READ", "WRITE"),
            *on_transactional_id("copying/", "WRITE", prefix=True),
            *on_group(f"{self.orders}-lag", "READ"),
        )
        settings: Any = {**secured.admin_config, "bootstrap.servers": secured.bootstrap_servers}
        self._producer = Producer(settings)

    def send(self, *values: bytes) -> None:
        for value in values:
            self._producer.produce(self.orders, value, b"k")
        assert self._producer.flush(60) == 0

    @contextmanager
    def without(self, rights: list[Right]) -> Iterator[None]:
        take(self.secured, self.user, rights)
        yield
        give(self.secured, self.user, rights)


@pytest.fixture
def hasty_for_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries that lack a right are tried again soon."""
    monkeypatch.setattr(restarts, "RIGHT_WAIT_S", 0.5)


@pytest.fixture
def shop(secured: DevBroker, new_secured_topic: Callable[..., str], new_user: Callable[..., User]) -> Shop:
    return Shop(secured, new_secured_topic, new_user)


@pytest.mark.chaos
@pytest.mark.usefixtures("spark", "hasty_for_rights")
def test_sinks_work_with_the_least_rights_and_go_on_by_themselves_when_one_is_given_back(
    shop: Shop, postgresql_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secured, servers, config = shop.secured, shop.secured.bootstrap_servers, shop.user.config
    database = new_database(postgresql_url)
    database.execute("CREATE TABLE orders (text TEXT PRIMARY KEY CHECK (text NOT LIKE 'bad%%'))")
    app = App("shop", bootstrap_servers=servers, config=config)
    every = {"trigger": "200 milliseconds"}

    @app.handler(shop.orders, retry=retry(1), on_failure="dead_letter")
    def bill(message: Message) -> None:
        if message.value and message.value.startswith(b"bad"):
            raise ValueError(PAYLOAD)

    copying = KafkaSink(servers, shop.copies, name="copying", config=config, parallelism=1, ledger_topic=shop.ledger)
    storing = SqlSink(
        database.url, "orders", ["text"], name="storing", dead_letters=DeadLetters(servers, config=config)
    )
    billing = app.handler_sink(shop.orders, parallelism=1)

    @app.sink(shop.orders, sink=copying, name="copying", group=f"{shop.orders}-lag", **every)
    def as_they_are(messages: DataFrame) -> DataFrame:
        return messages

    @app.sink(shop.orders, sink=storing, name="storing", **every)
    def as_texts(messages: DataFrame) -> DataFrame:
        return messages.selectExpr("cast(value as string) text", "topic", "partition", "offset")

    @app.sink(
        shop.orders,
        sink=billing,
        name="billing",
        checkpoint_location=str(tmp_path / "billing"),
        options={"includeHeaders": "true"},
        **every,
    )
    def all_of_it(messages: DataFrame) -> DataFrame:
        return messages

    shop.send(f"good {PAYLOAD}".encode(), f"bad {PAYLOAD}".encode())
    with caplog.at_level(logging.INFO, "penstock"), app.start() as running:
        wait_until(lambda: done(running, 2), timeout=SPARK_S)
        assert ends(secured, shop.letters) == 2

        with shop.without(shop.read):
            wait_until(lambda: waiting(running, shop.read[0], "copying", "storing", "billing"), timeout=SPARK_S)
            shop.send(b"while it was not allowed")
        wait_until(lambda: done(running, 3), timeout=SPARK_S)
        with shop.without(shop.write_copies):
            shop.send(b"not to be copied")
            wait_until(lambda: waiting(running, shop.write_copies[0], "copying"), timeout=SPARK_S)
        wait_until(lambda: done(running, 4), timeout=SPARK_S)
        with shop.without(shop.write_letters):
            shop.send(f"bad again {PAYLOAD}".encode())
            wait_until(lambda: waiting(running, shop.write_letters[0], "storing", "billing"), timeout=SPARK_S)
        wait_until(lambda: done(running, 5), timeout=SPARK_S)

    assert ends(secured, shop.letters) == 4
    assert database.rows("SELECT count(*) FROM orders") == [(3,)]
    # Five messages, each once, and the marker of each transaction.
    assert ends(secured, shop.copies) == 5 + 4
    for secret in (PAYLOAD, config["sasl.password"]):
        assert secret not in caplog.text
    summary_of = [record.message for record in caplog.records if "goes on once the right is given" in record.message]
    assert len(summary_of) == len(set(summary_of)) == 6, summary_of


def test_a_right_that_is_missing_at_the_start_is_raised_as_it_is(
    spark: SparkSession, shop: Shop, tmp_path: Path
) -> None:
    take(shop.secured, shop.user, [*shop.read, *shop.write_copies])
    servers, config = shop.secured.bootstrap_servers, shop.user.config
    copying = KafkaSink(servers, shop.copies, name="copying", config=config, parallelism=1, ledger_topic=shop.ledger)
    through: Any = {"bootstrap_servers": servers, "config": config, "name": "q", "checkpoint_location": str(tmp_path)}

    with pytest.raises(MissingRightError, match=rf"--operation Read --topic '{shop.orders}'"):
        start_sink(spark, shop.orders, print, **through)
    # A query of Spark's own ends with the same sentence.
    options = {"kafka.bootstrap.servers": servers, "subscribe": shop.orders}
    options |= {f"kafka.{name}": value for name, value in config.items()}
    frame = spark.readStream.format("penstock").options(**options).load()
    with pytest.raises(PySparkException, match=r"MissingRightError: topic .* cannot be read: User:") as raised:
        frame.writeStream.format("noop").start().awaitTermination(SPARK_S)
    assert config["sasl.password"] not in str(raised.value)
    give(shop.secured, shop.user, shop.read)
    with pytest.raises(MissingRightError, match=rf"sink copying cannot publish: .* Write on topic {shop.copies};"):
        start_sink(spark, shop.orders, copying, **through)
