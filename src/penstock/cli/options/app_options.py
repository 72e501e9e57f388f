"""How commands import an app, and what the command line sets of it: shared by `penstock run` and `penstock check`."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options.connection import on_command_line
from penstock.cli.output import debugging
from penstock.errors import ConfigurationError

if TYPE_CHECKING:
    from penstock.app import App

Target = Annotated[str, typer.Argument(metavar="MODULE:APP", help="Module and the name of the App in it.")]

AppServers = Annotated[
    str | None,
    typer.Option("--bootstrap-servers", help="Addresses of the brokers, instead of those that the app names."),
]

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="OPTION=VALUE", help="An option of the App instead of what its code says; may be repeated."
    ),
]


@contextmanager
def app_settings(
    servers: str | None, settings: Sequence[str] | None, config: list[str] | None, config_file: Path | None
) -> Iterator[None]:
    """Have an app that is loaded in the block, or by a process started there, get what the command line says."""
    from penstock.settings import on_command_line as settings_on_command_line

    values: dict[str, Any] = {}
    for setting in settings or ():
        name, equals, value = setting.partition("=")
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
    with app_settings(servers, settings, config, config_file):
        return load_app(target)


def load_app(target: str) -> App:
    """Import the app that `target` (`module:name`) names, with the current folder on the import path.

    `ConfigurationError`: no such module or name, the module failed, or what it names is no `penstock.App`.
    """
    from penstock.app import App

    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise ConfigurationError(f"{target!r} does not name an app; write MODULE:APP, as in orders:app")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:
        if debugging():
            raise
        raise _import_failed(module_name, error) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"module {module_name} has no {name!r}; correct the name after the colon")
        found = getattr(found, part)
    if not isinstance(found, App):
        raise ConfigurationError(
            f"{target} is a {type(found).__name__}, not a penstock.App; name the variable that holds the app"
        )
    return found


def _import_failed(module_name: str, error: Exception) -> ConfigurationError:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
        return ConfigurationError(
            f"no module {error.name} in {Path.cwd()} or among the installed packages; "
            "go to the folder that holds it, or correct the name"
        )
    place = traceback.extract_tb(error.__traceback__)[-1]
    return ConfigurationError(
        f"module {module_name} could not be imported: {type(error).__name__}: {error} "
        f"({Path(place.filename).name}, line {place.lineno}); correct it, or see the stack with penstock --debug"
    )
