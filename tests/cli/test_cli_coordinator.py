"""What `penstock coordinator`, `penstock tx` and `App(coordinator=...)` give to a coordinator and the Kafka clients."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from commands import Command
from penstock import App, Coordinator, TransactionalProducer, clients, transactions
from penstock.cli.coordinator import coordinator
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError
from penstock.message import Message
from penstock.reports.group_state import Group
from penstock.reports.reader import ReportReader
from penstock.reports.settings import DEFAULT_TOPIC
from penstock.transactions import FileStore, SqlStore
from waiting import wait_until

#: Arguments of `Coordinator` that a command line cannot give.
NOT_GIVEN = {"self", "check_timeout", "telemetry", "store"}


class Recorder:
    """A coordinator that notes what it was made with, and ends at once."""

    made: list[dict[str, Any]]

    def __init__(self, **arguments: object) -> None:
        self.made.append(arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, timeout: float) -> bool:
        return timeout > 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of coordinators that a command makes."""
    Recorder.made = []
    monkeypatch.setattr(transactions, "Coordinator", Recorder)
    return Recorder.made


def test_the_command_has_every_argument_of_a_coordinator_with_its_default() -> None:
    of_class = inspect.signature(Coordinator.__init__).parameters
    of_command = dict(inspect.signature(coordinator).parameters)
    # Where more of `config` stands, what names a store, and what is not the coordinator's own.
    for name in ("config_file", "sql", "file", "report"):
        del of_command[name]

    assert set(of_command) == set(of_class) - NOT_GIVEN
    assert {name: one.default for name, one in of_command.items()} == {
        name: of_class[name].default for name in of_command
    } | {"bootstrap_servers": inspect.Parameter.empty}


def test_every_option_reaches_the_coordinator(penstock_command: Command, made: list[dict[str, Any]]) -> None:
    options = "--discard rollback --check-backoff 2 --target-latency 0.5 --session-timeout 9 --partitions 7"
    settings = "--config security.protocol=SASL_SSL --config sasl.password=a=b"

    outcome = penstock_command("coordinator", "--bootstrap-servers", "b:1", *options.split(), *settings.split())

    assert outcome.code == 0, outcome.err
    (arguments,) = made
    assert arguments["config"] == {"security.protocol": "SASL_SSL", "sasl.password": "a=b"}
    names = ("discard", "check_backoff", "target_latency", "session_timeout", "partitions")
    assert [arguments[name] for name in names] == ["rollback", 2.0, 0.5, 9.0, 7]


def test_a_store_in_a_database_or_a_folder_is_given_what_is_its_own(
    penstock_command: Command, made: list[dict[str, Any]], tmp_path: Path
) -> None:
    shared = ("--bootstrap-servers", "b:1", "--prefix", "shop", "--config", "client.id=c", "--check-max", "3")

    sql = penstock_command("coordinator", *shared, "--sql", f"sqlite:///{tmp_path}/store.db")
    file = penstock_command("coordinator", *shared, "--file", str(tmp_path / "folder"))
    both = penstock_command("coordinator", *shared, "--file", str(tmp_path), "--sql", "sqlite:///store.db")

    assert (sql.code, file.code, both.code) == (0, 0, 2), sql.err + file.err
    assert "leave one of them out" in both.err
    of_sql, of_file = made
    assert isinstance(of_sql["store"], SqlStore)
    assert isinstance(of_file["store"], FileStore)
    for arguments in made:
        store = arguments["store"]
        assert (store.bootstrap_servers, store.prefix, store.config) == ("b:1", "shop", {"client.id": "c"})
        assert arguments["check_max"] == 3
        assert not {"bootstrap_servers", "prefix", "config"} & set(arguments)


