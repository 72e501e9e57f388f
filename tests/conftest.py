"""Fixtures for every test: one real broker, PostgreSQL and Spark for the whole run, separate topics and databases."""

from __future__ import annotations

import itertools
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import hypothesis
import pytest

import canary
from support import services
from waiting import wait_until

# Each fixture imports what it needs: `pytest tests/routing` runs without Kafka's client, PostgreSQL and Spark.
if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient, ClusterMetadata
    from pyspark.sql import SparkSession

    from databases import TestDatabase
    from penstock.devbroker import DevBroker, User
    from rights import Right

# A machine that has other things to do is no failure of what is tested. And what fails here fails again: the examples
# are the same in every run; PENSTOCK_EXPLORE=1 looks for others.
hypothesis.settings.register_profile(
    "penstock",
    max_examples=50,
    deadline=None,
    derandomize="PENSTOCK_EXPLORE" not in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
)
hypothesis.settings.load_profile("penstock")

#: Seconds for a test with a Spark: where one is interrupted, Spark's answers go to the wrong questions from then on.
SPARK_S = 1200
#: What each process would start one of, with a sign of the files that use it: these run in one process.
IN_ONE_PROCESS = {
    "spark": r"^tests/spark_sink/[^\0]*\bpyspark\b",
    "secured": r"\b(secured|new_user)\b|^tests/security/",
}

