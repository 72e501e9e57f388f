"""How every command reaches a cluster: addresses and client settings, from the command line, a file or the environment.

Others on a machine can read a command line, so whatever may be secret can stand in a file or in the environment.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

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
    """Return the settings of the Kafka clients: the environment's, over them the file's, over them `--config`.

    `ConfigurationError` where one is not NAME=VALUE or the file cannot be read: it repeats nothing that may be secret.
    """
    settings = _read(os.environ.get(CONFIG_VARIABLE, ""), CONFIG_VARIABLE)
    if file is not None:
        try:
            settings |= _read(file.read_text(encoding="utf-8"), f"--config-file {file}")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--config-file {file} cannot be read: {type(error).__name__}") from error
    return settings | dict(_pair(one, "--config", number) for number, one in enumerate(given or (), 1))


def _read(text: str, place: str) -> dict[str, str]:
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text)
        except ValueError:
            raise ConfigurationError(f"{place} begins as a JSON object, but is none; correct it") from None
        return {str(name): value if isinstance(value, str) else json.dumps(value) for name, value in found.items()}
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return dict(_pair(line, place, number) for number, line in lines if line and not line.startswith("#"))


def _pair(text: str, place: str, number: int) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name.strip() or not equals:
        raise ConfigurationError(
            f"{place} takes NAME=VALUE, but number {number} of them is not so; write security.protocol=SASL_SSL"
        )
    return name.strip(), value if place == "--config" else value.strip()
