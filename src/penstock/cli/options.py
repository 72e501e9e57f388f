"""Options that several commands have in common, as one parameter each: how a cluster is reached, which app is loaded.

Others on a machine can read a command line, so whatever may be secret can stand in a file or in the environment.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from penstock.cli.output import Result, debugging, show
from penstock.errors import ConfigurationError
from penstock.supervisor.stopping import until_signal

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.clients.factory import AdminClient

#: Settings for all commands: a JSON object, or lines of NAME=VALUE.
CONFIG_VARIABLE = "PENSTOCK_CONFIG"
SERVERS_VARIABLE = "PENSTOCK_BOOTSTRAP_SERVERS"

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

GroupName = Annotated[str, typer.Argument(metavar="GROUP", help="The group: the name of an App.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be, and change nothing.")]
Partitions = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        metavar="TOPIC[:PARTITIONS]",
        help="Only this topic, or these partitions of it: orders:0,4-7. Repeatable. Left out: all.",
    ),
]


@dataclass(frozen=True)
class Cluster:
    """How a command reaches a cluster."""

    bootstrap_servers: Annotated[
        str | None,
        typer.Option(
            "--bootstrap-servers",
            help=f"Addresses of the brokers, HOST:PORT, separated by commas (also {SERVERS_VARIABLE}).",
        ),
    ] = None
    config: ClientSettings = None
    config_file: ConfigFile = None

    @functools.cached_property
    def named_servers(self) -> str | None:
        """The addresses of the brokers, from the command line, the environment or a file; None where none names any."""
        from penstock.settings import outside

        found: str | None = self.bootstrap_servers or outside().get("bootstrap_servers")
        return found

    @property
    def servers(self) -> str:
        """The addresses of the brokers; `ConfigurationError` where nothing names any."""
        if self.named_servers is None:
            raise ConfigurationError(
                f"--bootstrap-servers is missing: name the brokers there, in {SERVERS_VARIABLE} or in penstock.toml"
            )
        return self.named_servers

    @functools.cached_property
    def settings(self) -> dict[str, str]:
        """The settings of the Kafka clients: those of `penstock.settings`, over them the command line's.

        `ConfigurationError` where one is not NAME=VALUE or a file cannot be read: it repeats nothing that is secret.
        """
        from penstock.settings import outside
        from penstock.settings.text import client_value

        found = {name: client_value(value) for name, value in outside().get("config", {}).items()}
        return found | _on_command_line(self.config, self.config_file)


@dataclass(frozen=True)
class Reading(Cluster):
    """How a command that does one thing and ends reaches a cluster: it does not wait long for brokers."""

    connect_timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            envvar="PENSTOCK_CONNECT_TIMEOUT",
            help="Seconds in which a broker must answer first: more for a slow network.",
        ),
    ] = 4.0

    def admin(self, what: str) -> AdminClient:
        """Return a client that has reached a broker; `BrokerConnectionError` says that `what` could not be read."""
        from penstock import clients
        from penstock.clients.topics import partition_counts
        from penstock.errors import BrokerConnectionError

        admin = clients.admin(self.servers, self.settings)
        try:
            partition_counts(admin, self.connect_timeout)
        except BrokerConnectionError as error:
            raise BrokerConnectionError(f"{what}: {error}") from error
        return admin


@dataclass(frozen=True)
class AppOptions:
    """The app that a command loads, and what the command line sets of it."""

    target: Annotated[str, typer.Argument(metavar="MODULE:APP", help="Module and the name of the App in it.")]
    servers: Annotated[
        str | None,
        typer.Option("--bootstrap-servers", help="Addresses of the brokers, instead of those that the app names."),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="OPTION=VALUE", help="An option of the App instead of what its code says; may be repeated."
        ),
    ] = None
    config: ClientSettings = None
    config_file: ConfigFile = None

    @contextmanager
    def applied(self, *more: str) -> Iterator[None]:
        """Have an app that is loaded in the block, or by a process started there, get what the command line says.

        `more`: further settings, as `--set` takes them.
        """
        from penstock.settings import on_command_line as settings_on_command_line

        values: dict[str, Any] = {}
        for setting in (*(self.settings or ()), *more):
            name, equals, value = setting.partition("=")
            if not equals or not name:
                raise ConfigurationError(f"--set takes OPTION=VALUE, but is {name!r}; write --set workers=32")
            if name == "config":
                raise ConfigurationError("--set config=... is none; give client settings by --config or --config-file")
            values[name] = value
        if self.servers is not None:
            values["bootstrap_servers"] = self.servers
        if found := _on_command_line(self.config, self.config_file):
            values["config"] = found
        with settings_on_command_line(values):
            yield

    def load(self) -> App:
        """Import the app, with what the command line sets. Raises as `load_app`."""
        with self.applied():
            return load_app(self.target)


def as_command(function: Callable[..., Any]) -> Callable[..., None]:
    """Return a command as typer takes it.

    A parameter that is one of the classes above becomes an option for each of its fields. Where the function returns or
    yields a `Result`, that is printed, and there is an option `--json`.
    """
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    bundles: dict[str, Any] = {it.name: it.annotation for it in parameters if dataclasses.is_dataclass(it.annotation)}
    prints = "Result" in str(function.__annotations__.get("return"))
    options = [it for it in parameters if it.name not in bundles]
    for bundle in bundles.values():
        hints = get_type_hints(bundle, include_extras=True)
        options += [it.replace(annotation=hints[it.name]) for it in inspect.signature(bundle).parameters.values()]
    if prints:
        as_json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
        options.append(inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=as_json))

    @functools.wraps(function)
    def run(*, as_json: bool = False, **given: Any) -> None:
        for name, bundle in bundles.items():
            own = (it.name for it in dataclasses.fields(bundle))
            given[name] = bundle(**{it: given.pop(it) for it in own})
        found = function(**given)
        if isinstance(found, Result):
            show(found, as_json=as_json)
        elif prints:
            with until_signal():
                for result in found:
                    show(result, as_json=as_json)

    keywords = [it.replace(kind=inspect.Parameter.KEYWORD_ONLY) for it in options]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined] # what typer reads options from
    return run


def _on_command_line(given: list[str] | None, file: Path | None) -> dict[str, str]:
    """Return the settings of the Kafka clients that the command line gives: the file's, over them `--config`."""
    from penstock.settings.text import client_settings_text, name_and_value

    found: dict[str, str] = {}
    if file is not None:
        try:
            found = client_settings_text(file.read_text(encoding="utf-8"), f"--config-file {file}")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--config-file {file} cannot be read: {type(error).__name__}") from error
    return found | dict(name_and_value(text, "--config", number) for number, text in enumerate(given or (), 1))


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
    stack = traceback.extract_tb(error.__traceback__)
    # The line of the user's that failed, not the frozen standard library that it called, as `os.environ["NAME"]` does.
    place = next((frame for frame in reversed(stack) if not frame.filename.startswith("<")), stack[-1])
    return ConfigurationError(
        f"module {module_name} could not be imported: {type(error).__name__}: {error} "
        f"({Path(place.filename).name}, line {place.lineno}); correct it, or see the stack with penstock --debug"
    )