def test_settings_may_come_from_the_environment(
    penstock_command: Command, made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG", "security.protocol=SASL_SSL\nsasl.password=secret")

    assert penstock_command("coordinator", "--bootstrap-servers", "b:1").code == 0

    assert made[0]["config"] == {"security.protocol": "SASL_SSL", "sasl.password": "secret"}


@pytest.mark.parametrize(
    ("option", "told"),
    [("--discard=ask", "--discard"), ("--config=secret", "NAME=VALUE"), ("--config==secret", "NAME=VALUE")],
)
def test_an_option_without_sense_is_told_and_a_secret_is_not(penstock_command: Command, option: str, told: str) -> None:
    outcome = penstock_command("coordinator", "--bootstrap-servers", "127.0.0.1:1", option)

    assert outcome.code == 2
    assert told in outcome.err
    assert "secret" not in outcome.err


@pytest.mark.parametrize(
    "arguments",
    [("coordinator",), ("tx", "ls"), ("tx", "commit", "018f4e9c-5c1e-7abc-8def-0123456789ab")],
    ids=" ".join,
)
def test_settings_reach_the_kafka_clients(
    penstock_command: Command, arguments: tuple[str, ...], broker: DevBroker
) -> None:
    outcome = penstock_command(
        *arguments, "--bootstrap-servers", broker.bootstrap_servers, "--config", "security.protocol=nonsense"
    )

    assert outcome.code == 2
    assert "security.protocol" in outcome.err


def test_an_app_runs_a_coordinator_that_was_made_for_it(broker: DevBroker, new_topic: Any) -> None:
    topic = new_topic()
    own = Coordinator(bootstrap_servers=broker.bootstrap_servers, prefix=f"store.{topic}", check_backoff=2.0)
    app = App(topic, bootstrap_servers=broker.bootstrap_servers, coordinator=own)

    @app.handler(topic)
    def handle(message: Message) -> None:
        pass

    running = app.start()
    assert not own.wait(0), "it runs"
    running.stop()
    assert own.wait(0), "it ended with the app"


def test_an_app_is_told_what_is_no_coordinator() -> None:
    app = App("a", bootstrap_servers="127.0.0.1:1", coordinator={"check_max": 3})  # type: ignore[arg-type] # on purpose

    @app.handler("t")
    def handle(message: Message) -> None:
        pass

    with pytest.raises(ConfigurationError, match=r"coordinator must be .* but is a dict"):
        app.start()


def test_a_coordinator_that_reports_shows_its_pending_transaction_and_takes_itself_out_at_its_end(
    broker: DevBroker, new_topic: Callable[..., str], topic_numbers: Iterator[int]
) -> None:
    topic, prefix = new_topic(), f"reporting-{next(topic_numbers)}"
    command = [sys.executable, "-m", "penstock", "coordinator", "--report", "--prefix", prefix]
    process = subprocess.Popen([*command, "--bootstrap-servers", broker.bootstrap_servers])
    try:
        with (
            TransactionalProducer("shop", bootstrap_servers=broker.bootstrap_servers, prefix=prefix) as producer,
            producer.transaction(topic, value=b"paid?") as pending,
        ):
            pending.unknown()
        wait_until(lambda: _reporting(broker), 90)
        with ReportReader(broker.bootstrap_servers) as reader:

            def transactions() -> list[str]:
                reader.follow(1.0)
                found = [one for one in reader.groups() if one.name == f"{prefix}.coordinator"]
                return [told["id"] for group in found for one in group.members for told in one.report.transactions]

            seen = wait_until(transactions, 90)
            process.send_signal(signal.SIGTERM)
            ended = process.wait(60)
            wait_until(lambda: reader.follow(1.0) and f"{prefix}.coordinator" not in map(_name, reader.groups()), 60)
    finally:
        process.kill()
        process.wait()

    assert seen == [pending.transaction_id]
    assert ended == 0


def _reporting(broker: DevBroker) -> bool:
    return DEFAULT_TOPIC in clients.admin(broker.bootstrap_servers, {}).list_topics(timeout=10).topics


def _name(group: Group) -> str:
    return group.name
