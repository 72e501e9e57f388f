"""Fixtures of the Spark tests: a reader, and writers of committed and aborted rows."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient

from databases import TestDatabase, new_database
from kafka_tools import produce, transactional, wait_for_markers
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.devbroker import DevBroker
from penstock.spark_sink.sinks.kafka_ledger import PARTITIONS, TOPIC_CONFIG
from telemetry_tools import Recorded

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Record = tuple[bytes | None, bytes | None]


@pytest.fixture
def frame_of(spark: SparkSession) -> Callable[..., DataFrame]:
    """Return a function that makes a frame: `frame_of("id STRING, n INT", [(partition, offset, id, n), ...])`."""

    def make(columns: str, rows: Sequence[tuple[Any, ...]]) -> DataFrame:
        schema = f"topic STRING, partition INT, offset BIGINT, {columns}"
        return spark.createDataFrame([("orders", *row) for row in rows], schema)

    return make


@pytest.fixture
def write(broker: DevBroker) -> Callable[..., None]:
    """Return a function that writes records to one partition: `write(topic, partition, records)`."""

    def to_partition(topic: str, partition: int, records: Sequence[Record], headers: Any = None) -> None:
        produce(broker.bootstrap_servers, topic, records, partition=partition, headers=headers)

    return to_partition


@pytest.fixture
def write_transaction(broker: DevBroker) -> Callable[..., None]:
    """Return a function that writes one transaction: `write_transaction(rows, commit=True)`, rows with places.

    It returns when the markers are in the logs, which the broker writes after it has answered the client.
    """
    producer = transactional(broker.bootstrap_servers)

    def in_transaction(rows: Sequence[tuple[str, int, bytes]], *, commit: bool) -> None:
        producer.begin_transaction()
        for topic, partition, value in rows:
            producer.produce(topic, partition=partition, value=value)
        # What is not on the broker yet would be forgotten by an abort instead of aborted.
        assert producer.flush(30) == 0
        if commit:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)
        wait_for_markers(broker.bootstrap_servers, *{topic for topic, _, _ in rows})

    return in_transaction


@pytest.fixture
def open_transaction(broker: DevBroker) -> Iterator[Callable[[str, int], Producer]]:
    """Return a function that begins a transaction with one record, and gives the producer that is to end it.

    A busy machine has the time to; what is left open ends with the test.
    """
    begun: list[Producer] = []

    def begin(topic: str, partition: int) -> Producer:
        named = {"transactional.id": f"open-{uuid.uuid4().hex}", "transaction.timeout.ms": 600_000}
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers, **named})
        producer.init_transactions(60)
        producer.begin_transaction()
        begun.append(producer)
        producer.produce(topic, b"open", partition=partition)
        assert producer.flush(30) == 0
        return producer

    yield begin
    for producer in begun:
        with contextlib.suppress(KafkaException):  # the test has ended it itself
            producer.abort_transaction(30)


@pytest.fixture
def read(spark: SparkSession, broker: DevBroker) -> Callable[..., DataFrame]:
    """Return a function that loads the source: `read(stream=False, subscribe=..., **options)`."""

    def load(*, stream: bool = False, **options: str) -> DataFrame:
        reader: Any = (spark.readStream if stream else spark.read).format("penstock")
        settings = {"kafka.bootstrap.servers": broker.bootstrap_servers, **options}
        return reader.options(**settings).load()

    return load


@pytest.fixture(scope="session")
def ledger_topic(broker: DevBroker, admin: AdminClient, topic_numbers: Iterator[int]) -> str:
    """One ledger in Kafka for all tests: each sink has its own name."""
    name = f"ledger-{next(topic_numbers)}"
    ensure_topics(admin, [TopicSpec(name, PARTITIONS, TOPIC_CONFIG)])
    return name


def new_database_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> TestDatabase:
    """Make a database of a kind."""
    if kind == "sqlite":
        return TestDatabase("sqlite", f"sqlite:///{folder / 'test.db'}")
    return new_database(request.getfixturevalue(f"{kind}_url"))


#: The conformance suite and the types of MariaDB's columns are in every run, the rest of it in the long ones.
MARIADB = pytest.param("mariadb", marks=pytest.mark.thorough)


@pytest.fixture(params=["sqlite", "postgresql", MARIADB])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> TestDatabase:
    """A database for each kind that a sink knows."""
    return new_database_of(request.param, request, tmp_path)


#: Each way that rows go: a database, and the sink's `staging`.
WAYS = [
    ("sqlite", "driver"),
    ("postgresql", "executors"),
    *(
        pytest.param(one, marks=pytest.mark.thorough)
        for one in (("postgresql", "driver"), ("mariadb", "driver"), ("mariadb", "executors"))
    ),
]


@pytest.fixture(params=WAYS, ids="-".join)
def way(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[TestDatabase, str]:
    """Each way that rows go."""
    kind, staged = request.param
    return new_database_of(kind, request, tmp_path), staged


@pytest.fixture(params=["postgresql", MARIADB])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> TestDatabase:
    """A database of each server to which executors connect."""
    return new_database_of(request.param, request, tmp_path)


@pytest.fixture
def postgresql(postgresql_url: str) -> TestDatabase:
    """A separate database."""
    return new_database(postgresql_url)


@pytest.fixture
def mariadb(mariadb_url: str) -> TestDatabase:
    """A separate database."""
    return new_database(mariadb_url)


@pytest.fixture
def recorded() -> Recorded:
    """Providers that keep all spans and metrics."""
    return Recorded()
