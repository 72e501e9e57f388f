"""How every command reaches a cluster: addresses and settings from the command line, a file and the environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from commands import Command
from penstock.cli.options import client_settings
from penstock.devbroker import DevBroker, User
from penstock.errors import ConfigurationError


def test_the_command_line_goes_before_the_file_and_the_file_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG", "client.id=environment\nsasl.password=p #=1; \nclient.rack=r")
    file = tmp_path / "client.properties"
    file.write_text("# a comment\n\nclient.id = file\nsasl.username=orders\n", encoding="utf-8")

    assert client_settings(["client.id=line"], file) == {
        "client.id": "line",
        "sasl.username": "orders",
        "sasl.password": "p #=1;",
        "client.rack": "r",
    }
    assert client_settings(None, file)["client.id"] == "file"


def test_the_environment_may_hold_any_character_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG", '{"sasl.password": " a\\nb\\"c ", "socket.keepalive.enable": true}')

    assert client_settings() == {"sasl.password": ' a\nb"c ', "socket.keepalive.enable": "true"}


@pytest.mark.parametrize("text", ['{"sasl.password": canary}', "canary"])
def test_what_cannot_be_read_is_not_shown(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG", text)

    with pytest.raises(ConfigurationError, match="PENSTOCK_CONFIG") as caught:
        client_settings()

    assert "canary" not in str(caught.value)


@pytest.mark.thorough
def test_commands_reach_a_secured_cluster_without_a_secret_on_the_command_line(
    penstock_command: Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    secured: DevBroker,
    new_user: Callable[..., User],
) -> None:
    file = tmp_path / "client.properties"
    file.write_text("\n".join(f"{name}={value}" for name, value in new_user().config.items()), encoding="utf-8")
    monkeypatch.setenv("PENSTOCK_BOOTSTRAP_SERVERS", secured.bootstrap_servers)

    for command in ("doctor", "dlq ls --all", "tx ls", "lag sms"):
        arguments = (*command.split(), "--config-file", str(file))
        let_in = penstock_command(*arguments)
        refused = penstock_command(*arguments, "--config", "sasl.password=canary-4711")

        assert let_in.code != 3, let_in.err
        assert refused.code == 3
        assert "SASL authentication error" in refused.err
        assert "canary-4711" not in refused.err + refused.out
    file.unlink()  # it holds a password on purpose
