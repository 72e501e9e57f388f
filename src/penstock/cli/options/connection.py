"""How every command reaches a cluster: addresses and client settings, as `penstock.settings` finds them for an app.

Others on a machine can read a command line, so whatever may be secret can stand in a file or in the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.errors import ConfigurationError

#: Settings for all commands: a JSON object, or lines of NAME=VALUE.
CONFIG_VARIABLE = "PENSTOCK_CONFIG"

SERVERS_OPTION = typer.Option(
    "--bootstrap-servers",
    envvar="PENSTOCK_BOOTSTRAP_SERVERS",
    help="Addresses of the brokers, HOST:PORT, separated by commas.",
)
BootstrapServers = Annotated[str, SERVERS_OPTION]

ClientSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        metavar="NAME=VALUE",
        help="A setting of the Kafka clients by librdkafka's name; may be repeated. Others on this machine can read a "
        f"command line: give secrets by --config-file or {CONFIG_VARIABLE}.",
    ),
]

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config-file",
        help=f"File with settings of the Kafka clients: lines of NAME=VALUE, or a JSON object. {CONFIG_VARIABLE} may "
        "hold the same text; the file goes before it, and --config before both.",
    ),
]


def client_settings(given: list[str] | None = None, file: Path | None = None) -> dict[str, str]:
    """Return the settings of the Kafka clients: those of `penstock.settings`, over them the command line's.

    `ConfigurationError` where one is not NAME=VALUE or a file cannot be read: it repeats nothing that may be secret.
    """
    from penstock.settings import outside
    from penstock.settings.text import client_value

    found = {name: client_value(value) for name, value in outside().get("config", {}).items()}
    return found | on_command_line(given, file)


def on_command_line(given: list[str] | None = None, file: Path | None = None) -> dict[str, str]:
    """Return the settings of the Kafka clients that the command line gives: the file's, over them `--config`."""
    from penstock.settings.text import client_settings_text, name_and_value

    found: dict[str, str] = {}
    if file is not None:
        try:
            found = client_settings_text(file.read_text(encoding="utf-8"), f"--config-file {file}")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--config-file {file} cannot be read: {type(error).__name__}") from error
    return found | dict(name_and_value(text, "--config", number) for number, text in enumerate(given or (), 1))


def servers_from_settings() -> Any:
    """Return the addresses that stand in a file or the environment, or None; asked where a command names none."""
    from penstock.settings import outside

    return outside().get("bootstrap_servers")