_RUN = pytest.StashKey[IO[str] | None]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the version of Kafka be chosen."""
    parser.addoption("--kafka", help="version of the embedded Kafka, where not the usual one; such as 3.9.1")


def pytest_configure(config: pytest.Config) -> None:
    """Begin the run whose processes share servers; processes of pytest-xdist belong to the run that started them."""
    if (version := config.getoption("--kafka")) is not None:
        os.environ["PENSTOCK_KAFKA_VERSION"] = version
    if not hasattr(config, "workerinput"):
        config.stash[_RUN] = services.begin_run()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the servers of the run."""
    if (run := config.stash.get(_RUN, None)) is not None:
        services.end_run(run)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest in one process, and give tests with the Spark of this run their time."""
    old = os.environ.get("PENSTOCK_KAFKA_VERSION", "4") < "4"
    for item in items:
        if old and "kip848" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="group.protocol=consumer needs Kafka 4.0"))
        if "spark" in getattr(item, "fixturenames", ()) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SPARK_S))
    servers = list(IN_ONE_PROCESS)
    items.sort(key=lambda item: servers.index(scope) if (scope := scope_of(item.nodeid)) in servers else len(servers))


@cache
def _scope_of_file(path: str) -> str:
    text = (Path(__file__).parents[1] / path).read_text(encoding="utf-8")
    return next((name for name, sign in IN_ONE_PROCESS.items() if re.search(sign, f"{path}\n{text}")), path)


def scope_of(nodeid: str) -> str:
    """Return what tests of the same process have in common: their file, or the server that their files use."""
    return _scope_of_file(nodeid.partition("::")[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file in one process, and so all files that use Spark, or the secured broker."""
    from xdist.scheduler import LoadScopeScheduling

    class ByServer(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return ByServer(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print in one line which tests were skipped, and why."""
    reasons = Counter(
        str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
    )
    listed = "; ".join(f"{count} ({reason})" for reason, count in reasons.most_common()) or "nothing"
    terminalreporter.write_line(f"skipped: {listed}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that leaves a canary on standard output or error: this process, or the JVM and others it started."""
    report = yield
    shown = [title for title, text in report.sections if canary.PASSWORD in text or canary.PAYLOAD in text]
    if report.when == "teardown" and report.passed and shown:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} shows a password or a payload in: {', '.join(shown)}"
    return report


class SharedBroker:
    """The Kafka of this run, with the interface of `DevBroker`. No test can harm it, because others use it, too."""

    def __init__(self, bootstrap_servers: str) -> None:
        self.bootstrap_servers = bootstrap_servers
        self.admin_config: dict[str, str] = {}

    def create_topic(self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None) -> None:
        """Create a topic, unless it exists, and return when its partitions have leaders."""
        from penstock import clients
        from penstock.clients.topics import TopicSpec, ensure_topics

        admin = clients.admin(self.bootstrap_servers, {})
        ensure_topics(admin, [TopicSpec(name, partitions, dict(config or {}))])
        # Creation is acknowledged by the controller; a client may ask before the broker has heard of it.
        wait_until(lambda: has_leaders(admin, name, partitions))


@pytest.fixture(scope="session")
def broker() -> SharedBroker:
    """The Kafka broker of this run, shared by all of its processes. Tests that harm a broker start their own."""
    return SharedBroker(services.address("kafka"))


@pytest.fixture(scope="session")
def admin(broker: SharedBroker) -> AdminClient:
    """An admin client of the run's broker."""
    from penstock import clients

    return clients.admin(broker.bootstrap_servers, {})


@pytest.fixture(scope="session")
def topic_numbers() -> Iterator[int]:
    """Numbers that make names unique among all processes that use the broker."""
    return itertools.count(random.SystemRandom().randrange(10**8))


@pytest.fixture
def new_name(topic_numbers: Iterator[int], request: pytest.FixtureRequest) -> Callable[..., str]:
    """Return a function that makes a unique name, for a topic, a group or a prefix: `new_name("shop")`."""
    return lambda stem=None: f"{stem or _name_of_test(request)}-{next(topic_numbers)}"


@pytest.fixture
def new_topic(broker: SharedBroker, admin: AdminClient, new_name: Callable[..., str]) -> Iterator[Callable[..., str]]:
    """Return a function that creates a topic with a unique name: `new_topic(partitions=1, config=None)`.

    It is deleted after the test, with all whose names have its number: who lists topics would read those of all tests.
    """
    numbers: list[str] = []

    def create(partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
        numbers.append((name := new_name()).rpartition("-")[2])
        broker.create_topic(name, partitions, config)
        return name

    yield create
    of_this_test = re.compile(rf"-({'|'.join(numbers)})(?!\d)")
    listed = admin.list_topics(timeout=30).topics if numbers else ()
    if topics := [topic for topic in listed if of_this_test.search(topic)]:
        admin.delete_topics(topics)


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevBroker]:
    """The secured broker of this run: passwords over TLS, and rights. It starts when a test first asks for it.

    Every password holds a canary, which must show nowhere until the run ends.
    """
    from kafka_tools import STEADY
    from penstock.devbroker import DevBroker

    with (
        canary.watching(tmp_path_factory.getbasetemp(), canary.LOG),
        DevBroker(security="sasl_ssl", acls=True, config=STEADY) as running,
    ):
        yield running


@pytest.fixture(autouse=True)
def logs_are_not_rationed_by_earlier_tests() -> None:
    """Let each test log lines that others have logged a moment ago."""
    # Not imported here: rooms without Kafka run without its client.
    if (ration := sys.modules.get("penstock.clients.ration")) is not None:
        ration.lines.forget_all()


@pytest.fixture(autouse=True)
def canaries_show_nowhere(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test during which a password of the secured broker, or a payload, was logged or listed by `ps`."""
    yield
    shown = canary.LOG.take()
    if "secured" in request.fixturenames:
        shown += canary.processes_that_show(canary.PASSWORD)
    assert shown == []


@pytest.fixture
def new_user(secured: DevBroker, new_name: Callable[..., str]) -> Callable[..., User]:
    """Return a function that makes a user of the secured broker with these rights: `new_user(*rights)`."""
    from rights import give

    def create(*rights: Right) -> User:
        user = secured.user(new_name())
        give(secured, user, rights)
        return user

    return create


@pytest.fixture
def new_secured_topic(secured: DevBroker, new_name: Callable[..., str]) -> Callable[..., str]:
    """Return a function that creates a topic on the secured broker: `new_secured_topic(partitions=1, config=None)`."""

    def create(partitions: int = 1, config: Mapping[str, str] | None = None) -> str:
        secured.create_topic(name := new_name(), partitions, config)
        return name

    return create


@pytest.fixture(scope="session")
def postgresql_url() -> str:
    """Address of the PostgreSQL server of this run, shared by all of its processes."""
    return services.address("postgresql")


@pytest.fixture(scope="session")
def mariadb_url() -> str:
    """Address of the MariaDB server of this run, shared by all of its processes."""
    found = services.address("mariadb")
    if not found:
        pytest.skip("no MariaDB: none is installed, and apt-get does not download Debian's")
    return found


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The Spark session of this run, with the source registered. Its event log is searched for canaries in the end."""
    import pyspark
    from pyspark.sql import SparkSession

    from penstock.devbroker import spark_environment
    from penstock.spark_sink import register

    # Spark has its workers import PySpark from a zip, which keeps nothing compiled: three times the CPU for each.
    python = tmp_path_factory.mktemp("worker") / "python"
    packages = Path(pyspark.__file__).parents[1]
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    os.environ.update(spark_environment())
    os.environ |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": str(python)}
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
        # A worker or a thread of a busy machine may need more than fifteen seconds to connect.
        .config("spark.python.authenticate.socketTimeout", "300s")
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
    from databases import TestDatabase, new_database

    if request.param == "sqlite":
        return TestDatabase("sqlite", f"sqlite:///{tmp_path / 'test.db'}")
    return new_database(request.getfixturevalue("postgresql_url"))


def has_leaders(admin: AdminClient, topic: str, partitions: int) -> bool:
    """Return whether the brokers know all partitions of a topic, and their leaders."""
    found = admin.list_topics(timeout=30).topics.get(topic)
    return found is not None and sum(partition.leader >= 0 for partition in found.partitions.values()) == partitions


def _name_of_test(request: pytest.FixtureRequest) -> str:
    return re.sub(r"[^a-zA-Z0-9]+", "-", request.node.name)[:60].strip("-")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Requests for metadata give up after a second; the requested time limits are returned."""
    from confluent_kafka.admin import AdminClient

    asked: list[float] = []
    ask = AdminClient.list_topics

    def ask_briefly(self: AdminClient, *, timeout: float) -> ClusterMetadata:
        asked.append(timeout)
        return ask(self, timeout=min(timeout, 1.0))

    monkeypatch.setattr(AdminClient, "list_topics", ask_briefly)
    return asked
