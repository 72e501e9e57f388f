"""What the commands share: errors and log lines on standard error, and the option for the brokers."""

from __future__ import annotations

import logging
import os
from typing import Annotated

import typer

from penstock.errors import ConfigurationError

DEBUG_VARIABLE = "PENSTOCK_DEBUG"

#: The option of every command that talks to a broker.
BootstrapServers = Annotated[
    str,
    typer.Option(
        "--bootstrap-servers",
        envvar="PENSTOCK_BOOTSTRAP_SERVERS",
        help="Addresses of the brokers, HOST:PORT, separated by commas.",
    ),
]

#: Settings of the Kafka clients, for commands that make them.
ClientSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        metavar="NAME=VALUE",
        envvar="PENSTOCK_CONFIG",
        help="A setting of the Kafka clients by librdkafka's name; may be repeated. Others on this machine can read a "
        "command line: give secrets in the variable, with blanks in between.",
    ),
]


def client_settings(given: list[str] | None) -> dict[str, str]:
    """Read the option `--config`.

    Raises:
        ConfigurationError: one is not NAME=VALUE. It is not repeated in the error: it may be a secret.
    """
    settings = {}
    for number, one in enumerate(given or (), 1):
        name, equals, value = one.partition("=")
        if not name.strip() or not equals:
            raise ConfigurationError(
                f"--config takes NAME=VALUE, but number {number} of them is not so; write security.protocol=SASL_SSL"
            )
        settings[name.strip()] = value
    return settings


def debugging() -> bool:
    """Tell whether stacks are to be shown."""
    return os.environ.get(DEBUG_VARIABLE, "") not in {"", "0"}


def print_error(text: str) -> None:
    """Print a sentence on standard error, red where it is a terminal."""
    from rich.console import Console
    from rich.text import Text

    # Soft wrap: a terminal breaks lines, a log file or a pipe keeps the sentence whole.
    Console(stderr=True).print(Text(f"penstock: {text}", style="red"), soft_wrap=True)


def log_to_stderr() -> None:
    """Show log lines, unless the user's program has set logging up already."""
    logging.basicConfig(
        level=logging.DEBUG if debugging() else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
