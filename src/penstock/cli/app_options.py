"""How commands find an app and what the command line sets of it: shared by `penstock run` and `penstock check`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.connection import on_command_line
from penstock.errors import ConfigurationError

if TYPE_CHECKING:
    from penstock.app import App

Target = Annotated[str, typer.Argument(metavar="MODULE:APP", help="Module and the name of the App in it.")]

AppServers = Annotated[
    str | None,
    typer.Option("--bootstrap-servers", help="Addresses of the brokers, in place of those that the app names."),
]

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="OPTION=VALUE", help="An option of the App in place of what its code says; may be repeated."
    ),
]


@contextmanager
def app_settings(
    servers: str | None, settings: Sequence[str] | None, config: list[str] | None, config_file: Path | None
) -> Iterator[None]:
    """Have an app that is loaded in the block, or by a process started there, get what the command line says."""
    from penstock.settings import on_command_line as settings_on_command_line

    values: dict[str, Any] = {}
    for one in settings or ():
        name, equals, value = one.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"--set takes OPTION=VALUE, but is {name!r}; write --set workers=32")
        if name == "config":
            raise ConfigurationError("--set config=... is none; give client settings by --config or --config-file")
        values[name] = value
    if servers is not None:
        values["bootstrap_servers"] = servers
    if found := on_command_line(config, config_file):
        values["config"] = found
    with settings_on_command_line(values):
        yield


def loaded(
    target: str,
    servers: str | None,
    settings: Sequence[str] | None,
    config: list[str] | None,
    config_file: Path | None,
) -> App:
    """Import the app that `target` names, with what the command line sets. Raises as `load_app`."""
    from penstock.cli.run import load_app

    with app_settings(servers, settings, config, config_file):
        return load_app(target)
