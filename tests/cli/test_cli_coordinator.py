"""What `penstock coordinator`, `penstock tx` and `App(coordinator=...)` give to a coordinator and the Kafka clients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from commands import Command
from penstock import App, Coordinator, transactions
from penstock.cli.coordinator import coordinator
from penstock.cli.options import as_command
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError
from penstock.transactions import FileStore, SqlStore

#: Arguments of `Coordinator` that a command line cannot give.
NOT_GIVEN = {"self", "check_timeout", "telemetry", "store"}


class Recorder:
    """A coordinator that records its arguments and ends at once."""

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
    of_command = dict(inspect.signature(as_command(coordinator)).parameters)
    # Where more of `config` stands, what names a store, and what is not the coordinator's own.
    for name in ("config_file", "sql", "file", "report", "http"):
        del of_command[name]

    assert set(of_command) == set(of_class) - NOT_GIVEN
    assert {name: one.default for name, one in of_command.items()} == {
        name: of_class[name].default for name in of_command
    } | {"bootstrap_servers": None}


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
    nowhere = penstock_command("coordinator", *shared, "--http", "8400")

    assert (sql.code, file.code, both.code, nowhere.code) == (0, 0, 2, 2), sql.err + file.err
    assert "omit one of them" in both.err
    of_sql, of_file = made
    assert isinstance(of_sql["store"], SqlStore)
    assert isinstance(of_file["store"], FileStore)
    for arguments in made:
        store = arguments["store"]
        assert (store.bootstrap_servers, store.prefix, store.config) == ("b:1", "shop", {"client.id": "c"})
        assert arguments["check_max"] == 3
        assert not {"bootstrap_servers", "prefix", "config"} & set(arguments)


def test_an_app_runs_a_coordinator_that_was_made_for_it(broker: DevBroker, new_topic: Callable[..., str]) -> None:
    topic = new_topic()
    own = Coordinator(bootstrap_servers=broker.bootstrap_servers, prefix=f"store.{topic}", check_backoff=2.0)
    app = App(topic, bootstrap_servers=broker.bootstrap_servers, coordinator=own)
    app.handler(topic)(print)
    wrong = App("a", bootstrap_servers="127.0.0.1:1", coordinator={"check_max": 3})  # type: ignore[arg-type] # on purpose
    wrong.handler("t")(print)

    running = app.start()
    assert not own.wait(0), "it runs"
    running.stop()
    assert own.wait(0), "it ended with the app"
    with pytest.raises(ConfigurationError, match=r"coordinator must be .* but is a dict"):
        wrong.start()
